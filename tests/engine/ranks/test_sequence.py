"""Tokens over several ranks: logits of one rank, whichever pages each part has. The ranks are threads here;
``test_ranks.py`` has processes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.engine.ranks.test_share import FAMILIES, MOST, OneThread, Threads
from tests.portions import chosen
from tests.tiny_models import VOCAB
from tierstore.errors import TierStoreError
from tierstore.spec import KVSpec
from tierstore.tiers.group_pools import attach_group_pools, bytes_for, open_group_pools
from tierstore.tiers.hbm import COMPLETED, HostRegion, PagePool
from tierstore_engine.attention.base import Span
from tierstore_engine.build import load_model, open_model
from tierstore_engine.loaded import LoadedModel, make_memory
from tierstore_engine.model import Model
from tierstore_engine.ranks.member import model_of, read_weights
from tierstore_engine.ranks.share import RankPlace
from tierstore_engine.step import Step

CASES = tuple(product(FAMILIES, ((1, 2), (1, 4), (2, 2)), ("auto", "int8")))
NORMAL = (
    ("llama3", (1, 2), "auto"),
    ("llama3", (2, 2), "int8"),
    ("llama2", (1, 4), "auto"),
    ("qwen2-moe", (1, 2), "auto"),
    ("deepseek-v3", (1, 4), "auto"),
    ("deepseek-v3", (2, 2), "int8"),
    ("gemma3", (1, 2), "int8"),
    ("gemma2", (1, 4), "auto"),
    ("gpt-oss", (2, 2), "auto"),
    ("qwen3-next", (1, 2), "auto"),
    ("falcon-h1", (2, 2), "auto"),
    ("zamba2", (1, 2), "auto"),
)
CHUNK = 16
PROMPT, LATER = 150, 2


@dataclass
class Pools:
    """Pools of two sequences in parts, with pages in a random order."""

    spec: KVSpec
    states: frozenset[int]
    parts: int
    seed: int

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        specs = self.spec.split()
        pages = -(-(PROMPT + LATER) // CHUNK)
        counts = [2 if group in self.states else 2 * pages for group in range(len(specs))]
        self.pools: Sequence[PagePool]
        nbytes = bytes_for(specs, counts) * 2
        if len(specs) == 1:
            count = -(-nbytes // specs[0].page_bytes)
            self.pools = [PagePool(specs[0], count, shared_parts=self.parts)]
        else:
            self.pools = open_group_pools(specs, nbytes, shared_parts=self.parts)
        taken = []
        for pool, count in zip(self.pools, counts, strict=True):
            found = [page for _ in range(count) for page in pool.allocate(1) or ()]
            draw.shuffle(found)
            taken.append(found)
        self.tables = [tuple(each[: len(each) // 2] for each in taken)]
        self.tables += [tuple(each[len(each) // 2 :] for each in taken)]

    def of(self, part: int) -> list[PagePool]:
        region = self.pools[0].region
        assert isinstance(region, HostRegion)
        assert region.memory.fd is not None
        size = region.large_pages.part_size
        fd = os.dup(region.memory.fd)
        specs = [pool.spec for pool in self.pools]
        return attach_group_pools(specs, fd, region.large_pages.large_bytes, size, first=part * size)

    def steps(self) -> list[Step]:
        """Return two prompts in steps, of which some have both, and then tokens one by one."""
        draw = random.Random(self.seed)
        one, other = ([draw.randrange(VOCAB) for _ in range(PROMPT + LATER)] for _ in range(2))
        ends = [(61, 0), (140, 70), (PROMPT, PROMPT)]
        ends += [(PROMPT + later, PROMPT + later) for later in range(1, LATER + 1)]
        made, done = [], (0, 0)
        for stops in ends:
            spans, tokens = [], []
            for table, text, start, stop in zip(self.tables, (one, other), done, stops, strict=True):
                if start < stop:
                    spans.append(Span(table, start, stop))
                    tokens += text[start:stop]
            made.append(Step(tuple(spans), tokens, range(len(tokens)), COMPLETED, CHUNK))
            done = stops
        return made


def alone(model: LoadedModel, pools: Pools) -> list[torch.Tensor]:
    memories = [make_memory(pool, model.config) for pool in pools.pools]
    whole = Model(model.config, model.weights, memories, device="cpu")
    return [whole.compute(step) for step in pools.steps()]


def together(
    folder: str, kv_dtype: str, heads: int, pools: Pools
) -> tuple[list[torch.Tensor], dict[tuple[int, int], OneThread]]:
    """Return what all ranks compute, and the ranks of each share of the heads in each part."""
    opened = open_model(
        folder, device="cpu", kv_dtype=kv_dtype, tensor_parallel=heads, sequence_parallel=pools.parts
    )
    by_part = [Threads(heads) for _ in range(pools.parts)]
    by_heads = [Threads(pools.parts) for _ in range(heads)]
    members: dict[tuple[int, int], OneThread] = {}

    def play(number: int) -> list[torch.Tensor]:
        try:
            place = RankPlace.of(number, heads=heads, parts=pools.parts)
            share, part = place.heads.rank, place.tokens.rank
            weights = read_weights(opened, place.heads, seed=0)
            own = pools.pools if number == 0 else pools.of(part)
            members[share, part] = by_heads[share].rank(part)
            model = model_of(
                opened.config,
                weights,
                own,
                place,
                by_part[part].rank(share) if heads > 1 else None,
                members[share, part],
                pools.pools[0].large_pages.part_size,
            )
            return [model.compute(step) for step in pools.steps()]
        except BaseException:
            for group in (*by_part, *by_heads):
                group.give_up()
            raise

    with ThreadPoolExecutor(opened.ranks) as executor:
        of_rank_0, *_ = executor.map(play, range(opened.ranks))
    return of_rank_0, members


@pytest.mark.parametrize(("name", "ranks", "kv_dtype"), chosen(CASES, *NORMAL))
def test_parts_compute_what_one_rank_computes(
    name: str, ranks: tuple[int, int], kv_dtype: str, checkpoints: Callable[..., Path]
) -> None:
    """Some spans pass their queries and some their KV."""
    folder = str(checkpoints(name))
    heads, parts = ranks
    try:
        open_model(folder, device="cpu", kv_dtype=kv_dtype, tensor_parallel=heads, sequence_parallel=parts)
    except TierStoreError as error:
        pytest.skip(str(error))
    model = load_model(folder, device="cpu", kv_dtype=kv_dtype)
    spec = model.kv_spec(chunk_tokens=CHUNK)
    expected = alone(model, Pools(spec, model.config.states, 1, seed=1))
    found, _ = together(folder, kv_dtype, heads, Pools(spec, model.config.states, parts, seed=1))
    for mine, wanted in zip(found, expected, strict=True):
        scale = max(float(wanted.abs().max()), 1.0)
        torch.testing.assert_close(mine, wanted, rtol=0, atol=MOST[kv_dtype] * scale)
