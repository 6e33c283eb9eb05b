"""The proxy's settings: flags before the file before the defaults, frozen, checked when made."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from tierstore.client.handshake import Address, CurveKeys
from tierstore.errors import UsageError
from tierstore.units import KIB, MIB, parse_size
from tierstore.wire.local_address import is_loopback

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]

_SIZES = ("max_body_bytes", "max_answer_bytes")


@dataclass(frozen=True)
class ProxySettings:
    """Which engines there are, how requests go to them, and how much of it at a time. Raises
    :class:`UsageError`.

    ``decode`` and ``prefill`` are engines' URLs; without prefill engines the proxy only shares requests
    out. ``daemon`` has the decode engines' daemons (one for each, or one for all), ``selector`` is
    Dynamo's; ``keys`` and ``server_key`` are files for daemons at tcp:// (``tierstore keygen``),
    ``identity`` chooses among what a daemon has pages of. A prompt of which the decode engine lacks
    ``min_prefill_tokens`` or more is computed by a prefill engine, for which ``prefill_s`` seconds are
    waited. ``look_s`` is waited for a daemon, a selector, and token ids. With ``api_key`` everything
    wants it but ``/health``; without one only loopback addresses are served. ``max_requests`` are under way
    at a time, with ``max_queued_tokens`` prompt tokens among them. A request may have a body of
    ``max_body_bytes`` and take ``request_s`` seconds, its answer ``max_answer_bytes``. SIGTERM waits
    ``drain_s`` seconds for what is under way.
    """

    decode: tuple[str, ...]
    prefill: tuple[str, ...] = ()
    daemon: tuple[str, ...] = ()
    selector: str = ""
    identity: str = ""
    keys: str = ""
    server_key: str = ""
    listen: str = "127.0.0.1:8100"
    api_key: str | None = None
    min_prefill_tokens: int = 128
    prefill_s: float = 30.0
    look_s: float = 0.05
    max_body_bytes: int = 4 * MIB
    max_answer_bytes: int = 256 * MIB
    max_requests: int = 1024
    max_queued_tokens: int = 16_000_000
    request_s: float = 600.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.decode:
            raise UsageError("no decode engine: give --decode URL, once for each")
        for name in ("prefill", "decode"):
            urls = tuple(_url(name, url) for url in getattr(self, name))
            if len(set(urls)) < len(urls):
                raise UsageError(f"one of the {name} engines is named twice")
            object.__setattr__(self, name, urls)
        if self.selector:
            object.__setattr__(self, "selector", _url("selector", self.selector))
            if self.daemon:
                raise UsageError("give either a daemon or a selector, which follows them")
        curve = CurveKeys.read(*self.key_files)
        for url in self.daemon:
            Address.parse(url, curve)
        if len(self.daemon) not in (0, 1, len(self.decode)):
            raise UsageError(
                f"{len(self.daemon)} daemons for {len(self.decode)} decode engines: give one for each, in "
                "the same order, or one for all"
            )
        if self.api_key == "":
            raise UsageError("an api key must not be empty; leave it out to serve without one")
        host, _ = self.address
        if self.api_key is None and not is_loopback(host):
            raise UsageError(
                f"{host} is reached from other machines: give an --api-key, or listen at 127.0.0.1"
            )
        if self.max_body_bytes < KIB or self.max_answer_bytes < KIB:
            raise UsageError("max_body_bytes and max_answer_bytes must be at least 1 KiB")
        for name in ("min_prefill_tokens", "max_requests", "max_queued_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("prefill_s", "look_s", "request_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be positive, not {getattr(self, name)}")
        if not self.drain_s >= 0:
            raise UsageError("drain_s must not be negative")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.listen.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise UsageError(f"listen is {self.listen!r}: give HOST:PORT, with port 0 for any free one")
        return host, int(port)

    @property
    def key_files(self) -> tuple[Path | None, Path | None]:
        """``keys`` and ``server_key``."""
        return (Path(self.keys) if self.keys else None, Path(self.server_key) if self.server_key else None)

    @classmethod
    def load(cls, flags: Mapping[str, object], *, file: Path | None = None) -> ProxySettings:
        """Settings from flags (None: not given) and a TOML file with the same names."""
        given = {} if file is None else _read(file)
        known = [each.name for each in fields(cls)]
        for name in given.keys() - set(known):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise UsageError(f"{file}: there is no setting {name!r}; the nearest is {near!r}")
        given |= {name: value for name, value in flags.items() if value is not None}
        for name in _SIZES:
            if isinstance(given.get(name), str):
                given[name] = parse_size(str(given[name]))
        try:
            return msgspec.convert({"decode": (), **given}, cls)
        except msgspec.ValidationError as error:
            sentence, _, place = str(error).partition(" - at `$.")
            raise UsageError(f"{place.rstrip('`') or file}: {sentence}") from error


def _read(file: Path) -> dict[str, object]:
    try:
        return dict(tomllib.loads(file.read_text("utf-8")))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not TOML: {error}") from error


def _url(name: str, text: str) -> str:
    """Without what would come before a path. Raises :class:`UsageError`."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or parts.username or parts.path.rstrip("/"):
        raise UsageError(f"{name} is {text!r}: give http://HOST:PORT")
    return text.rstrip("/")
