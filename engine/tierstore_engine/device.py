"""The model on a CUDA device. Torch computes on the pool's compute stream, and the pool copies at the same
time.

This module has little code on purpose, because it cannot run without a GPU. The decisions are in
``graphs.py``, ``gathered.py``, ``gather.py`` and the pool, which are tested without a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch

from tierstore.memory import Memory as HostMemory
from tierstore.tiers.device import DeviceMemoryError, SourceOrder, Stream
from tierstore.tiers.device_pool import DevicePool
from tierstore.units import format_size
from tierstore_engine.attention.base import BatchLayout, Span
from tierstore_engine.attention.cuda import CudaAttention
from tierstore_engine.attention.gathered import EVERYWHERE, NOWHERE, LibraryRanges, choose, least_tokens
from tierstore_engine.attention.push_down import PushDownAttention
from tierstore_engine.choices import kept_choice, per_call
from tierstore_engine.config import ModelConfig
from tierstore_engine.gather import LARGEST_BYTES, KernelGather, OnStream, crossover
from tierstore_engine.graphs import Captured, DecodeGraphs
from tierstore_engine.kernels.cubins import source_digest
from tierstore_engine.kernels.cupy_launcher import CupyLauncher
from tierstore_engine.model import Memory, Model
from tierstore_engine.sampling import Choice, Draw, sample
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import PartialStep, Runner, Step

log = logging.getLogger(__name__)

_REPETITIONS = 3
_FRAGMENTS = 1024


class CudaRunner(Runner):
    """``model`` on the device of ``pool``. The constructor measures alternatives and captures decoding,
    before anything else computes or copies."""

    def __init__(
        self,
        model: Model,
        memories: Sequence[Memory],
        pools: Sequence[DevicePool],
        settings: EngineSettings,
    ) -> None:
        """``memories`` and ``pools`` have one entry for each layer group of the model."""
        attention, pool = memories[0], pools[0]
        beyond = attention if isinstance(attention, PushDownAttention) else None
        if beyond is not None:
            attention = beyond.device
        self._model = model
        self._pool = pool
        self._settings = settings
        self._stream = external(pool.compute, pool.device)
        # The weights were made on torch's default stream. This stream must be told to wait for it.
        self._stream.wait_stream(torch.cuda.default_stream(torch.device(pool.device)))
        # A model that has only states has block tables of one page.
        pages = pool.num_pages if model.config.attends else 1
        positions = min(model.config.max_positions, pages * pool.spec.chunk_tokens)
        with (
            shortage_explained(pool, settings),
            torch.inference_mode(),
            torch.cuda.stream(self._stream),
        ):
            if isinstance(attention, CudaAttention):
                attention.library_at = _prefill_ranges(attention, model.config, pool, settings, positions)
            for each in pools:
                each.gather = _gather(each)
            self.graphs: DecodeGraphs | None = None
            # A captured step uses other kernels than prefill, and their last bits differ. The host takes part
            # in a step over pages beyond the memory, so it cannot be captured.
            if beyond is None and not model.config.arithmetic:
                self.graphs = self._capture(memories, -(-positions // pool.spec.chunk_tokens))
            if beyond is not None:
                beyond.break_even = _break_even(beyond, model.config, pool)
        self._stream.synchronize()

    def _capture(self, memories: Sequence[Memory], width: int) -> DecodeGraphs:
        return DecodeGraphs(
            self._model,
            [cast(Captured, memory) for memory in memories],
            CudaRecorder(self._pool.device),
            max_sequences=self._settings.max_sequences,
            width=width,
        )

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    def compute(self, step: Step) -> torch.Tensor:
        with shortage_explained(self._pool, self._settings), torch.cuda.stream(self._stream):
            logits = None if self.graphs is None else self.graphs.compute(step)
            return self._model.compute(step) if logits is None else logits

    def advance(self, partial: PartialStep, layers: range) -> torch.Tensor | None:
        with shortage_explained(self._pool, self._settings), torch.cuda.stream(self._stream):
            return self._model.advance(partial, layers)

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> list[Choice]:
        with shortage_explained(self._pool, self._settings), torch.cuda.stream(self._stream):
            sampled = sample(logits, draws, rows).to_host()
        self.wait()
        return sampled.choices()

    def wait(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        """Do nothing: all pages are in memory."""


class CudaRecorder:
    """CUDA graphs. A step runs once before its capture, so that libraries are initialized. The capture uses
    one of torch's streams, where the pool's threads cannot interfere."""

    def __init__(self, device: str) -> None:
        self._device = device

    def buffers(self, numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.zeros(numbers, dtype=torch.int32, pin_memory=True)
        return host, torch.zeros(numbers, dtype=torch.int32, device=self._device)

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        step()
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return captured

        return replay


def external(stream: Stream, device: str) -> torch.cuda.ExternalStream:
    """Return a stream of the pool as torch's type."""
    return torch.cuda.ExternalStream(stream, torch.device(device))  # type: ignore[no-untyped-call]


def on_stream(device: str) -> OnStream:
    """Return a function that puts work of torch and CuPy on a stream of the pool."""

    def call(stream: Stream, work: Callable[[], None]) -> None:
        with torch.cuda.stream(external(stream, device)):
            work()

    return call


def device_facts(device: str) -> dict[str, str]:
    """Return the facts about device and software on which a measurement depends."""
    return {
        "device": torch.cuda.get_device_name(torch.device(device)),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "kernels": source_digest(),
    }


def timed(work: Callable[[], object], repetitions: int = _REPETITIONS) -> float:
    """Return the seconds that ``work`` takes on torch's current stream, by events."""

    def seconds_of(calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return per_call(seconds_of, repetitions)


def _prefill_ranges(
    attention: CudaAttention, config: ModelConfig, pool: DevicePool, settings: EngineSettings, limit: int
) -> LibraryRanges:
    """Return the lengths of the past for which torch computes a chunk's attention. The measurement uses pages
    of the pool, which are still unused. Only the pages that have memory are cleared and used: a pool that may
    grow has addresses without memory."""
    if attention.library is None:
        return NOWHERE
    if settings.prefill_backend != "auto":
        return EVERYWHERE if settings.prefill_backend == "library" else NOWHERE
    limit = min(limit, pool.capacity * pool.spec.chunk_tokens)
    chunk = min(settings.prefill_chunk, limit)
    dtype: torch.dtype = getattr(torch, config.dtype)
    queries = torch.randn((chunk, config.heads, config.head_dim), dtype=dtype, device=pool.device)
    torch.as_tensor(pool.array, device=pool.device)[: pool.capacity].zero_()

    def seconds(past: int, ranges: LibraryRanges) -> float:
        attention.library_at = ranges
        pages = list(range(-(-(past + chunk) // attention.chunk_tokens)))
        spans = [Span((pages,), past, past + chunk)]
        batch = BatchLayout.of(spans, chunk_tokens=attention.chunk_tokens, device=pool.device)
        return timed(lambda: attention.attend(attention.layers[0], queries, batch))

    def library_seconds(past: int) -> float:
        try:
            return seconds(past, EVERYWHERE)
        except (RuntimeError, TypeError) as error:  # out of memory, no such kernel, or an older torch
            log.warning("cannot use torch's attention after %d tokens: %s", past, error)
            return float("inf")

    def measure() -> list[tuple[int, int]]:
        ranges = choose(
            lambda past: seconds(past, NOWHERE),
            library_seconds,
            chunk=chunk,
            limit=limit,
        )
        return list(ranges.ranges)

    shape = {name: getattr(config, name) for name in ("heads", "kv_heads", "head_dim", "dtype")}
    facts = {**device_facts(pool.device), **shape, "chunk": chunk, "limit": limit}
    found = tuple((first, stop) for first, stop in kept_choice("prefill", facts, measure))
    return LibraryRanges(found, least_tokens(chunk))


def _break_even(attention: PushDownAttention, config: ModelConfig, pool: DevicePool) -> float:
    """Return the number of queries for which attention on the host takes as long as copying the pages to the
    device."""
    facts = {**device_facts(pool.device), "model": config.digest(), "threads": torch.get_num_threads()}
    device = torch.device(pool.device)
    return float(kept_choice("break-even", facts, lambda: attention.measure_break_even(device)))


def _gather(pool: DevicePool) -> KernelGather | None:
    """Return the kernel that copies layers of pages, if it is faster than the device's copy engines. Return
    None if it is not."""
    nbytes = max(pool.spec.layer(layer).nbytes for group in pool.spec.groups for layer in group.layers)
    fragments = min(_FRAGMENTS, pool.capacity)
    if nbytes > LARGEST_BYTES or not pool.runtime.host_pointers:
        return None

    gather = KernelGather(CupyLauncher(pool.device), on_stream(pool.device), device=pool.device)

    def measure() -> int:
        host = HostMemory(fragments * nbytes, shared=False)
        host.populate()
        numbers = np.arange(fragments, dtype=np.uint64)
        targets = numbers * np.uint64(pool.spec.page_bytes) + np.uint64(pool.address)
        sources = numbers * np.uint64(nbytes) + np.uint64(host.address)
        sizes = np.full(fragments, nbytes, np.uint64)
        stream = pool.compute
        pool.register(host.address, host.nbytes)
        try:
            engines_s = timed(
                lambda: pool.runtime.copy_many(stream, targets, sources, sizes, SourceOrder.ANY)
            )
            kernel_s = timed(lambda: gather.copy(stream, targets, sources, nbytes))
        finally:
            pool.unregister(host.address)
        return crossover(engines_s, kernel_s, nbytes)

    facts = {**device_facts(pool.device), "fragment_bytes": nbytes, "fragments": fragments}
    gather.below_bytes = int(kept_choice("gather", facts, measure))
    return gather


@contextmanager
def shortage_explained(pool: DevicePool, settings: EngineSettings) -> Iterator[None]:
    """Turn torch's out-of-memory error into a :class:`DeviceMemoryError` with the relevant numbers.

    The pool got its memory when the engine was made. Computing shares the rest with the weights and the
    captured steps, so a smaller pool or smaller steps help. A failed step changes nothing for its sequences,
    and the engine can continue with other requests.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        memory = pool.runtime.memory()
        raise DeviceMemoryError(
            f"{pool.device} has no memory left to compute a step of up to {settings.batch_tokens} tokens: "
            f"{format_size(memory.free)} of its {format_size(memory.total)} are free, and the page pool has "
            f"{format_size(pool.large_pages.nbytes)}. Give it fewer pages, or a smaller "
            f"prefill_chunk ({settings.prefill_chunk}) or max_sequences ({settings.max_sequences}), or take "
            "prefill_backend kernels, which needs no gathered copy"
        ) from error
