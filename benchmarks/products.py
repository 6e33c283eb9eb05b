"""Measure products of activations with a weight matrix on the CPU: the compiled part beside torch.

    python benchmarks/products.py --shapes 896x9728,4864x896 --rows 1,4,17,64,128,512 --threads 1

Each pair of products takes turns, with other matrices in between, so that weights come from memory as in a
step. The result is the median of the compiled part's time over torch's.
"""

from __future__ import annotations

import statistics
import time

import torch
import typer

from tierstore import native
from tierstore.command_line import one_line_errors
from tierstore.errors import UsageError
from tierstore_engine.products import by_torch, multiply, same_bits
from tierstore_tools import machine, report

_MATRICES = 6


def main(
    shapes: str = "576x1536,896x9728,4864x896",
    rows: str = "1,4,17,64,128,512",
    threads: int = 1,
    times: int = 14,
    json: str | None = None,
) -> None:
    """Measure products of ROWS rows with matrices of SHAPES (columns x rows)."""
    report.require_targets(json)
    if native.DECODE is None:
        raise UsageError("the compiled part is missing: tierstore doctor says how to build it")
    try:
        sizes = [tuple(map(int, shape.split("x"))) for shape in shapes.split(",")]
        counts = [int(count) for count in rows.split(",")]
    except ValueError:
        raise UsageError("--shapes are like 576x1536,896x9728 and --rows like 1,4,17") from None
    if any(len(size) != 2 for size in sizes) or min(*counts, *(min(size) for size in sizes), threads) < 1:
        raise UsageError("--shapes are like 576x1536,896x9728, and all numbers are at least 1")
    torch.set_num_threads(threads)
    capability = torch.backends.cpu.get_cpu_capability()
    typer.echo(f"{capability}, {threads} threads: compiled ÷ torch", err=json == "-")
    rows_of = []
    for columns, products in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            matrices = [torch.randn(products, columns).to(dtype) for _ in range(_MATRICES)]
            name = str(dtype).removeprefix("torch.")
            found = {count: ratio(matrices, count, times) for count in counts}
            rows_of.append({"columns": columns, "rows": products, "dtype": name, "of_torch": found})
            text = ", ".join(f"{count} rows {each:.2f}" for count, each in found.items())
            typer.echo(f"{columns} x {products} {name}: {text}", err=json == "-")
    facts = {"machine": machine.describe(), "capability": capability, "threads": threads}
    report.write_json({**facts, "rows": rows_of}, json)


def ratio(matrices: list[torch.Tensor], rows: int, times: int) -> float:
    """Return the median of the compiled part's time over torch's for products of ``rows`` rows."""
    x = torch.randn(rows, matrices[0].shape[1]).to(matrices[0].dtype)
    ratios = []
    for turn in range(times):
        one, other = (matrices[(turn + half) % len(matrices)] for half in (0, len(matrices) // 2))
        begun = time.perf_counter()
        by_torch(x, one, None)
        between = time.perf_counter()
        with same_bits():
            multiply(x, other)
        ratios.append((time.perf_counter() - between) / (between - begun))
    return statistics.median(ratios)


if __name__ == "__main__":
    with one_line_errors("products"):
        typer.run(main)
