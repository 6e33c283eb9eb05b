"""All that the engine says to the connector: a sequence's pages are taken, filled from the store, saved and
given back here, and nowhere else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from tierstore.planner import Plan
from tierstore.tiers.hbm import arrivals_of
from tierstore.transfer import Transfer
from tierstore.types import Hint, Loaded, inferred
from tierstore_connectors.base import Connector, Hit
from tierstore_engine.meeting import Meeting
from tierstore_engine.sequence import Loading, Sequence, SequenceState
from tierstore_engine.side_groups import PageShares, SavePoint, SideGroup, SideTable, side_groups

T = TypeVar("T")

_ELSEWHERE = Hint(elsewhere=True)
_UNKNOWN_S = 30.0  # for a load of which no plan says how long it may take


class PageKeeper:
    """Moves sequences between *waiting* (no page), *loading* and *running*, as far as pages decide it.

    A sequence is admitted with pages for all of its tokens at once, so that only decoding can ever run out;
    whoever has to give way is parked: its pages are saved and released, and it is admitted again later like
    a new sequence whose prompt happens to be in the store.

    Sequences that were forked share pages by reference. Full ones are never written again; the one that is
    not is copied by the first who writes to it, and belongs to the last who has it.

    Pages here are those of the model's first layer group, which needs all of the past. What the groups beside
    it have is in ``Sequence.sides`` (:mod:`tierstore_engine.side_groups`): they take pages as they go, and
    are saved where :meth:`step_end` makes steps end.
    """

    def __init__(
        self, connector: Connector, *, plan: str = "load", prefill_chunk: int = 0, checkpoint_tokens: int = 0
    ) -> None:
        """``plan`` is one of :data:`~tierstore_engine.settings.PLANS`, ``checkpoint_tokens`` how far save
        points are apart at most in a model of several layer groups (0: none but those that requests make)."""
        self.connector = connector
        self._chunk = connector.pool.spec.chunk_tokens
        self._plan = plan
        self._prefill_chunk = prefill_chunk
        self._parking: deque[Transfer[int]] = deque()  # saves whose end may make pages available
        self._shares = PageShares()
        self._sides = side_groups(connector)
        self._checkpoint = checkpoint_tokens

    @property
    def keeps(self) -> bool:
        """Whether pages that one sequence has computed can be had by others."""
        return self.connector.keeps

    @property
    def chunk_tokens(self) -> int:
        return self._chunk

    def available(self) -> int:
        """Pages that could be had now."""
        return self.connector.available()

    def evict_idle(self) -> None:
        """Let all that nobody uses leave HBM: where groups share a memory, pages that are used in place may
        lie so that no large page is free, however few they are."""
        for group, pool in enumerate(self.connector.pools):
            self.connector.evict(pool.num_pages, group=group)

    def room(self) -> tuple[int, ...]:
        """The same of each layer group."""
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
        return self._shares.total() + sum(side.shared_pages for side in self._sides)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold the KV of ``tokens`` tokens."""
        return -(-tokens // self._chunk)

    def side_peaks(self, tokens: int) -> list[int]:
        """By each group beside the first: the most pages that a sequence of ``tokens`` tokens has at a
        time."""
        return [side.peak(tokens, self._prefill_chunk) for side in self._sides]

    def step_end(self, sequence: Sequence, stop: int) -> int:
        """Where a step that could compute up to ``stop`` has to end: at the next save point, if there is one
        before."""
        if not self._sides:
            return stop
        points = [point for point in sequence.save_points if point > sequence.computed]
        if self._checkpoint:
            points.append((sequence.computed // self._checkpoint + 1) * self._checkpoint)
        return min([stop, *points])

    def add_save_point(self, sequence: Sequence, tokens: int, *, parts: bool = False) -> None:
        """Save what a hit of the first ``tokens`` tokens of a sequence needs; ``parts``: since others go on
        from there, so that it stays when the sequence's session has come further."""
        if self._sides:
            point = tokens // self._chunk * self._chunk
            sequence.save_points[point] = parts or sequence.save_points.get(point, False)

    def arriving(self, sequence: Sequence) -> bool:
        """Whether bytes of the sequence's pages are still on their way, although its load was taken over.

        Once they are there that is so for good, and the pool is not asked again: while a load goes on it
        would look for every page of everybody who decodes, at every step."""
        if sequence.arriving:
            tables = (sequence.pages, *(side.pages for side in sequence.sides))
            sequence.arriving = arrivals_of(self.connector.pools, tables).pending
        return sequence.arriving

    def look_up(self, sequence: Sequence) -> Hit:
        """What the store holds of a sequence that waits, under a lease: to be admitted with, or released."""
        most = 0 if sequence.no_load else len(sequence.tokens) - 1
        return self.connector.lookup(sequence.prompt, max_tokens=most)

    def lacking(self, admitted: Iterable[Sequence]) -> list[int]:
        """Return how many pages of each group the ``admitted`` sequences still have to take for their tokens.

        Beside the first group a prefill step takes pages that it gives back at once, so only the largest step
        counts: where there is room for one, the prompts can be computed one after the other.
        """
        counts, steps = [0] * (1 + len(self._sides)), [0] * len(self._sides)
        for sequence in admitted:
            loading, tokens = sequence.loading, len(sequence.tokens)
            on_their_way = loading.lacking if loading is not None else 0
            if loading is not None:
                counts[0] += min(loading.pages, on_their_way)
            elif sequence.meeting is not None:
                counts[0] += sequence.meeting.lacking
            for number, side in enumerate(self._sides):
                if loading is not None:
                    brought = side.brought(sum(loading.by_tier.values()))
                    held = brought - min(brought, on_their_way)
                else:
                    held = side.held(sequence.sides[number]) if sequence.sides else 0
                kept = side.kept(tokens)
                counts[1 + number] += max(kept - held, 0)
                if sequence.remaining > 1 or not sequence.sides:
                    step = min(sequence.remaining, self._prefill_chunk)
                    steps[number] = max(steps[number], side.peak(tokens, step) - kept)
        return [counts[0], *(count + step for count, step in zip(counts[1:], steps, strict=True))]

    def admit(self, sequence: Sequence, hit: Hit, *, beside: Iterable[Sequence] = ()) -> bool:
        """Give a waiting sequence its pages and start loading what the store holds of it: it is *loading* or
        *running* then. False, and nothing changed but that the hit is released, when the pages that it needs
        and those that the sequences ``beside`` it still lack cannot be had together."""
        plan = self.planned(sequence, hit)
        in_hbm = hit.by_tier.get("hbm", 0)
        both = plan.meet > in_hbm
        loaded = in_hbm if both else plan.tokens
        total = self.pages_for(len(sequence.tokens))
        # A page that is whole and in HBM is shared, not copied.
        shared = min(hit.hbm_pages, loaded // self._chunk)
        fresh = self._reserve(sequence, total - shared, total - self.pages_for(loaded), beside)
        if fresh is None:
            hit.release()
            return False
        self.add_save_point(sequence, len(sequence.tokens) - 1)
        if hit.branch - hit.tokens >= self._chunk:
            self.add_save_point(sequence, hit.branch, parts=True)
        self.connector.decline(hit, plan)
        if both:
            return self._meet(sequence, hit, plan, fresh)
        if not loaded:
            hit.release()
            sides = self._begin_sides(Loaded(0))
            if sides is None:
                self._release(fresh)
                return False
            sequence.pages, sequence.sides = fresh, sides
            sequence.state = SequenceState.RUNNING
        else:
            started = time.monotonic()
            deadline_s = _UNKNOWN_S if plan.deadline_s is None else plan.deadline_s
            transfer = self.connector.load_part(
                hit, 0, self.pages_for(loaded), deadline_s=None if loaded == in_hbm else deadline_s, last=True
            )
            by_tier = clip_tiers(hit.by_tier, loaded)
            sequence.loading = Loading(transfer, by_tier, fresh, started, total - shared - len(fresh))
            sequence.state = SequenceState.LOADING
        return True

    def planned(self, sequence: Sequence, hit: Hit) -> Plan:
        """How much of a hit is going to be used."""
        in_hbm = hit.by_tier.get("hbm", 0)
        if self._plan == "load" or hit.tokens == in_hbm:
            return Plan(hit.tokens, 0, 0.0, 0.0, None)
        if self._plan == "compute":
            return Plan(0 if self._sides else in_hbm, 0, 0.0, 0.0, None)
        if self._sides:  # a part of the hit would be none: other pages belong to it
            plan = self.connector.plan(hit, len(sequence.tokens), block=0)
            return plan if plan.tokens in (0, hit.tokens) else Plan(hit.tokens, 0, 0.0, 0.0, None)
        block = self._prefill_chunk if self._plan == "both-ends" else 0
        return self.connector.plan(hit, len(sequence.tokens), block=block)

    def _meet(self, sequence: Sequence, hit: Hit, plan: Plan, fresh: list[int]) -> bool:
        """Begin to compute a sequence from the front and to load it from the back: *running*. False where
        what was in HBM has gone."""
        in_hbm = hit.by_tier.get("hbm", 0)
        here = self.connector.load_part(hit, 0, in_hbm // self._chunk).wait()  # shared, nothing moves
        pages = [*here.pages, *fresh]
        if here.tokens < in_hbm:
            self._release(pages)
            hit.release()
            return False
        sequence.restore(here.tokens)
        sequence.saved_pages = len(here.pages)
        sequence.state = SequenceState.RUNNING
        sequence.meeting = Meeting(self.connector, hit, plan, pages, chunk=self._prefill_chunk)
        sequence.pages = pages
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
            sequence.pages = meeting.pages
            return
        if not (meeting.stop() and had):
            self.leave(sequence)
            return
        sequence.pages = meeting.pages
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
        sequence.saved_pages = max(sequence.saved_pages, meeting.tokens // self._chunk)

    def settle(self, sequence: Sequence) -> None:
        """Take over a load that has ended: *running*, or *waiting* again if it came short and there are no
        pages to compute the rest in. A load still under way is left alone."""
        loading = sequence.loading
        if loading is None or not loading.transfer.done:
            return
        loaded = loading.transfer.wait()
        missing = self.pages_for(len(sequence.tokens)) - len(loaded.pages) - len(loading.fresh)
        had = [*loaded.pages, *loading.fresh]
        more = self.connector.allocate(missing, near=had) if missing > 0 else []
        sequence.loading = None
        sides = self._begin_sides(loaded) if more is not None else None
        if more is None or sides is None:
            self._let_go(loaded, [*loading.fresh, *(more or [])], taken=more is not None)
            sequence.state = SequenceState.WAITING
            return
        self._account(sequence, loading, loaded)
        sequence.pages = [*loaded.pages, *loading.fresh, *more]
        sequence.sides = sides
        sequence.arriving = True
        sequence.restore(loaded.tokens)
        sequence.saved_pages = loaded.tokens // self._chunk
        sequence.state = SequenceState.RUNNING

    def share(self, parent: Sequence, child: Sequence) -> bool:
        """Give ``child``, which has the same tokens, the pages of ``parent``, all of whose KV is computed. No
        byte moves but those of states. False, and nothing changed, where there is no room for these."""
        assert parent.computed == len(parent.tokens) == len(child.tokens)
        sides: list[SideTable] = []
        for side, table in zip(self._sides, parent.sides, strict=True):
            sides.append(SideTable())
            if not side.share(table, sides[-1]):
                self._drop_sides(sides)
                return False
        child.sides = sides
        self._shares.update(parent.pages)
        child.pages = list(parent.pages)
        child.arriving = parent.arriving
        child.saved_pages = parent.saved_pages
        child.restore(parent.computed)
        child.state = SequenceState.RUNNING
        return True

    def grow_sides(self, sequence: Sequence, stop: int) -> bool:
        """See to it that the next step, up to ``stop``, has pages in the groups beside the first. False where
        there is no room."""
        sides = zip(self._sides, sequence.sides, strict=True)
        return all(side.grow(table, sequence.computed, stop) for side, table in sides)

    def grow(self, sequence: Sequence, *, draft_tokens: int = 0) -> bool:
        """See to it that the tokens still to be computed, and ``draft_tokens`` more, have pages that nobody
        else writes to. False, and nothing changed, when there is no room."""
        if not self.grow_sides(sequence, len(sequence.tokens) + draft_tokens):
            return False
        pages = sequence.pages
        first = sequence.computed // self._chunk
        shared = [place for place in range(first, len(pages)) if self._shares[pages[place]]]
        missing = max(self.pages_for(len(sequence.tokens) + draft_tokens) - len(pages), 0)
        if not shared and not missing:
            return True
        fresh = self.connector.allocate(len(shared) + missing, near=pages)
        if fresh is None:
            return False
        copies = [(fresh.pop(), place) for place in shared]
        self.connector.pool.copy_pages((page, pages[place]) for page, place in copies)
        self._release([pages[place] for place in shared])
        # A new list: a captured step knows a table that only grows by its identity.
        table = list(pages) if copies else pages
        for page, place in copies:
            table[place] = page
        table += fresh
        sequence.pages = table
        return True

    def trim(self, sequence: Sequence) -> None:
        """Give back the pages behind the sequence's newest token: what was drafted there was not accepted."""
        keep = self.pages_for(len(sequence.tokens))
        if len(sequence.pages) > keep:
            self._release(sequence.pages[keep:])
            sequence.pages = sequence.pages[:keep]
        for side, table in zip(self._sides, sequence.sides, strict=True):
            side.trim(table, len(sequence.tokens))

    def save(self, sequence: Sequence) -> Transfer[int] | None:
        """Publish the pages that have become full since the last call, and at a save point what goes with
        them. What the groups beside the first do not need any more is given back."""
        computed = sequence.computed
        full = computed // self._chunk
        hint = _ELSEWHERE if sequence.hint is not None and sequence.hint.elsewhere else None
        saving = self._publish(sequence, full, hint=hint if full > sequence.saved_pages else None)
        for side, table in zip(self._sides, sequence.sides, strict=True):
            side.passed(table, computed)
        if computed in sequence.save_points or (self._checkpoint and computed % self._checkpoint == 0):
            parts = sequence.save_points.get(computed, False)
            saves = self._save_sides(
                sequence, computed, hint=hint, session=None if parts else sequence.session
            )
            # Pages that a window gives back meanwhile stay where they are until these end.
            self._parking += [each for each in saves if not each.done]
        return saving

    def leave(self, sequence: Sequence, *, save: bool = True) -> None:
        """Save what has been computed (or not), the partial last page too unless it is shared, and give all
        pages back: *waiting*."""
        if sequence.loading is not None:
            self._abandon(sequence.loading)
            sequence.loading = None
        if sequence.meeting is not None:
            sequence.meeting.stop()
            sequence.pages = sequence.meeting.pages
            sequence.meeting = None
        full = sequence.computed // self._chunk
        saves: list[Transfer[int] | None] = []
        hint, inside = _hint(sequence), save and self._ends_inside(sequence)
        if save:
            saves.append(self._publish(sequence, full + inside, hint=hint))
            if not inside or sequence.finish_reason is not None:
                # Who goes on from an answer may not have its last tokens: a parked sequence has.
                saves += self._save_sides_last(sequence, full * self._chunk, hint)
        submitted = min(sequence.saved_pages, full)
        if not all(side.saved(table, submitted * self._chunk) for side, table in self._sides_of(sequence)):
            submitted = 0  # nobody can go on there: not to be waited for
        if inside:
            saves += self._save_sides_last(sequence, sequence.computed, _here(hint))
        self._parking += [saving for saving in saves if saving is not None and not saving.done]
        self._drop_sides(sequence.sides)
        sequence.submitted_tokens = submitted * self._chunk if self.connector.shared else 0
        self._release(sequence.pages)
        sequence.pages, sequence.sides = [], []
        sequence.arriving = False
        sequence.partial = None
        sequence.in_step = False
        sequence.computed = sequence.saved_pages = 0
        sequence.state = SequenceState.WAITING

    def _ends_inside(self, sequence: Sequence) -> bool:
        """Whether a sequence that leaves has a partial page that can be saved: as the end of its prompt, and
        where nobody else is going to write to it. A prefill that is cut short ends at a page's end, or within
        a page that was loaded and is in the store already. A step that has not ended has left KV behind the
        sequence's end, where nobody looks, but in a live state it is for good."""
        computed = sequence.computed
        if not computed % self._chunk or computed < len(sequence.prompt):
            return False
        if self._shares[sequence.pages[computed // self._chunk]]:
            return False
        if any(side.shares(table, computed) for side, table in self._sides_of(sequence)):
            return False
        return not (self._sides and sequence.in_step)

    def _save_sides_last(self, sequence: Sequence, tokens: int, hint: Hint | None) -> list[Transfer[int]]:
        """:meth:`_save_sides` of a sequence that leaves."""
        leaves = tokens == sequence.computed and not sequence.in_step
        return self._save_sides(sequence, tokens, hint=hint, session=sequence.session, leaves=leaves)

    def wait_for_room(self, timeout_s: float) -> None:
        """Wait, briefly, for something that may make pages available."""
        if self.parking:
            wait_briefly(self._parking[0], timeout_s)
        else:
            time.sleep(timeout_s)

    def _reserve(
        self, sequence: Sequence, needed: int, fresh: int, beside: Iterable[Sequence]
    ) -> list[int] | None:
        """Take ``fresh`` pages for a sequence that needs ``needed`` in all. None where these, its pages in
        the other groups and what the sequences ``beside`` it lack cannot be had together."""
        counts = self.lacking([*beside, sequence])
        counts[0] += needed
        return self.connector.allocate(fresh) if self.connector.has_room(counts) else None

    def _publish(self, sequence: Sequence, stop: int, *, hint: Hint | None = None) -> Transfer[int] | None:
        first = sequence.saved_pages
        if sequence.no_save or (stop <= first and (hint is None or not first)):
            return None
        pages = sequence.pages[first:stop]
        saving = self.connector.save(sequence.prompt, pages, first=first, hint=hint, session=sequence.session)
        sequence.saved_pages = first + len(pages)
        return saving

    def _abandon(self, loading: Loading) -> None:
        loading.transfer.cancel()
        # It may have ended before it could be cancelled.
        self._let_go(loading.transfer.wait(), loading.fresh)

    def _let_go(self, loaded: Loaded, fresh: list[int], *, taken: bool = False) -> None:
        """What was loaded is not used; ``taken``: the groups beside the first have given theirs back."""
        self._release([*loaded.pages, *fresh])
        if not taken:
            for side, held in zip(self._sides, loaded.groups[1:], strict=False):
                side.discard(held)

    def _begin_sides(self, loaded: Loaded) -> list[SideTable] | None:
        """Tables of the groups beside the first behind what was loaded; None, and all of it given back, where
        one has no room."""
        tables = [SideTable() for _ in self._sides]
        groups = loaded.groups[1:]
        for number, (side, table) in enumerate(zip(self._sides, tables, strict=True)):
            held = groups[number] if groups and groups[number].pages else None
            if not side.begin(table, held, loaded.tokens):
                self._drop_sides(tables[:number])
                for other, unused in zip(self._sides[number:], groups[number:], strict=False):
                    other.discard(unused)
                return None
        return tables

    def _sides_of(self, sequence: Sequence) -> Iterator[tuple[SideGroup, SideTable]]:
        return zip(self._sides, sequence.sides, strict=False)

    def _drop_sides(self, tables: list[SideTable]) -> None:
        for side, table in zip(self._sides, tables, strict=False):
            side.drop(table)

    def _save_sides(
        self,
        sequence: Sequence,
        tokens: int,
        *,
        hint: Hint | None = None,
        session: str | None,
        leaves: bool = False,
    ) -> list[Transfer[int]]:
        """Publish what a hit at ``tokens`` needs of the groups beside the first; the copies are under way."""
        if sequence.no_save or not tokens:
            return []
        point = SavePoint(sequence.prompt, tokens, hint, session, leaves)
        saves = [side.save(table, point) for side, table in self._sides_of(sequence)]
        return [saving for saving in saves if saving is not None]

    def _release(self, pages: list[int]) -> None:
        """A sequence is done with these pages: the last that has one gives it back."""
        self.connector.release(self._shares.owned(pages))

    def _account(self, sequence: Sequence, loading: Loading, loaded: Loaded) -> None:
        tally = sequence.tally
        tally.loaded_bytes += loaded.moved_bytes
        tally.load_s += time.monotonic() - loading.started
        if not sequence.started:
            tally.reused_by_tier = clip_tiers(loading.by_tier, loaded.tokens)


def _hint(sequence: Sequence) -> Hint | None:
    """What is known of the future of a sequence's pages when it leaves."""
    hint, reason = sequence.hint, sequence.finish_reason
    if hint is not None and hint.for_policy and reason is not None:
        return hint
    guess = inferred(reason.value if reason is not None else "parked")
    return replace(guess or _ELSEWHERE, elsewhere=True) if hint is not None and hint.elsewhere else guess


def _here(hint: Hint | None) -> Hint | None:
    """Of pages that no other host asks for: partial ones."""
    return replace(hint, elsewhere=False) if hint is not None and hint.for_policy else None


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
