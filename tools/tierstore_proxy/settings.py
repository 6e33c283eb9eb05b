"""The proxy's settings, checked when they are made. Flags override the file, and the file overrides
defaults."""

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
    """The settings of the proxy. Raises :class:`UsageError` for invalid values.

    - ``decode``, ``prefill``: URLs of engines. Without prefill engines the proxy only distributes requests.
    - ``daemon``: the decode engines' daemons, one for each or one for all. ``selector``: Dynamo's selector
      instead. ``keys``, ``server_key``: key files for daemons at tcp:// (``tierstore keygen``). ``identity``
      selects one of a daemon's identities.
    - ``min_prefill_tokens``: if the decode engine lacks at least this many tokens of a prompt, a prefill
      engine computes it. ``prefill_s``: the time limit of a prefill.
    - ``look_s``: the time limit of a question to a daemon or selector, and for token ids.
    - ``api_key``: the key for everything except ``/health``. Without a key only loopback addresses are
      served.
    - ``max_requests``, ``max_queued_tokens``: limits on concurrent requests and on their prompt tokens.
    - ``max_body_bytes``, ``max_answer_bytes``, ``request_s``: limits of one request: its body, answer and
      duration.
    - ``drain_s``: how long SIGTERM waits for running requests.
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
                raise UsageError(f"two of the {name} engines have the same URL")
            object.__setattr__(self, name, urls)
        if self.selector:
            object.__setattr__(self, "selector", _url("selector", self.selector))
            if self.daemon:
                raise UsageError("give either --daemon or --selector: a selector already follows the daemons")
        curve = CurveKeys.read(*self.key_files)
        for url in self.daemon:
            Address.parse(url, curve)
        if len(self.daemon) not in (0, 1, len(self.decode)):
            raise UsageError(
                f"{len(self.daemon)} daemons for {len(self.decode)} decode engines: give one for each in "
                "the same order, or one for all"
            )
        if self.api_key == "":
            raise UsageError("api_key must not be empty; leave it out to serve without a key")
        host, _ = self.address
        if self.api_key is None and not is_loopback(host):
            raise UsageError(f"other machines can reach {host}: give an --api-key, or listen at 127.0.0.1")
        if self.max_body_bytes < KIB or self.max_answer_bytes < KIB:
            raise UsageError("max_body_bytes and max_answer_bytes must be at least 1 KiB")
        for name in ("min_prefill_tokens", "max_requests", "max_queued_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("prefill_s", "look_s", "request_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.drain_s >= 0:
            raise UsageError("drain_s must not be negative")

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port."""
        host, _, port = self.listen.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise UsageError(f"listen must be HOST:PORT (port 0 for any free port), got {self.listen!r}")
        return host, int(port)

    @property
    def key_files(self) -> tuple[Path | None, Path | None]:
        """Return ``keys`` and ``server_key`` as paths; None for an empty one."""
        return (Path(self.keys) if self.keys else None, Path(self.server_key) if self.server_key else None)

    @classmethod
    def load(cls, flags: Mapping[str, object], *, file: Path | None = None) -> ProxySettings:
        """Return settings from flags (None: not given) and a TOML file with the same names."""
        given = {} if file is None else _read(file)
        known = [each.name for each in fields(cls)]
        for name in given.keys() - set(known):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise UsageError(f"{file}: unknown setting {name!r}; did you mean {near!r}?")
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
    """Return a URL without a trailing slash. Raises :class:`UsageError`."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or parts.username or parts.path.rstrip("/"):
        raise UsageError(f"{name} must be http://HOST:PORT, got {text!r}")
    return text.rstrip("/")
