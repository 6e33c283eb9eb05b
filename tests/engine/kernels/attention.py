"""Attention kernels by shape, on the executor or a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from tests.engine.kernels.device import MirrorLauncher, kernel_launcher
from tests.engine.kernels.executor import SCHEDULES
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tests.engine.kernels.problem import Problem, Shape
from tierstore_engine.kernels.operations import EVERYTHING, AttentionKernels, Sight, SplitRule

SMALL_SPLITS = SplitRule(min_pages=1, max_splits=3)
SIGHTS = [
    EVERYTHING,
    Sight(window=50),
    Sight(chunk=60),
    Sight(causal=False),
    Sight(window=50, causal=False),
]
SOAKED = [*SIGHTS, Sight(window=1), Sight(window=64), Sight(chunk=64), Sight(chunk=100)]


def sights_of(most: int) -> st.SearchStrategy[Sight]:
    """Everything, windows and chunks of up to so many tokens; with and without the tokens behind."""
    tokens, causal = st.integers(1, most), st.booleans()
    return (
        st.builds(Sight, st.none(), st.none(), causal)
        | st.builds(Sight, tokens, st.none(), causal)
        | st.builds(Sight, st.none(), tokens, causal)
    )


class Executed:
    """The kernels for ``shape``; ``seed`` is the schedule, on the executor."""

    def __init__(
        self,
        shape: Shape,
        *,
        split_rule: SplitRule = SMALL_SPLITS,
        launcher: ExecutorLauncher | MirrorLauncher | None = None,
    ) -> None:
        self.shape = shape
        self.launcher = launcher or kernel_launcher()
        self.kernels = AttentionKernels(
            self.launcher,
            dtype=shape.dtype,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            page_tokens=shape.page_tokens,
            kv=shape.format,
            score_scale=shape.score_scale,
            score_cap=shape.score_cap,
            split_rule=split_rule,
        )

    def prefill(self, problem: Problem, *, splits: Sequence[int] | None = None, seed: int = 0) -> Problem:
        """``splits`` are those of each sequence of ``problem``."""
        self.launcher.seed = seed
        sequences = problem.sequences(splits=splits)
        arguments = (problem.layer, problem.queries, sequences, problem.out, problem.lse)
        self.kernels.prefill(*arguments, sight=problem.sight)
        return problem

    def decode(self, problem: Problem, *, seed: int = 0) -> Problem:
        """``problem`` has one new token per sequence."""
        self.launcher.seed = seed
        sequences = problem.sequences()
        arguments = (problem.layer, problem.queries, sequences, problem.out, problem.lse)
        self.kernels.decode(*arguments, sight=problem.sight)
        return problem


def some_schedules(count: int, name: str, names: Iterable[str]) -> list[int]:
    """Return ``count`` schedules. Others of ``names``, with all sights, have the others."""
    case = list(names).index(name)
    first = case + case // len(SIGHTS)
    return [SCHEDULES[(first + number) % len(SCHEDULES)] for number in range(count)]


def one_token_each(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return [(length - 1, 1) for length in lengths]
