"""Random problems of recurrent states: the CPU's solution, and everything that a kernel must not look at
poisoned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from tests.engine.kernels.device import MirrorLauncher, kernel_launcher
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tests.engine.kernels.problem import guarded_tensor, int32
from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import BatchLayout, Span
from tierstore_engine.config import DeltaConfig, Mamba2Config, ModelConfig, StateConfig
from tierstore_engine.delta import CpuDeltaStates
from tierstore_engine.kernels.catalog import StateSet, delta_set, mamba2_set
from tierstore_engine.kernels.launcher import Launcher
from tierstore_engine.kernels.states import DeltaKernels, LayerStates, Mamba2Kernels, StateSpans
from tierstore_engine.layer_weights import Mamba2Terms
from tierstore_engine.mamba2 import CpuMamba2States
from tierstore_engine.presets import preset
from tierstore_engine.states import StatePages

LAYER = 1  # of those with states
ALLOWED = {"float16": 4e-3, "bfloat16": 3e-2}
NOBODYS = 2  # rows behind those of each sequence
BESIDE = 3  # numbers behind each row that is part of a longer one


@dataclass(frozen=True)
class DeltaShape:
    """``dtype`` by torch's name."""

    dtype: str = "float16"
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 12
    value_dim: int = 8
    conv_width: int = 4

    @property
    def states(self) -> DeltaConfig:
        return DeltaConfig(self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.conv_width)

    @property
    def config(self) -> ModelConfig:
        return replace(preset("tiny-qwen3-next", dtype=self.dtype), delta=self.states)

    @property
    def kernels(self) -> StateSet:
        return delta_set(
            dtype=self.dtype, key_dim=self.key_dim, value_dim=self.value_dim, conv_width=self.conv_width
        )


@dataclass(frozen=True)
class Mamba2Shape:
    """The same of Mamba-2. ``limits`` are the least and the most step."""

    dtype: str = "float16"
    heads: int = 4
    head_dim: int = 8
    state_dim: int = 12
    groups: int = 2
    conv_width: int = 4
    biased: bool = True
    limits: tuple[float, float | None] = (0.0, None)

    @property
    def states(self) -> Mamba2Config:
        sizes = (self.heads, self.head_dim, self.state_dim, self.groups, self.conv_width)
        least, most = self.limits
        return Mamba2Config(*sizes, conv_bias=self.biased, least_step=least, most_step=most)

    @property
    def config(self) -> ModelConfig:
        return replace(preset("tiny-nemotron-h", dtype=self.dtype), mamba=self.states)

    @property
    def kernels(self) -> StateSet:
        return mamba2_set(dtype=self.dtype, state_dim=self.state_dim, conv_width=self.conv_width)


StateShape: TypeAlias = DeltaShape | Mamba2Shape


class StateProblem(ABC):
    """Sequences of (past, new) tokens, each with its state in a page; the last entry of a launch is none."""

    out: torch.Tensor
    """``[tokens, heads, value_dim]``: what the kernels say that tokens read."""

    def __init__(
        self,
        config: ModelConfig,
        states: StateConfig,
        spans: Sequence[tuple[int, int]],
        random: torch.Generator,
    ) -> None:
        self.spans, self._dtype = list(spans), config.dtype
        self.drafted = [0] * len(spans)
        pool = PagePool(config.kv_spec(chunk_tokens=64).split()[1], len(spans) + 1)
        pool.array[:] = 0xFF  # not a number
        self._theirs, self._memory = StatePages(pool, config), torch.from_numpy(pool.array)
        self._pages = torch.randperm(len(spans) + 1, generator=random).tolist()[: len(spans)]
        for (past, _), page in zip(self.spans, self._pages, strict=True):
            if past:
                for tensor in self._state(page):
                    tensor.copy_(torch.randn(tensor.shape, generator=random))
        self.pool = guarded_tensor(torch.from_numpy(pool.array.copy()))
        self.layer = LayerStates(self.pool, pool.spec.layer(LAYER).start)
        self._before = self.pool.clone()
        self.rows = np.cumsum([1, *(new + NOBODYS for _, new in spans)]).tolist()
        self._host_pool, self._tokens = pool, self.rows.pop()
        self._numbers = partial(torch.randn, self._tokens, generator=random)
        self._channels = states.channels

    @abstractmethod
    def advance(self, launcher: Launcher) -> None:
        """By the kernels."""

    @abstractmethod
    def _on_cpu(self, rows: slice, layout: BatchLayout) -> torch.Tensor:
        """What the tokens of ``layout``, which have these rows, read; ``[tokens, heads, value_dim]``."""

    def sequences(self) -> StateSpans:
        return StateSpans(
            rows=int32([*self.rows, 0]),
            counts=int32([*(new for _, new in self.spans), 1]),
            lengths=int32([*(past + new for past, new in self.spans), 0]),
            tables=guarded_tensor(
                torch.tensor([[page, -1] for page in [*self._pages, -1]], dtype=torch.int32)
            ),
            drafts=int32([*self.drafted, 0]) if any(self.drafted) else None,
        )

    def _state(self, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and matrices in a page of the CPU's."""
        return self._theirs.inputs[LAYER][page], self._theirs.matrices[LAYER][page]

    def untouched(self, number: int) -> bool:
        """Whether the state of a span is the one before it."""
        page = self._pages[number]
        return torch.equal(self.pool[page], self._before[page])

    def check(self) -> None:
        """What tokens read, and the states behind them, are the CPU's."""
        theirs = torch.ones(len(self.out), dtype=torch.bool)
        places = zip(self.spans, self.drafted, self.rows, self._pages, strict=True)
        for (past, new), drafted, row, page in places:
            rows = slice(row, row + new)
            theirs[rows] = False
            span = Span(((page,),), past, past + new, drafted)
            right = self._on_cpu(rows, BatchLayout.of_states([span], device="cpu", group=0))
            self._assert_close(self.out[rows].float(), right.float())
            # The same page of ours, through the same views.
            inputs, matrices = self._state(page)
            held = self._memory[page].clone()
            self._memory[page] = self.pool[page]
            ours = inputs.clone(), matrices.clone()
            self._memory[page] = held
            assert torch.equal(ours[0], inputs)
            self._assert_close(ours[1], matrices)
        assert self.out[theirs].isnan().all(), "rows that are nobody's were written"
        unused = sorted({*range(len(self.pool))} - {*self._pages})
        assert torch.equal(self.pool[unused], self._before[unused]), "a page that is nobody's was written"

    def _assert_close(self, ours: torch.Tensor, right: torch.Tensor) -> None:
        """What is small beside the others may be the difference of large numbers that were rounded."""
        allowed = ALLOWED[self._dtype]
        atol = allowed * max(1.0, float(right.std()))
        torch.testing.assert_close(ours, right, atol=atol, rtol=allowed)

    def _part_of_longer(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows as a projection of more than them has them; what is beside them is not a number."""
        beside = torch.full((len(numbers), BESIDE), torch.nan, dtype=numbers.dtype)
        return guarded_tensor(torch.cat((beside, numbers), dim=1))[:, BESIDE:]

    def _unread(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return guarded_tensor(torch.full((self._tokens, *shape), torch.nan, dtype=dtype))


class DeltaProblem(StateProblem):
    """Of the gated delta rule."""

    def __init__(self, shape: DeltaShape, spans: Sequence[tuple[int, int]], random: torch.Generator) -> None:
        delta, dtype = shape.states, getattr(torch, shape.dtype)
        super().__init__(shape.config, delta, spans, random)
        self._delta = delta
        self._cpu = CpuDeltaStates(self._host_pool, shape.config)
        self.channels = self._part_of_longer(self._numbers(delta.channels).to(dtype))
        conv = torch.randn((delta.channels, 1, delta.conv_width), generator=random)
        self.conv = guarded_tensor(conv.to(dtype))
        self.rates = guarded_tensor(self._numbers(delta.value_heads).sigmoid())
        self.decays = guarded_tensor(-self._numbers(delta.value_heads).exp())
        self.out = self._unread(delta.value_heads, delta.value_dim, dtype=dtype)

    def advance(self, launcher: Launcher) -> None:
        inputs = (self.channels, self.conv, self.rates, self.decays)
        DeltaKernels(launcher, self._delta, dtype=self._dtype).advance(
            self.layer, *inputs, self.sequences(), self.out
        )

    def _on_cpu(self, rows: slice, layout: BatchLayout) -> torch.Tensor:
        inputs = (self.channels[rows], self.conv, self.rates[rows], self.decays[rows])
        return self._cpu.advance(LAYER, *inputs, layout)


class Mamba2Problem(StateProblem):
    """Of Mamba-2."""

    def __init__(self, shape: Mamba2Shape, spans: Sequence[tuple[int, int]], random: torch.Generator) -> None:
        mamba, dtype = shape.states, getattr(torch, shape.dtype)
        super().__init__(shape.config, mamba, spans, random)
        self._mamba = mamba
        self._cpu = CpuMamba2States(self._host_pool, shape.config)
        self.channels = self._part_of_longer(self._numbers(mamba.channels).to(dtype))
        self.steps = self._part_of_longer((2 * self._numbers(mamba.heads)).to(dtype))
        if spans[0][0] == 0:
            self.steps[self.rows[0], 0] = 100.0  # no float is e to that
            self.channels[self.rows[0]] /= 64

        def of_heads() -> torch.Tensor:
            return torch.randn(mamba.heads, generator=random)

        conv = torch.randn((mamba.channels, 1, mamba.conv_width), generator=random).to(dtype)
        bias = torch.randn(mamba.channels, generator=random).to(dtype)
        self.terms = Mamba2Terms(
            conv=guarded_tensor(conv),
            conv_bias=guarded_tensor(bias) if mamba.conv_bias else None,
            step_bias=guarded_tensor(of_heads()),
            decay=guarded_tensor(-of_heads().exp()),
            skip=guarded_tensor(of_heads()),
        )
        self.out = self._unread(mamba.heads, mamba.head_dim, dtype=torch.float32)

    def advance(self, launcher: Launcher) -> None:
        inputs = (self.channels, self.steps, self.terms)
        Mamba2Kernels(launcher, self._mamba, dtype=self._dtype).advance(
            self.layer, *inputs, self.sequences(), self.out
        )

    def _on_cpu(self, rows: slice, layout: BatchLayout) -> torch.Tensor:
        return self._cpu.advance(LAYER, self.channels[rows], self.steps[rows], self.terms, layout)


def state_problem(shape: StateShape, spans: Sequence[tuple[int, int]], *, seed: int = 0) -> StateProblem:
    random = torch.Generator().manual_seed(seed)
    if isinstance(shape, DeltaShape):
        return DeltaProblem(shape, spans, random)
    return Mamba2Problem(shape, spans, random)


class ExecutedStates:
    """The kernels for ``shape``."""

    def __init__(
        self, shape: StateShape, *, launcher: ExecutorLauncher | MirrorLauncher | None = None
    ) -> None:
        self.shape = shape
        self.launcher = launcher or kernel_launcher()

    def solve(
        self, spans: Sequence[tuple[int, int]], *, drafted: Sequence[int] = (), seed: int = 0
    ) -> StateProblem:
        """A problem of this shape that the kernels have gone through. ``drafted`` is how many of each span's
        new tokens are a draft."""
        problem = state_problem(self.shape, spans, seed=seed)
        problem.drafted[: len(drafted)] = drafted
        return self.advance(problem, seed=seed)

    def advance(self, problem: StateProblem, *, seed: int = 0) -> StateProblem:
        self.launcher.seed = seed
        problem.advance(self.launcher)
        return problem
