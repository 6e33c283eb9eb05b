"""One benchmark on the GPU, as a process of its own: ``python -m tierstore_tools.gpu.bench NAME RESULT``.

RESULT is a JSON file. It is written again after every row, so a crash keeps the rows before it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tierstore.tiers.cuda import CudaDevice
from tierstore.tiers.device import Stream
from tierstore.tiers.device_pool import DevicePool
from tierstore.units import format_size
from tierstore_engine.attention import make_attention
from tierstore_engine.device import external, timed
from tierstore_engine.kernels.cupy_launcher import CupyLauncher
from tierstore_engine.presets import preset
from tierstore_tools.gpu import decode, kinds, prefill, weights
from tierstore_tools.gpu.arithmetic import LLAMA_3_8B, pages_for
from tierstore_tools.gpu.push_down import PushDownBench
from tierstore_tools.gpu.transfers import TransferBench

DEVICE = "cuda:0"
HIT_TOKENS = 100_000
_SLOWDOWN = decode.DecodeCase(16, 16384)
_SHORT_S = 1e-3
_CAPTURED = 20


def kernel_seconds(work: Callable[[], object]) -> float:
    """Return the seconds of ``work`` on the device. Short work is captured many times into a CUDA graph and
    replayed: single launches from Python would measure Python."""
    seconds = timed(work)
    if seconds > _SHORT_S:
        return seconds
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CAPTURED):
            work()
    return timed(graph.replay) / _CAPTURED


def decode_rows() -> Iterator[Any]:
    free = torch.cuda.mem_get_info()[0]
    fit = [case for case in decode.CASES if decode.memory_needed(case) <= free]
    yield from map(asdict, decode.run(CupyLauncher(DEVICE), DEVICE, kernel_seconds, cases=fit))
    for case in decode.CASES:
        if case not in fit:
            needed = format_size(decode.memory_needed(case))
            yield asdict(case) | {"state": f"not measured: needs {needed} of memory"}


def prefill_rows() -> Iterator[Any]:
    yield from map(asdict, prefill.run(CupyLauncher(DEVICE), DEVICE, kernel_seconds))


def kind_rows() -> Iterator[Any]:
    yield from map(asdict, kinds.run(CupyLauncher(DEVICE), DEVICE, kernel_seconds))


def weight_rows() -> Iterator[Any]:
    yield from map(asdict, weights.run(CupyLauncher(DEVICE), DEVICE, kernel_seconds))


def transfer_rows() -> Iterator[Any]:
    device = CudaDevice(0)
    spec = preset("llama-3-8b", dtype=None).kv_spec()
    pool = DevicePool(spec, pages_for(HIT_TOKENS, spec.chunk_tokens) + 8, device)
    bench = TransferBench(pool, pages_for(HIT_TOKENS, pool.spec.chunk_tokens))
    yield from map(asdict, bench.rows())
    problem = decode.DecodeProblem(
        CupyLauncher(DEVICE),
        DEVICE,
        _SLOWDOWN,
        shape=LLAMA_3_8B,
        page_tokens=decode.PAGE_TOKENS,
    )
    stream = external(pool.compute, DEVICE)

    def one() -> None:
        with torch.cuda.stream(stream):
            problem.ours()

    yield asdict(bench.slowdown(one, stream.synchronize))
    bench.close()
    yield {"refused_batches": device.refused_batches}


def push_down_rows() -> Iterator[Any]:
    def computing(stream: Stream) -> torch.cuda.StreamContext:
        return torch.cuda.stream(external(stream, DEVICE))

    config = preset("llama-3-8b", dtype=None)
    yield from map(asdict, PushDownBench.on(CudaDevice(0), config, make_attention, computing).rows())


BENCHMARKS: dict[str, Callable[[], Iterator[Any]]] = {
    "decode": decode_rows,
    "prefill": prefill_rows,
    "kinds": kind_rows,
    "transfers": transfer_rows,
    "weights": weight_rows,
    "push-down": push_down_rows,
}


def write_rows(rows: Iterator[Any], result: Path) -> None:
    """Write all rows so far, after each row."""
    done: list[Any] = []
    for row in rows:
        done.append(row)
        result.write_text(json.dumps(done))


if __name__ == "__main__":
    with torch.inference_mode():
        write_rows(BENCHMARKS[sys.argv[1]](), Path(sys.argv[2]))
