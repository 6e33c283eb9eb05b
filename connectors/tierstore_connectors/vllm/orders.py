"""Messages between the scheduler half and the worker half, which vLLM pickles and sends between processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierstore.groups import GroupRule
from tierstore.keys import Identity, PageKey
from tierstore.types import Hint

NULL_BLOCK = 0  # vLLM's placeholder for "no block"
RENEW_S = 0.1  # how long a new epoch waits for its connection to the daemon
_NO_HINT = Hint()


@dataclass(frozen=True, slots=True)
class Rank:
    """A worker's tensor-parallel rank out of ``tensors``, and its pipeline stage out of ``pipelines``."""

    tensor: int
    tensors: int
    pipeline: int
    pipelines: int

    def shard(self, group: str) -> str:
        """Return the name of this worker's part of the KV cache group with this label."""
        return f"tp{self.tensor}/{self.tensors},pp{self.pipeline}/{self.pipelines},{group}"


@dataclass(frozen=True, slots=True)
class GroupShard:
    """The pages of one KV cache group on one worker. ``rule`` says which pages a hit needs."""

    group: int
    identity: Identity
    page_bytes: int
    rule: GroupRule


@dataclass(frozen=True, slots=True)
class Shard:
    """The pages of one worker."""

    chunk_tokens: int
    groups: tuple[GroupShard, ...]
    others: tuple[tuple[GroupShard, ...], ...] = ()
    """Pages that engines of other parallelism save and that this worker can load, by size
    (``share_sizes``)."""
    model: Identity | None = None
    """The whole model's shared identity; None without ``share_engines``."""


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """The blocks of chunks ``first, first + 1, …`` in one group. In a group of recurrent states, a chunk has
    one block, with the state at the chunk's end. Block 0 is skipped."""

    group: int
    first: int
    chunks: tuple[tuple[int, ...], ...]

    @property
    def end(self) -> int:
        return self.first + len(self.chunks)

    @property
    def blocks(self) -> frozenset[int]:
        return frozenset(block for chunk in self.chunks for block in chunk if block != NULL_BLOCK)


@dataclass(frozen=True, slots=True)
class PromptUpdate:
    """The keys and tokens (uint32, little-endian) of a request's chunks from chunk ``first`` on."""

    request: str
    first: int
    keys: tuple[PageKey, ...]
    tokens: bytes


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """An order to load pages into blocks, so that the prompt's first ``chunks`` chunks are complete. ``size``
    is 0 for the worker's own pages, or ``n`` for item ``n - 1`` of ``Shard.others``."""

    request: str
    chunks: int
    groups: tuple[GroupBlocks, ...]
    size: int = 0


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """An order to save blocks after the step that carries the order."""

    request: str
    groups: tuple[GroupBlocks, ...]
    ttl_s: float | None = None
    priority: int = 0
    hands_over: bool = False

    @property
    def hint(self) -> Hint | None:
        """Return the request's hint to the eviction policy, or None."""
        hint = Hint(ttl_s=self.ttl_s, priority=self.priority, elsewhere=self.hands_over)
        return None if hint == _NO_HINT else hint


@dataclass(slots=True)
class StepWork:
    """The orders of one step.

    ``fresh`` are blocks that the step may write and that other requests may have used before; ``all_fresh``
    means all blocks. ``refused`` are requests whose load vLLM waits for but that are not loaded. ``idle`` is
    True if the step computes no tokens. ``epoch`` changes when all earlier pages must become unfindable.
    """

    number: int = 0
    epoch: str = ""
    idle: bool = False
    grown: list[PromptUpdate] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)
    all_fresh: bool = False
    refused: list[str] = field(default_factory=list)
    forget: list[str] = field(default_factory=list)
    pin: list[str] = field(default_factory=list)


@dataclass(slots=True)
class LoadReport:
    """Failed loads: the first missing chunk of each request, the minimum over all workers."""

    failed: dict[str, int] = field(default_factory=dict)

    def merge(self, other: LoadReport) -> LoadReport:
        failed = dict(self.failed)
        for request, chunk in other.failed.items():
            failed[request] = min(chunk, failed.get(request, chunk))
        return LoadReport(failed)
