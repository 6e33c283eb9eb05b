"""Measure the conversion between an engine's blocks and the pages that engines share.

    python benchmarks/sharing.py --layers 16 --kv-heads 8 --head-dim 128

Each round copies a prompt's blocks to pages and back, for each dtype and each order of blocks. ``by token``
has a token's K and V side by side, as vLLM on a GPU. ``turned`` has K as ``[head_dim, token]``, as on a CPU.
The baseline is libc's memcpy of the same bytes, in the same rounds. A row has the median of each speed, and
of its ratio to memcpy's in a round. Times are this thread's on a core, so that other programs matter less.
docs/sharing.md has results.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import typer

from tierstore.command_line import one_line_errors
from tierstore.spec import DTYPE_BITS, KVSpec
from tierstore_connectors.common.shared_pages import (
    BlockConverter,
    EngineBlocks,
    PagePart,
    PartSource,
    Vectors,
)
from tierstore_tools import machine, report

CHUNK = 64
BY_TOKEN, TURNED = "by token", "turned"
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ConversionRow:
    """One order and dtype. ``…_of_memcpy`` is the median of speed over memcpy's speed, round by round."""

    order: str
    dtype: str
    gather_gb_per_s: float
    scatter_gb_per_s: float
    memcpy_gb_per_s: float
    gather_of_memcpy: float
    scatter_of_memcpy: float
    exact: bool


def main(
    layers: int = 16,
    kv_heads: int = 8,
    head_dim: int = 128,
    block: int = 32,
    tokens: int = 1024,
    rounds: int = 15,
    json: str | None = None,
) -> None:
    """Measure the conversion of shared pages beside memcpy."""
    report.require_targets(json)
    rows = []
    for dtype in ("float32", "bfloat16"):
        spec = KVSpec.uniform(
            layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, chunk_tokens=CHUNK
        )
        rows += [measured(spec, order, block, tokens, rounds) for order in (BY_TOKEN, TURNED)]
    report.table(
        f"blocks of {block} tokens and pages of {CHUNK}, {tokens:,} tokens, one core",
        ("order", "dtype", "gather GB/s", "scatter GB/s", "memcpy GB/s", "gather ÷", "scatter ÷", "exact"),
        [
            (
                row.order,
                row.dtype,
                *map(report.rate, (row.gather_gb_per_s, row.scatter_gb_per_s, row.memcpy_gb_per_s)),
                f"{row.gather_of_memcpy:.2f}",
                f"{row.scatter_of_memcpy:.2f}",
                {True: "yes", False: "NO"}[row.exact],
            )
            for row in rows
        ],
        to_stderr=json == "-",
    )
    report.write_json({"machine": machine.describe(), "rows": [asdict(row) for row in rows]}, json)


def measured(spec: KVSpec, order: str, block: int, tokens: int, rounds: int) -> ConversionRow:
    """Return the speeds for one order of blocks."""
    count = tokens // CHUNK
    nbytes = count * spec.page_bytes
    memory, pages, other = (np.zeros(nbytes, np.uint8) for _ in range(3))
    memory[:] = np.arange(nbytes, dtype=np.uint32).astype(np.uint8)
    converter = BlockConverter(spec.describe(), blocks_in(memory, spec, order, block), whole(spec))
    per_chunk = CHUNK // block
    numbers = np.random.default_rng(0).permutation(count * per_chunk).reshape(count, per_chunk).tolist()
    places = [
        (chunk, page.ctypes.data) for chunk, page in zip(numbers, pages.reshape(count, -1), strict=True)
    ]
    before = memory.copy()
    ways: dict[str, Callable[[], object]] = {
        "gather": lambda: converter.gather(places),
        "scatter": lambda: converter.scatter(places),
        "memcpy": lambda: ctypes.memmove(other.ctypes.data, pages.ctypes.data, nbytes),
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.thread_time()
            way()
            spent[name].append(time.thread_time() - began)
    speeds = {name: nbytes / statistics.median(times) / 1e9 for name, times in spent.items()}
    of_memcpy = {
        name: statistics.median(base / own for base, own in zip(spent["memcpy"], times, strict=True))
        for name, times in spent.items()
    }
    return ConversionRow(
        order,
        spec.dtype,
        speeds["gather"],
        speeds["scatter"],
        speeds["memcpy"],
        of_memcpy["gather"],
        of_memcpy["scatter"],
        bool((memory == before).all() and pages.any()),
    )


def blocks_in(memory: Bytes, spec: KVSpec, order: str, block: int) -> EngineBlocks:
    """Return memory as an engine's blocks, layer after layer."""
    [group] = spec.groups
    item = DTYPE_BITS[spec.dtype] // 8
    width = group.head_dim * item
    head = 2 * block * width
    layer_bytes = memory.nbytes // len(group.layers)
    layers = {}
    for layer in group.layers:
        start, stride = memory.ctypes.data + layer * layer_bytes, group.kv_heads * head
        if order == BY_TOKEN:
            layers[layer] = [
                Vectors(start + plane * width, stride, head, 2 * width, item) for plane in range(2)
            ]
        else:
            layers[layer] = [
                Vectors(start, stride, head, item, block * item),
                Vectors(start + head // 2, stride, head, width, item),
            ]
    return EngineBlocks(layers, block, item)


def whole(spec: KVSpec) -> PartSource:
    """Return pages with all heads and layers as a source."""
    [group] = spec.groups
    every = range(group.kv_heads)
    return PartSource(PagePart(0, 1, group.layers), every, every)


if __name__ == "__main__":
    with one_line_errors("sharing"):
        typer.run(main)
