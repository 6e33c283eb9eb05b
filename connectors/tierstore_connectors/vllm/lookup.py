"""Lookups: threads ask the daemon what it holds of prompts, the scheduler polls in every step.

Prompts that wait at the same time are asked for together (:meth:`Lookups.ask`), in rounds, each of which
builds on the answers of the one before: an answer has to be had for each KV cache group on each worker, since
a chunk that one of them lacks cannot be loaded. Groups of attention are asked how far they go, which says how
long a hit they all can serve (:func:`tierstore.groups.longest_hit`); then those with states, whether they
have the one at that place, and where else, until the longest hit is known
(:func:`tierstore.groups.search`). Then pages on disk are *brought* into memory, with a deadline,
before anything is promised to vLLM: a page that turns out to be damaged is then a shorter hit (where there
are states: none) and not a failed load. A lease keeps what was found in place all along.

What another engine has promised to save is waited for first, before anything is asked, as long as it said.

Groups with a sliding window are not brought: vLLM reads the last pages of them only, and those come from disk
when they are loaded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from tierstore.errors import StoreClosedError
from tierstore.groups import GroupRule, Past, Search, longest_hit, search
from tierstore.keys import Identity, PageKey, Prompt
from tierstore.planner import Planner
from tierstore.transfer import Transfer, TransferState
from tierstore.types import Promise
from tierstore_connectors.common.guard import Breaker, ErrorLog
from tierstore_connectors.vllm.config import Settings
from tierstore_connectors.vllm.identity import ChunkNames
from tierstore_connectors.vllm.orders import Shard, kept_by_name, under_epoch
from tierstore_connectors.vllm.stores import Hit, Store, Stores, look_up, prompt_of

_THREADS = 2  # that wait for answers
_BRINGERS = 4  # that wait for other hosts
# A daemon that is well has answered by the first of these. The second is for an engine that has nothing to do
# but to ask: it would spin through empty steps, and with it in the way the threads that wait for the answer
# come to run every 5 ms only.
_FIRST_POLL_S = 0.004
_POLL_S = 0.001
_CONNECT_S = 1.0  # that the engine's start waits for the daemon


@dataclass(frozen=True, slots=True)
class _Place:
    """Where pages of one KV cache group are: those of one worker. ``rule``: what a hit needs of them."""

    store: Store
    identity: Identity
    rule: GroupRule


@dataclass(frozen=True, slots=True)
class _Bringing:
    """Pages on their way from disk. ``all_of``: of pages that are nothing without one another, the tokens
    that they stand for."""

    transfer: Transfer[int]
    all_of: int = 0

    def tokens(self, found: int) -> int:
        """How many of the ``found`` tokens can be loaded of what has come."""
        came = self.transfer.wait()
        return came if not self.all_of else found if came >= self.all_of else 0


class PromptLookup:
    """The lookup of one prompt: one thread asks, another polls."""

    def __init__(self, keys: Sequence[PageKey], tokens: Callable[[], bytes], chunk_tokens: int) -> None:
        """``tokens`` gives those of the chunks that ``keys`` stand for; it is called on the asking thread."""
        self.keys = keys
        self.chunk_tokens = chunk_tokens
        self.first_polled: float | None = None  # when vLLM first wanted to know
        self.on_disk = 0  # tokens that came from there
        self.batch = 0  # asked for in one go
        self.asked_at = 0.0
        self.late = False  # the daemon did not answer in time
        self.declined = 0  # tokens that are held, and that computing has sooner
        self.extra_s = 0.0  # that the answer may take longer: pages of other hosts are on their way
        self.promise: Promise | None = None  # of another engine, until it was waited for
        self.epoch = ""  # under which it is asked for
        self._tokens = tokens
        self._data: bytes | None = None
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._names = ChunkNames(chunk_tokens)
        self._hits: list[Hit] = []  # guarded by _lock, as is all below
        self._brought: list[_Bringing] = []
        self._expected: list[Transfer[None]] | None = None
        self._found = len(keys) * chunk_tokens  # as far as the answers go
        self._only: int | None = None  # the length that a hit has to have
        self._released = False

    @property
    def answered(self) -> bool:
        """Whether there is an answer (also that the daemon is away)."""
        return self._answered.is_set()

    @property
    def found(self) -> int:
        """How many leading tokens have been in every answer so far; none after the release."""
        with self._lock:
            return 0 if self._released else self._found

    @property
    def promise_over(self) -> bool:
        """Whether what was promised has come, or does not come any more."""
        with self._lock:
            expected = self._expected
        return expected is not None and all(transfer.done for transfer in expected)

    def wait(self, timeout: float) -> None:
        """Wait for what comes next: promised pages, the answer, or pages on their way."""
        if self.promise is not None:
            with self._lock:
                expected = list(self._expected or ())
            for transfer in expected:
                if not transfer.done:
                    with suppress(TimeoutError):
                        transfer.wait(timeout)
                    return
        if not self._answered.is_set():
            self._answered.wait(timeout)
            return
        with self._lock:
            brought = [each.transfer for each in self._brought]
        for bringing in brought:
            if not bringing.done:
                with suppress(TimeoutError):
                    bringing.wait(timeout)
                return

    def tokens(self) -> int | None:
        """How many leading tokens can be loaded; None while it is not known, or they are on their way."""
        if not self._answered.is_set():
            return None
        with self._lock:
            if self._released:
                return 0
            brought = list(self._brought)
        if not all(each.transfer.done for each in brought):  # ends those whose time is over
            return None
        came = min((each.tokens(self._found) for each in brought), default=self._found)
        tokens = min(came, self._found) // self.chunk_tokens * self.chunk_tokens
        return tokens if self._only in (None, tokens) else 0

    def release(self) -> None:
        """Give everything back. Repeating it is harmless."""
        with self._lock:
            self._released = True
            hits, self._hits = self._hits, []
            brought, self._brought = self._brought, []
            expected, self._expected = self._expected or [], []
        for bringing in brought:
            bringing.transfer.cancel()
        for waiting in expected:
            waiting.cancel()
        for hit in hits:
            hit.release()

    # -- for the asking thread -------------------------------------------------------------------------

    def prompt(self, identity: Identity) -> Prompt:
        """As much of the prompt as has been in every answer so far."""
        keys = self.keys[: self._found // self.chunk_tokens]
        return prompt_of(identity, keys, self._known_tokens(), self.chunk_tokens)

    def pages(self, identity: Identity, chunks: range) -> Prompt:
        """Some of its pages, by name."""
        return self._names.pages(identity, chunks, self.keys, self._known_tokens())

    def pages_to(self, identity: Identity, ends: Sequence[int]) -> Prompt:
        """The same by where they end: whole pages that follow one another."""
        return self.pages(identity, range(ends[0] // self.chunk_tokens - 1, ends[-1] // self.chunk_tokens))

    def _known_tokens(self) -> bytes:
        if self._data is None:
            self._data = self._tokens()
        return self._data

    def expect(self, places: Sequence[_Place], promise: Promise) -> None:
        """Begin to wait for promised pages in all of these places, unless the lookup was released."""
        expected = []
        length = min(promise.tokens, len(self.keys) * self.chunk_tokens)
        length -= length % self.chunk_tokens
        for place in places:
            if not kept_by_name(place.rule):
                expected.append(place.store.expect(self.prompt(place.identity), promise))
            elif chunks := place.rule.pages(length, self.chunk_tokens):
                needed = Promise(len(chunks) * self.chunk_tokens, promise.until_s)
                expected.append(place.store.expect(self.pages(place.identity, chunks), needed))
        with self._lock:
            if not self._released:
                self._expected, expected = expected, []
        for transfer in expected:
            transfer.cancel()

    def hold(self, hit: Hit | None, *, instead_of: Hit | None, limits: bool = True) -> None:
        """Take an answer in. ``limits``: nothing behind the hit can be loaded."""
        with self._lock:
            if hit is not None and limits:
                self._found = min(self._found, hit.tokens)
            self._hits = [each for each in self._hits if each is not instead_of]
            if hit is not None:
                self._hits.append(hit)
        if instead_of is not None:
            instead_of.release()

    def limit(self, tokens: int, *, exactly: bool) -> None:
        """No longer hit than one of so many tokens can be loaded; ``exactly``: nor any other."""
        with self._lock:
            self._found = min(self._found, tokens)
            if exactly:
                self._only = tokens

    def decline(self, tokens: int) -> None:
        """Make no use of what is behind the first ``tokens``."""
        with self._lock:
            tokens = tokens // self.chunk_tokens * self.chunk_tokens
            self.declined = max(self._found - tokens, 0)
            self._found = min(self._found, tokens)

    def bring(self, hit: Hit, within_s: float, *, by_name: bool) -> Transfer[int] | None:
        """Begin to bring pages from disk, unless the lookup was released: that would lease them once more."""
        with self._lock:
            if self._released:
                return None
            if not by_name:
                self.on_disk = max(self.on_disk, hit.by_tier["disk"])
            brought = hit.prefetch(deadline_s=within_s)
            self._brought.append(_Bringing(brought, hit.tokens if by_name else 0))
            return brought

    def end(self) -> None:
        """There is nothing more to ask."""
        if self._released or not self._found:
            self.release()  # hits that came after the release, too
        self._answered.set()


@dataclass(slots=True)
class _Question:
    """One prompt in one place, and the answer of which it is known that it is needed."""

    lookup: PromptLookup
    place: _Place
    hit: Hit | None = None

    @property
    def by_name(self) -> bool:
        """Whether pages are asked for one by one."""
        return kept_by_name(self.place.rule)

    @property
    def windowed(self) -> bool:
        """Whether the end of it is all that a hit needs, and it is no state."""
        return self.place.rule.past in (Past.WINDOW, Past.CHUNK)

    @property
    def brought(self) -> bool:
        """Whether there is something to bring. Of windows only the end is read."""
        return self.hit is not None and not self.windowed and bool(self.hit.by_tier.get("disk"))

    def answer(self, hit: Hit | None) -> None:
        """Take an answer in, and give the one before back."""
        self.lookup.hold(hit, instead_of=self.hit, limits=self.place.rule.past is Past.ALL)
        self.hit = hit


@dataclass(slots=True)
class _Searching:
    """The search for the longest hit of one prompt. ``asked``: ends of pages by the number of their question,
    all of them whole, since the hit is; ``hits``: the last answers. ``elsewhere``: what other hosts seem to
    have counts as held, and nothing is leased for long."""

    questions: Sequence[_Question]
    steps: Search
    asked: Mapping[int, Sequence[int]]
    elsewhere: bool = False
    hits: Mapping[int, Hit] = field(default_factory=dict)
    length: int = 0

    @classmethod
    def begin(cls, questions: Sequence[_Question], tokens: int, *, elsewhere: bool = False) -> _Searching:
        """For a hit of at most so many tokens."""
        rules = {number: each.place.rule for number, each in enumerate(questions)}
        steps = search(rules, tokens, questions[0].lookup.chunk_tokens)
        return cls(questions, steps, next(steps), elsewhere)

    def go_on(self, hits: Mapping[int, Hit]) -> bool:
        """Whether there is more to ask, after these answers. If not, they are what the hit needs."""
        self.hits = hits
        for number, question in enumerate(self.questions):
            if not self.elsewhere:
                question.answer(hits.get(number))
            elif number in hits:
                hits[number].release()
        held = {
            number: [ends[at] for at in (*hits[number].positions, *hits[number].remote_positions)]
            for number, ends in self.asked.items()
        }
        try:
            self.asked = self.steps.send(held)
        except StopIteration as end:
            self.length = end.value
            return False
        return True


def _search(searching: Sequence[_Searching], *, gain: int = 0) -> None:
    """Go on with all of these searches to their ends, with the questions of all at once."""
    while searching:
        hits = iter(
            look_up(
                (
                    (
                        each.questions[number].place.store,
                        each.questions[number].lookup.pages_to(each.questions[number].place.identity, ends),
                    )
                    for each in searching
                    for number, ends in each.asked.items()
                ),
                gain=gain,
            )
        )
        answered = [(each, {number: next(hits) for number in each.asked}) for each in searching]
        searching = [each for each, found_there in answered if each.go_on(found_there)]


class Lookups:
    """Asks the daemon, unless it is away or does not answer. Belongs to the scheduler's thread."""

    def __init__(
        self, settings: Settings, errors: ErrorLog, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.breaker = Breaker()
        self._settings = settings
        self._errors = errors
        self._clock = clock
        self._stores = Stores(settings, threads=1)
        self.planner = Planner()  # of all stores: what bringing pages and computing prompts has taken
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tierstore-find")
        self._bringers = ThreadPoolExecutor(_BRINGERS, thread_name_prefix="tierstore-remote")
        self._shards: tuple[Shard, ...] = ()
        self._batches = 0
        self._late = 0  # the last batch whose answers did not come in time

    def connect(self, shards: Sequence[Shard]) -> None:
        """Begin to look up these pages: the workers are ready. Before this call nothing is found. Raises
        :class:`~tierstore.errors.UsageError`."""
        self._shards = tuple(shards)
        self._open()
        self._stores.wait_connected(_CONNECT_S)  # or not: then it is misses until the daemon comes

    def renew(self) -> None:
        """Use new identities from now on. Lookups that are under way find nothing."""
        self._stores.renew(self._open)

    def _open(self) -> None:
        for shard in self._shards:
            for group in shard.groups:
                self._stores.open(group.identity, group.page_bytes, shard.chunk_tokens)

    @property
    def connected(self) -> bool:
        """Whether there are pages to find."""
        return bool(self._shards)

    @property
    def reachable(self) -> bool:
        """Whether the daemon is there."""
        return self.connected and self._stores.connected

    def may_ask(self) -> bool:
        """Whether the daemon is there and not left alone. After True something is to be asked."""
        return self.reachable and self.breaker.allows(self._clock())

    def ask(self, lookups: Sequence[PromptLookup], epoch: str) -> None:
        """Ask for all of these prompts, soon and together."""
        places = [
            _Place(
                self._stores.open(group.identity, group.page_bytes, shard.chunk_tokens),
                under_epoch(group.identity, epoch),
                group.rule,
            )
            for shard in self._shards
            for group in shard.groups
        ]
        self._batches += 1
        for lookup in lookups:
            lookup.batch, lookup.asked_at, lookup.epoch = self._batches, self._clock(), epoch
            if lookup.promise is not None:
                self._threads.submit(self._expect, lookup, lookup.promise, places)
        questions = [
            [_Question(lookup, place) for place in places] for lookup in lookups if lookup.promise is None
        ]
        if questions and any(place.store.backend.remote for place in places):
            self._bringers.submit(self._ask_further, questions)
        elif questions:
            self._threads.submit(self._ask, questions)

    def poll(self, lookup: PromptLookup, *, patient: bool) -> int | None:
        """The tokens that a lookup has found; None: poll again in the next step. A lookup without an answer
        after ``lookup_s`` has found nothing. ``patient``: wait for a millisecond or a few."""
        now = self._clock()
        if lookup.promise is not None:
            late = now - lookup.asked_at > lookup.promise.until_s + self._settings.lookup_s
            if not (lookup.promise_over or late):
                if patient:
                    lookup.wait(_POLL_S)
                return None
            lookup.promise = None
            self.ask([lookup], lookup.epoch)
        if lookup.first_polled is None:
            lookup.first_polled = now
            lookup.wait(_FIRST_POLL_S if patient else 0)
        elif patient:
            lookup.wait(_POLL_S)
        if lookup.answered and not lookup.late:
            self.breaker.succeeded()
            return lookup.tokens()
        patience_s = self._settings.lookup_s + lookup.extra_s
        if not lookup.answered and self._clock() - lookup.first_polled < patience_s:
            return None
        lookup.late = True
        if lookup.batch > self._late:  # one question, as far as the breaker is concerned
            self._late = lookup.batch
            self.breaker.failed(self._clock())
        lookup.release()
        return 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._bringers.shutdown(wait=False, cancel_futures=True)
        self._stores.close()

    # -- on a thread -----------------------------------------------------------------------------------

    def _expect(self, lookup: PromptLookup, promise: Promise, places: Sequence[_Place]) -> None:
        try:
            lookup.expect(places, promise)
        except StoreClosedError:  # asked of a session that has been given up
            lookup.expect([], promise)
        except Exception as error:  # noqa: BLE001  # on this thread it would go unseen
            self._errors.caught("waiting for promised pages", error)
            lookup.expect([], promise)

    def _ask_further(self, questions: Sequence[Sequence[_Question]]) -> None:
        """Have pages come that other hosts have of these prompts, and ask then."""
        try:
            self._bring_from_others(questions)
        except StoreClosedError:
            pass  # asked of a session that has been given up: so will _ask be
        except Exception as error:  # noqa: BLE001  # on this thread it would go unseen
            self._errors.caught("bringing pages of other hosts", error)
        finally:
            self._ask(questions)

    def _bring_from_others(self, questions: Sequence[Sequence[_Question]]) -> None:
        """How far chains go with what other hosts have says what a hit there needs of pages that are asked
        for one by one; then all of that is brought."""
        chains = [[each for each in of_prompt if not each.by_name] for of_prompt in questions]
        hits = iter(
            look_up(
                (each.place.store, each.lookup.prompt(each.place.identity))
                for of_prompt in chains
                for each in of_prompt
            )
        )
        found = [[next(hits) for _ in of_prompt] for of_prompt in chains]
        for hit in (hit for of_prompt in found for hit in of_prompt):
            hit.release()
        searching: dict[PromptLookup, _Searching] = {}
        most = 0
        for of_prompt, of_chains in zip(questions, found, strict=True):
            lookup, named = of_prompt[0].lookup, [each for each in of_prompt if each.by_name]
            reach = min([lookup.found, *(hit.tokens + hit.remote_tokens for hit in of_chains)])
            if named:
                searching[lookup] = _Searching.begin(named, reach, elsewhere=True)
                most = max(most, reach)
        _search(list(searching.values()), gain=most)
        brought = []
        for of_prompt, of_chains in zip(chains, found, strict=True):
            for question, hit in zip(of_prompt, of_chains, strict=True):
                search_ended = searching.get(question.lookup)
                length = None if search_ended is None else search_ended.length
                brought.append((question, self._begin_bringing(question, hit, length)))
        for each in searching.values():
            for number, hit in each.hits.items() if each.length else ():
                question = each.questions[number]
                brought.append((question, self._begin_bringing(question, hit, each.length)))
        for question, bringing in brought:
            if bringing is not None:
                question.lookup.extra_s = self._settings.prefetch_s
        for _, bringing in brought:
            if bringing is not None:
                bringing.wait()

    def _begin_bringing(self, question: _Question, hit: Hit, length: int | None) -> Transfer[int] | None:
        """Have what a hit of ``length`` tokens (None: the longest) lacks in one place come from other hosts,
        where that is worth it."""
        store, within_s = question.place.store, self._settings.prefetch_s
        store.planner = self.planner
        if not question.by_name:
            return store.bring(hit, tokens=length, deadline_s=within_s)
        nbytes = len(hit.remote_positions) * store.spec.page_bytes
        if not nbytes or store.worth_bringing(0, length or 0, nbytes) is None:
            return None
        return hit.bring(within_s)

    def _ask(self, questions: Sequence[Sequence[_Question]]) -> None:
        """``questions`` by prompt."""
        lookups = [each[0].lookup for each in questions]
        try:
            self._ask_rounds(questions)
        except StoreClosedError:  # asked of a session that has been given up
            for lookup in lookups:
                lookup.release()
        except Exception as error:  # noqa: BLE001  # on this thread it would go unseen
            self._errors.caught("looking up a prompt", error)
            for lookup in lookups:
                lookup.release()
        finally:
            for lookup in lookups:
                lookup.end()

    def _ask_rounds(self, questions: Sequence[Sequence[_Question]]) -> None:
        # A prompt that the first group lacks is lacking in nearly all cases: one question finds that out. As
        # a rule all groups hold equally much: the others are not asked for more than the first has.
        chains = [
            sorted((each for each in of_prompt if not each.by_name), key=lambda each: each.windowed)
            for of_prompt in questions
        ]
        began = time.monotonic()
        _look_up(each[0] for each in chains if each)
        late = time.monotonic() - began >= self._settings.lookup_s
        for first, *_ in questions:
            if not first.lookup.found:
                first.lookup.late = late  # else the daemon has said that there is none
                first.lookup.end()  # it need not wait for the others
        _look_up(question for each in chains for question in each[1:])
        for of_prompt in chains:
            _fit_windows(of_prompt)
            self._plan(of_prompt)
        named = [[each for each in of_prompt if each.by_name] for of_prompt in questions]
        searching = [
            _Searching.begin(each, found) for each in named if each and (found := each[0].lookup.found)
        ]
        _search(searching)
        for search_ended in searching:
            search_ended.questions[0].lookup.limit(search_ended.length, exactly=True)
        # What one group lacks cannot be loaded of any, and need not be brought.
        everything = [question for each in questions for question in each]
        _look_up(
            each
            for each in everything
            if each.brought and not each.by_name and _tokens(each) > each.lookup.found
        )
        for each in everything:
            if each.hit is not None and each.brought and each.lookup.found:
                self._bring(each, each.hit)

    def _plan(self, questions: Sequence[_Question]) -> None:
        """Decline what the disk has of one prompt where it would come later than computing it. All groups are
        read at the same time, and their rates are measured so: one of them stands for all."""
        question = next((each for each in questions if each.brought and each.lookup.found), None)
        if question is None or question.hit is None:
            return
        lookup, store = question.lookup, question.place.store
        store.planner = self.planner
        planned = store.plan(question.hit, len(lookup.keys) * lookup.chunk_tokens + 1)
        if planned.declined:
            store.decline(question.hit, planned)
            lookup.decline(planned.tokens)

    def _bring(self, question: _Question, hit: Hit) -> None:
        """Begin to bring pages from disk, and measure that."""
        began, on_disk = self._clock(), hit.by_tier["disk"]
        brought = question.lookup.bring(hit, self._settings.prefetch_s, by_name=question.by_name)
        if brought is None:
            return
        token_bytes = question.place.store.spec.page_bytes / question.lookup.chunk_tokens

        def came() -> None:
            now = self._clock()
            late = brought.state is TransferState.EXPIRED
            tokens = on_disk if late else brought.wait() - (hit.tokens - on_disk)
            if brought.state is not TransferState.CANCELLED and tokens > 0:
                self.planner.moved("disk", tokens * token_bytes, now - began, now_s=now)

        brought.on_end(came)


def _look_up(questions: Iterable[_Question]) -> None:
    """Ask all of these at once, except for prompts that were released or are known not to be held."""
    asked = [each for each in questions if each.lookup.found]
    prompts = ((each.place.store, each.lookup.prompt(each.place.identity)) for each in asked)
    for question, hit in zip(asked, look_up(prompts) if asked else (), strict=True):
        question.answer(hit)


def _fit_windows(questions: Sequence[_Question]) -> None:
    """Limit a prompt's hit to what its windows can serve."""
    windows = [each for each in questions if each.windowed]
    if not windows:
        return
    lookup = windows[0].lookup
    held = [(each.place.rule, [range(_tokens(each))] if _tokens(each) else []) for each in windows]
    length = longest_hit(held, lookup.found, align=lookup.chunk_tokens)
    # Where an attention chunk begins nothing of the group is needed, and anything shorter may be.
    lookup.limit(length, exactly=any(_tokens(each) < length for each in windows))


def _tokens(question: _Question) -> int:
    return 0 if question.hit is None else question.hit.tokens
