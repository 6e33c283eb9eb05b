"""Simulate a trace through all tiers of one engine: hits of each tier, bytes moved, time to first token.

**The model.** Tiers include one another as in the live store. Computed pages are in HBM, are saved to the
host tier at once, and are written to disk in the background, as far as the queue of writes (half of the host
tier) has room. Pages from disk also go to the host tier. Each tier has a policy of its own. A request arrives
at its time in the trace. Its time to first token is the time to load plus the time to compute the rest. The
store's own planner decides how many leading blocks are loaded, from the machine's rates and each link's
queue. A slow disk is therefore never worse than no disk. The disk and the link from host to HBM serve one
request at a time, in order.

**Left out.** Requests do not wait for each other's computing, and decoding costs nothing: TTFT is that of an
engine without overload, compared with the same engine without a store. Loading does not overlap with
computing (the engine overlaps layers). Output tokens are not saved, because traces do not have their blocks.
Lookups take no time.

**Prefetch.** It uses only information that the store could have. After each turn of a conversation the next
turn is expected after the median of its earlier gaps. Gaps after a tool call and after an answer are
separate. The pages of its prompt that are only on disk are read into the host tier, half of that gap before
the expected time. If pages stay in the host tier for less than the gap, they are read half of their stay
before that time. These reads use idle time of the disk, and requests have precedence. The first gap of a
conversation is never predicted.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierstore.planner import TierPart, TierRate, plan
from tierstore_tools.replay.hints import Hinter
from tierstore_tools.replay.machine import Machine
from tierstore_tools.replay.simulator import Cache, SimulatedMemory
from tierstore_tools.replay.trace import TraceRequest

_GAPS_KEPT = 8
_LEAD = 0.5  # reading begins this fraction of the expected gap (or of a page's stay) before the turn
_PERCENTILES = (50, 90, 99)
_TIERS = ("hbm", "host", "disk")


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds to the first token, over all requests."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Waits:
        """Return mean and percentiles (nearest rank); all 0 for an empty sequence."""
        if not seconds:
            return cls(0.0, 0.0, 0.0, 0.0)
        ordered = sorted(seconds)
        ranks = (ordered[max(0, -(-len(ordered) * each // 100) - 1)] for each in _PERCENTILES)
        return cls(sum(ordered) / len(ordered), *ranks)


@dataclass(frozen=True, slots=True)
class HitTokens:
    """Tokens that were not computed, by tier. ``declined`` tokens were held, but loading them would have
    taken longer than computing."""

    hbm: int
    host: int
    disk: int
    declined: int


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """Bytes of loads by link, bytes of saves, and bytes of prefetches. ``prefetched_used`` were later found
    in the host tier by a request."""

    host_to_hbm: int
    disk_to_host: int
    hbm_to_host: int
    host_to_disk: int
    not_written: int  # blocks that were not written, because the queue of writes was full
    prefetched: int
    prefetched_used: int


@dataclass(frozen=True, slots=True)
class TieredRow:
    """The result of one replay, a row of the document. ``write_amplification`` is bytes written to disk over
    bytes of different pages: above 1 if pages were written again after their eviction.
    ``disk_read_per_written`` is bytes read for requests per byte written."""

    policy: str
    hints: str
    prefetch: bool
    input_tokens: int
    hit_tokens: HitTokens
    moved_bytes: MovedBytes
    write_amplification: float
    disk_read_per_written: float
    ttft: Waits
    recompute_ttft: Waits

    @property
    def hit_rate(self) -> float:
        """The share of all prompt tokens that were not computed."""
        hits = self.hit_tokens
        return (hits.hbm + hits.host + hits.disk) / self.input_tokens if self.input_tokens else 0.0


class Link:
    """A link that carries one load at a time, in order."""

    def __init__(self, gb_per_s: float) -> None:
        self._bytes_per_s = gb_per_s * 1e9
        self.free_at_s = 0.0
        self.moved_bytes = 0

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of ``nbytes`` on an idle link."""
        return nbytes / self._bytes_per_s

    def would_end(self, now_s: float, nbytes: int) -> float:
        """Return the time at which a load would end if it began now. This changes nothing."""
        return max(now_s, self.free_at_s) + self.seconds(nbytes) if nbytes else now_s

    def move(self, now_s: float, nbytes: int) -> float:
        """Queue a load now. Carry a load and return the time at which it ends."""
        end = self.would_end(now_s, nbytes)
        if nbytes:
            self.free_at_s = end
            self.moved_bytes += nbytes
        return end


class SimulatedWrites:
    """Background writes to disk. Writes beyond a queue of ``most_bytes`` are dropped."""

    def __init__(self, gb_per_s: float, most_bytes: int) -> None:
        self._link = Link(gb_per_s)
        self._most_bytes = most_bytes
        self.dropped_blocks = 0

    @property
    def written_bytes(self) -> int:
        return self._link.moved_bytes

    def room(self, now_s: float, block_bytes: int) -> int:
        """Return how many blocks the queue of writes has room for now."""
        waiting = max(0.0, self._link.free_at_s - now_s) / self._link.seconds(1)
        return max(0, int((self._most_bytes - waiting) // block_bytes))

    def write(self, now_s: float, nbytes: int) -> None:
        self._link.move(now_s, nbytes)


class Conversations:
    """Finds the conversation of each request, in order of arrival. Without a session in the trace, a prompt
    that begins with all whole blocks of an earlier one (the latest of several) is its next turn."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ends: dict[int, str] = {}  # last whole block of a conversation's latest prompt → its name
        self._count = 0

    def of(self, request: TraceRequest) -> str:
        """Return the request's own session, else the conversation that it continues, else a new one."""
        if request.session is not None:
            return request.session
        name = None
        for block in reversed(request.blocks):
            name = self._ends.pop(block, None)
            if name is not None:
                break
        if name is None:
            name = f"#{self._count}"
            self._count += 1
        whole = min(request.input_tokens // self._block_tokens, len(request.blocks))
        if whole:
            self._ends[request.blocks[whole - 1]] = name
        return name


@dataclass(slots=True)
class _KnownConversation:
    """``gaps`` are the latest seconds from one arrival to the next, by the reason of the earlier answer's
    end."""

    turn: int = 0
    arrived_s: float = 0.0
    stop: str = ""
    blocks: Sequence[int] = ()
    gaps: dict[str, deque[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, order=True)
class _Due:
    at_s: float
    number: int
    name: str = field(compare=False)
    turn: int = field(compare=False)


class Expectations:
    """All conversations, with the expected time of the next turn of each."""

    def __init__(self) -> None:
        self._conversations: dict[str, _KnownConversation] = {}
        self._due: list[_Due] = []
        self._numbers = itertools.count()

    def arrived(self, name: str, now_s: float, stop: str, blocks: Sequence[int], *, stays_s: float) -> None:
        """Register a turn. ``stop`` is the reason of its answer's end, which the engine knows before it is
        used. ``stays_s`` is the time that an unused page stays in the host tier now."""
        conversation = self._conversations.setdefault(name, _KnownConversation())
        if conversation.turn:
            gaps = conversation.gaps.setdefault(conversation.stop, deque(maxlen=_GAPS_KEPT))
            gaps.append(now_s - conversation.arrived_s)
        conversation.turn += 1
        conversation.arrived_s, conversation.stop, conversation.blocks = now_s, stop, blocks
        known = conversation.gaps.get(stop)
        if known:
            gap_s = statistics.median(known)
            self._expect(name, conversation.turn, now_s + gap_s - _LEAD * min(gap_s, stays_s))

    def next_due(self, before_s: float) -> tuple[str, Sequence[int], float] | None:
        """Return the next conversation to prepare, its latest prompt, and the time, if that is before
        ``before_s``. Conversations whose next turn has arrived are skipped."""
        while self._due and self._due[0].at_s < before_s:
            due = heapq.heappop(self._due)
            conversation = self._conversations[due.name]
            if conversation.turn == due.turn:
                return due.name, conversation.blocks, due.at_s
        return None

    def postpone(self, name: str, at_s: float) -> None:
        """Read the rest of this conversation's prompt from ``at_s`` on, when the disk is idle again."""
        self._expect(name, self._conversations[name].turn, at_s)

    def _expect(self, name: str, turn: int, at_s: float) -> None:
        heapq.heappush(self._due, _Due(at_s, next(self._numbers), name, turn))


@dataclass(frozen=True, slots=True)
class _Found:
    """How many leading blocks of a prompt are in HBM, how many in HBM or the host tier, and how many in any
    tier."""

    hbm: int
    host: int
    disk: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """A plan for one request: how many leading blocks it uses, and the seconds to its first token."""

    used: int
    wait_s: float


class TieredEngine:
    """Runs requests in order of time. Every tier has the policy named ``policy``."""

    def __init__(
        self,
        machine: Machine,
        policy: str,
        *,
        block_tokens: int,
        prefetch: bool = False,
        hints: Hinter | None = None,
        hints_name: str = "none",
    ) -> None:
        self._machine = machine
        self._policy = policy
        self._block_tokens = block_tokens
        self._block_bytes = machine.block_bytes
        self._hints = hints
        self._hints_name = hints_name
        self._memory = SimulatedMemory()
        self._hbm = self._tier(machine.hbm_blocks)
        self._host = self._tier(machine.host_blocks)
        self._disk = self._tier(machine.disk_blocks)
        self._tiers = [tier for tier in (self._hbm, self._host, self._disk) if tier.capacity_blocks]
        rates = machine.bandwidths
        self._to_hbm = Link(rates.host_to_hbm_gb_per_s)
        self._reads = Link(rates.disk_read_gb_per_s)
        self._writes = SimulatedWrites(
            rates.disk_write_gb_per_s, machine.host_blocks * self._block_bytes // 2
        )
        self._conversations = Conversations(block_tokens)
        self._expectations = Expectations() if prefetch else None
        self._prefetched: set[int] = set()  # prefetched blocks in the host tier that no request has used yet
        self._prefetched_blocks = 0
        self._prefetched_used_blocks = 0
        self._written: set[int] = set()  # blocks that have been on disk
        self._saved_blocks = 0  # copied from HBM to the host tier
        self._started_s: float | None = None
        self._requests = 0
        self._input_tokens = 0
        # tokens from HBM, from the host tier and from disk, and tokens that were not loaded
        self._hits = [0, 0, 0, 0]
        self._waits: list[float] = []
        self._recompute_waits: list[float] = []

    def _tier(self, blocks: int) -> Cache:
        return Cache(self._policy, blocks, self._memory, block_bytes=self._block_bytes)

    # -- one request ---------------------------------------------------------------------------------

    def step(self, request: TraceRequest) -> float:
        """Run a request. Run one request and return the seconds to its first token."""
        now_s, blocks = request.timestamp_s, request.blocks
        self._prefetch_until(now_s)
        self._memory.now_s = now_s
        self._expire_hints()
        found = self._find(blocks)
        plan = self._plan(request, found)
        self._count(request, found, plan)
        self._use(blocks[: plan.used])
        self._load(now_s, found, plan.used)
        self._save(now_s, blocks, from_disk=range(found.host, plan.used))
        self._end(request, plan.used)
        if self._expectations is not None:
            name = self._conversations.of(request)
            self._expectations.arrived(name, now_s, request.stop, blocks, stays_s=self._stays_s(now_s))
        self._requests += 1
        return plan.wait_s

    def _expire_hints(self) -> None:
        if self._hints is not None:
            over = self._memory.expire_hints()
            for tier in self._tiers:
                tier.worth_less(over)

    def _find(self, blocks: Sequence[int]) -> _Found:
        hbm = self._hbm.held(blocks)
        host = max(hbm, self._host.held(blocks))
        return _Found(hbm, host, max(host, self._disk.held(blocks)))

    def _plan(self, request: TraceRequest, found: _Found) -> _Plan:
        """Return the planner's choice, and the time of its load."""
        now_s = request.timestamp_s
        ends = [self._tokens(request, blocks) for blocks in (found.hbm, found.host, found.disk)]
        sizes = [0, found.host - found.hbm, found.disk - found.host]
        parts = [
            TierPart(tier, end - start, blocks * self._block_bytes)
            for tier, start, end, blocks in zip(_TIERS, [0, *ends], ends, sizes, strict=False)
        ]
        bandwidths = self._machine.bandwidths
        up_s = max(self._to_hbm.free_at_s - now_s, 0.0)
        read_s = max(self._reads.free_at_s - now_s, up_s)
        # Pieces continue to HBM as they arrive from disk: the slower of the two links decides.
        read_gb_per_s = min(bandwidths.disk_read_gb_per_s, bandwidths.host_to_hbm_gb_per_s)
        rates = {
            "host": TierRate(bandwidths.host_to_hbm_gb_per_s * 1e9, backlog_s=up_s),
            "disk": TierRate(read_gb_per_s * 1e9, backlog_s=read_s),
        }
        planned = plan(parts, request.input_tokens, rates, self._machine.prefill)
        used = next(
            (
                blocks
                for blocks, end in zip((found.disk, found.host), (ends[2], ends[1]), strict=True)
                if planned.tokens >= end
            ),
            found.hbm,
        )
        return _Plan(used, self._wait(request, found, used))

    def _wait(self, request: TraceRequest, found: _Found, used: int) -> float:
        now_s = request.timestamp_s
        from_disk = max(0, used - found.host) * self._block_bytes
        loaded = max(0, used - found.hbm) * self._block_bytes
        read_end = self._reads.would_end(now_s, from_disk)
        # Pieces continue to HBM as they arrive from disk: the slower of the two links decides.
        loaded_s = max(read_end, self._to_hbm.would_end(now_s, loaded)) - now_s
        held = self._tokens(request, used)
        return loaded_s + self._machine.prefill.seconds(request.input_tokens - held, held)

    def _tokens(self, request: TraceRequest, blocks: int) -> int:
        """Return the tokens of leading blocks. The last token of a prompt is always computed: it gives the
        first token of the answer."""
        return max(0, min(blocks * self._block_tokens, request.input_tokens - 1))

    def _count(self, request: TraceRequest, found: _Found, plan: _Plan) -> None:
        ends = [self._tokens(request, min(end, plan.used)) for end in (found.hbm, found.host, found.disk)]
        for tier, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            self._hits[tier] += end - start
        self._hits[3] += self._tokens(request, found.disk) - ends[-1]
        self._input_tokens += request.input_tokens
        self._waits.append(plan.wait_s)
        self._recompute_waits.append(self._machine.prefill.seconds(request.input_tokens))

    def _use(self, blocks: Sequence[int]) -> None:
        self._memory.use(blocks)
        for block in blocks:
            if block in self._prefetched:
                self._prefetched.discard(block)
                self._prefetched_used_blocks += block in self._host
        for tier in self._tiers:
            tier.hold(blocks[: tier.held(blocks)])

    def _load(self, now_s: float, found: _Found, used: int) -> None:
        self._reads.move(now_s, max(0, used - found.host) * self._block_bytes)
        self._to_hbm.move(now_s, max(0, used - found.hbm) * self._block_bytes)

    def _save(self, now_s: float, blocks: Sequence[int], *, from_disk: range) -> None:
        """Store all blocks of the prompt in HBM and in the host tier, and queue their writes to disk."""
        self._fill(self._hbm, blocks, len(blocks))
        before = self._host.held(blocks)
        in_host = self._fill(self._host, blocks, len(blocks))
        loaded = range(max(before, from_disk.start), min(in_host, from_disk.stop))
        self._saved_blocks += in_host - before - len(loaded)
        on_disk = self._disk.held(blocks)
        wanted = in_host - on_disk
        if wanted <= 0 or not self._machine.disk_blocks:
            return
        room = min(wanted, self._writes.room(now_s, self._block_bytes))
        self._writes.dropped_blocks += wanted - room
        kept = self._fill(self._disk, blocks, on_disk + room)
        self._writes.write(now_s, (kept - on_disk) * self._block_bytes)
        self._written.update(blocks[on_disk:kept])

    def _fill(self, tier: Cache, blocks: Sequence[int], stop: int) -> int:
        """Store blocks up to ``stop`` in a tier as far as it has room, and hold its leading blocks. Return
        their number."""
        held = tier.held(blocks)
        tier.hold(blocks[:held])
        return tier.store(blocks[:stop], held) if held < stop else held

    def _end(self, request: TraceRequest, used: int) -> None:
        """Report saves and hints to the policies, and release the held blocks."""
        blocks = request.blocks
        kept = max((tier.held(blocks) for tier in self._tiers), default=0)
        self._memory.saved(blocks[used:kept])
        said = self._hints.hints(self._requests, request) if self._hints is not None else None
        if said is not None:
            self._memory.hint(blocks[:kept], said)
        for tier in self._tiers:
            if said is not None:
                tier.worth_less(blocks[:kept])
            tier.release(blocks[: tier.held(blocks)])

    def _stays_s(self, now_s: float) -> float:
        """Return the time to fill the host tier with new pages, at the mean rate so far."""
        if self._started_s is None:
            self._started_s = now_s
        stored = self._host.stored_blocks
        return (now_s - self._started_s) * self._host.capacity_blocks / stored if stored else 0.0

    # -- before a request ----------------------------------------------------------------------------

    def _prefetch_until(self, now_s: float) -> None:
        """Read for expected turns, in the idle time of the disk before ``now_s``."""
        if self._expectations is None:
            return
        while self._reads.free_at_s < now_s:
            due = self._expectations.next_due(now_s)
            if due is None:
                return
            name, blocks, at_s = due
            start_s = max(at_s, self._reads.free_at_s)
            if self._read_ahead(blocks, start_s, now_s):
                self._expectations.postpone(name, self._reads.free_at_s)

    def _read_ahead(self, blocks: Sequence[int], start_s: float, until_s: float) -> bool:
        """Read the blocks of a prompt that are only on disk into the host tier. Return whether blocks are
        left because the time was too short."""
        in_host, on_disk = self._host.held(blocks), self._disk.held(blocks)
        missing = on_disk - in_host
        if on_disk <= max(in_host, self._hbm.held(blocks)):
            return False
        block_s = self._reads.seconds(self._block_bytes)
        # A read that has begun is finished, also if a request arrives.
        count = min(missing, int((until_s - start_s) / block_s) + 1)
        kept = self._fill(self._host, blocks, in_host + count)
        # An expected use counts as a use for eviction, or these blocks would leave first.
        self._memory.saved(blocks[:kept])
        self._host.release(blocks[:kept])
        self._prefetched.update(blocks[in_host:kept])
        self._prefetched_blocks += kept - in_host
        self._reads.free_at_s = start_s + (kept - in_host) * block_s
        return kept == in_host + count < on_disk

    # -- afterwards ----------------------------------------------------------------------------------

    def row(self) -> TieredRow:
        """Return the result of all requests so far."""
        size = self._block_bytes
        written = self._writes.written_bytes
        read = self._reads.moved_bytes
        return TieredRow(
            policy=self._policy,
            hints=self._hints_name,
            prefetch=self._expectations is not None,
            input_tokens=self._input_tokens,
            hit_tokens=HitTokens(*self._hits),
            moved_bytes=MovedBytes(
                host_to_hbm=self._to_hbm.moved_bytes,
                disk_to_host=read,
                hbm_to_host=self._saved_blocks * size,
                host_to_disk=written,
                not_written=self._writes.dropped_blocks * size,
                prefetched=self._prefetched_blocks * size,
                prefetched_used=self._prefetched_used_blocks * size,
            ),
            write_amplification=written / (len(self._written) * size) if self._written else 0.0,
            disk_read_per_written=(read + self._prefetched_used_blocks * size) / written if written else 0.0,
            ttft=Waits.of(self._waits),
            recompute_ttft=Waits.of(self._recompute_waits),
        )
