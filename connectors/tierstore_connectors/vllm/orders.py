"""Messages between the two halves: plain data that vLLM pickles and carries between processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierstore.groups import GroupRule
from tierstore.keys import Identity, PageKey
from tierstore.types import Hint

NULL_BLOCK = 0  # vLLM's placeholder for "no block"
RENEW_S = 0.1  # how long a new epoch waits for the daemon, which normally answers sooner
_NOTHING_SAID = Hint()


@dataclass(frozen=True, slots=True)
class Rank:
    """A worker's part of the model."""

    tensor: int
    tensors: int
    pipeline: int
    pipelines: int

    def shard(self, group: str) -> str:
        """Return the name of a page's part and KV cache group."""
        return f"tp{self.tensor}/{self.tensors},pp{self.pipeline}/{self.pipelines},{group}"


@dataclass(frozen=True, slots=True)
class GroupShard:
    """The pages of one KV cache group on one worker. ``rule`` says which of them a hit needs."""

    group: int
    identity: Identity
    page_bytes: int
    rule: GroupRule


@dataclass(frozen=True, slots=True)
class Shard:
    """The pages that one worker keeps."""

    chunk_tokens: int
    groups: tuple[GroupShard, ...]
    others: tuple[tuple[GroupShard, ...], ...] = ()
    """Pages that engines of other sizes save and that this worker can load instead, by size
    (``share_sizes``)."""
    model: Identity | None = None
    """The whole model's shared identity; None without ``share_engines``."""


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """The blocks of chunks ``first, first + 1, …`` in one group. For states they are the blocks with the
    states at the chunks' ends. Blocks to leave alone are 0."""

    group: int
    first: int
    chunks: tuple[tuple[int, ...], ...]

    @property
    def end(self) -> int:
        return self.first + len(self.chunks)

    @property
    def blocks(self) -> set[int]:
        return {block for chunk in self.chunks for block in chunk if block != NULL_BLOCK}


@dataclass(frozen=True, slots=True)
class PromptUpdate:
    """Keys and tokens (uint32, little-endian) of chunks ``first …`` of a request's prompt."""

    request: str
    first: int
    keys: tuple[PageKey, ...]
    tokens: bytes


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """An order to fill these blocks. It needs the prompt's first ``chunks`` chunks in the store. ``size`` is
    0 for the worker's own pages; ``n`` stands for item ``n - 1`` of ``Shard.others``."""

    request: str
    chunks: int
    groups: tuple[GroupBlocks, ...]
    size: int = 0


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """An order to save these blocks after the step that carries the order."""

    request: str
    groups: tuple[GroupBlocks, ...]
    ttl_s: float | None = None
    priority: int = 0
    hands_over: bool = False

    @property
    def hint(self) -> Hint | None:
        """Return the request's hints about its pages, None without any."""
        hint = Hint(ttl_s=self.ttl_s, priority=self.priority, elsewhere=self.hands_over)
        return None if hint == _NOTHING_SAID else hint


@dataclass(slots=True)
class StepWork:
    """The orders of one step.

    ``fresh`` are blocks that the step may write and that other requests may have used before; with
    ``all_fresh`` every block is one. ``refused`` are requests that vLLM waits for but that get no load.
    ``idle``: the step computes nothing. ``epoch`` changes when all earlier pages must become unfindable.
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
    """Failed loads: the first missing chunk of each request, the earliest if several workers report."""

    failed: dict[str, int] = field(default_factory=dict)

    def merge(self, other: LoadReport) -> LoadReport:
        failed = dict(self.failed)
        for request, chunk in other.failed.items():
            failed[request] = min(chunk, failed.get(request, chunk))
        return LoadReport(failed)


def kept_by_name(rule: GroupRule) -> bool:
    """Return whether each page is found by a name that stands for all tokens up to its end
    (:class:`~tierstore_connectors.vllm.identity.ChunkNames`).

    Other pages are found by the tokens of all chunks before them, and need all pages of these chunks.
    """
    return not rule.chained
