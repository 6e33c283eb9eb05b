"""Pages that engines share: the parts of a page, and copies between pages and an engine's blocks.

A shared page has the layout of :class:`~tierstore.spec.KVSpec`, which the bundled engine uses in its pools:
``[layer][K|V][kv_head][token][head_dim]``. Other engines order the dimensions of a block differently, and
some transpose keys. :class:`BlockConverter` copies between pages and blocks, one matrix ``[token, head_dim]``
at a time.

**Parts.** A tensor-parallel rank has some of the heads, and a pipeline stage some of the layers. Two ranks
cannot write one page together. So each rank saves pages of its own part of the heads and layers, and
:class:`PagePart` names the part in the page's identity. A rank can load from parts of another size
(:func:`sources`): some heads and layers of a larger part, or several smaller parts. If there are more ranks
than KV heads, several ranks have the same heads and so the same part. MLA has one latent vector for all
heads, so all ranks of an MLA model have the same part.

>>> part_of_rank(1, 4, kv_heads=8, layers=(0, 1))
PagePart(index=1, count=4, layers=(0, 1), stage=0, stages=1)
>>> part_of_rank(3, 4, kv_heads=2, layers=(0, 1)).heads(2)
range(1, 2)
>>> [(each.part.index, each.page_heads, each.own_heads)
...  for each in sources(PagePart(0, 2, (0, 1)), parts_of(4, 1, 2, kv_heads=8, layers=(0, 1)), kv_heads=8)]
[(0, range(0, 2), range(0, 2)), (1, range(0, 2), range(2, 4))]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tierstore import copying
from tierstore.copying import Matrix
from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.spec import KVSpec

Pages = Sequence[tuple[Sequence[int], int]]
"""For each chunk, the block numbers of the chunk in the engine, and the address of the chunk's page."""


@dataclass(frozen=True, slots=True)
class PagePart:
    """Part ``index`` of ``count`` equal parts of a layer group's KV heads. ``layers`` are the group's layers
    in pipeline stage ``stage`` of ``stages``."""

    index: int
    count: int
    layers: tuple[int, ...]
    stage: int = 0
    stages: int = 1

    def heads(self, kv_heads: int) -> range:
        """Return the part's heads in a group with ``kv_heads``."""
        each = kv_heads // self.count
        return range(self.index * each, (self.index + 1) * each)

    def identity(self, whole: Identity) -> Identity:
        """Return the identity of the part's pages. ``whole`` is the identity of pages with all heads and
        layers of the group."""
        spec = KVSpec.parse(whole.layout)
        [group] = spec.groups
        heads = len(self.heads(group.kv_heads))
        own = replace(spec, groups=(replace(group, kv_heads=heads, layers=self.layers),))
        shard = f"tp{self.index}/{self.count},pp{self.stage}/{self.stages}"
        return replace(whole, layout=own.describe(), shard=shard)


@dataclass(frozen=True, slots=True)
class PartSource:
    """The pages of ``part`` as a source for a target part. Heads ``page_heads`` of the pages become heads
    ``own_heads`` of the target part. Both head ranges are counted from 0 within their part."""

    part: PagePart
    page_heads: range
    own_heads: range


def part_of_rank(
    rank: int, ranks: int, *, kv_heads: int, layers: Sequence[int], stage: int = 0, stages: int = 1
) -> PagePart:
    """Return the part of one rank, in a pipeline stage with these ``layers``. Raise :class:`UsageError`
    unless the number of heads is a multiple or a divisor of the number of ranks."""
    if max(ranks, kv_heads) % min(ranks, kv_heads):
        raise UsageError(f"share_engines: {kv_heads} KV heads cannot be divided among {ranks} ranks")
    count = min(ranks, kv_heads)
    return PagePart(rank * count // ranks, count, tuple(layers), stage, stages)


def parts_of(
    ranks: int, stages: int, model_layers: int, *, kv_heads: int, layers: Sequence[int]
) -> list[PagePart]:
    """Return the parts that an engine with ``ranks`` tensor-parallel ranks and ``stages`` pipeline stages
    saves, without repetitions. ``layers`` are the layers of the layer group. :func:`stage_layers` divides the
    model's layers among the stages."""
    found: list[PagePart] = []
    for stage, of_stage in enumerate(stage_layers(model_layers, stages)):
        own = [layer for layer in layers if layer in of_stage]
        for rank in range(ranks):
            part = part_of_rank(rank, ranks, kv_heads=kv_heads, layers=own, stage=stage, stages=stages)
            if own and part not in found:
                found.append(part)
    return found


def stage_layers(layers: int, stages: int) -> list[range]:
    """Return the model's layers in each pipeline stage, as vLLM's ``get_pp_indices`` does
    (distributed/utils.py, 0.32). If the layers do not divide evenly, the last stages before the final one
    have one layer more.

    >>> stage_layers(10, 4)
    [range(0, 2), range(2, 5), range(5, 8), range(8, 10)]
    """
    each, more = divmod(layers, stages)
    sizes = [each] * stages
    for at in range(2, more + 2):
        sizes[-at] += 1
    ends = np.cumsum([0, *sizes]).tolist()
    return [range(first, stop) for first, stop in pairwise(ends)]


def sources(own: PagePart, parts: Iterable[PagePart], *, kv_heads: int) -> list[PartSource]:
    """Return those of ``parts`` that hold heads and layers of ``own``. Raise :class:`UsageError` if ``parts``
    lack heads or layers of ``own``."""
    heads, found, covered = own.heads(kv_heads), [], 0
    for part in parts:
        theirs = part.heads(kv_heads)
        both = range(max(heads.start, theirs.start), min(heads.stop, theirs.stop))
        common = set(own.layers) & set(part.layers)
        if both and common:
            covered += len(both) * len(common)
            found.append(PartSource(part, _within(both, theirs), _within(both, heads)))
    if covered != len(heads) * len(own.layers):
        raise UsageError("share_engines: these parts of pages do not hold all heads and layers of this rank")
    return found


def _within(some: range, whole: range) -> range:
    return range(some.start - whole.start, some.stop - whole.start)


@dataclass(frozen=True, slots=True)
class Vectors:
    """The keys or values of one layer in an engine's memory. ``address`` is the address of the first number;
    the strides ``block``, ``head``, ``token`` and ``item`` (one number of a vector) are in bytes."""

    address: int
    block: int
    head: int
    token: int
    item: int


@dataclass(frozen=True, slots=True)
class EngineBlocks:
    """The memory of an engine's blocks, by layer of the model: K and V, or one latent vector.

    A block has ``block_tokens`` tokens. One block number of the engine means ``pieces`` consecutive blocks in
    memory. If an engine has several block tables, ``tables`` has the layers of each table, and the block
    numbers of a chunk are listed table by table."""

    layers: Mapping[int, Sequence[Vectors]]
    block_tokens: int
    item_bytes: int
    pieces: int = 1
    tables: Sequence[Sequence[int]] = ()

    def planes(self, layers: Iterable[int]) -> Iterator[tuple[int, int, int, Vectors]]:
        """Yield the block table, layer, plane (0 for K, 1 for V) and vectors of each of ``layers`` that this
        memory has."""
        table_of = {layer: at for at, own in enumerate(self.tables) for layer in own}
        for layer in sorted(set(layers) & self.layers.keys()):
            for plane, vectors in enumerate(self.layers[layer]):
                yield table_of.get(layer, 0), layer, plane, vectors


class BlockConverter:
    """Copies between blocks and the pages of one part.

    ``layout`` is the layout of the pages. ``source`` maps heads of a page to heads of the blocks. A copy
    leaves out layers that only the pages or only the blocks have, and the block number ``skipped``.
    """

    def __init__(
        self, layout: str, blocks: EngineBlocks, source: PartSource, *, skipped: int | None = None
    ) -> None:
        spec = KVSpec.parse(layout)
        [group] = spec.groups
        self._pieces, self._skipped = blocks.pieces, skipped
        if spec.chunk_tokens % (blocks.block_tokens * blocks.pieces):
            raise UsageError(
                f"share_engines: pages of {spec.chunk_tokens} tokens do not hold whole blocks of "
                f"{blocks.block_tokens * blocks.pieces}: give chunk_tokens a multiple"
            )
        width = group.head_dim * blocks.item_bytes
        self._block_bytes = blocks.block_tokens * width  # of one head of one layer, in a page
        self._tables = max(len(blocks.tables), 1)
        places: dict[tuple[int, Matrix], list[tuple[int, int, int]]] = {}
        for table, layer, plane, vectors in blocks.planes(group.layers):
            matrix = Matrix(
                blocks.block_tokens,
                group.head_dim,
                blocks.item_bytes,
                to=(width, blocks.item_bytes),
                of=(vectors.token, vectors.item),
            )
            places.setdefault((table, matrix), []).extend(
                (vectors.address + own * vectors.head, vectors.block, spec.tile(layer, plane, head).start)
                for head, own in zip(source.page_heads, source.own_heads, strict=True)
            )
        self._places = [
            (table, matrix, np.array(sorted(each), np.uint64)) for (table, matrix), each in places.items()
        ]

    def gather(self, pages: Pages) -> None:
        """Copy blocks to pages."""
        for matrix, there, here in self._pairs(pages):
            copying.copy_matrices(np.stack([here, there], axis=1), matrix)

    def scatter(self, pages: Pages) -> None:
        """Copy pages to blocks."""
        for matrix, there, here in self._pairs(pages):
            turned = replace(matrix, to=matrix.of, of=matrix.to)
            copying.copy_matrices(np.stack([there, here], axis=1), turned)

    def _pairs(self, pages: Pages) -> Iterable[tuple[Matrix, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]]:
        """Yield each matrix shape with the addresses of all matrices of this shape in blocks and in pages."""
        if not pages:
            return
        chunks = np.array([chunk for chunk, _ in pages], np.int64)
        starts = np.array([address for _, address in pages], np.uint64)
        wanted = np.ones_like(chunks, bool) if self._skipped is None else chunks != self._skipped
        # the number of blocks in memory for each block table
        count = chunks.shape[1] * self._pieces // self._tables
        shape = (len(pages), self._tables, count)
        wanted = np.repeat(wanted, self._pieces, axis=1).reshape(shape)
        numbers = (chunks[:, :, None] * self._pieces + np.arange(self._pieces)).reshape(shape)
        within = np.arange(count, dtype=np.uint64) * np.uint64(self._block_bytes)
        rows = starts[:, None] + within
        for table, matrix, places in self._places:
            there = wanted[:, table]
            blocks, page_rows = numbers[:, table][there].astype(np.uint64), rows[there]
            address, stride, offset = places.T
            # Addresses are ordered by block, then by their order in memory.
            yield matrix, (address + blocks[:, None] * stride).ravel(), (offset + page_rows[:, None]).ravel()
