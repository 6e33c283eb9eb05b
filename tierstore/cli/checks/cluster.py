"""Checks for sharing pages with other hosts. Mooncake needs its Python package, its system libraries, and a
master that answers. An object store needs the package obstore, and a bucket that answers."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from tierstore.cli.checks.check import Check, fail, ok
from tierstore.cluster.shared_store import check_url, is_object_store
from tierstore.errors import SharedStoreError
from tierstore.extras import install

_LIBRARIES = {"ibverbs": "libibverbs1", "numa": "libnuma1"}  # Mooncake imports them even for TCP
_CONNECT_S = 2.0


def checks(url: str) -> Iterator[Check]:
    """Check the requirements of the shared store at ``url``. Raise :class:`~tierstore.errors.UsageError` for
    a malformed address."""
    check_url(url)
    yield from _object_store(url) if is_object_store(url) else _mooncake(url)


def _object_store(url: str) -> Iterator[Check]:
    from tierstore.cluster.s3 import Bucket
    from tierstore.cluster.s3_address import S3Address

    if importlib.util.find_spec("obstore") is None:
        yield fail("obstore", "not installed", install("s3"))
        return
    yield ok("obstore", importlib.metadata.version("obstore"))
    bucket = Bucket(S3Address.parse(url))
    try:
        first = next(bucket.list("bundles"), None)
    except SharedStoreError as error:
        yield fail("object store", str(error), "correct the cause. The daemon also works without the bucket")
    else:
        what = "answers" if first is not None else "answers; it has no pages below this prefix yet"
        yield ok("object store", f"bucket {bucket.address.bucket} {what}")


def _mooncake(url: str) -> Iterator[Check]:
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
