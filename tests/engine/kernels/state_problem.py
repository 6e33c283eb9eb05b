"""Random problems of recurrent states: the CPU's solution, and everything that a kernel must not look at
poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tests.engine.kernels.device import MirrorLauncher, kernel_launcher
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tests.engine.kernels.problem import guarded_tensor, int32
from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import Span
from tierstore_engine.config import DeltaConfig, ModelConfig
from tierstore_engine.kernels.states import StateKernels, StateSpans
from tierstore_engine.presets import preset
from tierstore_engine.states import CpuStates

LAYER = 1  # of three with states
ALLOWED = {"float16": 4e-3, "bfloat16": 3e-2}
NOBODYS = 2  # rows behind those of each sequence


@dataclass(frozen=True)
class StateShape:
    """``dtype`` by torch's name."""

    dtype: str = "float16"
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 12
    value_dim: int = 8
    conv_width: int = 4

    @property
    def config(self) -> ModelConfig:
        delta = DeltaConfig(self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.conv_width)
        return replace(preset("tiny-qwen3-next", dtype=self.dtype), delta=delta)

    @property
    def delta(self) -> DeltaConfig:
        assert self.config.delta is not None
        return self.config.delta


class StateProblem:
    """Sequences of (past, new) tokens, each with its state in a page; the last entry of a launch is none."""

    def __init__(self, shape: StateShape, spans: Sequence[tuple[int, int]], *, seed: int = 0) -> None:
        self.shape, self.spans, delta = shape, list(spans), shape.delta
        dtype = getattr(torch, shape.dtype)
        random = torch.Generator().manual_seed(seed)
        pool = PagePool(shape.config.kv_spec(chunk_tokens=64).split()[1], len(spans) + 1)
        self.states, self.memory = CpuStates(pool, shape.config), torch.from_numpy(pool.array)
        pool.array[:] = 0xFF  # not a number
        self.pages = torch.randperm(len(spans) + 1, generator=random).tolist()[: len(spans)]
        for (past, _), page in zip(self.spans, self.pages, strict=True):
            if past:
                state = self.states.state(LAYER, page)
                for tensor in (state.inputs, state.matrices):
                    tensor.copy_(torch.randn(tensor.shape, generator=random))
        self.offset = pool.spec.layer(LAYER).start
        self.pool = guarded_tensor(torch.from_numpy(pool.array.copy()))
        self.before = self.pool.clone()
        self.rows = np.cumsum([1, *(new + NOBODYS for _, new in spans)]).tolist()
        total = self.rows.pop()

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random)

        self.channels = guarded_tensor(numbers(total, delta.channels).to(dtype))
        self.conv = guarded_tensor(numbers(delta.channels, 1, delta.conv_width).to(dtype))
        self.rates = guarded_tensor(numbers(total, delta.value_heads).sigmoid())
        self.decays = guarded_tensor(-numbers(total, delta.value_heads).exp())
        out = torch.full((total, delta.value_heads, delta.value_dim), torch.nan, dtype=dtype)
        self.out = guarded_tensor(out)

    def sequences(self) -> StateSpans:
        return StateSpans(
            rows=int32([*self.rows, 0]),
            counts=int32([*(new for _, new in self.spans), 1]),
            lengths=int32([*(past + new for past, new in self.spans), 0]),
            tables=guarded_tensor(
                torch.tensor([[page, -1] for page in [*self.pages, -1]], dtype=torch.int32)
            ),
        )

    def check(self) -> None:
        """What tokens read, and the states behind them, are the CPU's."""
        theirs = torch.ones(len(self.out), dtype=torch.bool)
        allowed = ALLOWED[self.shape.dtype]
        kept = self.memory
        for (past, new), row, page in zip(self.spans, self.rows, self.pages, strict=True):
            rows = slice(row, row + new)
            theirs[rows] = False
            span = Span(((page,),), past, past + new)
            state = self.states.before(span, LAYER, page)
            inputs = (self.channels[rows], self.conv, self.rates[rows], self.decays[rows])
            right = self.states._of_span(span, state, *inputs)
            torch.testing.assert_close(self.out[rows].float(), right.float(), atol=allowed, rtol=allowed)
            # The same page of ours, through the same views.
            held = kept[page].clone()
            kept[page] = self.pool[page]
            ours = state.inputs.clone(), state.matrices.clone()
            kept[page] = held
            assert torch.equal(ours[0], state.inputs)
            torch.testing.assert_close(ours[1], state.matrices, atol=allowed, rtol=allowed)
        assert self.out[theirs].isnan().all(), "rows that are nobody's were written"
        unused = sorted({*range(len(self.pool))} - {*self.pages})
        assert torch.equal(self.pool[unused], self.before[unused]), "a page that is nobody's was written"


class ExecutedStates:
    """The kernels for ``shape``."""

    def __init__(
        self, shape: StateShape, *, launcher: ExecutorLauncher | MirrorLauncher | None = None
    ) -> None:
        self.shape = shape
        self.launcher = launcher or kernel_launcher()
        self.kernels = StateKernels(self.launcher, shape.delta, dtype=shape.dtype)

    def advance(self, problem: StateProblem, *, seed: int = 0) -> StateProblem:
        self.launcher.seed = seed
        inputs = (problem.channels, problem.conv, problem.rates, problem.decays)
        self.kernels.advance(problem.pool, problem.offset, *inputs, problem.sequences(), problem.out)
        return problem
