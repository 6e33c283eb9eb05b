"""The daemon's settings, from flags, then ``TIERSTORE_…`` in the environment, then the file, then the
defaults.

Every setting has one spelling: ``host_bytes`` is ``--host-bytes``, ``TIERSTORE_HOST_BYTES`` and
``host_bytes`` in the file. An unknown setting is an error.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiofiles

from tierstore import codec
from tierstore.errors import UsageError
from tierstore.policy import DEFAULT_POLICY, POLICIES
from tierstore.units import GIB, MIB, format_size, parse_size
from tierstore.wire.local_address import default_directory

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]

PREFIX = "TIERSTORE_"
_OTHERS = frozenset({"TIERSTORE_API_KEY", "TIERSTORE_OPERATOR_KEY"})  # settings of the engine and the proxy
_KUBERNETES = re.compile(
    r"TIERSTORE_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)=.*|PORT(_\d+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://.*"
    r"|PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=.*)"
)
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("plain", "json")
EVENT_ENCODINGS = ("map", "array")
PUBLISH = ("reused", "all", "none")
_RESERVE_FRACTION = 1 / 4
_MOST_RESERVE = 1 * GIB


def default_listen() -> str:
    """Return the default address of this user's daemon."""
    return f"ipc://{default_directory()}/tierstore.sock"


HELP: Mapping[str, str] = {
    "listen": "Where clients connect: ipc://PATH or tcp://HOST:PORT, comma-separated",
    "host_bytes": "Size of the arena in host memory",
    "disk": "Directory of the disk tier (without one, pages live as long as the daemon)",
    "disk_bytes": "Cap on everything in that directory",
    "disk_write_budget": "Bytes of pages written to disk per day (0: unlimited)",
    "disk_codec": f"Compression of pages on disk: {', '.join(codec.NAMES)}",
    "page_bytes": "Size of most pages; it divides the disk",
    "policy": f"Order in which pages leave a full tier: {', '.join(POLICIES)}",
    "lease_s": "How long a lookup holds its pages",
    "reserve_bytes": "Limit of one client's reservations (0: a quarter of the arena, at most 1 GiB)",
    "server_key": "The daemon's own key file, required for tcp:// off loopback",
    "tenants": "Directory with the public keys of the admitted clients, TENANT.key",
    "quotas": "Bytes of the arena by tenant: TENANT=SIZE, comma-separated",
    "metrics_port": "Port of /metrics, /healthz, /readyz and the dashboard (0: off)",
    "metrics_host": "Address of that port",
    "dashboard_token": "File with the dashboard's token (required off loopback)",
    "events": "Publish KV events in vLLM's format at URL (ipc://PATH or tcp://127.0.0.1:PORT), or at "
    "MODEL=URL, comma-separated, with one endpoint per model (empty: off)",
    "events_replay": "Replay endpoint for missed events: URL or MODEL=URL",
    "events_topic": "Topic of all events; {model} is replaced by the endpoint's model",
    "events_encoding": f"One of {', '.join(EVENT_ENCODINGS)} (array: for followers of vLLM up to 0.23)",
    "events_block_tokens": "Tokens of a block in the events; it divides a page's tokens (0: whole pages)",
    "events_tenants": "Include pages of tenants in the events (true or false)",
    "events_connect": "Connect to the URL instead of listening there (true or false)",
    "events_anywhere": "Allow followers on other machines: events have prompts in clear text (true or false)",
    "cluster": "Share pages with other hosts through the shared store at mooncake://HOST:PORT or "
    "etcd://HOST:PORT",
    "cluster_publish": f"Which pages to publish: {', '.join(PUBLISH)} (reused: those requested again)",
    "cluster_min_tokens": "Ask the shared store if at least this many tokens of a prompt are not held here",
    "cluster_look_s": "How long a lookup waits for the shared store's answer",
    "cluster_bytes_per_s": "Limit of published bytes per second (0: unlimited)",
    "cluster_staging": "Size of the buffers for pages to and from other hosts",
    "cluster_secret": "File with 16 to 64 bytes that all hosts share; the names of pages depend on it",
    "cluster_protocol": "tcp or rdma",
    "cluster_devices": "RDMA devices, such as mlx5_0,mlx5_1",
    "cluster_host": "This host's address in the shared store (default: the one it connects from)",
    "drain_s": "How long SIGTERM waits for writes to disk",
    "log_level": f"One of {', '.join(LOG_LEVELS)}",
    "log_format": f"One of {', '.join(LOG_FORMATS)}",
}
_RELOADED = frozenset({"quotas", "drain_s", "log_level"})  # can change at run time


@dataclass(frozen=True)
class Settings:
    """All settings; ``HELP`` describes them. Raises :class:`UsageError` for inconsistent values."""

    listen: tuple[str, ...] = field(default_factory=lambda: (default_listen(),))
    host_bytes: int = 8 * GIB
    disk: Path | None = None
    disk_bytes: int = 100 * GIB
    disk_write_budget: int = 0
    disk_codec: str = codec.NONE
    page_bytes: int = 1 * MIB
    policy: str = DEFAULT_POLICY
    lease_s: float = 60.0
    reserve_bytes: int = 0
    server_key: Path | None = None
    tenants: Path | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    dashboard_token: Path | None = None
    events: Mapping[str, str] = field(default_factory=dict)  # model (empty: all) → URL
    events_replay: Mapping[str, str] = field(default_factory=dict)
    events_topic: str = ""
    events_encoding: str = "map"
    events_block_tokens: int = 0
    events_tenants: bool = False
    events_connect: bool = False
    events_anywhere: bool = False
    cluster: str = ""
    cluster_publish: str = "reused"
    cluster_min_tokens: int = 1024
    cluster_look_s: float = 0.003
    cluster_bytes_per_s: int = 0
    cluster_staging: int = 128 * MIB
    cluster_secret: Path | None = None
    cluster_protocol: str = "tcp"
    cluster_devices: str = ""
    cluster_host: str = ""
    drain_s: float = 30.0
    log_level: str = "info"
    log_format: str = "plain"

    def __post_init__(self) -> None:
        if not self.reserve_bytes:
            reserve = min(int(self.host_bytes * _RESERVE_FRACTION), _MOST_RESERVE)
            object.__setattr__(self, "reserve_bytes", reserve)
        choices: Mapping[str, Iterable[str]] = {
            "policy": POLICIES,
            "disk_codec": codec.NAMES,
            "log_level": LOG_LEVELS,
            "log_format": LOG_FORMATS,
            "events_encoding": EVENT_ENCODINGS,
            "cluster_publish": PUBLISH,
            "cluster_protocol": ("tcp", "rdma"),
        }
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                raise UsageError(f"{name} is {value!r}: it must be one of {', '.join(known)}")
        if not self.listen:
            raise UsageError(
                "listen is empty: say where clients connect, for example ipc:///run/tierstore.sock"
            )
        if self.reserve_bytes > self.host_bytes:
            raise UsageError(
                f"reserve_bytes ({format_size(self.reserve_bytes)}) is more than host_bytes "
                f"({format_size(self.host_bytes)})"
            )
        for model in self.events_replay.keys() - self.events.keys():
            what = f"of {model}" if model else "of all models"
            raise UsageError(
                f"events_replay has an endpoint {what}, but events has none: use the same models in both"
            )
        for name, least in (("lease_s", 0.1), ("drain_s", 0.0), ("cluster_look_s", 0.0)):
            if not least <= getattr(self, name) <= 86400:
                raise UsageError(f"{name} is {getattr(self, name)}: give {least} to 86400 seconds")

    @classmethod
    def load(
        cls,
        flags: Mapping[str, object] | None = None,
        *,
        file: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Settings:
        """Read the settings from all places. ``flags`` that are None were not given."""
        with _reading(file):
            text = "" if file is None else file.read_text("utf-8")
        return cls._put_together(flags, file, text, environment)

    @classmethod
    async def load_again(cls, flags: Mapping[str, object], *, file: Path | None) -> Settings:
        """:meth:`load` while serving: the file is read without blocking the event loop."""
        text = ""
        with _reading(file):
            if file is not None:
                async with aiofiles.open(file, encoding="utf-8") as source:
                    text = await source.read()
        return cls._put_together(flags, file, text)

    @classmethod
    def _put_together(
        cls,
        flags: Mapping[str, object] | None,
        file: Path | None,
        text: str,
        environment: Mapping[str, str] | None = None,
    ) -> Settings:
        given: dict[str, Any] = {}
        for name, value in _toml(file, text).items():
            _require_known(name, f"{file}: ")
            given[name] = _parse(name, value)
        for variable, value in (os.environ if environment is None else environment).items():
            if variable in _OTHERS:
                continue
            if variable.startswith(PREFIX) and not _is_kubernetes(variable, value):
                name = variable.removeprefix(PREFIX).lower()
                _require_known(name, f"{variable}: ")
                given[name] = _parse(name, value)
        for name, flag in (flags or {}).items():
            if flag == "" and _PARSERS[name] is _path:
                raise UsageError(
                    f"--{name.replace('_', '-')} is empty: give a value, or leave the option out"
                )
            if flag is not None:
                given[name] = _parse(name, flag)
        return cls(**given)

    def reloaded(self, newer: Settings) -> tuple[Settings, list[str]]:
        """Return these settings with the values of ``newer`` that can change at run time, and the names of
        changed settings that need a restart."""
        stuck = [
            name for name in HELP if name not in _RELOADED and getattr(self, name) != getattr(newer, name)
        ]
        return replace(self, **{name: getattr(newer, name) for name in _RELOADED}), stuck


@contextmanager
def _reading(file: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not TOML: {error}") from error


def _toml(file: Path | None, text: str) -> dict[str, object]:
    try:
        return dict(tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not TOML: {error}") from error


def _is_kubernetes(variable: str, value: str) -> bool:
    """Return whether Kubernetes has set this variable in the container, for a Service named
    ``tierstore…``."""
    return _KUBERNETES.fullmatch(f"{variable}={value}") is not None


def _require_known(name: str, where: str) -> None:
    if name not in HELP:
        near = difflib.get_close_matches(name, HELP, n=1, cutoff=0)[0]
        raise UsageError(f"{where}there is no setting {name!r}, the nearest is {near!r}")


def _parse(name: str, value: object) -> object:
    """Parse a value as it is written in any of the places. Raise :class:`UsageError` if it is malformed."""
    try:
        return _PARSERS[name](value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} cannot be {value!r}: {error}") from error


def _size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("give a size such as 512MiB or 8GiB")
    return parse_size(value)


def _names(value: object) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ValueError("give text, or a list of it")
    names = tuple(part.strip() for part in parts)
    if len(names) > 1 and "" in names:
        raise ValueError("one of its parts is empty")
    return tuple(filter(None, names))


def _sizes(value: object) -> dict[str, int]:
    if isinstance(value, str):
        pairs = [part.partition("=") for part in _names(value)]
        value = {name.strip(): size for name, _, size in pairs}
        if len(value) < len(pairs):
            raise ValueError("one name has two sizes")
    if not isinstance(value, Mapping):
        raise ValueError("give NAME=SIZE, comma-separated, or a table")
    if "" in value:
        raise ValueError("a size has no name: give NAME=SIZE")
    return {str(name): _size(size) for name, size in value.items()}


def _path(value: object) -> Path | None:
    if not isinstance(value, str | Path):
        raise ValueError("give a path")
    return Path(value) if str(value) else None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("give text")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("give a number")
    return float(value)


def _count(value: object) -> int:
    count = _number(value)
    if count < 0 or count != int(count):
        raise ValueError("give a whole number")
    return int(count)


def _flag(value: object) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False, "": False}
    flag = known.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(flag, bool):
        raise ValueError("give true or false")
    return flag


def _urls(value: object) -> dict[str, str]:
    """Parse endpoints by model. ``URL`` alone is for all models."""
    if isinstance(value, str):
        named = re.compile(r"([^=]*?)=(\w+://.*)")
        parts = [(part, named.fullmatch(part)) for part in _names(value)]
        pairs = [(str(match[1]), str(match[2])) if match else ("", part) for part, match in parts]
        value = dict(pairs)
        if len(value) < len(pairs):
            raise ValueError("one model has two endpoints")
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value.values()):
        raise ValueError("give URL, or MODEL=URL, comma-separated, or a table")
    return {str(model).strip(): url.strip() for model, url in value.items()}


def _port(value: object) -> int:
    port = _number(value)
    if not 0 <= port < 1 << 16 or port != int(port):
        raise ValueError("a port must lie between 0 and 65535")
    return int(port)


_PARSERS: Mapping[str, Callable[[object], object]] = {
    "listen": _names,
    "host_bytes": _size,
    "disk": _path,
    "disk_bytes": _size,
    "disk_write_budget": _size,
    "disk_codec": _text,
    "page_bytes": _size,
    "policy": _text,
    "lease_s": _number,
    "reserve_bytes": _size,
    "tenants": _path,
    "server_key": _path,
    "quotas": _sizes,
    "metrics_port": _port,
    "metrics_host": _text,
    "dashboard_token": _path,
    "events": _urls,
    "events_replay": _urls,
    "events_topic": _text,
    "events_encoding": _text,
    "events_block_tokens": _count,
    "events_tenants": _flag,
    "events_connect": _flag,
    "events_anywhere": _flag,
    "cluster": _text,
    "cluster_publish": _text,
    "cluster_min_tokens": _count,
    "cluster_look_s": _number,
    "cluster_bytes_per_s": _size,
    "cluster_staging": _size,
    "cluster_secret": _path,
    "cluster_protocol": _text,
    "cluster_devices": _text,
    "cluster_host": _text,
    "drain_s": _number,
    "log_level": _text,
    "log_format": _text,
}
