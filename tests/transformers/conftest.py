"""Small random models of each family, and caches over stores that are checked when they are closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.tiny_models import reference_model
from tests.transformers.asking import CHUNK
from tierstore_connectors.transformers import TierStoreCache
from tierstore_tools.vllm.daemon import ServeProcess


@pytest.fixture
def make_cache(tmp_path: Path) -> Iterator[Callable[..., TierStoreCache]]:
    """``make_cache(model, place)``: a cache over a store in a directory, or at a daemon. At the end of the
    test no error may have been caught."""
    made: list[TierStoreCache] = []

    def make(model: Any, place: str | Path = "kv", **options: Any) -> TierStoreCache:
        if "://" not in str(place):
            place = tmp_path / place
            options = {"host_bytes": 32 << 20, "disk_bytes": 64 << 20, **options}
        made.append(TierStoreCache(model, place, **{"chunk_tokens": CHUNK, **options}))
        return made[-1]

    yield make
    for cache in made:
        errors = dict(cache.errors.counts)
        cache.close()
        assert set(errors) <= {"bypass", "late lookups"}


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., ServeProcess]]:
    """``make_daemon(host_bytes=…, …)``: a running daemon with a disk, gone at the end of the test."""
    daemons: list[ServeProcess] = []

    def make(**options: Any) -> ServeProcess:
        daemons.append(ServeProcess(tmp_path, **options))
        return daemons[-1].start()

    yield make
    for daemon in daemons:
        daemon.close()


@pytest.fixture
def llama() -> Any:
    return reference_model("llama3")
