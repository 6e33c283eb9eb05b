"""``tierstore-bench codec``: what codecs make of a model's KV pages, beside general ones.

The pages are the bundled engine's own, of a document that a model has computed: random numbers have other
exponents. Each way encodes and decodes all pages, one by one, in turn, ``rounds`` times. Medians of the
core's time are shown: what others take of the machine meanwhile does not count.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import codec
from tierstore.codec import Codec
from tierstore.errors import UsageError
from tierstore.tiers.hbm import COMPLETED, PagePool
from tierstore.units import format_size
from tierstore_engine.attention.base import Span
from tierstore_engine.build import load_model, make_runner, open_model, pages_for_tokens
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Step
from tierstore_tools import codec_hits, corpus, machine, report

_CHUNK = 256  # tokens computed at once
_HIT_CODECS = ("none", "lossless", "zstd")
Pages = npt.NDArray[np.uint8]  # [pages, bytes]


@dataclass(frozen=True)
class CodecRow:
    """One way to keep pages. ``ratio``: their bytes by those that are kept. Speeds are of a page's bytes, on
    one core. ``exact``: every page came back bit for bit."""

    way: str
    ratio: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    exact: bool


@dataclass(frozen=True)
class _Way:
    name: str
    encode: Callable[[memoryview], bytes | memoryview]
    decode: Callable[[bytes | memoryview, memoryview], None]


def run(
    model: str,
    tokens: int,
    *,
    dtype: str | None,
    text: str | None,
    rounds: int,
    json: str | None,
    store: Path | None = None,
    hit_tokens: int = 100_000,
) -> list[CodecRow]:
    """Compute the pages, measure, show, write. Raises :class:`UsageError` for a model or package that is not
    there."""
    report.require_targets(json)
    others = _libraries()
    with report.phases() as phases:
        with phases.phase(f"computing {tokens:,} tokens", measurable=False):
            pages, layout = _computed(model, tokens, dtype=dtype, text=text)
        with phases.phase("encoding and decoding") as phase:
            rows = _measure(pages, _ways(layout, others), rounds, phase.update)
        hits = []
        if store is not None:
            with phases.phase(f"hits of {hit_tokens:,} tokens") as phase:
                hits = codec_hits.measure(
                    store, pages, layout, hit_tokens, _HIT_CODECS, rounds=rounds, progress=phase.update
                )
    bound = _entropy_ratio(pages, codec.number_bytes(layout))
    megabytes = pages.nbytes / 1e6
    report.table(
        f"codecs over {len(pages)} pages of {pages.shape[1]:,} bytes ({megabytes:,.0f} MB), one core",
        ("way", "ratio", "encode GB/s", "decode GB/s", "exact"),
        [
            (
                row.way,
                f"{row.ratio:.3f}",
                report.rate(row.encode_gb_per_s),
                report.rate(row.decode_gb_per_s),
                "yes" if row.exact else "no",
            )
            for row in rows
        ]
        + [("entropy of exponents, 8 KiB", f"{bound:.3f}", "", "", "")],
        to_stderr=json == "-",
    )
    if hits:
        report.table(
            f"a hit of {hit_tokens:,} tokens from disk",
            ("codec", "on disk", "of none", "hit", "of none", "exact"),
            [
                (
                    row.codec,
                    format_size(row.disk_bytes),
                    f"{row.disk_bytes / hits[0].disk_bytes:.3f}",
                    report.seconds(row.hit_s),
                    f"{row.of_none:.2f}",
                    "yes" if row.exact else "no",
                )
                for row in hits
            ],
            to_stderr=json == "-",
        )
    facts = {"model": Path(model).name, "layout": layout, "pages": len(pages), "page_bytes": pages.shape[1]}
    document = {**facts, "entropy_ratio": bound, "rows": [asdict(row) for row in rows]}
    document["hits"] = [asdict(row) for row in hits]
    report.write_json({"machine": machine.describe("cpu"), **document}, json)
    return rows


def _libraries() -> dict[str, Any]:
    found = {}
    for module, package in (("lz4.block", "lz4"), ("zstandard", "zstandard")):
        try:
            found[package] = importlib.import_module(module)
        except ImportError as error:
            raise UsageError(
                f"the comparison needs the package {package}: pip install 'tierstore[bench]'"
            ) from error
    return found


def _computed(model: str, tokens: int, *, dtype: str | None, text: str | None) -> tuple[Pages, str]:
    """The full pages of a document of so many tokens, and their layout."""
    opened = open_model(model, device="cpu", dtype=dtype)
    if tokens > opened.config.max_positions:
        raise UsageError(f"the model allows {opened.config.max_positions} tokens, not {tokens}")
    loaded = load_model(opened)
    spec = loaded.kv_spec()
    if tokens < spec.chunk_tokens:
        raise UsageError(f"a page is {spec.chunk_tokens} tokens: give --tokens at least that")
    document = corpus.long_prompt(opened.tokenizer.encode, tokens, text=text, question=corpus.QUESTION)
    pool = PagePool(spec, pages_for_tokens(spec, len(document)))
    runner = make_runner(loaded, [pool], EngineSettings())
    for start in range(0, len(document), _CHUNK):
        stop = min(start + _CHUNK, len(document))
        span = Span((range(pool.num_pages),), start, stop)
        runner.compute(Step((span,), document[start:stop], range(1), COMPLETED, spec.chunk_tokens))
    pages: Pages = pool.array[: len(document) // spec.chunk_tokens].copy()
    return pages, spec.describe()


# -- ways ----------------------------------------------------------------------------------------------


def _ways(layout: str, libraries: dict[str, Any]) -> list[_Way]:
    lz4, zstandard = libraries["lz4"], libraries["zstandard"]
    size = codec.number_bytes(layout)
    ways = [_Way("copy", bytes, _copy)]
    ways += [_shuffled("lz4", 1, _lz4(lz4)), _shuffled("lz4, bytes shuffled", size, _lz4(lz4))]
    for level in (1, 3):
        zstd = _zstd(zstandard, level)
        ways += [
            _shuffled(f"zstd -{level}", 1, zstd),
            _shuffled(f"zstd -{level}, bytes shuffled", size, zstd),
        ]
    ways += [_own(each, layout) for name in codec.NAMES if (each := codec.by_name(name)) is not None]
    return ways


_Pair = tuple[Callable[[Any], bytes], Callable[[Any, int], bytes]]


def _lz4(lz4: Any) -> _Pair:
    return (
        lambda data: bytes(lz4.compress(bytes(data), store_size=False)),
        lambda data, nbytes: bytes(lz4.decompress(data, uncompressed_size=nbytes)),
    )


def _zstd(zstandard: Any, level: int) -> _Pair:
    compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    return (
        lambda data: bytes(compressor.compress(data)),
        lambda data, nbytes: bytes(decompressor.decompress(data, max_output_size=nbytes)),
    )


def _shuffled(name: str, size: int, pair: _Pair) -> _Way:
    """A general codec, over numbers of ``size`` bytes that are cut into planes; of 1: as they are."""
    compress, decompress = pair

    def encode(page: memoryview) -> bytes:
        if size == 1:
            return compress(page)
        return compress(np.frombuffer(page, np.uint8).reshape(-1, size).T.tobytes())

    def decode(data: bytes | memoryview, page: memoryview) -> None:
        found = np.frombuffer(decompress(data, page.nbytes), np.uint8)
        np.frombuffer(page, np.uint8).reshape(-1, size)[:] = found.reshape(size, -1).T

    return _Way(name, encode, decode)


def _own(own: Codec, layout: str) -> _Way:
    room = memoryview(bytearray())

    def encode(page: memoryview) -> bytes:
        nonlocal room
        if room.nbytes < own.bound(page.nbytes):
            room = memoryview(bytearray(own.bound(page.nbytes)))
        return bytes(room[: own.encode(page, room, layout)]) or bytes(page)

    def decode(data: bytes | memoryview, page: memoryview) -> None:
        if len(data) == page.nbytes:  # not worth it: kept as it is
            page[:] = data
        else:
            assert own.decode(memoryview(data), page)

    return _Way(f"tierstore {own.name}", encode, decode)


def _copy(data: bytes | memoryview, page: memoryview) -> None:
    page[:] = data


# -- measuring -----------------------------------------------------------------------------------------


def _measure(
    pages: Pages, ways: list[_Way], rounds: int, progress: Callable[[float], None]
) -> list[CodecRow]:
    taken: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    kept: dict[str, tuple[int, bool]] = {}
    back = np.zeros_like(pages)
    for number in range(rounds):
        for at, way in enumerate(ways):
            began = time.thread_time()
            encoded = [way.encode(memoryview(page)) for page in pages]
            between = time.thread_time()
            for data, page in zip(encoded, back, strict=True):
                way.decode(data, memoryview(page))
            taken[way.name].append((between - began, time.thread_time() - between))
            exact = bool((back == pages).all())
            kept[way.name] = (sum(map(len, encoded)), exact)
            back[:] = 0
            progress((number * len(ways) + at + 1) / (rounds * len(ways)))
    gigabytes = pages.nbytes / 1e9
    return [
        CodecRow(
            way.name,
            pages.nbytes / kept[way.name][0],
            gigabytes / statistics.median(encode for encode, _ in taken[way.name]),
            gigabytes / statistics.median(decode for _, decode in taken[way.name]),
            kept[way.name][1],
        )
        for way in ways
    ]


def _entropy_ratio(pages: Pages, size: int) -> float:
    """What an ideal code for the uppermost byte of each number (in bfloat16 and float32 its exponent) would
    come to, with statistics for each block of 8 KiB."""
    word = np.dtype(f"<u{size}")
    whole = pages.shape[1] // codec.BLOCK_BYTES * codec.BLOCK_BYTES
    blocks = pages[:, :whole].reshape(-1, codec.BLOCK_BYTES)
    blocks = blocks[:: max(len(blocks) // 1000, 1)].copy()
    if not len(blocks):
        return 1.0
    bits = 0.0
    for block in blocks:
        exponents = (block.view(word) << word.type(1)) >> word.type(8 * size - 8)
        shares = np.bincount(exponents.astype(np.int64), minlength=256) / len(exponents)
        shares = shares[shares > 0]
        bits -= float((shares * np.log2(shares)).sum()) / len(blocks)
    return 8 * size / (8 * (size - 1) + bits)
