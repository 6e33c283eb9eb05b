"""Messages between the two halves. Plain data: vLLM pickles it and carries it between processes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tierstore.groups import GroupRule
from tierstore.keys import Identity, PageKey
from tierstore.types import Hint

NULL_BLOCK = 0  # vLLM's block that stands for "nothing there"
RENEW_S = 0.1  # that a new epoch waits for the daemon: one that is well has answered by then
_NOTHING_SAID = Hint()


@dataclass(frozen=True, slots=True)
class GroupShard:
    """Pages of one KV cache group on one worker. ``rule``: those of them that a hit needs."""

    group: int
    identity: Identity
    page_bytes: int
    rule: GroupRule


@dataclass(frozen=True, slots=True)
class Shard:
    """The pages that one worker keeps."""

    chunk_tokens: int
    groups: tuple[GroupShard, ...]


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """The blocks of chunks ``first, first + 1, …`` in one group, or the ones with the states at their ends. A
    block that is not to be touched is 0."""

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
    """Fill these blocks; the prompt's first ``chunks`` chunks have to be held for that."""

    request: str
    chunks: int
    groups: tuple[GroupBlocks, ...]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Keep these blocks, after the step that carries the order."""

    request: str
    groups: tuple[GroupBlocks, ...]
    ttl_s: float | None = None
    priority: int = 0
    hands_over: bool = False

    @property
    def hint(self) -> Hint | None:
        """What the request has said about the future of its pages."""
        hint = Hint(ttl_s=self.ttl_s, priority=self.priority, elsewhere=self.hands_over)
        return None if hint == _NOTHING_SAID else hint


@dataclass(slots=True)
class StepWork:
    """One step's orders. ``fresh`` are blocks that the step may write and that another request may have had
    before (``all_fresh``: any may be). ``refused`` are requests that vLLM waits for and that get no load.
    ``idle``: the step computes nothing. ``epoch`` changes when nothing stored so far is to be found any
    more."""

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
    """Failed loads: by request, the first chunk that is missing (of several workers, the earliest)."""

    failed: dict[str, int] = field(default_factory=dict)

    def merge(self, other: LoadReport) -> LoadReport:
        failed = dict(self.failed)
        for request, chunk in other.failed.items():
            failed[request] = min(chunk, failed.get(request, chunk))
        return LoadReport(failed)


def kept_by_name(rule: GroupRule) -> bool:
    """Whether pages are found one by one, each by a name that stands for all tokens up to its end
    (:class:`~tierstore_connectors.vllm.identity.ChunkNames`). The others are found by the tokens of all
    chunks before them, of which none may be missing."""
    return not rule.chained


def under_epoch(identity: Identity, epoch: str) -> Identity:
    """The identity of the moment: pages of one epoch are not found in another."""
    return replace(identity, revision=f"{identity.revision}+{epoch}") if epoch else identity
