"""A tier without bytes: the store's own policies, asked about the blocks of a trace.

One request does what an engine does with the store: a lookup (the leading blocks that are held are used and
held), then a save of all that follow, which makes room as the policy says. Blocks of the running request
cannot leave, no block leaves before those after it, and what finds no room is not stored. Requests run one
after the other.

The **hit rate** is hit blocks over all blocks of all prompts, and a partial last block counts as a whole
one, on both sides; that is how the published figures are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tierstore.policy import POLICIES, PageHint, Policy
from tierstore_tools.replay.strand import Strand
from tierstore_tools.replay.strands import Strands
from tierstore_tools.replay.trace import Request

_SAVE_STEP = 64  # blocks; each step of a save is one tick of the store's clock


class Hinter(Protocol):
    """Where hints come from in a replay."""

    def hints(self, number: int, request: Request) -> Sequence[PageHint] | None:
        """What is said with request ``number`` (from 0) of each of its blocks, when it is saved; None when
        nothing is said."""
        ...


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a replay."""

    requests: int
    blocks: int  # of all prompts together
    hit_blocks: int
    evicted_blocks: int

    @property
    def hit_rate(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0


class Simulator:
    """One tier, one policy, one request at a time."""

    def __init__(
        self, policy: Policy, capacity_blocks: int, *, hints: Hinter | None = None, block_bytes: int = 1
    ) -> None:
        self.tier = Strands(policy, capacity_blocks, block_bytes=block_bytes)
        self._hints = hints
        self._requests = 0
        self._blocks = 0
        self._hit_blocks = 0

    def step(self, request: Request) -> int:
        """Run a request. Returns how many of its leading blocks were held."""
        tier, blocks = self.tier, list(request.blocks)
        if self._hints is not None:
            tier.expire_hints(request.timestamp_s)
        path = tier.take(blocks)
        hit = path[-1].end if path else 0
        self._save(blocks, path, hit)
        if self._hints is not None:
            said = self._hints.hints(self._requests, request)
            if said is not None:
                path = tier.hint(path, said)
        tier.release(path)
        self._requests += 1
        self._blocks += len(blocks)
        self._hit_blocks += hit
        return hit

    def _save(self, blocks: list[int], path: list[Strand], hit: int) -> None:
        """Save what follows the hit, as the store does: step by step. What is kept of it goes on ``path``."""
        kept = stop = hit
        while True:  # also a save of nothing is one
            stop = min(kept + _SAVE_STEP, len(blocks))
            kept += self.tier.save(blocks[kept:stop], path)
            if kept < stop or stop == len(blocks):
                return

    @property
    def result(self) -> Result:
        """Of all requests so far."""
        return Result(self._requests, self._blocks, self._hit_blocks, self.tier.evicted_blocks)


def simulate(
    requests: Iterable[Request], policy: str, capacity_blocks: int, *, hints: Hinter | None = None
) -> Result:
    """Replay all requests through one tier under the policy of this name."""
    simulator = Simulator(POLICIES[policy](), capacity_blocks, hints=hints)
    for request in requests:
        simulator.step(request)
    return simulator.result
