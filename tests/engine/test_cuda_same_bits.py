"""Attention by kernels, where a token must have the same bits in every step: however a sequence is cut, and
beside any other. On the executor, or on a device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.engine.kernels.device import kernel_launcher
from tests.engine.test_cuda_attention import CHUNK, executor, memory_kind
from tests.portions import portion
from tierstore.spec import LayerKind
from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import BatchLayout, Span
from tierstore_engine.attention.cuda import KernelAttention
from tierstore_engine.config import ModelConfig
from tierstore_engine.kv_format import KVFormat
from tierstore_engine.presets import preset

__all__ = ["executor"]

TOKENS, SEQUENCES = 200, 3
PAGES = -(-TOKENS // CHUNK)
_TINY = replace(preset("tiny", dtype="float16"), layers=1, arithmetic="of a test")
_WIDE = replace(_TINY, dtype="bfloat16", heads=6, kv_heads=2, head_dim=64)
_LATENTS = replace(preset("tiny-deepseek", dtype="float16"), arithmetic="of a test")
SHAPES = {
    "full": _TINY,
    "wide": _WIDE,
    "window": replace(_WIDE, windows=(50,)),
    "chunks": replace(_TINY, windows=(60,), kinds=(LayerKind.CHUNKED_ATTENTION,)),
    "capped": replace(_WIDE, score_cap=3.0),
    "codes": replace(_TINY, kv=KVFormat.parse("fp8_e4m3")),
    "latents": _LATENTS,
}


class Sequences:
    """Sequences whose keys and values are in pages, and what their tokens attend to in one step."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        [spec] = config.kv_spec(chunk_tokens=CHUNK).split()
        # A product that is fused with a sum is not rounded: without that, fewer mistakes change bits.
        [group], self.launcher = spec.groups, kernel_launcher(fused=True)
        pool = PagePool(spec, SEQUENCES * PAGES)
        memory = memory_kind(spec, config)(torch.from_numpy(pool.array), spec, config, self.launcher)
        assert isinstance(memory, KernelAttention)
        self._memory = memory
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(pool.num_pages, generator=generator).tolist()
        self._tables = [order[number * PAGES : (number + 1) * PAGES] for number in range(SEQUENCES)]

        def numbers(heads: int) -> torch.Tensor:
            made = torch.randn((SEQUENCES, TOKENS, heads, group.head_dim), generator=generator)
            return made.to(getattr(torch, config.dtype))

        self._queries = numbers(config.heads)
        batch = self._batch([(number, 0, TOKENS) for number in range(SEQUENCES)])
        keys, values = (numbers(group.kv_heads).flatten(0, 1) for _ in range(2))
        memory.write(0, keys, values if group.planes == 2 else None, batch)

    def _batch(self, parts: Sequence[tuple[int, int, int]]) -> BatchLayout:
        spans = [Span((self._tables[number],), start, stop) for number, start, stop in parts]
        return BatchLayout.of(spans, chunk_tokens=CHUNK, device="cpu")

    def attend(self, parts: Sequence[tuple[int, int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Compute parts of sequences in one step: numbers of sequences with their first and last tokens.
        Return the outputs and LSEs of each."""
        queries = torch.cat([self._queries[number, start:stop] for number, start, stop in parts])
        found = self._memory.attend_with_lse(0, queries, self._batch(parts))
        tokens = [stop - start for _, start, stop in parts]
        outs, lses = (torch.split(each, tokens) for each in found)
        return list(zip(outs, lses, strict=True))


def random_parts(chance: random.Random) -> list[tuple[int, int, int]]:
    parts = []
    for number in chance.sample(range(SEQUENCES), chance.randint(1, SEQUENCES)):
        start = chance.randrange(TOKENS)
        most = chance.choice([1, 1, 5, 40, TOKENS])
        parts.append((number, start, min(start + chance.randint(1, most), TOKENS)))
    return parts


@pytest.mark.parametrize("cases", portion(10, 750))
@pytest.mark.parametrize("name", SHAPES)
def test_cuts_and_neighbours_change_no_bits(name: str, cases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a sequence have 64 tokens here instead of 2,048."""
    monkeypatch.setattr("tierstore_engine.attention.cuda.PART_TOKENS", 64)
    config, chance = SHAPES[name], random.Random(name)
    sequences = Sequences(config, seed=1)
    whole = sequences.attend([(number, 0, TOKENS) for number in range(SEQUENCES)])
    for _ in range(cases):
        parts, sequences.launcher.seed = random_parts(chance), chance.randrange(1000)
        for (number, start, stop), found in zip(parts, sequences.attend(parts), strict=True):
            for own, right in zip(found, whole[number], strict=True):
                assert torch.equal(own, right[start:stop]), parts
    plain = Sequences(replace(config, arithmetic=""), seed=1)
    for found, right in zip(plain.attend([(0, 0, TOKENS)])[0], whole[0], strict=True):
        torch.testing.assert_close(found, right, atol=8e-3, rtol=8e-3)


@pytest.mark.parametrize("name", ["wide", "latents"])
def test_memory_for_parts_is_bounded_without_other_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore_engine.attention.cuda.PART_TOKENS", 64)
    whole = Sequences(SHAPES[name], seed=2).attend([(0, 0, TOKENS)])
    for module in ("cuda", "cuda_latents"):
        monkeypatch.setattr(f"tierstore_engine.attention.{module}.MOST_PARTS", 6 * 50)
    sequences = Sequences(SHAPES[name], seed=2)
    sequences.launcher.launches.clear()
    [found] = sequences.attend([(0, 0, TOKENS)])
    assert torch.equal(found[0], whole[0][0])
    assert sum("prefill" in each or "decode" in each for each in sequences.launcher.launches) > 3
