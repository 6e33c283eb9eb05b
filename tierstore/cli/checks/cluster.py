"""Requirements for sharing pages through Mooncake: the wheel, its system libraries, and a master that
answers."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from tierstore.cli.checks.check import Check, fail, ok
from tierstore.cluster.shared_store import check_url

_LIBRARIES = {"ibverbs": "libibverbs1", "numa": "libnuma1"}  # without them the import fails, even for TCP
_CONNECT_S = 2.0


def checks(url: str) -> Iterator[Check]:
    """Check wheel, libraries, master. Raise :class:`~tierstore.errors.UsageError` for a malformed address."""
    check_url(url)
    wheels = [
        f"{each.name} {each.version}"
        for each in importlib.metadata.distributions()
        if (each.name or "").startswith("mooncake-transfer-engine")
    ]
    if wheels:
        yield ok("mooncake", ", ".join(wheels))
    elif importlib.util.find_spec("mooncake") is not None:
        yield ok("mooncake", "installed")
    else:
        yield fail(
            "mooncake",
            "not installed",
            "pip install mooncake-transfer-engine-non-cuda (hosts without CUDA), -transfer-engine or -cuda13",
        )
    missing = [package for name, package in _LIBRARIES.items() if ctypes.util.find_library(name) is None]
    if missing:
        found = f"{', '.join(missing)} missing"
        yield fail("mooncake's libraries", found, f"apt-get install {' '.join(missing)}")
    else:
        yield ok("mooncake's libraries", "libibverbs1, libnuma1")
    place = urlsplit(url)
    try:
        socket.create_connection((place.hostname or "", place.port or 0), timeout=_CONNECT_S).close()
    except OSError as error:
        advice = "start mooncake_master there, or correct the address. The daemon works without it"
        yield fail("shared store", f"{place.netloc} does not answer: {error}", advice)
    else:
        yield ok("shared store", f"{place.netloc} answers")
