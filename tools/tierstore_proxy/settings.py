"""The proxy's settings, checked when they are made. Flags override the file, and the file overrides
defaults."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
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

SIZES = ("max_body_bytes", "max_answer_bytes")


def _setting(default: Any, metavar: str, help: str) -> Any:
    """Declare a setting, which is also an option of the command line."""
    return field(default=default, metadata={"metavar": metavar, "help": help})


@dataclass(frozen=True)
class ProxySettings:
    """The settings of the proxy. Raises :class:`UsageError` for invalid values."""

    prefill: tuple[str, ...] = _setting((), "URL", "Engine that computes prompts; may be repeated")
    decode: tuple[str, ...] = _setting((), "URL", "Engine that generates answers; may be repeated")
    daemon: tuple[str, ...] = _setting(
        (), "URL", "tierstore daemon of each --decode engine in the same order, or one for all"
    )
    selector: str = _setting("", "URL", "Dynamo's selector, asked instead of daemons")
    identity: str = _setting("", "HEX", "Identity of the pages, as `tierstore ls` shows it")
    keys: str = _setting("", "FILE", "Client's .secret file, for daemons at tcp://")
    server_key: str = _setting("", "FILE", "Public .key file of the daemons at tcp://")
    listen: str = _setting(
        "127.0.0.1:8100", "HOST:PORT", "Address to listen at; other than loopback needs a key"
    )
    api_key: str | None = _setting(
        None, "KEY", "Key that clients must send for all but /health; it is sent on to the engines"
    )
    min_prefill_tokens: int = _setting(
        128, "N", "Send a prompt with fewer missing tokens to a decode engine alone"
    )
    prefill_s: float = _setting(
        30.0, "SECONDS", "Time limit of a prefill; then the decode engine computes the prompt"
    )
    look_s: float = _setting(
        0.05, "SECONDS", "Time limit for the answer of a daemon or selector, and for token ids"
    )
    max_body_bytes: int = _setting(4 * MIB, "SIZE", "Largest request body; larger ones get 413")
    max_answer_bytes: int = _setting(256 * MIB, "SIZE", "Largest answer; the rest is cut off")
    max_requests: int = _setting(1024, "N", "Running requests at most; more get 429")
    max_queued_tokens: int = _setting(16_000_000, "N", "Prompt tokens of all running requests at most")
    request_s: float = _setting(600.0, "SECONDS", "Time limit of one request; then it gets 504")
    drain_s: float = _setting(30.0, "SECONDS", "How long SIGTERM waits for running requests")

    def __post_init__(self) -> None:
        if not self.decode:
            raise UsageError("no decode engine: give --decode URL, once for each")
        for name in ("prefill", "decode"):
            urls = tuple(checked_url(name, url) for url in getattr(self, name))
            if len(set(urls)) < len(urls):
                raise UsageError(f"two of the {name} engines have the same URL")
            object.__setattr__(self, name, urls)
        if self.selector:
            object.__setattr__(self, "selector", checked_url("selector", self.selector))
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
        return host_and_port(self.listen)

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
        for name in SIZES:
            if isinstance(given.get(name), str):
                given[name] = parse_size(str(given[name]))
        try:
            return msgspec.convert(given, cls)
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


def host_and_port(listen: str) -> tuple[str, int]:
    """Return the parts of an address to listen at. Raises :class:`UsageError`."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"listen must be HOST:PORT (port 0 for any free port), got {listen!r}")
    return host, int(port)


def checked_url(name: str, text: str) -> str:
    """Return a URL without a trailing slash. Raises :class:`UsageError`."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or parts.username or parts.path.rstrip("/"):
        raise UsageError(f"{name} must be http://HOST:PORT, got {text!r}")
    return text.rstrip("/")
