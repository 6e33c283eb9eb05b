"""``tierstore-bench codec --store DIR``: what a disk tier's codec does to a hit, and to the bytes on disk.

For each codec a store is filled with one prompt's pages, and closed. Then the stores are opened in turn,
``rounds`` times, with nothing in memory (pages are read with O_DIRECT), and the prompt is loaded into
buffers. A prompt that is longer than the pages that there are has them over and over, with other first bytes
each time. Of a page so many layers are kept that the prompt stays below 1 GiB.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

import tierstore
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.units import GIB, MIB

_WAIT_S = 300.0
_MOST_BYTES = 1 * GIB
_BATCH_PAGES = 64  # saved and flushed at once: the writer is never behind, and encodes all of them


@dataclass(frozen=True)
class HitRow:
    """A prompt's hit from disk. ``of_none`` is its time beside that without a codec, round by round."""

    codec: str
    disk_bytes: int
    hit_s: float
    of_none: float
    exact: bool


def measure(
    directory: Path,
    pages: npt.NDArray[np.uint8],
    layout: str,
    tokens: int,
    codecs: Sequence[str],
    *,
    rounds: int,
    progress: Callable[[float], None],
) -> list[HitRow]:
    """Measure in ``directory``, which is left as it was. The first of ``codecs`` is "none"."""
    spec = KVSpec.parse(layout)
    count = max(tokens // spec.chunk_tokens, 1)
    spec = _shallower(spec, _MOST_BYTES // count)
    pages = pages[:, : spec.page_bytes]
    room = np.zeros((count, spec.page_bytes), np.uint8)
    times: dict[str, list[float]] = {codec: [] for codec in codecs}
    exact = dict.fromkeys(codecs, True)
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=directory) as own:
        for at, codec in enumerate(codecs):
            sizes[codec] = _fill(Path(own, codec), spec, pages, count, codec)
            progress((at + 1) / (len(codecs) + rounds))
        for number in range(rounds):
            for codec in codecs:
                room[:] = 0
                times[codec].append(_hit(Path(own, codec), spec, room, codec))
                exact[codec] &= all(_is(page, pages, at) for at, page in enumerate(room))
            progress((len(codecs) + number + 1) / (len(codecs) + rounds))
    return [
        HitRow(
            codec,
            sizes[codec],
            statistics.median(times[codec]),
            statistics.median(one / none for one, none in zip(times[codec], times[codecs[0]], strict=True)),
            exact[codec],
        )
        for codec in codecs
    ]


def _shallower(spec: KVSpec, page_bytes: int) -> KVSpec:
    """The first layers of a model of one layer group, as many as a page of so many bytes holds."""
    [group] = spec.groups
    layers = max(page_bytes * len(group.layers) // spec.page_bytes, 1)
    return replace(spec, groups=(replace(group, layers=group.layers[:layers]),))


def _open(path: Path, spec: KVSpec, codec: str, nbytes: int) -> tierstore.Store:
    identity = Identity.of(spec, model="codec")
    return tierstore.open(
        path,
        spec,
        identity=identity,
        host_bytes=min(nbytes, 1 * GIB) + 64 * MIB,
        disk_bytes=2 * nbytes + 64 * MIB,
        disk_codec=codec,
    )


def _fill(path: Path, spec: KVSpec, pages: npt.NDArray[np.uint8], count: int, codec: str) -> int:
    """Save ``count`` pages. Returns what they take of the extents."""
    tokens = np.arange(count * spec.chunk_tokens)
    with _open(path, spec, codec, count * spec.page_bytes) as store:
        for start in range(0, count, _BATCH_PAGES):
            stop = min(start + _BATCH_PAGES, count)
            batch = [_page(pages, at).tobytes() for at in range(start, stop)]
            store.save(tokens[: stop * spec.chunk_tokens], batch, first=start).wait(_WAIT_S)
            assert store.flush(_WAIT_S)
        return store.stats().tiers["disk"].used_bytes


def _hit(path: Path, spec: KVSpec, room: npt.NDArray[np.uint8], codec: str) -> float:
    tokens = np.arange(len(room) * spec.chunk_tokens)
    with _open(path, spec, codec, room.nbytes) as store:
        store.wait_ready()
        began = time.perf_counter()
        hit = store.lookup(tokens)
        loaded = store.load(hit, [memoryview(page) for page in room]).wait(_WAIT_S)
        took = time.perf_counter() - began
        assert loaded.tokens == len(tokens), f"{loaded.tokens} of {len(tokens)} tokens are there"
    return took


def _page(pages: npt.NDArray[np.uint8], at: int) -> npt.NDArray[np.uint8]:
    page: npt.NDArray[np.uint8] = pages[at % len(pages)].copy()
    page[:4] = np.frombuffer(at.to_bytes(4, "little"), np.uint8)
    return page


def _is(page: npt.NDArray[np.uint8], pages: npt.NDArray[np.uint8], at: int) -> bool:
    return bool((page == _page(pages, at)).all())
