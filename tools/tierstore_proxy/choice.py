"""Decide where a request goes, from numbers, without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The current requests of this proxy at an engine. ``tokens`` are their prompt tokens. ``up`` is False
    while the engine does not answer."""

    requests: int
    tokens: int
    up: bool = True


def rank_prefill(loads: Sequence[EngineLoad], turn: int = 0) -> list[int]:
    """Return the engines that are up, the shortest queue first. ``turn`` rotates equal engines.

    >>> rank_prefill([EngineLoad(2, 900), EngineLoad(1, 4000), EngineLoad(0, 0, up=False)])
    [0, 1]
    """
    return _ranked(loads, [load.tokens for load in loads], turn)


def rank_decode(loads: Sequence[EngineLoad], held: Sequence[int], tokens: int, turn: int = 0) -> list[int]:
    """Return the engines for a prompt of ``tokens`` tokens, best first. ``held`` is how many of these each
    engine holds.

    The best engine has the least work: the tokens that it does not hold, plus the tokens of its current
    requests. If all engines are down, all are returned, because only a request can show whether one is up
    again.

    >>> rank_decode([EngineLoad(3, 9000), EngineLoad(1, 2000)], [8000, 0], 8000)
    [0, 1]
    >>> rank_decode([EngineLoad(3, 11000), EngineLoad(1, 2000)], [8000, 0], 8000)
    [1, 0]
    """
    if not any(load.up for load in loads):
        loads = [EngineLoad(load.requests, load.tokens) for load in loads]
    costs = [load.tokens + max(tokens - there, 0) for load, there in zip(loads, held, strict=True)]
    return _ranked(loads, costs, turn)


def worth_handing_over(tokens: int, held: int, least: int) -> bool:
    """Return whether a prefill engine should compute a prompt: only if at least ``least`` of its tokens are
    missing.

    >>> worth_handing_over(4000, 0, 128), worth_handing_over(4000, 3900, 128)
    (True, False)
    """
    return tokens - held >= least


def _ranked(loads: Sequence[EngineLoad], costs: Sequence[int], turn: int) -> list[int]:
    count = len(loads)
    up = [index for index in range(count) if loads[index].up]
    return sorted(up, key=lambda index: (costs[index], loads[index].requests, (index - turn) % count))
