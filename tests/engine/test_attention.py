"""Paged attention on the CPU against attention written down plainly, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention import cpu, make_attention
from tierstore_engine.attention.base import Attention, BatchLayout, Span
from tierstore_engine.config import ModelConfig

CHUNK = 4
PAGES = 64
LAYERS = 2

shapes = st.sampled_from([(1, 1, 8), (2, 2, 8), (4, 2, 16), (6, 1, 4), (4, 2, 24)])
# Tokens before and in each sequence's span.
spans = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=4)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks, so that merging them is what is tested."""
    monkeypatch.setattr(cpu, "BLOCK_TOKENS", 8)


def config_of(heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> ModelConfig:
    return ModelConfig(
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        layers=LAYERS,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=1024,
        dtype="float32",
        windows=(window,) * LAYERS,
    )


def plain(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
) -> torch.Tensor:
    """``queries [tokens, heads, dim]`` at the end of ``keys``, ``values [context, kv_heads, dim]``."""
    tokens, heads, dim = queries.shape
    context, kv_heads, _ = keys.shape
    keys = keys.repeat_interleave(heads // kv_heads, 1).double()
    values = values.repeat_interleave(heads // kv_heads, 1).double()
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) / dim**0.5
    positions = torch.arange(context - tokens, context)[:, None]
    others = torch.arange(context)[None, :]
    hidden = (others > positions) | (others <= positions - (window or context + 1))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def run(
    config: ModelConfig, lengths: list[tuple[int, int]], order: list[int], seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one batch with pages handed out in ``order``: what came out and what should have."""
    pool = PagePool(replace(config).kv_spec(chunk_tokens=CHUNK), PAGES)
    attention = make_attention(pool, config)
    generator = torch.Generator().manual_seed(seed)
    free = list(order)
    spans, queries, expected = [], [], []
    for past, new in lengths:
        table = [free.pop() for _ in range(-(-(past + new) // CHUNK))]
        q = torch.randn(new, config.heads, config.head_dim, generator=generator)
        k, v = torch.randn(2, past + new, config.kv_heads, config.head_dim, generator=generator)
        if past:
            write(attention, k[:past], v[:past], Span((table,), 0, past))
        write(attention, k[past:], v[past:], Span((table,), past, past + new))
        spans.append(Span((table,), past, past + new))
        queries.append(q)
        expected.append(plain(q, k, v, config.window(1)))
    batch = BatchLayout.of(spans, chunk_tokens=CHUNK, device="cpu")
    return attention.attend(1, torch.cat(queries), batch), torch.cat(expected)


def write(attention: Attention, keys: torch.Tensor, values: torch.Tensor, span: Span) -> None:
    attention.write(1, keys, values, BatchLayout.of([span], chunk_tokens=CHUNK, device="cpu"))


@given(shape=shapes, lengths=spans, window=st.none() | st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_against_plain_attention(
    shape: tuple[int, int, int], lengths: list[tuple[int, int]], window: int | None, seed: int
) -> None:
    out, expected = run(config_of(*shape, window), lengths, list(range(PAGES)), seed)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@given(lengths=spans, order=st.permutations(range(PAGES)), window=st.none() | st.just(9))
@settings(max_examples=25)
def test_which_pages_are_used_does_not_matter(
    lengths: list[tuple[int, int]], order: list[int], window: int | None
) -> None:
    config = config_of(4, 2, 16, window)
    straight, _ = run(config, lengths, list(range(PAGES)))
    shuffled, _ = run(config, lengths, order)
    assert torch.equal(straight, shuffled)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_pages(dtype: str) -> None:
    config = replace(config_of(4, 2, 16), dtype=dtype)
    attention = make_attention(PagePool(config.kv_spec(chunk_tokens=CHUNK), PAGES), config)
    half = getattr(torch, dtype)
    q, k, v = (torch.randn(21, heads, 16).to(half) for heads in (4, 2, 2))
    span = Span((list(range(6)),), 0, 21)
    write(attention, k, v, span)
    out = attention.attend(1, q, BatchLayout.of([span], chunk_tokens=CHUNK, device="cpu"))
    assert out.dtype is half
    torch.testing.assert_close(out.double(), plain(q, k, v, None), atol=2e-2, rtol=2e-2)


def test_pages_have_the_documented_layout() -> None:
    """``[layer][K|V][kv_head][token][head_dim]``, as the spec says, so that other code finds the tiles."""
    config = config_of(2, 2, 8)
    pool = PagePool(config.kv_spec(chunk_tokens=CHUNK), 3)
    attention = make_attention(pool, config)
    k, v = torch.randn(2, CHUNK, 2, 8)
    write(attention, k, v, Span(([2],), 0, CHUNK))
    for plane, written in enumerate((k, v)):
        for head in range(2):
            tile = pool.spec.tile(1, plane, head)
            found = torch.from_numpy(pool.array[2, tile.start : tile.stop]).view(torch.float32)
            assert torch.equal(found.view(CHUNK, 8), written[:, head])
