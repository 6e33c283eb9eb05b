"""The pages of a sequence in all layer groups: admission, loads, saves and leaving.
:mod:`tierstore_engine.tables` does the work for one group."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ints
from dataclasses import replace
from typing import TypeVar

from tierstore.groups import Past
from tierstore.planner import Plan
from tierstore.tiers.hbm import arrivals_of
from tierstore.transfer import Transfer
from tierstore.types import GroupPages, Hint, Loaded, inferred
from tierstore_connectors.base import Connector, ConnectorHit
from tierstore_engine.images import PromptImages
from tierstore_engine.meeting import Meeting
from tierstore_engine.sequence import InputLoad, Loading, Sequence, SequenceState
from tierstore_engine.settings import EngineSettings
from tierstore_engine.tables import CrossTable, GroupTable, SavePoint, empty_tables

T = TypeVar("T")

_ELSEWHERE = Hint(elsewhere=True)
_UNKNOWN_S = 30.0  # deadline of a load without a plan


class PageKeeper:
    """Moves sequences between the states *waiting* (without pages), *loading* and *running*, as far as pages
    decide this.

    A preempted sequence is *parked*: its pages are saved and released. Later the sequence is admitted like a
    new one whose prompt is in the store.
    """

    def __init__(
        self,
        connector: Connector,
        settings: EngineSettings,
        *,
        checkpoint_tokens: int = 0,
        rewinds: bool = False,
    ) -> None:
        """``checkpoint_tokens`` is the largest distance of save points in a model with several layer groups
        (0: only those that requests make). With ``rewinds``, the last token of a hit is computed again,
        because a drafter needs the model's output."""
        self.connector = connector
        self.chunk_tokens = connector.pool.spec.chunk_tokens
        self.keeps = connector.keeps  # whether other sequences can find saved pages
        self._plan = settings.plan
        self._prefill_chunk = settings.prefill_chunk
        self._rewinds = rewinds
        self._parking: deque[Transfer[int]] = deque()  # saves whose end may free pages
        self._empty = empty_tables(connector, whole_windows=settings.whole_windows)
        self._has_named = not all(rule.chained for rule in connector.rules)
        self.stateful = any(rule.past is Past.STATE for rule in connector.rules)
        self._checkpoint = checkpoint_tokens if self._has_named else 0
        crosses = [number for number, rule in enumerate(connector.rules) if rule.past is Past.CROSS]
        self._cross = crosses[0] if crosses else None

    def evict_idle(self) -> None:
        """Evict all unused pages from HBM. If groups share memory, a few pages that are cached in place can
        keep every large page occupied."""
        for group, pool in enumerate(self.connector.pools):
            self.connector.evict(pool.num_pages, group=group)

    def room(self) -> tuple[int, ...]:
        """Return how many pages of each layer group are available now."""
        return tuple(self.connector.available(group=group) for group in range(len(self.connector.pools)))

    @property
    def parking(self) -> bool:
        """Return whether pages of sequences that have left are still being copied, and will be free
        afterwards."""
        while self._parking and self._parking[0].done:
            self._parking.popleft()
        return bool(self._parking)

    @property
    def shared_pages(self) -> int:
        """Return how many pages are spared because sequences share pages: the sum of all sequences' pages,
        minus the pages in use."""
        return sum(table.group.shared_pages for table in self._empty)

    def pages_for(self, tokens: int) -> int:
        """Return how many pages of the first layer group a sequence of ``tokens`` tokens keeps: one for each
        chunk, or two if the model has only states."""
        return self._empty[0].kept(tokens)

    def longest(self, pages: int) -> int | None:
        """Return how many tokens a sequence of that many pages of the first layer group has; None if the
        pages do not limit it, because the model has only states."""
        table = self._empty[0]
        return pages * self.chunk_tokens if table.group.rule.chained else None

    def peaks(self, tokens: int, images: PromptImages | None = None) -> list[int]:
        """Return, by layer group, the most pages that a sequence of ``tokens`` tokens has at once."""
        return [table.peak(tokens, self._prefill_chunk) for table in self._tables_for(images)]

    def _tables_for(self, images: PromptImages | None) -> Ints[GroupTable]:
        """Return empty tables for a prompt with these images. The caller may only read them."""
        if self._cross is None or images is None:
            return self._empty
        return [table.another(images) for table in self._empty]

    def step_end(self, sequence: Sequence, stop: int) -> int:
        """Return where a step that could compute up to ``stop`` must end: at the next save point, if that is
        earlier."""
        points = [point for point in sequence.save_points if point > sequence.computed]
        if self._checkpoint:
            points.append((sequence.computed // self._checkpoint + 1) * self._checkpoint)
        end = min([stop, *points])
        return end if sequence.images is None else sequence.images.step_end(sequence.computed, end)

    def add_save_point(self, sequence: Sequence, tokens: int, *, parts: bool = False) -> None:
        """Add a save point: save the pages for a hit of the first ``tokens`` tokens. With ``parts``, other
        prompts continue from this point, so its pages are kept when the sequence's session continues."""
        if self._has_named:
            point = tokens // self.chunk_tokens * self.chunk_tokens
            sequence.save_points[point] = parts or sequence.save_points.get(point, False)

    def arriving(self, sequence: Sequence) -> bool:
        """Return whether bytes of the sequence's pages are still arriving after its load was taken over.

        Once this is False it stays False, and the pool is not asked again. During loads the pool would
        otherwise check every page of every decoding sequence in every step.
        """
        if sequence.arriving:
            pages = [table.pages for table in sequence.tables]
            sequence.arriving = arrivals_of(self.connector.pools, pages).pending
        return sequence.arriving

    def look_up(self, sequence: Sequence, *, admitting: bool = False) -> ConnectorHit:
        """Return what the store holds of a waiting sequence, under a lease. The caller passes the result to
        :meth:`admit`, or releases it.

        A waiting request is looked up often. The statistics count its first lookup for admission.
        """
        most = 0 if sequence.no_load else len(sequence.tokens) - 1
        counted, sequence.counted = admitting and not sequence.counted, sequence.counted or admitting
        hit = self.connector.lookup(sequence.prompt, max_tokens=most, counted=counted)
        while sequence.images is not None and sequence.images.shortened(hit.tokens) < hit.tokens:
            most = sequence.images.shortened(hit.tokens)
            hit.release()
            hit = self.connector.lookup(sequence.prompt, max_tokens=most, counted=False)
        return hit

    def lacking(self, admitted: Iterable[Sequence]) -> list[int]:
        """Return how many pages of each group the ``admitted`` sequences still need for their tokens.

        A prefill step may take pages that it releases at once, so only the largest step counts: if there is
        room for one, the prompts can be computed one after the other.
        """
        counts, steps = [0] * len(self._empty), [0] * len(self._empty)
        for sequence in admitted:
            tokens, coming = len(sequence.tokens), sequence.coming
            prefill = sequence.prefills or sequence.state is not SequenceState.RUNNING
            for number, table in enumerate(sequence.tables or self._tables_for(sequence.images)):
                counts[number] += table.lacking(tokens, coming)
                if prefill:
                    step = min(sequence.remaining, self._prefill_chunk)
                    steps[number] = max(steps[number], table.peak(tokens, step) - table.kept(tokens))
        return [count + step for count, step in zip(counts, steps, strict=True)]

    def admit(self, sequence: Sequence, hit: ConnectorHit, *, beside: Iterable[Sequence] = ()) -> bool:
        """Give a waiting sequence its pages and start to load its hit: it is *loading* or *running*
        afterwards.

        Return False if its pages, together with those that the sequences ``beside`` it still need, are not
        available. Then only the hit is released, and nothing else changes.
        """
        plan = self.planned(sequence, hit)
        in_hbm = hit.by_tier.get("hbm", 0)
        both = plan.meeting_point > in_hbm
        loaded = in_hbm if both else plan.tokens
        shared = min(hit.hbm_pages, loaded // self.chunk_tokens)  # whole pages that are in HBM are not copied
        counts = self.lacking([*beside, sequence])
        counts[0] -= shared
        if both:  # the pages for the hit's end are needed in addition to those of the front
            for number, table in enumerate(self._empty[1:], 1):
                counts[number] += len(table.group.rule.pages(plan.tokens, self.chunk_tokens))
        sequence.tables = [table.another(sequence.images) for table in self._empty]
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
        started = time.monotonic()
        deadline_s = _UNKNOWN_S if plan.deadline_s is None else plan.deadline_s
        inputs = self._load_inputs(sequence, loaded, deadline_s)
        if not loaded:
            hit.release()
            if not inputs:
                return self._begin(sequence, Loaded(0))
            transfer = Transfer.completed(Loaded(0))
        else:
            chunks = -(-loaded // self.chunk_tokens)
            transfer = self.connector.load_part(
                hit, 0, chunks, deadline_s=None if loaded == in_hbm else deadline_s, last=True
            )
        sequence.loading = Loading(transfer, clip_tiers(hit.by_tier, loaded), started, inputs)
        sequence.state = SequenceState.LOADING
        return True

    def _load_inputs(self, sequence: Sequence, hit_tokens: int, deadline_s: float) -> dict[int, InputLoad]:
        """Start to load the complete stored inputs of cross attention that come after a hit. Each may have
        been saved at another place of another prompt."""
        loads: dict[int, InputLoad] = {}
        for number, given in enumerate(sequence.prompt.inputs):
            if given.start < hit_tokens or sequence.no_load:
                continue
            assert self._cross is not None
            pages = sequence.prompt.pages_of_input(self._cross, number)
            found = self.connector.lookup(pages, counted=False)
            if found.tokens < len(pages):
                found.release()
                continue
            transfer = self.connector.load(found, deadline_s=deadline_s)
            loads[number] = InputLoad(transfer, found.positions)
            sequence.tables[self._cross].expected += len(pages.keys)
        return loads

    def planned(self, sequence: Sequence, hit: ConnectorHit) -> Plan:
        """Return how much of a hit will be used."""
        in_hbm = hit.by_tier.get("hbm", 0)
        if self._plan == "load" or hit.tokens == in_hbm:
            return Plan(hit.tokens, 0, 0.0, 0.0, None)
        if self._plan == "compute":
            return Plan(0 if self._has_named else in_hbm, 0, 0.0, 0.0, None)
        block = self._prefill_chunk if self._plan == "both-ends" else 0
        if sequence.images is not None and (sequence.images.longest_mutual or sequence.images.inputs):
            block = 0  # the front needs images that the loaded end would divide, or bring
        if self._has_named and (hit.hbm_pages or not self.connector.rules[0].chained):
            block = 0  # windows and states allow a front to be computed only from token 0 on
        plan = self.connector.plan(hit, len(sequence.tokens), block=block)
        # a shorter hit would need other pages of windows and states
        if self._has_named and plan.tokens not in (0, hit.tokens):
            return Plan(hit.tokens, 0, 0.0, 0.0, None)
        return plan

    def _load_from_both_ends(self, sequence: Sequence, hit: ConnectorHit, plan: Plan) -> bool:
        """Start to compute a sequence from its front while its hit is loaded from its back: *running*. Return
        False if pages of the hit that were in HBM have been evicted."""
        in_hbm = hit.by_tier.get("hbm", 0)
        here = self.connector.load_part(hit, 0, in_hbm // self.chunk_tokens).wait()  # shared, no copy
        if here.tokens < in_hbm:
            _release(sequence.tables, here.groups)
            self._drop(sequence)
        if not sequence.tables or not self._begin(sequence, here):
            hit.release()
            return False
        self._resume(sequence, here.tokens)
        sequence.meeting = Meeting(self.connector, hit, plan, sequence.tables[0], chunk=self._prefill_chunk)
        if not sequence.started:
            sequence.tally.reused_by_tier = clip_tiers(hit.by_tier, here.tokens)
            sequence.meeting.by_tier = dict(hit.by_tier)
        return True

    def may_compute(self, sequence: Sequence, stop: int) -> bool:
        """Return whether the next chunk, up to ``stop``, should be computed now instead of waiting for its
        pages."""
        meeting = sequence.meeting
        return meeting is None or meeting.may_compute(sequence.computed, stop)

    def poll(self, sequence: Sequence) -> None:
        """Take over the loaded pages of a sequence that is loaded from its back. The sequence is *waiting*
        afterwards if there are no pages for computing what was not loaded."""
        meeting = sequence.meeting
        if meeting is None:
            return
        had = meeting.poll(sequence.computed)
        if had and not meeting.met(sequence.computed):
            return
        stopped = meeting.stop()
        loaded = max(meeting.tokens - sequence.computed, 0) if meeting.back < meeting.end else 0
        if not (stopped and had) or (loaded and not self._join(sequence, meeting)):
            self.leave(sequence)
            return
        sequence.meeting = None
        if not loaded:
            _release(sequence.tables[1:], meeting.take_named())
            return
        sequence.tally.loaded_bytes += meeting.loaded_bytes
        sequence.tally.load_s += time.monotonic() - meeting.began
        reused = sequence.tally.reused_by_tier
        before = clip_tiers(meeting.by_tier, sequence.computed)
        for tier, tokens in clip_tiers(meeting.by_tier, meeting.tokens).items():
            if tokens > before[tier]:
                reused[tier] = reused.get(tier, 0) + tokens - before[tier]
        sequence.arriving = True
        self._resume(sequence, meeting.tokens)
        table = sequence.tables[0]
        table.saved_at = max(table.saved_at, meeting.tokens)

    def _join(self, sequence: Sequence, meeting: Meeting) -> bool:
        """In all groups except the first, replace the pages of the computed front by the pages for the hit's
        end. If the pool has no room, return False and change nothing in the tables."""
        held, fresh = meeting.take_named(), list[GroupTable]()
        for table, pages in zip(sequence.tables[1:], held, strict=False):
            twin = table.another()
            if not twin.begin(pages, meeting.tokens, len(sequence.tokens)):
                _release(sequence.tables[1 + len(fresh) :], held[len(fresh) :])
                for made in fresh:
                    made.drop()
                return False
            fresh.append(twin)
        for table in sequence.tables[1:]:
            table.drop()
        sequence.tables[1:] = fresh
        return True

    def settle(self, sequence: Sequence) -> None:
        """Take over a load that has ended: the sequence is *running*, or *waiting* again if the load was
        incomplete and there are no pages for computing the rest. If the load is still running, do nothing."""
        loading = sequence.loading
        if loading is None or not loading.transfer.done:
            return
        loaded = loading.hit.wait()
        sequence.loading = None
        begun = self._begin(sequence, loaded)
        self._take_inputs(sequence, loading)
        if not begun:
            return
        tally = sequence.tally
        tally.loaded_bytes += sum(each.wait().moved_bytes for each in loading.transfers)
        tally.load_s += time.monotonic() - loading.started
        if not sequence.started:
            tally.reused_by_tier = clip_tiers(loading.by_tier, loaded.tokens)
        sequence.arriving = True
        self._resume(sequence, loaded.tokens)

    def _take_inputs(self, sequence: Sequence, loading: Loading) -> None:
        """Take over loaded inputs, or release their pages if they are incomplete or the sequence waits."""
        for number, load in loading.inputs.items():
            assert self._cross is not None
            pages = load.pages(self._cross)
            table = sequence.tables[self._cross] if sequence.tables else None
            if isinstance(table, CrossTable) and len(pages) == len(table.pages_of(number)):
                table.take(number, pages)
            else:
                self._empty[self._cross].group.release(pages)

    def share(self, parent: Sequence, child: Sequence) -> bool:
        """Give ``child``, which has the same tokens, the pages of the completely computed ``parent``. Only
        states are copied. Return False, and change nothing, if there is no room for the pages that the child
        must copy."""
        assert parent.computed == len(parent.tokens) == len(child.tokens)
        for table in parent.tables:
            twin = table.fork()
            if twin is None:
                self._drop(child)
                return False
            child.tables.append(twin)
        child.arriving = parent.arriving
        child.restore(parent.computed)
        child.outputs, child.foreseen = parent.outputs, parent.foreseen
        child.state = SequenceState.RUNNING
        return True

    def most_drafted(self, sequence: Sequence) -> int:
        """Return the length of the longest draft that a sequence may have now. With recurrent states, the
        step after it must not pass the end of a page, because states are saved there."""
        known = len(sequence.tokens)
        most = max(sequence.max_tokens - known - 1, 0)
        return min(most, -(known + 1) % self.chunk_tokens) if self.stateful and self.keeps else most

    def accept(self, sequence: Sequence, accepted: int) -> None:
        """Record that the first ``accepted`` tokens of a draft were chosen, and release the pages after them.
        Recurrent states do not include the accepted tokens: the next step computes these again, together with
        the newest token."""
        if self.stateful:
            sequence.repeated = accepted
        else:
            sequence.advance(sequence.computed + accepted)
        for table in sequence.tables:
            table.trim(len(sequence.tokens))

    def save(self, sequence: Sequence) -> None:
        """Publish the pages that became full since the last call, and at a save point the pages for hits
        there. Release pages that no later token needs."""
        computed = sequence.computed
        whole = computed - computed % self.chunk_tokens
        hint = _ELSEWHERE if sequence.hint is not None and sequence.hint.elsewhere else None
        point = SavePoint(sequence.prompt, [whole], hint, sequence.session)
        for table in sequence.tables:
            if table.group.saves_all and whole > table.saved_at and not sequence.no_save:
                saves = table.save(point)
                if not table.group.rule.chained:
                    # pages that a window releases now keep their contents until these saves end
                    self._park(saves)
            table.passed(computed)
        if sequence.no_save:
            return
        # A step that ends where an image ends may have passed a save point.
        at = whole if sequence.images is not None and sequence.images.longest_mutual else computed
        parts = sequence.save_points.get(at)
        here = parts is not None or (self._checkpoint and at % self._checkpoint == 0)
        for table in sequence.tables:
            # The pages of an image are the same at any save point.
            if not table.group.saves_all and (here or table.group.rule.past is Past.CROSS):
                self._park(table.save(replace(point, session=None if parts else sequence.session)))

    def leave(self, sequence: Sequence, *, save: bool = True) -> None:
        """Let a sequence leave: it is *waiting* afterwards. Save what was computed unless ``save`` is False,
        including the partial last page unless it is shared, and release all pages."""
        if sequence.loading is not None:
            loading, sequence.loading = sequence.loading, None
            for transfer in loading.transfers:
                transfer.cancel()
            # The loads may have ended before the cancel.
            _release(sequence.tables, loading.hit.wait().groups)
            self._drop(sequence)
            self._take_inputs(sequence, loading)
        if sequence.meeting is not None:
            sequence.meeting.stop()
            _release(sequence.tables[1:], sequence.meeting.take_named())
            sequence.meeting = None
        computed = sequence.computed
        submitted = whole = computed - computed % self.chunk_tokens
        if save and not sequence.no_save:
            inside = self._ends_inside(sequence)
            # The next turn may end the answer with other tokens. A parked sequence continues with the same
            # tokens.
            ends = [whole] if not inside or sequence.finish_reason is not None else []
            ends += [computed] * inside
            live = None if sequence.in_step else computed
            point = SavePoint(sequence.prompt, ends, _hint(sequence), sequence.session, live)
            for table in sequence.tables:
                self._park(table.save(point))
        for table in sequence.tables:
            submitted = table.saved(submitted)  # do not wait for tokens at which no hit can end
        if submitted > sequence.prompt_tokens:  # in this case a hit ends at the prompt's save point
            submitted = (sequence.prompt_tokens - 1) // self.chunk_tokens * self.chunk_tokens
        sequence.submitted_tokens = submitted if self.connector.shared else 0
        self._drop(sequence)
        sequence.arriving = False
        sequence.partial = None
        sequence.in_step = False
        sequence.computed = sequence.repeated = sequence.foreseen = 0
        sequence.state = SequenceState.WAITING

    def _ends_inside(self, sequence: Sequence) -> bool:
        """Return whether a leaving sequence has a partial page that can be saved: the end of its prompt,
        which no other sequence will write to.

        A prefill that was interrupted ends at the end of a page, or inside a loaded page that is stored
        already. An unfinished step may leave KV after the sequence's end, which does no harm. A live state,
        however, includes that step's tokens for good.
        """
        computed = sequence.computed
        if not computed % self.chunk_tokens or computed < len(sequence.prompt):
            return False
        if any(table.is_shared(computed) for table in sequence.tables):
            return False
        return not (self._has_named and sequence.in_step)

    def wait_for_room(self, timeout_s: float) -> None:
        """Wait a short time for a transfer that may free pages."""
        if self.parking:
            wait_briefly(self._parking[0], timeout_s)
        else:
            time.sleep(timeout_s)

    def _begin(self, sequence: Sequence, loaded: Loaded) -> bool:
        """Take over loaded pages: the sequence is *running*. If a table has no room, the sequence is
        *waiting*, without pages."""
        for number, table in enumerate(sequence.tables):
            held = loaded.groups[number] if loaded.groups else GroupPages()
            if not table.begin(held, loaded.tokens, len(sequence.tokens)):
                _release(sequence.tables[number:], loaded.groups[number:])
                self._drop(sequence)
                sequence.state = SequenceState.WAITING
                return False
        sequence.state = SequenceState.RUNNING
        return True

    def _resume(self, sequence: Sequence, tokens: int) -> None:
        """Let a sequence continue after ``tokens`` loaded tokens. The last of these is computed again if a
        drafter needs its output and does not have it, and if there is room for a copy of its page."""
        rewinds = (
            self._rewinds and not self.stateful and tokens > 0 and sequence.output_of(tokens - 1) is None
        )
        if rewinds:
            rewinds = all(table.own(tokens) for table in sequence.tables)
        sequence.restore(tokens - rewinds)
        sequence.foreseen = tokens

    def _park(self, saves: Iterable[Transfer[int]]) -> None:
        self._parking += [saving for saving in saves if not saving.done]

    def _drop(self, sequence: Sequence) -> None:
        for table in sequence.tables:
            table.drop()
        sequence.tables = []


def _release(tables: Iterable[GroupTable], held: Iterable[GroupPages]) -> None:
    """Release the loaded pages (none after a cancel) that ``tables`` did not take over."""
    for table, unused in zip(tables, held, strict=False):
        table.group.release(unused.pages)


def _hint(sequence: Sequence) -> Hint | None:
    """Return a hint about the future of a leaving sequence's pages."""
    hint, reason = sequence.hint, sequence.finish_reason
    if hint is not None and hint.for_policy and reason is not None:
        return hint
    guess = inferred(reason.value if reason is not None else "parked")
    return replace(guess or _ELSEWHERE, elsewhere=True) if hint is not None and hint.elsewhere else guess


def clip_tiers(by_tier: Mapping[str, int], tokens: int) -> dict[str, int]:
    """Cut ``by_tier`` (fastest tier first, as along the prompt) to ``tokens`` in total."""
    clipped = {}
    for tier, count in by_tier.items():
        clipped[tier] = min(count, tokens)
        tokens -= clipped[tier]
    return clipped


def wait_briefly(transfer: Transfer[T], timeout_s: float) -> None:
    """Wait for the end of ``transfer``, for at most ``timeout_s`` seconds."""
    try:
        transfer.wait(timeout_s)
    except TimeoutError:
        return
