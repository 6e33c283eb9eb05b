"""Measure prefill attention: FLOP/s of the kernels and the library backend, beside torch's flash
attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tierstore_engine.attention.gathered import GatheredPrefill
from tierstore_engine.kernels.launcher import Launcher
from tierstore_engine.kernels.operations import AttentionKernels, ChunkSplits, LayerPages, Sequences
from tierstore_tools.gpu.arithmetic import LLAMA_3_8B, Heads, attention_flops, pages_for
from tierstore_tools.gpu.decode import ENGINE_LAYERS, PAGE_TOKENS, Timer


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """``tokens`` new tokens behind ``past``, in pages of ``layers`` layers. One layer is read."""

    tokens: int
    past: int = 0
    layers: int = 1


CASES = (
    *(PrefillCase(tokens << 10) for tokens in (16, 32, 64, 128)),
    *(PrefillCase(2048, (all_tokens << 10) - 2048) for all_tokens in (16, 64, 128)),
    PrefillCase(64, 100_000),  # the part of a prompt that is computed after a hit
    PrefillCase(64, 100_000, ENGINE_LAYERS),
    PrefillCase(2048, 30 << 10, ENGINE_LAYERS),
)


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One case. ``fraction`` is the kernels' speed over that of torch's flash attention on contiguous
    tensors. ``library_overhead`` is the time of gathering pages, divided by the time of the library's
    call."""

    tokens: int
    past: int
    layers: int
    flops: int
    kernel_s: float
    library_s: float
    flash_s: float
    kernel_tflop_per_s: float
    flash_tflop_per_s: float
    fraction: float
    library_overhead: float
    largest_difference: float


def run(
    launcher: Launcher,
    device: str,
    timer: Timer,
    *,
    cases: Sequence[PrefillCase] = CASES,
    shape: Heads = LLAMA_3_8B,
    page_tokens: int = PAGE_TOKENS,
) -> Iterator[PrefillRow]:
    """Yield one row per case."""
    kernels = AttentionKernels(
        launcher,
        dtype="bfloat16",
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        page_tokens=page_tokens,
    )
    for case in cases:
        yield _one(kernels, device, timer, case, shape, page_tokens)


def _sequences(table: torch.Tensor, tokens: int, stop: int, split: int) -> Sequences:
    """Return one sequence of ``stop`` tokens. Its last ``tokens`` tokens are new."""

    def number(value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int32, device=table.device)

    return Sequences(
        number(0),
        number(tokens),
        number(stop),
        tables=table.int().view(1, -1),
        max_count=tokens,
        max_length=stop,
        splits=ChunkSplits(number(split), number(0), split, split * tokens) if split > 1 else None,
    )


def _one(
    kernels: AttentionKernels,
    device: str,
    timer: Timer,
    case: PrefillCase,
    shape: Heads,
    page_tokens: int,
) -> PrefillRow:
    tokens, past, read = case.tokens, case.past, case.layers // 2
    stop = past + tokens
    pages = pages_for(stop, page_tokens)
    generator = torch.Generator(device).manual_seed(stop)
    planes = (pages, case.layers, 2, shape.kv_heads, page_tokens, shape.head_dim)
    pool = torch.zeros(planes, dtype=torch.bfloat16, device=device)
    pool[:, read].normal_(generator=generator)
    table = torch.randperm(pages, generator=generator, device=device)
    query = (tokens, shape.heads, shape.head_dim)
    queries = torch.empty(query, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    out = torch.empty_like(queries)
    sequences = _sequences(table, tokens, stop, kernels.chunk_splits(tokens, stop))
    layer = LayerPages(pool, page_stride=pool.stride(0), offset=read * pool.stride(1))
    library = GatheredPrefill(pool, shape.head_dim**-0.5)
    keys, values = (part.contiguous() for part in library.gather(read, table, stop))
    ours = queries.transpose(0, 1).unsqueeze(0)
    mask = causal_lower_right(tokens, stop) if past else None

    def flash() -> torch.Tensor:
        called: torch.Tensor = scaled_dot_product_attention(
            ours, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return called

    backends = (
        [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if device == "cpu" else [SDPBackend.FLASH_ATTENTION]
    )
    kernel_s = timer(lambda: kernels.prefill(layer, queries, sequences, out))
    with sdpa_kernel(backends):
        library_s = timer(lambda: library.attend(read, queries, table, stop))
        flash_s = timer(flash)
        difference = float((flash().squeeze(0).transpose(0, 1) - out).abs().max())
    flops = attention_flops(shape, tokens, past)
    return PrefillRow(
        tokens,
        past,
        case.layers,
        flops,
        kernel_s,
        library_s,
        flash_s,
        flops / kernel_s / 1e12,
        flops / flash_s / 1e12,
        flash_s / kernel_s,
        library_s / flash_s - 1,
        difference,
    )
