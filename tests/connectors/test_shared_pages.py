"""Pages of any engine become pages of any other, for every number of heads, ranks and stages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore_connectors.common.shared_pages import (
    BlockConverter,
    EngineBlocks,
    PagePart,
    PartSource,
    Vectors,
    part_of_rank,
    parts_of,
    sources,
    stage_layers,
)

CHUNK, DIM, BLOCKS = 16, 8, 6
SIZES = (1, 2, 3, 4, 8)


def whole_identity(layers: int, kv_heads: int, kind: LayerKind = LayerKind.FULL_ATTENTION) -> Identity:
    group = LayerGroup(kind, tuple(range(layers)), kv_heads, DIM)
    return Identity.of(KVSpec((group,), "float32", CHUNK), model="m")


class Memory:
    """An engine's blocks: the layers and heads of one part, in any order of dimensions. ``turned``: keys are
    kept as ``[dim, token]``, as vLLM does on a CPU."""

    def __init__(self, part: PagePart, kv_heads: int, planes: int = 2, block: int = 8, turned: bool = False):
        self.part, self.planes, self.turned = part, planes, turned
        self.heads = len(part.heads(kv_heads))
        self.keys, self.values = (
            np.zeros((len(part.layers), BLOCKS * CHUNK // block, self.heads, block, DIM), np.float32)
            for _ in range(2)
        )
        if turned:
            self.keys = self.keys.swapaxes(3, 4).copy().swapaxes(3, 4)
        both = (self.keys, self.values)[:planes]
        layers = {
            layer: [Vectors(each[at].ctypes.data, *each[at].strides) for each in both]
            for at, layer in enumerate(part.layers)
        }
        self.blocks = EngineBlocks(layers, block, 4, pieces=1)
        self.per_chunk = CHUNK // block

    def tokens(self, blocks: list[int]) -> np.ndarray:
        """``[layer, plane, head, token, dim]`` of these blocks."""
        both = np.stack((self.keys, self.values)[: self.planes], axis=1)[:, :, blocks]
        return both.transpose(0, 1, 3, 2, 4, 5).reshape(
            len(self.part.layers), self.planes, self.heads, -1, DIM
        )

    def compute(self, kv: np.ndarray, kv_heads: int, blocks: list[int]) -> None:
        """Fill blocks with this part of ``kv``, ``[layer, plane, head, token, dim]`` of the whole model."""
        mine = kv[list(self.part.layers)][:, :, list(self.part.heads(kv_heads))]
        cut = mine.reshape(*mine.shape[:3], len(blocks), -1, DIM).transpose(0, 1, 3, 2, 4, 5)
        for plane, memory in enumerate((self.keys, self.values)[: self.planes]):
            memory[:, blocks] = cut[:, plane]


def saved(memory: Memory, whole: Identity, blocks: list[int]) -> np.ndarray:
    """The page of a rank's own part."""
    layout = memory.part.identity(whole).layout
    page = np.zeros(KVSpec.parse(layout).page_bytes, np.uint8)
    every = range(memory.heads)
    source = PartSource(memory.part, every, every)
    BlockConverter(layout, memory.blocks, source).gather([(blocks, page.ctypes.data)])
    return page


def ranks_of(ranks: int, stages: int, layers: int, kv_heads: int) -> list[PagePart]:
    """The part of every rank, those with the same heads included."""
    return [
        part_of_rank(rank, ranks, kv_heads=kv_heads, layers=tuple(own), stage=stage, stages=stages)
        for stage, own in enumerate(stage_layers(layers, stages))
        if own
        for rank in range(ranks)
    ]


def check_assembled(kv_heads: int, layers: int, here: tuple[int, int], there: tuple[int, int]) -> None:
    """What ranks of one size save is what ranks of another size have computed, for a model of latents where
    there is one head."""
    planes = 1 if kv_heads == 1 else 2
    kind = LayerKind.MLA_LATENT if planes == 1 else LayerKind.FULL_ATTENTION
    whole = whole_identity(layers, kv_heads, kind)
    kv = np.random.default_rng(1).standard_normal((layers, planes, kv_heads, CHUNK, DIM)).astype(np.float32)
    pages = {}
    for at, part in enumerate(ranks_of(*here, layers, kv_heads)):
        memory = Memory(part, kv_heads, planes, turned=at % 2 == 0)
        memory.compute(kv, kv_heads, [4, 1])
        page = saved(memory, whole, [4, 1])
        assert np.array_equal(pages.setdefault(part, page), page)  # ranks with the same heads save one page
    parts = parts_of(*here, layers, kv_heads=kv_heads, layers=range(layers))
    assert set(parts) == set(pages)
    for part in ranks_of(*there, layers, kv_heads):
        memory = Memory(part, kv_heads, planes, block=4, turned=True)
        for source in sources(part, parts, kv_heads=kv_heads):
            converter = BlockConverter(source.part.identity(whole).layout, memory.blocks, source)
            converter.scatter([([3, 9, 0, 2], pages[source.part].ctypes.data)])
        expected = kv[list(part.layers)][:, :, list(part.heads(kv_heads))]
        assert np.array_equal(memory.tokens([3, 9, 0, 2]), expected)
        touched = np.flatnonzero(memory.keys.any(axis=(0, 2, 3, 4)))
        assert touched.tolist() == [0, 2, 3, 9]


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 8])
def test_any_tensor_parallelism_serves_any_other(kv_heads):
    fitting = [ranks for ranks in SIZES if not max(ranks, kv_heads) % min(ranks, kv_heads)]
    for here, there in itertools.product(fitting, repeat=2):
        check_assembled(kv_heads, 2, (here, 1), (there, 1))


@pytest.mark.parametrize("layers", [3, 7])
def test_uneven_stages_serve_any_other(layers):
    for here, there in itertools.product([(1, 1), (2, 2), (4, 3), (1, 2)], repeat=2):
        check_assembled(4, layers, here, there)


def test_heads_that_ranks_do_not_divide_are_refused():
    with pytest.raises(UsageError, match="3 KV heads cannot be divided among 2 ranks"):
        part_of_rank(0, 2, kv_heads=3, layers=(0,))


def test_parts_that_lack_something_are_refused():
    own = PagePart(0, 1, (0, 1))
    for lacking in ([PagePart(0, 2, (0, 1))], [PagePart(0, 1, (0,))], []):
        with pytest.raises(UsageError, match="do not hold all heads and layers"):
            sources(own, lacking, kv_heads=4)


def test_the_whole_model_has_the_identity_of_an_engine_without_parts():
    whole = whole_identity(3, 4)
    assert part_of_rank(0, 1, kv_heads=4, layers=(0, 1, 2)).identity(whole) == whole
    digests = {part.identity(whole).digest for part in parts_of(4, 2, 3, kv_heads=4, layers=range(3))}
    assert len(digests | {whole.digest}) == 9


def test_a_page_is_the_layout_of_the_bundled_engine():
    """``[layer][K|V][kv_head][token][head_dim]``, written out once without the converter."""
    whole = whole_identity(2, 3)
    memory = Memory(PagePart(0, 1, (0, 1)), 3, turned=True)
    kv = np.arange(2 * 2 * 3 * CHUNK * DIM, dtype=np.float32).reshape(2, 2, 3, CHUNK, DIM)
    memory.compute(kv, 3, [5, 2])
    assert saved(memory, whole, [5, 2]).tobytes() == kv.tobytes()


def test_a_skipped_block_is_left_alone():
    whole = whole_identity(1, 1)
    memory = Memory(PagePart(0, 1, (0,)), 1)
    page = np.ones(KVSpec.parse(whole.layout).page_bytes // 4, np.float32)
    source = PartSource(memory.part, range(1), range(1))
    BlockConverter(whole.layout, memory.blocks, source, skipped=0).scatter([([0, 3], page.ctypes.data)])
    assert np.flatnonzero(memory.values.any(axis=(0, 2, 3, 4))).tolist() == [3]


def test_a_block_in_pieces():
    whole = whole_identity(1, 2)
    memory = Memory(PagePart(0, 1, (0,)), 2, block=4, turned=True)
    kv = np.random.default_rng(2).standard_normal((1, 2, 2, CHUNK, DIM)).astype(np.float32)
    memory.compute(kv, 2, [6, 7, 2, 3])  # blocks 3 and 1 of 8 tokens
    pieces = EngineBlocks(memory.blocks.layers, 4, 4, pieces=2)
    page = np.zeros(kv.nbytes, np.uint8)
    source = PartSource(memory.part, range(2), range(2))
    BlockConverter(whole.layout, pieces, source).gather([([3, 1], page.ctypes.data)])
    assert page.tobytes() == kv.tobytes()


@settings(deadline=None, max_examples=30)
@given(
    layers=st.integers(1, 40),
    stages=st.integers(1, 9),
)
def test_every_layer_is_in_one_stage(layers, stages):
    assert [layer for own in stage_layers(layers, stages) for layer in own] == list(range(layers))


def test_pages_that_hold_no_whole_blocks_are_refused():
    memory = Memory(PagePart(0, 1, (0,)), 1)
    blocks = EngineBlocks(memory.blocks.layers, 32, 4)
    with pytest.raises(UsageError, match="pages of 16 tokens do not hold whole blocks of 32"):
        BlockConverter(whole_identity(1, 1).layout, blocks, PartSource(memory.part, range(1), range(1)))
