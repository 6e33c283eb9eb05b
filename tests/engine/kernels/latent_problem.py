"""Random problems of attention over latents, like those of problem.py: their exact solution, and everything
that a kernel must not look at poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.engine.kernels.device import MirrorLauncher, kernel_launcher
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tests.engine.kernels.problem import LAYER, LAYERS, NO_PAGE, UNIT_ROUNDOFF, guarded_tensor, int32
from tierstore_engine.kernels.latents import Entries, LatentKernels
from tierstore_engine.kernels.operations import LayerPages, SplitRule


@dataclass(frozen=True)
class LatentShape:
    """``width`` numbers a token, whose first ``rank`` are values. ``dtype`` by torch's name."""

    dtype: str = "float16"
    heads: int = 4
    width: int = 40
    rank: int = 32
    page_tokens: int = 64

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def scale(self) -> float:
        return 1.5 * self.width**-0.5


class LatentProblem:
    """Sequences of ``lengths`` tokens with their pages filled, and a query for the last ``chunk`` of each. In
    ``out`` and ``lse`` there are rows between them that belong to nobody."""

    def __init__(self, shape: LatentShape, lengths: Sequence[int], *, chunk: int = 1, seed: int = 0) -> None:
        self.shape, self.chunk, self.lengths = shape, chunk, list(lengths)
        random = torch.Generator().manual_seed(seed)
        pages = [-(-length // shape.page_tokens) for length in lengths]
        order = torch.randperm(sum(pages) + 1, generator=random).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in pages]
        numbers = shape.torch_dtype
        self.latents = [torch.randn(length, shape.width, generator=random).to(numbers) for length in lengths]
        pool = torch.full((sum(pages) + 1, LAYERS, shape.page_tokens, shape.width), torch.nan, dtype=numbers)
        for latents, table in zip(self.latents, self.tables, strict=True):
            for page, part in zip(table, latents.split(shape.page_tokens), strict=True):
                pool[page, LAYER, : len(part)] = part
        self.pool = guarded_tensor(pool)
        total = len(lengths) * (chunk + 1)  # behind the last there is nothing
        queries = torch.randn(total, shape.heads, shape.width, generator=random).to(numbers)
        self.queries = guarded_tensor(queries)
        self.out = guarded_tensor(torch.full((total, shape.heads, shape.rank), torch.nan, dtype=numbers))
        self.lse = guarded_tensor(torch.full((total, shape.heads), torch.nan))

    @property
    def layer(self) -> LayerPages:
        page = LAYERS * self.shape.page_tokens * self.shape.width
        return LayerPages(self.pool, page, LAYER * page // LAYERS)

    def first_row(self, sequence: int) -> int:
        return 1 + sequence * (self.chunk + 1)

    def entries(self) -> Entries:
        width = max(map(len, self.tables)) + 1
        padded = [table + [NO_PAGE] * (width - len(table)) for table in self.tables]
        each = [(at, back) for at in range(len(self.lengths)) for back in range(self.chunk)]
        return Entries(
            rows=int32([self.first_row(at) + back for at, back in each]),
            lengths=int32([self.lengths[at] - self.chunk + back + 1 for at, back in each]),
            tables=guarded_tensor(torch.tensor(padded, dtype=torch.int32)),
            max_length=max(self.lengths),
            owners=int32([at for at, _ in each]) if self.chunk > 1 else None,
        )

    def check(self) -> None:
        """The results are what they should be, to within the roundings that the kernel must make."""
        shape, u = self.shape, UNIT_ROUNDOFF[self.shape.torch_dtype]
        theirs = torch.ones(len(self.out), dtype=torch.bool)
        for at, latents in enumerate(self.latents):
            rows = slice(self.first_row(at), self.first_row(at) + self.chunk)
            theirs[rows] = False
            keys, length = latents.double(), self.lengths[at]
            scores = torch.einsum("qhw,kw->qhk", self.queries[rows].double(), keys) * shape.scale
            seen = torch.arange(length)[None, :] <= torch.arange(length - self.chunk, length)[:, None]
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
            weights, values = scores.softmax(-1), keys[:, : shape.rank]
            exact, magnitude = weights @ values, weights @ values.abs()
            allowed = 1.05 * u * (magnitude + exact.abs()) + 5e-5 * magnitude + length * 2.0**-24
            worst = ((self.out[rows].double() - exact).abs() / allowed).max().item()
            assert worst <= 1, f"sequence {at} of {length}: {worst:.2f} times the allowed error"
            lse_error = (self.lse[rows].double() - scores.logsumexp(-1)).abs().max().item()
            assert lse_error < 5e-5, f"sequence {at} of {length}: LSE off by {lse_error}"
        assert self.out[theirs].isnan().all(), "rows that are nobody's were written"
        assert self.lse[theirs].isnan().all(), "rows that are nobody's were written"


class ExecutedLatents:
    """The kernels for ``shape``."""

    def __init__(
        self, shape: LatentShape, *, launcher: ExecutorLauncher | MirrorLauncher | None = None
    ) -> None:
        self.shape = shape
        self.launcher = launcher or kernel_launcher()
        self.kernels = LatentKernels(
            self.launcher,
            dtype=shape.dtype,
            heads=shape.heads,
            width=shape.width,
            rank=shape.rank,
            page_tokens=shape.page_tokens,
            score_scale=shape.scale,
            split_rule=SplitRule(min_pages=1, max_splits=3),
        )

    def attend(self, problem: LatentProblem, *, split: bool, seed: int = 0) -> LatentProblem:
        self.launcher.seed = seed
        entries = problem.entries()
        self.kernels.attend(problem.layer, problem.queries, entries, problem.out, problem.lse, split=split)
        return problem
