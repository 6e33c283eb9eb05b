"""Measure decode attention: K and V bytes per second, beside the device's own copy and torch's attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tierstore_engine.kernels.launcher import Launcher
from tierstore_engine.kernels.operations import AttentionKernels, LayerPages, Sequences
from tierstore_tools.gpu.arithmetic import LLAMA_3_8B, Heads, copy_bytes, decode_bytes, pages_for

Timer = Callable[[Callable[[], object]], float]
"""Returns the seconds of a call on the device."""

PAGE_TOKENS = 64
ENGINE_LAYERS = 32  # layers in a page of the engine's pool, which set the stride between two pages
COPY_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """``batch`` sequences of ``context`` tokens, in pages of ``layers`` layers. One layer is read."""

    batch: int
    context: int
    layers: int = 1


CASES = (
    *(DecodeCase(batch, context << 10) for context in (4, 16, 32, 64, 128) for batch in (1, 4, 16, 64)),
    *(DecodeCase(batch, context << 10, ENGINE_LAYERS) for batch, context in ((1, 100), (16, 16))),
)


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One case. ``fraction`` is the rate of reading K and V, divided by the rate of a copy (bytes read plus
    bytes written). ``best_torch_s`` is the fastest of torch's attentions over contiguous K and V; None if
    none runs."""

    batch: int
    context: int
    layers: int
    kv_bytes: int
    kernel_s: float
    kv_gb_per_s: float
    copy_gb_per_s: float
    fraction: float
    best_torch_s: float | None
    largest_difference: float


def memory_needed(case: DecodeCase) -> int:
    """Return the bytes on the device for one case: K and V in pages of all layers, gathered and contiguous,
    the memory that the previous case may still hold, and the copy."""
    return (3 + case.layers) * decode_bytes(LLAMA_3_8B, case.batch, case.context) + 2 * COPY_BYTES


def copy_rate(device: str, timer: Timer, nbytes: int = COPY_BYTES) -> float:
    """Return the memory traffic per second of one large copy within the device."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return copy_bytes(nbytes) / timer(lambda: target.copy_(source))


class DecodeProblem:
    """The sequences of ``case``, with K and V in pages and the same K and V in contiguous tensors."""

    def __init__(
        self, launcher: Launcher, device: str, case: DecodeCase, *, shape: Heads, page_tokens: int
    ) -> None:
        batch, context = case.batch, case.context
        self._context = context
        self._layer = case.layers // 2
        pages = pages_for(context, page_tokens)
        generator = torch.Generator(device).manual_seed(batch * context)
        dtype = torch.bfloat16
        planes = (batch * pages, case.layers, 2, shape.kv_heads, page_tokens, shape.head_dim)
        self._pool = torch.zeros(planes, dtype=dtype, device=device)
        self._pool[:, self._layer].normal_(generator=generator)
        self._tables = torch.randperm(batch * pages, generator=generator, device=device).int().view(batch, -1)
        query = (batch, shape.heads, shape.head_dim)
        self._queries = torch.empty(query, dtype=dtype, device=device).normal_(generator=generator)
        self.out = torch.empty_like(self._queries)
        everyone = torch.arange(batch, dtype=torch.int32, device=device)
        self._sequences = Sequences(
            everyone,
            torch.ones_like(everyone),
            torch.full_like(everyone, context),
            tables=self._tables,
            max_count=1,
            max_length=context,
        )
        self._kernels = AttentionKernels(
            launcher,
            dtype="bfloat16",
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            page_tokens=page_tokens,
        )

    def ours(self) -> None:
        """Launch the kernel of the engine."""
        offset = self._layer * self._pool.stride(1)
        layer = LayerPages(self._pool, page_stride=self._pool.stride(0), offset=offset)
        self._kernels.decode(layer, self._queries, self._sequences, self.out)

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, and K and V gathered for torch's attention. This is not timed."""
        gathered = self._pool[:, self._layer][
            self._tables.long()
        ]  # [batch, pages, 2, kv_heads, page_tokens, head_dim]
        planes = gathered.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : self._context]
        keys, values = planes.contiguous()
        return self._queries.unsqueeze(2), keys, values


def torch_attentions(device: str) -> list[SDPBackend]:
    """Return the backends of torch's attention that the kernel is compared with."""
    if device == "cpu":
        return [SDPBackend.MATH]
    return [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def run(
    launcher: Launcher,
    device: str,
    timer: Timer,
    *,
    cases: Sequence[DecodeCase] = CASES,
    shape: Heads = LLAMA_3_8B,
    page_tokens: int = PAGE_TOKENS,
    copy_nbytes: int = COPY_BYTES,
) -> Iterator[DecodeRow]:
    """Yield one row per case."""
    for case in cases:
        # the copy is measured for each case, because the device's clock rates change
        copied = copy_rate(device, timer, copy_nbytes)
        problem = DecodeProblem(launcher, device, case, shape=shape, page_tokens=page_tokens)
        seconds = timer(problem.ours)
        queries, keys, values = problem.contiguous()
        times, reference = _torch_times(queries, keys, values, timer, device)
        nbytes = decode_bytes(shape, case.batch, case.context)
        difference = torch.nan
        if reference is not None:
            difference = float((reference.squeeze(2) - problem.out).abs().max())
        yield DecodeRow(
            case.batch,
            case.context,
            case.layers,
            nbytes,
            seconds,
            nbytes / seconds / 1e9,
            copied / 1e9,
            nbytes / seconds / copied,
            min(times, default=None),
            difference,
        )


def _torch_times(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, timer: Timer, device: str
) -> tuple[list[float], torch.Tensor | None]:
    """Return the time of each of torch's attentions that supports these tensors, and the output."""
    times: list[float] = []
    out: torch.Tensor | None = None
    for backend in torch_attentions(device):

        def attend() -> torch.Tensor:
            return scaled_dot_product_attention(queries, keys, values, enable_gqa=True)

        with sdpa_kernel(backend):
            try:
                out = attend()
                times.append(timer(attend))
            except RuntimeError:  # torch has no such kernel for these tensors
                continue
    return times, out
