"""The daemon's settings. A command-line flag overrides a variable ``TIERSTORE_…`` of the environment, which
overrides the settings file, which overrides the default.

Every setting has one name: ``host_bytes`` is ``--host-bytes`` as a flag, ``TIERSTORE_HOST_BYTES`` as a
variable and ``host_bytes`` in the file. An unknown setting is an error.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import aiofiles

from tierstore import codec
from tierstore.arguments import max_age_s
from tierstore.errors import UsageError
from tierstore.policy import DEFAULT_POLICY, POLICIES
from tierstore.units import GIB, MIB, format_size, parse_size
from tierstore.wire.local_address import default_directory

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]

PREFIX = "TIERSTORE_"
_OTHERS = frozenset({"TIERSTORE_API_KEY", "TIERSTORE_OPERATOR_KEY"})  # variables of the engine and the proxy
_KUBERNETES = re.compile(  # variables that Kubernetes sets for a Service whose name begins with tierstore
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
        raise ValueError("a part between commas is empty")
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


def _setting(default: Any, parse: Callable[[object], object], metavar: str, help: str) -> Any:
    """Declare a setting. ``parse`` converts a value from the command line, the environment or the file. If
    ``default`` is callable, its result is the default."""
    metadata = {"parse": parse, "metavar": metavar, "help": help}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


_RELOADED = frozenset({"quotas", "drain_s", "log_level"})  # settings that can change at run time


@dataclass(frozen=True)
class Settings:
    """All settings of a daemon. Raises :class:`UsageError` for wrong or inconsistent values."""

    listen: tuple[str, ...] = _setting(
        lambda: (default_listen(),),
        _names,
        "URL",
        "Where clients connect: ipc://PATH or tcp://HOST:PORT, comma-separated",
    )
    host_bytes: int = _setting(8 * GIB, _size, "SIZE", "Size of the arena in host memory")
    disk: Path | None = _setting(
        None, _path, "DIR", "Directory of the disk tier (without one, pages live as long as the daemon)"
    )
    disk_bytes: int = _setting(100 * GIB, _size, "SIZE", "Limit of the bytes of all files in --disk")
    disk_write_budget: int = _setting(
        0, _size, "SIZE", "Bytes of pages written to disk per day (0: unlimited)"
    )
    disk_codec: str = _setting(
        codec.NONE, _text, "NAME", f"Compression of pages on disk: {', '.join(codec.NAMES)}"
    )
    disk_key: str = _setting(
        "", _text, "FILE|command:CMD", "Encrypt the disk tier with this key: a file, or the output of CMD"
    )
    disk_keyring: Path | None = _setting(
        None, _path, "FILE", "Keyring with the tenants' keys, outside of DIR (default: the key's FILE.ring)"
    )
    session_keys: bool = _setting(
        False,
        _flag,
        "BOOL",
        "With disk_key: a key for each session, which a forget of the session drops (true or false)",
    )
    max_age_days: float = _setting(
        0.0, _number, "DAYS", "Remove pages this long after they were saved (0: no limit)"
    )
    page_bytes: int = _setting(1 * MIB, _size, "SIZE", "Size of most pages, which divides the disk tier")
    policy: str = _setting(
        DEFAULT_POLICY, _text, "NAME", f"Order in which pages leave a full tier: {', '.join(POLICIES)}"
    )
    lease_s: float = _setting(60.0, _number, "SECONDS", "How long a lookup holds its pages")
    reserve_bytes: int = _setting(
        0, _size, "SIZE", "Limit of one client's reservations (0: a quarter of the arena, at most 1 GiB)"
    )
    server_key: Path | None = _setting(
        None, _path, "FILE", "The daemon's own key file, required for tcp:// off loopback"
    )
    tenants: Path | None = _setting(
        None, _path, "DIR", "Directory with the public keys of the admitted clients, TENANT.key"
    )
    quotas: Mapping[str, int] = _setting(
        dict, _sizes, "NAME=SIZE,…", "Bytes of the arena by tenant: TENANT=SIZE, comma-separated"
    )
    metrics_port: int = _setting(
        0, _port, "PORT", "Port of /metrics, /healthz, /readyz and the dashboard (0: off)"
    )
    metrics_host: str = _setting("127.0.0.1", _text, "ADDRESS", "Address of --metrics-port")
    dashboard_token: Path | None = _setting(
        None, _path, "FILE", "File with the dashboard's token (required off loopback)"
    )
    events: Mapping[str, str] = _setting(
        dict,
        _urls,
        "URL",
        "Publish KV events in vLLM's format at URL (ipc://PATH or tcp://127.0.0.1:PORT), or at "
        "MODEL=URL, comma-separated, with one endpoint per model (empty: off)",
    )
    events_replay: Mapping[str, str] = _setting(
        dict, _urls, "URL", "Replay endpoint for missed events: URL or MODEL=URL"
    )
    events_topic: str = _setting(
        "", _text, "TEXT", "Topic of all events; {model} is replaced by the endpoint's model"
    )
    events_encoding: str = _setting(
        "map", _text, "NAME", f"One of {', '.join(EVENT_ENCODINGS)} (array: for followers of vLLM up to 0.23)"
    )
    events_block_tokens: int = _setting(
        0, _count, "N", "Tokens of a block in the events, a divisor of a page's tokens (0: a page is a block)"
    )
    events_tenants: bool = _setting(
        False, _flag, "BOOL", "Include pages of tenants in the events (true or false)"
    )
    events_connect: bool = _setting(
        False, _flag, "BOOL", "Connect to the URL of --events instead of listening (true or false)"
    )
    events_anywhere: bool = _setting(
        False,
        _flag,
        "BOOL",
        "Allow followers on other machines: events have prompts in clear text (true or false)",
    )
    cluster: str = _setting(
        "",
        _text,
        "URL",
        "Share pages with other hosts through the shared store at mooncake://HOST:PORT or etcd://HOST:PORT, "
        "or through an object store, s3://BUCKET/PREFIX",
    )
    cluster_publish: str = _setting(
        "reused",
        _text,
        "NAME",
        f"Which pages to publish: {', '.join(PUBLISH)} (reused: pages requested again)",
    )
    cluster_min_tokens: int = _setting(
        1024, _count, "N", "Ask the shared store if at least this many tokens of a prompt are missing here"
    )
    cluster_look_s: float = _setting(
        0.003, _number, "SECONDS", "How long a lookup waits for the shared store's answer"
    )
    cluster_bytes_per_s: int = _setting(
        0, _size, "SIZE", "Limit of published bytes per second (0: unlimited)"
    )
    cluster_bytes: int = _setting(
        0,
        _size,
        "SIZE",
        "Limit of the bytes in the object store (0: 100 GiB); the least used pages leave first",
    )
    cluster_days: float = _setting(
        0.0, _number, "DAYS", "Delete pages from the object store DAYS after they were written (0: never)"
    )
    cluster_staging: int = _setting(
        128 * MIB, _size, "SIZE", "Size of the buffers for pages to and from other hosts"
    )
    cluster_secret: Path | None = _setting(
        None, _path, "FILE", "File with 16 to 64 bytes that all hosts share; the names of pages depend on it"
    )
    cluster_keys: str = _setting(
        "", _text, "URL", "With disk_key: another bucket, for the keys of shared pages, s3://KEYS/PREFIX"
    )
    cluster_protocol: str = _setting("tcp", _text, "NAME", "Transport between hosts: tcp or rdma")
    cluster_devices: str = _setting("", _text, "NAMES", "RDMA devices, such as mlx5_0,mlx5_1")
    cluster_host: str = _setting(
        "",
        _text,
        "ADDRESS",
        "This host's address in the shared store (default: where it connects from)",
    )
    drain_s: float = _setting(30.0, _number, "SECONDS", "How long the daemon writes to disk after SIGTERM")
    log_level: str = _setting("info", _text, "LEVEL", f"One of {', '.join(LOG_LEVELS)}")
    log_format: str = _setting("plain", _text, "FORMAT", f"One of {', '.join(LOG_FORMATS)}")

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
        if self.cluster_keys and not self.cluster:
            raise UsageError("cluster_keys is for the pages in a shared store: give cluster, or leave it out")
        if self.session_keys and self.cluster:
            raise UsageError(
                "session_keys drops a session's keys on this host only, and cluster publishes its pages to "
                "other hosts: leave out session_keys or cluster"
            )
        max_age_s(self.max_age_days)
        if self.max_age_days and self.cluster:
            raise UsageError(
                "max_age_days removes pages from this host only, and cluster publishes them to other hosts: "
                "leave out max_age_days or cluster"
            )
        for model in self.events_replay.keys() - self.events.keys():
            what = f"of {model}" if model else "of all models"
            raise UsageError(
                f"events_replay has an endpoint {what}, but events has none: use the same models in both"
            )
        for name, least in (("lease_s", 0.1), ("drain_s", 0.0), ("cluster_look_s", 0.0)):
            if not least <= getattr(self, name) <= 86400:
                raise UsageError(f"{name} is {getattr(self, name)}: give {least} to 86400 seconds")

        if not 0 <= self.cluster_days <= 36500:
            raise UsageError(f"cluster_days is {self.cluster_days}: give 0 to 36500 days")

    @classmethod
    def load(
        cls,
        flags: Mapping[str, object] | None = None,
        *,
        file: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Settings:
        """Read the settings from flags, environment and file. A flag that is None was not given. Raise
        :class:`UsageError` for an unknown setting or a wrong value."""
        with _reading(file):
            text = "" if file is None else file.read_text("utf-8")
        return cls._put_together(flags, file, text, environment)

    @classmethod
    async def load_again(cls, flags: Mapping[str, object], *, file: Path | None) -> Settings:
        """Like :meth:`load`, but read the file without blocking the event loop."""
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
        try:
            document = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{file} is not TOML: {error}") from error
        for name, value in document.items():
            _require_known(name, f"{file}: ")
            given[name] = _parse(name, value)
        for variable, value in (os.environ if environment is None else environment).items():
            if variable in _OTHERS:
                continue
            if variable.startswith(PREFIX) and not _KUBERNETES.fullmatch(f"{variable}={value}"):
                name = variable.removeprefix(PREFIX).lower()
                _require_known(name, f"{variable}: ")
                given[name] = _parse(name, value)
        for name, flag in (flags or {}).items():
            if flag == "" and SETTINGS[name]["parse"] is _path:
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
            name for name in SETTINGS if name not in _RELOADED and getattr(self, name) != getattr(newer, name)
        ]
        return replace(self, **{name: getattr(newer, name) for name in _RELOADED}), stuck


SETTINGS: Mapping[str, Mapping[str, Any]] = {each.name: each.metadata for each in fields(Settings)}
"""The ``help``, ``metavar`` and ``parse`` of each setting."""


@contextmanager
def _reading(file: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not TOML: {error}") from error


def _require_known(name: str, where: str) -> None:
    if name not in SETTINGS:
        near = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0)[0]
        raise UsageError(f"{where}there is no setting {name!r}, the nearest is {near!r}")


def _parse(name: str, value: object) -> object:
    """Parse the value of a setting. Raise :class:`UsageError` if it is malformed."""
    try:
        return SETTINGS[name]["parse"](value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} cannot be {value!r}: {error}") from error
