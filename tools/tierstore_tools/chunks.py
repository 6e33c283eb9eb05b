"""``chunks``: what the size of a chunk does to a store, on the prompts of a trace.

The prompts are looked up and saved in order, for every chunk size in a store of its own that has room for all
of them. What differs then is the chunk: how much of a hit is in whole chunks (states, windows and other
engines' pages are found whole, attention's also within one), how much of what is stored is the empty end of a
prompt's last page, how many bytes a copy moves, how long a lookup takes.

A trace has ids of blocks, and says nothing of where within a block two prompts part. Here they do at a place
that is drawn for each block, with equal chances for all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import tierstore
from tierstore.errors import UsageError
from tierstore.keys import TOKEN_DTYPE, Identity
from tierstore.sizing import PRESETS, group_sizes
from tierstore.spec import KVSpec
from tierstore.tiers.slabs import slot_bytes
from tierstore.units import MIB, format_size
from tierstore_tools import machine, report
from tierstore_tools.replay.formats import LengthsTrace, load
from tierstore_tools.replay.trace import Trace

_WORDS = 50_000  # of a vocabulary
_ROOM = 1.25  # of what all pages take


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """One chunk size. Shares are of 1: ``hits`` and ``whole_hits`` of all prompts' tokens, ``empty`` of the
    bytes stored. ``copy_bytes`` is a page of the model."""

    chunk_tokens: int
    hits: float
    whole_hits: float
    empty: float
    pages: int
    copy_bytes: int
    lookup_us: float  # median
    slow_lookup_us: float  # 99 of 100 take less


def run(trace: Path, sizes: Sequence[int], *, requests: int, model: str, json: str | None) -> None:
    """Measure, show, write. Raises :class:`UsageError` for a file that is no trace of prompts, a model that
    is no preset, and sizes that are none."""
    if model not in PRESETS:
        raise UsageError(f"no model {model!r} (known: {', '.join(PRESETS)})")
    token_bytes = sum(group.token_bytes for group in group_sizes(PRESETS[model]))
    report.require_targets(json)
    with report.phases() as phases:
        with phases.phase(f"reading {trace.name}", measurable=False):
            prompts = _prompts(trace, requests)
        rows = []
        for size in sizes:
            with phases.phase(f"{len(prompts)} prompts in chunks of {size}") as phase:
                rows.append(_measure(prompts, size, token_bytes, phase.update))
    tokens = sum(map(len, prompts))
    report.table(
        f"chunks: {len(prompts):,} prompts of {trace.name}, {tokens:,} tokens; pages of {model}",
        ("tokens", "hits", "in whole chunks", "empty", "pages", "a copy", "lookup µs", "99 of 100"),
        [
            (
                f"{row.chunk_tokens}",
                f"{row.hits:.4f}",
                f"{row.whole_hits:.4f}",
                f"{row.empty:.4f}",
                f"{row.pages:,}",
                format_size(row.copy_bytes),
                f"{row.lookup_us:,.0f}",
                f"{row.slow_lookup_us:,.0f}",
            )
            for row in rows
        ],
        to_stderr=json == "-",
    )
    described = {"machine": machine.describe(), "trace": trace.name, "model": model}
    counts = {"prompts": len(prompts), "tokens": tokens}
    report.write_json({**described, **counts, "chunks": [asdict(row) for row in rows]}, json)


def _measure(
    prompts: Sequence[npt.NDArray[np.uint32]],
    chunk_tokens: int,
    token_bytes: float,
    progress: Callable[[float], None],
) -> ChunkRow:
    # The smallest pages that there are: their bytes are not looked at.
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=chunk_tokens)
    page = bytes(spec.page_bytes)
    most_pages = sum(-(-len(prompt) // chunk_tokens) for prompt in prompts)
    room = int(most_pages * slot_bytes(spec.page_bytes) * _ROOM) + 64 * MIB
    hits = whole = saved = pages = 0
    seconds: list[float] = []
    identity = Identity.of(spec, model="chunks")
    with tierstore.open(None, spec, identity=identity, host_bytes=room) as store:
        store.wait_ready()
        for number, tokens in enumerate(prompts):
            began = time.perf_counter()
            hit = store.lookup(tokens)
            seconds.append(time.perf_counter() - began)
            hit.release()
            held = hit.tokens // chunk_tokens
            hits += hit.tokens
            whole += held * chunk_tokens
            count = -(-len(tokens) // chunk_tokens) - held
            before = store.stats().counters["saved_pages"]
            store.save(tokens, [page] * count, first=held).wait()
            new = _number(store.stats().counters["saved_pages"]) - _number(before)
            pages += new
            # All new pages are full but the last one of the prompt, where that is new and partial.
            saved += new * chunk_tokens - (-len(tokens) % chunk_tokens if new else 0)
            progress((number + 1) / len(prompts))
    asked = sum(map(len, prompts))
    return ChunkRow(
        chunk_tokens,
        hits=hits / asked,
        whole_hits=whole / asked,
        empty=1 - saved / (pages * chunk_tokens) if pages else 0.0,
        pages=pages,
        copy_bytes=round(chunk_tokens * token_bytes),
        lookup_us=statistics.median(seconds) * 1e6,
        slow_lookup_us=float(np.quantile(seconds, 0.99)) * 1e6,
    )


def _number(counter: object) -> int:
    assert isinstance(counter, int), "pages are counted one by one"
    return counter


def _prompts(path: Path, requests: int) -> list[npt.NDArray[np.uint32]]:
    """The tokens of a trace's first prompts."""
    trace = load(path).trace
    if isinstance(trace, LengthsTrace):
        raise UsageError(f"{path} has lengths and no prompts: give a trace with block ids")
    prompts = [_tokens(trace, request.blocks, request.input_tokens) for request in trace[:requests]]
    prompts = [prompt for prompt in prompts if len(prompt)]
    if not prompts:
        raise UsageError(f"{path} has no prompt with a token: there is nothing to look up")
    return prompts


def _tokens(trace: Trace, blocks: Sequence[int], count: int) -> npt.NDArray[np.uint32]:
    """A block begins like all that come after the same one, up to a place that is drawn for it."""
    found, before = [], -1
    for block in blocks:
        common = np.random.default_rng([0, before + 1]).integers(0, _WORDS, trace.block_tokens, TOKEN_DTYPE)
        own = np.random.default_rng([1, block])
        parts = int(own.integers(0, trace.block_tokens))
        rest = own.integers(_WORDS, 2 * _WORDS, trace.block_tokens - parts, TOKEN_DTYPE)
        found.append(np.concatenate([common[:parts], rest]))
        before = block
    return np.concatenate(found)[:count] if found else np.empty(0, TOKEN_DTYPE)
