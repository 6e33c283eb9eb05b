"""Measure decoding with other kinds of layers, in bytes per second beside the device's own copy: latents,
recurrent states of both rules, windows, capped scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tierstore_engine.config import DeltaConfig, Mamba2Config, StateConfig
from tierstore_engine.kernels.latents import Entries, LatentKernels
from tierstore_engine.kernels.launcher import Launcher
from tierstore_engine.kernels.operations import AttentionKernels, LayerPages, Sequences, Sight
from tierstore_engine.kernels.states import DeltaKernels, LayerStates, Mamba2Kernels, StateSpans
from tierstore_engine.layer_weights import Mamba2Terms
from tierstore_tools.gpu.arithmetic import Heads, pages_for
from tierstore_tools.gpu.decode import COPY_BYTES, PAGE_TOKENS, Timer, copy_rate

_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class KindCase:
    """``batch`` sequences of ``context`` tokens. ``name`` is one of :data:`PROBLEMS`."""

    name: str
    batch: int
    context: int


CASES = tuple(
    KindCase(name, batch, context << 10)
    for name in ("latents", "window", "capped", "delta", "mamba2")
    for batch, context in ((1, 32), (16, 32), (64, 8))
)


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shape of one layer of each kind."""

    latent_heads: int
    width: int
    rank: int
    windowed: Heads
    window: int
    capped: Heads
    delta: DeltaConfig
    mamba: Mamba2Config


LARGE = Shapes(
    latent_heads=16,  # the shape of DeepSeek's models, divided over 8 devices
    width=576,
    rank=512,
    windowed=Heads(64, 8, 64),  # gpt-oss
    window=128,
    capped=Heads(16, 8, 256),  # Gemma 2
    delta=DeltaConfig(16, 32, 128, 128, 4),  # Qwen3-Next
    mamba=Mamba2Config(48, 64, 128, 1, 4),  # Granite 4.0-H Tiny
)


@dataclass(frozen=True, slots=True)
class KindRow:
    """One case. ``nbytes`` is the memory traffic of a step in one layer. ``fraction`` is its rate divided by
    the copy's rate.
    """

    name: str
    batch: int
    context: int
    nbytes: int
    kernel_s: float
    gb_per_s: float
    copy_gb_per_s: float
    fraction: float


@dataclass(frozen=True, slots=True)
class Problem:
    """A launch, and its memory traffic in bytes."""

    launch: Callable[[], None]
    nbytes: int


def run(
    launcher: Launcher,
    device: str,
    timer: Timer,
    *,
    cases: Sequence[KindCase] = CASES,
    shapes: Shapes = LARGE,
    page_tokens: int = PAGE_TOKENS,
    copy_nbytes: int = COPY_BYTES,
) -> Iterator[KindRow]:
    """Yield one row per case."""
    for case in cases:
        # the copy is measured for each case, because the device's clock rates change
        copied = copy_rate(device, timer, copy_nbytes)
        problem = PROBLEMS[case.name](launcher, device, case, shapes, page_tokens)
        seconds = timer(problem.launch)
        rate = problem.nbytes / seconds
        sizes = (case.batch, case.context, problem.nbytes)
        yield KindRow(case.name, *sizes, seconds, rate / 1e9, copied / 1e9, rate / copied)


def _latents(launcher: Launcher, device: str, case: KindCase, shapes: Shapes, page_tokens: int) -> Problem:
    kernels = LatentKernels(
        launcher,
        dtype="bfloat16",
        heads=shapes.latent_heads,
        width=shapes.width,
        rank=shapes.rank,
        page_tokens=page_tokens,
        score_scale=shapes.width**-0.5,
    )
    rows, lengths, tables = _sequences(device, case, page_tokens)
    pool = _numbers(device, tables.numel(), page_tokens, shapes.width)
    queries = _numbers(device, case.batch, shapes.latent_heads, shapes.width)
    out = queries.new_empty(case.batch, shapes.latent_heads, shapes.rank)
    entries = Entries(rows, lengths, tables, case.context)
    layer = LayerPages(pool, pool.stride(0), 0)
    read = case.batch * case.context * shapes.width * _DTYPE.itemsize
    return Problem(lambda: kernels.attend(layer, queries, entries, out, split=True), read)


def _window(launcher: Launcher, device: str, case: KindCase, shapes: Shapes, page_tokens: int) -> Problem:
    sight = Sight(window=shapes.window)
    return _attention(launcher, device, case, shapes.windowed, page_tokens, sight=sight)


def _capped(launcher: Launcher, device: str, case: KindCase, shapes: Shapes, page_tokens: int) -> Problem:
    return _attention(launcher, device, case, shapes.capped, page_tokens, cap=50.0)


def _attention(
    launcher: Launcher,
    device: str,
    case: KindCase,
    heads: Heads,
    page_tokens: int,
    *,
    sight: Sight | None = None,
    cap: float | None = None,
) -> Problem:
    sight = sight or Sight()
    kernels = AttentionKernels(
        launcher,
        dtype="bfloat16",
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        page_tokens=page_tokens,
        score_cap=cap,
    )
    rows, lengths, tables = _sequences(device, case, page_tokens)
    pool = _numbers(device, tables.numel(), 2, heads.kv_heads, page_tokens, heads.head_dim)
    queries = _numbers(device, case.batch, heads.heads, heads.head_dim)
    out, layer = torch.empty_like(queries), LayerPages(pool, pool.stride(0), 0)
    ones = torch.ones_like(rows)
    sequences = Sequences(rows, ones, lengths, tables, max_count=1, max_length=case.context)
    seen = case.context - sight.first(case.context - 1)
    return Problem(
        lambda: kernels.decode(layer, queries, sequences, out, sight=sight),
        case.batch * seen * heads.token_bytes,
    )


def _delta(launcher: Launcher, device: str, case: KindCase, shapes: Shapes, page_tokens: int) -> Problem:
    delta = shapes.delta
    kernels = DeltaKernels(launcher, delta, dtype="bfloat16")
    states, spans, channels, conv = _states(device, case, delta, page_tokens)
    rates = torch.full((case.batch, delta.value_heads), 0.5, device=device)
    out = channels.new_empty(case.batch, delta.value_heads, delta.value_dim)
    return Problem(
        lambda: kernels.advance(states, channels, conv, rates, -rates, spans, out),
        2 * case.batch * delta.state_bytes("bfloat16"),
    )


def _mamba2(launcher: Launcher, device: str, case: KindCase, shapes: Shapes, page_tokens: int) -> Problem:
    mamba = shapes.mamba
    kernels = Mamba2Kernels(launcher, mamba, dtype="bfloat16")
    states, spans, channels, conv = _states(device, case, mamba, page_tokens)
    bias, ones = _numbers(device, mamba.channels), torch.ones(mamba.heads, device=device)
    terms = Mamba2Terms(conv, bias, step_bias=ones, decay=-ones, skip=ones)
    steps = _numbers(device, case.batch, mamba.heads)
    out = torch.empty((case.batch, mamba.heads, mamba.head_dim), device=device)
    return Problem(
        lambda: kernels.advance(states, channels, steps, terms, spans, out),
        2 * case.batch * mamba.state_bytes("bfloat16"),
    )


def _states(
    device: str, case: KindCase, shape: StateConfig, page_tokens: int
) -> tuple[LayerStates, StateSpans, torch.Tensor, torch.Tensor]:
    """Return a page per sequence, the next tokens, and the convolution's channels and weights."""
    pool = torch.zeros((case.batch, shape.state_bytes("bfloat16")), dtype=torch.uint8, device=device)
    rows, lengths, _ = _sequences(device, case, page_tokens)
    spans = StateSpans(rows, torch.ones_like(rows), lengths, rows.unsqueeze(1))
    channels = _numbers(device, case.batch, shape.channels)
    return LayerStates(pool, 0), spans, channels, _numbers(device, shape.channels, 1, shape.conv_width)


PROBLEMS = {"latents": _latents, "window": _window, "capped": _capped, "delta": _delta, "mamba2": _mamba2}


def _sequences(
    device: str, case: KindCase, page_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, lengths, and tables of pages in random order."""
    rows = torch.arange(case.batch, dtype=torch.int32, device=device)
    pages = case.batch * pages_for(case.context, page_tokens)
    generator = torch.Generator(device).manual_seed(pages)
    tables = torch.randperm(pages, generator=generator, device=device).int().view(case.batch, -1)
    return rows, torch.full_like(rows, case.context), tables


def _numbers(device: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(len(shape))
    return torch.empty(shape, dtype=_DTYPE, device=device).normal_(generator=generator)
