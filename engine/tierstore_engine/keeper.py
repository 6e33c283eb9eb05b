"""The pages of a sequence in all layer groups: admission, loads, saves and leaving. What each of these means
for one group is in :mod:`tierstore_engine.tables`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from tierstore.planner import Plan
from tierstore.tiers.hbm import arrivals_of
from tierstore.transfer import Transfer
from tierstore.types import GroupPages, Hint, Loaded, inferred
from tierstore_connectors.base import Connector, ConnectorHit
from tierstore_engine.meeting import Meeting
from tierstore_engine.sequence import Loading, Sequence, SequenceState
from tierstore_engine.tables import GroupTable, SavePoint, empty_tables

T = TypeVar("T")

_ELSEWHERE = Hint(elsewhere=True)
_UNKNOWN_S = 30.0  # for a load of which no plan says how long it may take


class PageKeeper:
    """Moves sequences between *waiting* (no page), *loading* and *running*, as far as pages decide it.

    A sequence that has to give way is *parked*: its pages are saved and released, and it is admitted again
    later like a new sequence whose prompt happens to be in the store.
    """

    def __init__(
        self, connector: Connector, *, plan: str = "load", prefill_chunk: int = 0, checkpoint_tokens: int = 0
    ) -> None:
        """``plan`` is one of :data:`~tierstore_engine.settings.PLANS`, ``checkpoint_tokens`` how far save
        points are apart at most in a model of several layer groups (0: none but those that requests make)."""
        self.connector = connector
        self.chunk_tokens = connector.pool.spec.chunk_tokens
        self.keeps = connector.keeps  # whether pages that one sequence has computed can be had by others
        self._plan = plan
        self._prefill_chunk = prefill_chunk
        self._parking: deque[Transfer[int]] = deque()  # saves whose end may make pages available
        self._empty = empty_tables(connector)
        self._has_named = not all(rule.chained for rule in connector.rules)
        self._checkpoint = checkpoint_tokens if self._has_named else 0

    def evict_idle(self) -> None:
        """Let all that nobody uses leave HBM: where groups share a memory, pages that are used in place may
        lie so that no large page is free, however few they are."""
        for group, pool in enumerate(self.connector.pools):
            self.connector.evict(pool.num_pages, group=group)

    def room(self) -> tuple[int, ...]:
        """Pages of each layer group that could be had now."""
        return tuple(self.connector.available(group=group) for group in range(len(self.connector.pools)))

    @property
    def parking(self) -> bool:
        """Whether pages of sequences that have left are still being copied, and come free after that."""
        while self._parking and self._parking[0].done:
            self._parking.popleft()
        return bool(self._parking)

    @property
    def shared_pages(self) -> int:
        """Pages that are saved by sharing: those that all sequences would have, less those there are."""
        return sum(table.group.shared_pages for table in self._empty)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold the KV of ``tokens`` tokens."""
        return -(-tokens // self.chunk_tokens)

    def peaks(self, tokens: int) -> list[int]:
        """By layer group: the most pages that a sequence of ``tokens`` tokens has at a time."""
        return [table.peak(tokens, self._prefill_chunk) for table in self._empty]

    def step_end(self, sequence: Sequence, stop: int) -> int:
        """Where a step that could compute up to ``stop`` has to end: at the next save point, if there is one
        before."""
        points = [point for point in sequence.save_points if point > sequence.computed]
        if self._checkpoint:
            points.append((sequence.computed // self._checkpoint + 1) * self._checkpoint)
        return min([stop, *points])

    def add_save_point(self, sequence: Sequence, tokens: int, *, parts: bool = False) -> None:
        """Save what a hit of the first ``tokens`` tokens of a sequence needs; ``parts``: since others go on
        from there, so that it stays when the sequence's session has come further."""
        if self._has_named:
            point = tokens // self.chunk_tokens * self.chunk_tokens
            sequence.save_points[point] = parts or sequence.save_points.get(point, False)

    def arriving(self, sequence: Sequence) -> bool:
        """Whether bytes of the sequence's pages are still on their way, although its load was taken over.

        Once they are there that is so for good, and the pool is not asked again: while a load goes on it
        would look for every page of everybody who decodes, at every step."""
        if sequence.arriving:
            pages = [table.pages for table in sequence.tables]
            sequence.arriving = arrivals_of(self.connector.pools, pages).pending
        return sequence.arriving

    def look_up(self, sequence: Sequence, *, admitting: bool = False) -> ConnectorHit:
        """Return what the store holds of a waiting sequence, under a lease: admit with it, or release it.

        A request is looked up often while it waits. The statistics count its first lookup for admission."""
        most = 0 if sequence.no_load else len(sequence.tokens) - 1
        counted, sequence.counted = admitting and not sequence.counted, sequence.counted or admitting
        return self.connector.lookup(sequence.prompt, max_tokens=most, counted=counted)

    def lacking(self, admitted: Iterable[Sequence]) -> list[int]:
        """Return how many pages of each group the ``admitted`` sequences still have to take for their tokens.

        A prefill step may take pages that it gives back at once, so only the largest step counts: where there
        is room for one, the prompts can be computed one after the other.
        """
        counts, steps = [0] * len(self._empty), [0] * len(self._empty)
        for sequence in admitted:
            tokens, coming = len(sequence.tokens), sequence.coming
            prefill = sequence.remaining > 1 or sequence.state is not SequenceState.RUNNING
            for number, table in enumerate(sequence.tables or self._empty):
                counts[number] += table.lacking(tokens, coming)
                if prefill:
                    step = min(sequence.remaining, self._prefill_chunk)
                    steps[number] = max(steps[number], table.peak(tokens, step) - table.kept(tokens))
        return [count + step for count, step in zip(counts, steps, strict=True)]

    def admit(self, sequence: Sequence, hit: ConnectorHit, *, beside: Iterable[Sequence] = ()) -> bool:
        """Give a waiting sequence its pages and start loading what the store holds of it: it is *loading* or
        *running* then. False, and nothing changed but that the hit is released, when the pages that it needs
        and those that the sequences ``beside`` it still lack cannot be had together."""
        plan = self.planned(sequence, hit)
        in_hbm = hit.by_tier.get("hbm", 0)
        both = plan.meeting_point > in_hbm
        loaded = in_hbm if both else plan.tokens
        shared = min(hit.hbm_pages, loaded // self.chunk_tokens)  # whole and in HBM: not copied
        counts = self.lacking([*beside, sequence])
        counts[0] -= shared
        sequence.tables = [table.another() for table in self._empty]
        if not self.connector.has_room(counts) or not all(
            table.reserve(loaded, len(sequence.tokens), shared) for table in sequence.tables
        ):
            self._drop(sequence)
            hit.release()
            return False
        self.add_save_point(sequence, len(sequence.tokens) - 1)
        if hit.branch - hit.tokens >= self.chunk_tokens:
            self.add_save_point(sequence, hit.branch, parts=True)
        self.connector.decline(hit, plan)
        if both:
            return self._load_from_both_ends(sequence, hit, plan)
        if not loaded:
            hit.release()
            return self._begin(sequence, Loaded(0))
        deadline_s = _UNKNOWN_S if plan.deadline_s is None else plan.deadline_s
        started = time.monotonic()
        transfer = self.connector.load_part(
            hit, 0, self.pages_for(loaded), deadline_s=None if loaded == in_hbm else deadline_s, last=True
        )
        sequence.loading = Loading(transfer, clip_tiers(hit.by_tier, loaded), started)
        sequence.state = SequenceState.LOADING
        return True

    def planned(self, sequence: Sequence, hit: ConnectorHit) -> Plan:
        """How much of a hit is going to be used."""
        in_hbm = hit.by_tier.get("hbm", 0)
        if self._plan == "load" or hit.tokens == in_hbm:
            return Plan(hit.tokens, 0, 0.0, 0.0, None)
        if self._plan == "compute":
            return Plan(0 if self._has_named else in_hbm, 0, 0.0, 0.0, None)
        if self._has_named:  # a part of the hit would be none: other pages belong to it
            plan = self.connector.plan(hit, len(sequence.tokens), block=0)
            return plan if plan.tokens in (0, hit.tokens) else Plan(hit.tokens, 0, 0.0, 0.0, None)
        block = self._prefill_chunk if self._plan == "both-ends" else 0
        return self.connector.plan(hit, len(sequence.tokens), block=block)

    def _load_from_both_ends(self, sequence: Sequence, hit: ConnectorHit, plan: Plan) -> bool:
        """Begin to compute a sequence from the front and to load it from the back: *running*. False where
        what was in HBM has gone."""
        in_hbm = hit.by_tier.get("hbm", 0)
        here = self.connector.load_part(hit, 0, in_hbm // self.chunk_tokens).wait()  # shared, nothing moves
        if here.tokens < in_hbm:
            _release(sequence.tables, here.groups)
            self._drop(sequence)
        if not sequence.tables or not self._begin(sequence, here):
            hit.release()
            return False
        sequence.restore(here.tokens)
        [table] = sequence.tables
        sequence.meeting = Meeting(self.connector, hit, plan, table, chunk=self._prefill_chunk)
        if not sequence.started:
            sequence.tally.reused_by_tier = clip_tiers(hit.by_tier, here.tokens)
            sequence.meeting.by_tier = dict(hit.by_tier)
        return True

    def may_compute(self, sequence: Sequence, stop: int) -> bool:
        """Whether the next chunk, up to ``stop``, is to be computed now, rather than waited for."""
        meeting = sequence.meeting
        return meeting is None or meeting.may_compute(sequence.computed, stop)

    def poll(self, sequence: Sequence) -> None:
        """Take over what has come of a sequence that is loaded from its back. *Waiting* afterwards if there
        are no pages to compute in what did not come."""
        meeting = sequence.meeting
        if meeting is None:
            return
        had = meeting.poll(sequence.computed)
        if had and not meeting.met(sequence.computed):
            return
        if not (meeting.stop() and had):
            self.leave(sequence)
            return
        sequence.meeting = None
        loaded = max(meeting.tokens - sequence.computed, 0) if meeting.back < meeting.end else 0
        if not loaded:
            return
        sequence.tally.loaded_bytes += meeting.loaded_bytes
        sequence.tally.load_s += time.monotonic() - meeting.began
        reused = sequence.tally.reused_by_tier
        before = clip_tiers(meeting.by_tier, sequence.computed)
        for tier, tokens in clip_tiers(meeting.by_tier, meeting.tokens).items():
            if tokens > before[tier]:
                reused[tier] = reused.get(tier, 0) + tokens - before[tier]
        sequence.arriving = True
        sequence.restore(meeting.tokens)
        [table] = sequence.tables
        table.saved_at = max(table.saved_at, meeting.tokens)

    def settle(self, sequence: Sequence) -> None:
        """Take over a load that has ended: *running*, or *waiting* again if it came short and there are no
        pages to compute the rest in. A load still under way is left alone."""
        loading = sequence.loading
        if loading is None or not loading.transfer.done:
            return
        loaded = loading.transfer.wait()
        sequence.loading = None
        if not self._begin(sequence, loaded):
            return
        tally = sequence.tally
        tally.loaded_bytes += loaded.moved_bytes
        tally.load_s += time.monotonic() - loading.started
        if not sequence.started:
            tally.reused_by_tier = clip_tiers(loading.by_tier, loaded.tokens)
        sequence.arriving = True
        sequence.restore(loaded.tokens)

    def share(self, parent: Sequence, child: Sequence) -> bool:
        """Give ``child``, which has the same tokens, the pages of ``parent``, all of whose KV is computed. No
        byte moves but those of states. False, and nothing changed, where there is no room for these."""
        assert parent.computed == len(parent.tokens) == len(child.tokens)
        for table in parent.tables:
            twin = table.fork()
            if twin is None:
                self._drop(child)
                return False
            child.tables.append(twin)
        child.arriving = parent.arriving
        child.restore(parent.computed)
        child.state = SequenceState.RUNNING
        return True

    def grow(self, sequence: Sequence, stop: int) -> bool:
        """See to it that the tokens from the first that is not computed up to ``stop`` have pages that nobody
        else writes to. False when there is no room; what was had by then stays in its table."""
        return all(table.grow(sequence.computed, stop) for table in sequence.tables)

    def trim(self, sequence: Sequence) -> None:
        """Give back the pages behind the sequence's newest token: what was drafted there was not accepted."""
        for table in sequence.tables:
            table.trim(len(sequence.tokens))

    def save(self, sequence: Sequence) -> None:
        """Publish the pages that have become full since the last call, and at a save point what goes with
        them. Pages that no later token needs are given back."""
        computed = sequence.computed
        for table in sequence.tables:
            table.passed(computed)
        if sequence.no_save:
            return
        whole = computed - computed % self.chunk_tokens
        hint = _ELSEWHERE if sequence.hint is not None and sequence.hint.elsewhere else None
        point = SavePoint(sequence.prompt, [whole], hint, sequence.session)
        parts = sequence.save_points.get(computed)
        here = parts is not None or (self._checkpoint and computed % self._checkpoint == 0)
        for table in sequence.tables:
            if table.group.rule.chained:
                if whole > table.saved_at:
                    table.save(point)
            elif here:
                # Pages that a window gives back meanwhile stay where they are until these end.
                self._park(table.save(replace(point, session=None if parts else sequence.session)))

    def leave(self, sequence: Sequence, *, save: bool = True) -> None:
        """Save what has been computed (or not), the partial last page too unless it is shared, and give all
        pages back: *waiting*."""
        if sequence.loading is not None:
            sequence.loading.transfer.cancel()
            # It may have ended before it could be cancelled.
            _release(sequence.tables, sequence.loading.transfer.wait().groups)
            sequence.loading = None
        if sequence.meeting is not None:
            sequence.meeting.stop()
            sequence.meeting = None
        computed = sequence.computed
        submitted = whole = computed - computed % self.chunk_tokens
        if save and not sequence.no_save:
            inside = self._ends_inside(sequence)
            # The next turn after an answer may have other last tokens. A parked sequence goes on as it is.
            ends = [whole] if not inside or sequence.finish_reason is not None else []
            ends += [computed] * inside
            live = None if sequence.in_step else computed
            point = SavePoint(sequence.prompt, ends, _hint(sequence), sequence.session, live)
            for table in sequence.tables:
                self._park(table.save(point))
        for table in sequence.tables:
            submitted = table.saved(submitted)  # where nobody can go on, it is not to be waited for
        sequence.submitted_tokens = submitted if self.connector.shared else 0
        self._drop(sequence)
        sequence.arriving = False
        sequence.partial = None
        sequence.in_step = False
        sequence.computed = 0
        sequence.state = SequenceState.WAITING

    def _ends_inside(self, sequence: Sequence) -> bool:
        """Whether a sequence that leaves has a partial page that can be saved: as the end of its prompt, and
        where nobody else is going to write to it. A prefill that is cut short ends at a page's end, or within
        a page that was loaded and is in the store already. A step that has not ended has left KV behind the
        sequence's end, where nobody looks, but in a live state it is for good."""
        computed = sequence.computed
        if not computed % self.chunk_tokens or computed < len(sequence.prompt):
            return False
        if any(table.is_shared(computed) for table in sequence.tables):
            return False
        return not (self._has_named and sequence.in_step)

    def wait_for_room(self, timeout_s: float) -> None:
        """Wait, briefly, for something that may make pages available."""
        if self.parking:
            wait_briefly(self._parking[0], timeout_s)
        else:
            time.sleep(timeout_s)

    def _begin(self, sequence: Sequence, loaded: Loaded) -> bool:
        """Take over what was loaded: *running*. *Waiting*, and all pages given back, where a table has no
        room."""
        for number, table in enumerate(sequence.tables):
            held = loaded.groups[number] if loaded.groups else GroupPages()
            if not table.begin(held, loaded.tokens, len(sequence.tokens)):
                _release(sequence.tables[number:], loaded.groups[number:])
                self._drop(sequence)
                sequence.state = SequenceState.WAITING
                return False
        sequence.state = SequenceState.RUNNING
        return True

    def _park(self, saves: Iterable[Transfer[int]]) -> None:
        self._parking += [saving for saving in saves if not saving.done]

    def _drop(self, sequence: Sequence) -> None:
        for table in sequence.tables:
            table.drop()
        sequence.tables = []


def _release(tables: Iterable[GroupTable], held: Iterable[GroupPages]) -> None:
    """Give back what a load has brought (nothing, if it was cancelled) and ``tables`` have not taken over."""
    for table, unused in zip(tables, held, strict=False):
        table.group.release(unused.pages)


def _hint(sequence: Sequence) -> Hint | None:
    """What is known of the future of a sequence's pages when it leaves."""
    hint, reason = sequence.hint, sequence.finish_reason
    if hint is not None and hint.for_policy and reason is not None:
        return hint
    guess = inferred(reason.value if reason is not None else "parked")
    return replace(guess or _ELSEWHERE, elsewhere=True) if hint is not None and hint.elsewhere else guess


def clip_tiers(by_tier: Mapping[str, int], tokens: int) -> dict[str, int]:
    """``by_tier`` (fastest tier first, which also is the order along the prompt) cut to ``tokens`` in all."""
    clipped = {}
    for tier, count in by_tier.items():
        clipped[tier] = min(count, tokens)
        tokens -= clipped[tier]
    return clipped


def wait_briefly(transfer: Transfer[T], timeout_s: float) -> None:
    """Wait for the end of ``transfer``, at most ``timeout_s``."""
    try:
        transfer.wait(timeout_s)
    except TimeoutError:
        return
