"""Measure codecs over a model's KV pages, and hits from a disk tier that uses them.

    python benchmarks/codec.py --model /models/Llama-3.1-8B --tokens 4096 --store /mnt/nvme

The pages are the bundled engine's own, computed from a document: random numbers have other exponents. Each
way encodes and decodes every page in turn, and medians of the core's own time are shown. With ``--store``,
each codec gets a store with one prompt of ``--hit-tokens``, made of these pages, and every round loads it
with nothing in memory. Pages of SmolLM2-135M in bfloat16 answered: ``lossless`` needs 1 / 1.41 of the bytes
and decodes at 4.6 GB/s per core of an AMD EPYC (docs/codecs.md).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import numpy.typing as npt
import typer
import zstandard

import tierstore
from tierstore import codec
from tierstore.command_line import one_line_errors
from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.tiers.hbm import COMPLETED, PagePool
from tierstore.units import GIB, MIB, format_size
from tierstore_engine.attention.base import Span
from tierstore_engine.build import load_model, make_runner, open_model
from tierstore_engine.pool_sizes import pages_for_tokens
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Step
from tierstore_tools import corpus, machine, report

CHUNK = 256  # tokens computed per step
WAIT_S = 300.0
HIT_CODECS = ("none", "lossless", "zstd")
MOST_HIT_BYTES = 1 * GIB  # a longer prompt gets fewer layers
BATCH_PAGES = 64  # the writer keeps up with batches of this size, and so encodes every page
Pages = npt.NDArray[np.uint8]  # [pages, bytes]


@dataclass(frozen=True)
class Way:
    """A way to keep pages."""

    name: str
    encode: Callable[[memoryview], bytes]
    decode: Callable[[bytes, memoryview], object]


@dataclass(frozen=True)
class CodecRow:
    """One way. ``ratio`` is the pages' bytes over the encoded bytes. ``exact``: every page came back bit for
    bit."""

    way: str
    ratio: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    exact: bool


@dataclass(frozen=True)
class HitRow:
    """A hit from disk. ``of_none`` is the median of its time over that without a codec, round by round."""

    codec: str
    disk_bytes: int
    hit_s: float
    of_none: float
    exact: bool


def main(
    model: str = "deep",
    tokens: int = 4096,
    dtype: str | None = None,
    rounds: int = 5,
    store: Path | None = None,
    hit_tokens: int = 100_000,
    json: str | None = None,
) -> None:
    """Measure codecs over a model's KV pages, and with STORE (a directory) hits from disk."""
    report.require_targets(json)
    pages, spec = computed(model, tokens, dtype)
    with report.phases() as phases:
        with phases.phase("encoding and decoding", measurable=False):
            rows = measured(pages, ways(spec.describe()), rounds)
        hits = []
        if store is not None:
            with phases.phase(f"hits of {hit_tokens:,} tokens", measurable=False):
                hits = measured_hits(store, pages, spec, hit_tokens, rounds)
    yes = {True: "yes", False: "NO"}
    report.table(
        f"codecs over {len(pages)} pages of {pages.shape[1]:,} bytes, one core",
        ("way", "ratio", "encode GB/s", "decode GB/s", "exact"),
        [
            (
                row.way,
                f"{row.ratio:.3f}",
                report.rate(row.encode_gb_per_s),
                report.rate(row.decode_gb_per_s),
                yes[row.exact],
            )
            for row in rows
        ],
        to_stderr=json == "-",
    )
    if hits:
        report.table(
            f"a hit of {hit_tokens:,} tokens from disk",
            ("codec", "on disk", "hit", "÷ none", "exact"),
            [
                (
                    hit.codec,
                    format_size(hit.disk_bytes),
                    report.seconds(hit.hit_s),
                    f"{hit.of_none:.2f}",
                    yes[hit.exact],
                )
                for hit in hits
            ],
            to_stderr=json == "-",
        )
    facts = {"machine": machine.describe(), "model": Path(model).name, "layout": spec.describe()}
    document = {"rows": [asdict(row) for row in rows], "hits": [asdict(hit) for hit in hits]}
    report.write_json({**facts, **document}, json)


def computed(model: str, tokens: int, dtype: str | None) -> tuple[Pages, KVSpec]:
    """Return the full pages of a document of ``tokens`` tokens, and their layout."""
    opened = open_model(model, device="cpu", dtype=dtype)
    spec = opened.config.kv_spec()
    if not spec.chunk_tokens <= tokens <= opened.config.max_positions:
        most = opened.config.max_positions
        raise UsageError(f"--tokens must be from {spec.chunk_tokens} (a page) to {most}, got {tokens}")
    document = corpus.long_prompt(opened.tokenizer.encode, tokens, question=corpus.QUESTION)
    pool = PagePool(spec, pages_for_tokens(spec, tokens))
    runner = make_runner(load_model(opened), [pool], EngineSettings())
    for start in range(0, tokens, CHUNK):
        stop = min(start + CHUNK, tokens)
        span = Span((range(pool.num_pages),), start, stop)
        runner.compute(Step((span,), document[start:stop], range(1), COMPLETED, spec.chunk_tokens))
    return pool.array[: tokens // spec.chunk_tokens].copy(), spec


def ways(layout: str) -> list[Way]:
    """Return all ways: a copy, general codecs, and the store's own."""
    zstd, unzstd = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    size = codec.number_bytes(layout)

    def shuffled(page: memoryview) -> bytes:
        return zstd.compress(np.frombuffer(page, np.uint8).reshape(-1, size).T.tobytes())

    def unshuffled(data: bytes, page: memoryview) -> None:
        planes = np.frombuffer(unzstd.decompress(data, page.nbytes), np.uint8).reshape(size, -1)
        np.frombuffer(page, np.uint8).reshape(-1, size)[:] = planes.T

    def lz4_decode(data: bytes, page: memoryview) -> None:
        page[:] = lz4.block.decompress(data, uncompressed_size=page.nbytes)

    found = [
        Way("copy", bytes, lambda data, page: page.__setitem__(slice(None), data)),
        Way("lz4", lambda page: lz4.block.compress(bytes(page), store_size=False), lz4_decode),
        Way("zstd -1, bytes shuffled", shuffled, unshuffled),
    ]
    own = [each for name in codec.NAMES if (each := codec.by_name(name)) is not None]
    return found + [own_way(each, layout) for each in own]


def own_way(own: Any, layout: str) -> Way:
    """Return the way of one of the store's codecs, which keeps a page as it is if encoding gains too
    little."""

    def encode(page: memoryview) -> bytes:
        room = memoryview(bytearray(own.bound(page.nbytes)))
        return bytes(room[: own.encode(page, room, layout)]) or bytes(page)

    def decode(data: bytes, page: memoryview) -> None:
        if len(data) == page.nbytes:
            page[:] = data
        else:
            assert own.decode(memoryview(data), page)

    return Way(f"tierstore {own.name}", encode, decode)


def measured(pages: Pages, all_ways: list[Way], rounds: int) -> list[CodecRow]:
    """Encode and decode every page ``rounds`` times, all ways in turn."""
    encodes: dict[str, list[float]] = {way.name: [] for way in all_ways}
    decodes: dict[str, list[float]] = {way.name: [] for way in all_ways}
    kept: dict[str, tuple[int, bool]] = {}
    back = np.zeros_like(pages)
    for _ in range(rounds):
        for way in all_ways:
            began = time.thread_time()
            encoded = [way.encode(memoryview(page)) for page in pages]
            between = time.thread_time()
            for data, page in zip(encoded, back, strict=True):
                way.decode(data, memoryview(page))
            encodes[way.name].append(between - began)
            decodes[way.name].append(time.thread_time() - between)
            kept[way.name] = (sum(map(len, encoded)), bool((back == pages).all()))
            back[:] = 0
    gb = pages.nbytes / 1e9
    return [
        CodecRow(
            way.name,
            pages.nbytes / kept[way.name][0],
            gb / statistics.median(encodes[way.name]),
            gb / statistics.median(decodes[way.name]),
            kept[way.name][1],
        )
        for way in all_ways
    ]


def measured_hits(parent: Path, pages: Pages, spec: KVSpec, tokens: int, rounds: int) -> list[HitRow]:
    """Load a prompt of ``tokens`` tokens from a store per codec, all codecs in turn."""
    count = max(tokens // spec.chunk_tokens, 1)
    [group] = spec.groups
    layers = max(min(MOST_HIT_BYTES // count, spec.page_bytes) * len(group.layers) // spec.page_bytes, 1)
    spec = replace(spec, groups=(replace(group, layers=group.layers[:layers]),))
    pages = pages[np.arange(count) % len(pages), : spec.page_bytes]
    pages[:, :4] = np.arange(count, dtype="<u4").view(np.uint8).reshape(-1, 4)  # no two pages are equal
    times: dict[str, list[float]] = {name: [] for name in HIT_CODECS}
    exact = dict.fromkeys(HIT_CODECS, True)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=parent.absolute()) as scratch:
        sizes = {name: fill(Path(scratch, name), pages, spec, name) for name in HIT_CODECS}
        for _ in range(rounds):
            for name in HIT_CODECS:
                room = np.zeros_like(pages)
                times[name].append(hit(Path(scratch, name), room, spec, name))
                exact[name] &= bool((room == pages).all())
    none = times[HIT_CODECS[0]]
    return [
        HitRow(
            name,
            sizes[name],
            statistics.median(times[name]),
            statistics.median(one / other for one, other in zip(times[name], none, strict=True)),
            exact[name],
        )
        for name in HIT_CODECS
    ]


def opened_store(path: Path, spec: KVSpec, name: str, nbytes: int) -> tierstore.Store:
    """Open a store with room for ``nbytes`` on disk."""
    return tierstore.open(
        path,
        spec,
        identity=Identity.of(spec, model="codec"),
        host_bytes=min(nbytes, GIB) + 64 * MIB,
        disk_bytes=2 * nbytes + 64 * MIB,
        disk_codec=name,
    )


def fill(path: Path, pages: Pages, spec: KVSpec, name: str) -> int:
    """Save the pages. Return their bytes on disk."""
    tokens = np.arange(len(pages) * spec.chunk_tokens)
    with opened_store(path, spec, name, pages.nbytes) as store:
        for start in range(0, len(pages), BATCH_PAGES):
            batch = [page.tobytes() for page in pages[start : start + BATCH_PAGES]]
            stop = start + len(batch)
            store.save(tokens[: stop * spec.chunk_tokens], batch, first=start).wait(WAIT_S)
            assert store.flush(WAIT_S)
        return store.stats().tiers["disk"].used_bytes


def hit(path: Path, room: Pages, spec: KVSpec, name: str) -> float:
    """Load all pages into ``room``. Return the seconds of lookup and load."""
    tokens = np.arange(len(room) * spec.chunk_tokens)
    with opened_store(path, spec, name, room.nbytes) as store:
        store.wait_ready()
        began = time.perf_counter()
        loaded = store.load(store.lookup(tokens), [memoryview(page) for page in room]).wait(WAIT_S)
        took = time.perf_counter() - began
        assert loaded.tokens == len(tokens), f"{loaded.tokens} of {len(tokens)} tokens were found"
    return took


if __name__ == "__main__":
    with one_line_errors("codec"):
        typer.run(main)
