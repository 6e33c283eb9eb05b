"""Random problems of paged attention, their exact solution, and how far from it a kernel may be.

Whatever a kernel must not look at is poisoned: tokens that no row sees are NaN, unused table entries name
pages far outside of the pool, and every array ends at a guard page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from tests.engine.kernels.executor import guarded
from tierstore.spec import KVSpec
from tierstore_engine.kernels.operations import EVERYTHING, ChunkSplits, LayerPages, Sequences, Sight, Slots
from tierstore_engine.kv_format import KVFormat, quantise

LAYERS, LAYER = 2, 1
NO_PAGE = 1 << 24

UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Shape:
    """One shape of attention. ``dtype`` by torch's name; ``kv`` as ``--kv-dtype`` has it."""

    dtype: str = "float16"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_tokens: int = 64
    kv: str = "auto"
    score_scale: float | None = None
    score_cap: float | None = None

    @property
    def format(self) -> KVFormat:
        return KVFormat.parse(self.kv)

    @property
    def spec(self) -> KVSpec:
        """Of pages of codes."""
        keys, values = (code.dtype for code in self.format.codes)
        shape = {"layers": LAYERS, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return KVSpec.uniform(
            **shape, dtype=keys, value_dtype=values, scaled=True, chunk_tokens=self.page_tokens
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def page_shape(self) -> tuple[int, ...]:
        return (LAYERS, 2, self.kv_heads, self.page_tokens, self.head_dim)


def guarded_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in guarded memory."""
    bits = tensor.contiguous().view(torch.int16) if tensor.element_size() == 2 else tensor.contiguous()
    return torch.from_numpy(guarded(bits.numpy())).view(tensor.dtype)


def int32(values: Sequence[int] | np.ndarray) -> torch.Tensor:
    return guarded_tensor(torch.from_numpy(np.array(values, np.int32)))


class Problem:
    """Sequences of (past, new) tokens with their pages filled, queries for the new tokens, and room for the
    result.

    Between the sequences' rows there are rows that belong to nobody; they must come out as they went in
    (NaN). Pages of which nobody sees anything have been given back, as those of a windowed group.
    """

    def __init__(
        self,
        shape: Shape,
        spans: Sequence[tuple[int, int]],
        *,
        sight: Sight = EVERYTHING,
        seed: int = 0,
    ) -> None:
        self.shape, self.spans, self.sight = shape, list(spans), sight
        self._random = torch.Generator().manual_seed(seed)
        lengths = [past + new for past, new in spans]
        pages = [-(-length // shape.page_tokens) for length in lengths]
        order = torch.randperm(sum(pages) + 1, generator=self._random).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in pages]
        self.keys = [self._normal(length, shape.kv_heads) for length in lengths]
        self.values = [self._normal(length, shape.kv_heads) for length in lengths]
        if shape.format.quantised:
            self.pool = self._filled_codes(sum(pages) + 1)
        else:
            self.pool = self._filled_pool(sum(pages) + 1)

        self.first_rows = []
        rows = 1
        for _, new in spans:
            self.first_rows.append(rows)
            rows += new + 1
        self.queries = guarded_tensor(self._normal(rows, shape.heads))
        self.out = guarded_tensor(torch.full_like(self.queries, torch.nan))
        self.lse = guarded_tensor(torch.full((rows, shape.heads), torch.nan))

    @property
    def layer(self) -> LayerPages:
        if self.shape.format.quantised:
            return LayerPages(self.pool, self.shape.spec.page_bytes, self.shape.spec.layer(LAYER).start)
        page = int(np.prod(self.shape.page_shape))
        return LayerPages(self.pool, page, LAYER * page // LAYERS)

    def sequences(self, *, extra_width: int = 1, splits: Iterable[int] | None = None) -> Sequences:
        width = max(map(len, self.tables), default=0) + extra_width
        tables = []
        for table, (past, _) in zip(self.tables, self.spans, strict=True):
            gone = self.sight.first(past) // self.shape.page_tokens
            tables.append([-1] * gone + table[gone:] + [NO_PAGE] * (width - len(table)))
        lengths = [past + new for past, new in self.spans]
        counts = [new for _, new in self.spans]
        return Sequences(
            rows=int32(self.first_rows),
            counts=int32(counts),
            lengths=int32(lengths),
            tables=int32(np.array(tables, np.int32).reshape(len(tables), width)),
            max_count=max(counts),
            max_length=max(lengths),
            splits=self._chunk_splits(list(splits)) if splits is not None else None,
        )

    def _chunk_splits(self, splits: list[int]) -> ChunkSplits:
        pairs = zip(self.spans, splits, strict=True)
        first_parts = list(accumulate((new * count for (_, new), count in pairs), initial=0))
        return ChunkSplits(int32(splits), int32(first_parts[:-1]), max(splits), first_parts[-1])

    def check(self) -> None:
        """The results are what they should be, to within the roundings that a kernel must make."""
        theirs = set(range(len(self.queries)))
        for index, (_, new) in enumerate(self.spans):
            rows = slice(self.first_rows[index], self.first_rows[index] + new)
            theirs -= set(range(rows.start, rows.stop))
            exact, lse, tolerance = self._exact(index, self.queries[rows])
            error = (self.out[rows].double() - exact).abs()
            worst = (error / tolerance).max().item()
            assert worst <= 1, f"sequence {index} {self.spans[index]}: {worst:.2f} times the allowed error"
            lse_error = (self.lse[rows].double() - lse).abs().max().item()
            assert lse_error < 5e-5, f"sequence {index} {self.spans[index]}: LSE off by {lse_error}"
        assert self.out[sorted(theirs)].isnan().all(), "rows that are nobody's were written"
        assert self.lse[sorted(theirs)].isnan().all(), "rows that are nobody's were written"

    def _exact(self, index: int, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In float64: outputs ``[new, heads, head_dim]``, LSEs ``[new, heads]``, and the error allowed to
        each output.

        Rounded are the softmax weights (each by up to u, or 2^-25 where they are subnormal) and the output;
        all else is in float32.
        """
        past, new = self.spans[index]
        group = self.shape.heads // self.shape.kv_heads
        keys = self.keys[index].double().repeat_interleave(group, 1)
        values = self.values[index].double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries.double(), keys)
        scores *= self.shape.score_scale or self.shape.head_dim**-0.5
        if (cap := self.shape.score_cap) is not None:
            scores = cap * torch.tanh(scores / cap)
        positions = torch.arange(past, past + new)[:, None]
        others = torch.arange(past + new)[None, :]
        oldest = torch.tensor([self.sight.first(position) for position in range(past, past + new)])[:, None]
        hidden = (self.sight.causal & (others > positions)) | (others < oldest)
        scores = scores.masked_fill(hidden, -torch.inf)
        weights = scores.softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, values)
        magnitude = torch.einsum("hqk,khd->qhd", weights, values.abs())
        u = UNIT_ROUNDOFF[self.shape.torch_dtype]
        tolerance = 1.05 * u * (magnitude + out.abs()) + 5e-5 * magnitude + (past + new) * 2.0**-24
        return out, scores.logsumexp(-1).T, tolerance

    def _normal(self, tokens: int, heads: int) -> torch.Tensor:
        numbers = torch.randn((tokens, heads, self.shape.head_dim), generator=self._random)
        return numbers.to(self.shape.torch_dtype)

    def _filled_pool(self, num_pages: int) -> torch.Tensor:
        shape = self.shape
        pool = torch.full((num_pages, *shape.page_shape), torch.nan, dtype=shape.torch_dtype)
        for index, (past, _) in enumerate(self.spans):
            unseen = self.sight.first(past)  # tokens that the first row does not see, nor any other
            for plane, tokens in enumerate((self.keys[index], self.values[index])):
                seen = tokens.clone()
                seen[:unseen] = torch.nan
                for chunk, page in enumerate(self.tables[index]):
                    part = seen[chunk * shape.page_tokens : (chunk + 1) * shape.page_tokens]
                    pool[page, LAYER, plane, :, : len(part)] = part.transpose(0, 1)
        return guarded_tensor(pool)

    def _filled_codes(self, num_pages: int) -> torch.Tensor:
        """The same of codes: what they stand for, in the kernels' dtype, takes the numbers' place. Bytes
        that nobody must look at are 255: scales that are NaN."""
        shape, spec = self.shape, self.shape.spec
        pool = torch.full((num_pages, spec.page_bytes), 255, dtype=torch.uint8)
        for index, (past, _) in enumerate(self.spans):
            unseen = self.sight.first(past)
            for plane, vectors in enumerate((self.keys, self.values)):
                code = shape.format.codes[plane]
                codes, scales = quantise(vectors[index], code)
                kept = code.decode(codes) * scales.float().unsqueeze(-1)
                vectors[index] = kept.to(shape.torch_dtype)
                for token in range(unseen, len(codes)):
                    page, offset = self.tables[index][token // shape.page_tokens], token % shape.page_tokens
                    write_codes(pool[page], spec, plane, offset, codes[token], scales[token])
        return guarded_tensor(pool)


def write_codes(
    page: torch.Tensor, spec: KVSpec, plane: int, offset: int, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """A token's vectors, ``[kv_heads, bytes]`` and their scales, to where ``spec`` has them."""
    width = codes.shape[1]
    for head in range(len(codes)):
        tile, scale = spec.tile(LAYER, plane, head).start, spec.scales(LAYER, plane, head).start
        page[tile + offset * width : tile + (offset + 1) * width] = codes[head]
        page[scale + 2 * offset : scale + 2 * offset + 2] = scales[head : head + 1].view(torch.uint8)


def slots_of(pages: Sequence[int], offsets: Sequence[int]) -> Slots:
    return Slots(int32(pages), int32(offsets))
