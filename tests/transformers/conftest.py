"""Small random models of each family, and caches over stores that are checked when they are closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.serving import make_daemon
from tests.tiny_models import reference_model
from tests.transformers.asking import CHUNK
from tierstore_connectors.transformers import TierStoreCache

__all__ = ["make_daemon"]


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
def llama() -> Any:
    return reference_model("llama3")
