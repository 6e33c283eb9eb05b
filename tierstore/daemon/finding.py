"""Lookups of a connected store: what is in HBM, and what the daemon has behind it.

Any number of questions is asked at once, of one store or of several, and then waited for together: an engine
has as many about one prompt as it has workers times KV cache groups, and with a round trip for each they
would come near the end of its patience. One question is the same with one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from tierstore.daemon.connected_hit import ConnectedHit
from tierstore.daemon.local import LocalPages
from tierstore.daemon.remembered import Question
from tierstore.daemon.remote import Asked, Remote
from tierstore.store.base import DEFAULT_LEASE_S

# On their way to the daemon at a time. More gain nothing, and each may have to wait for a disk there.
_AT_ONCE = 32


class Finder:
    """Thread-safe. The sync and the asyncio face differ in how they wait, and in nothing else."""

    def __init__(self, local: LocalPages, remote: Remote) -> None:
        self.local = local
        self.remote = remote

    def lookup(self, question: Question) -> ConnectedHit:
        return look_up([(self, question)])[0]

    async def lookup_async(self, question: Question) -> ConnectedHit:
        search = Search(self, question, time.monotonic())
        try:
            if search.registering is not None:
                await search.registering
            search.ask()
            if search.asked is not None:
                await search.asked.call
            return search.hit()
        except BaseException:
            search.give_up()
            raise


class Search:
    """One question, from the moment that it is asked to its answer. Belongs to one thread (or task).

    It has until ``patience_s`` of its store after ``began`` (by ``time.monotonic()``), whatever comes before
    its own request: searches that began together end together."""

    def __init__(self, finder: Finder, question: Question, began: float) -> None:
        self._local = finder.local
        self._remote = finder.remote
        self._question = question
        self._ends = began + finder.remote.connection.patience_s
        self.asked: Asked | None = None
        self._needed = self._local.match(question).tokens < question.num_tokens
        # What has to end before the question can be sent; None in nearly all cases.
        self.registering = self._remote.registering(question) if self._needed else None

    def ask(self, *, led: bool = False) -> None:
        """Send it, if there is something to ask for and still time. ``led``: this thread waits for the answer
        at once."""
        if self._needed:
            self.asked = self._remote.ask(self._question, self._ends - time.monotonic(), led=led)

    def hit(self) -> ConnectedHit:
        """What was found; waits for it."""
        question, state = self._question, self._local.state
        lease = self._remote.answer(self.asked) if self.asked is not None else None
        # Looked at again, because the daemon's answer took its time and nothing was held meanwhile.
        match = self._local.match(question)
        session = self._remote.connection.session
        lease_s = session.lease_s if session is not None else DEFAULT_LEASE_S
        with state.lock:
            held = self._local.use(match, question.num_tokens, lease_s)
            hit = ConnectedHit(state, self._remote, question, match, held, lease)
            for label, tokens in hit.by_tier.items():
                state.counters.hit_tokens[label] += tokens
        return hit

    def give_up(self) -> None:
        """Nobody wants to know any more: what the daemon holds for the answer is given back, now or when the
        answer comes."""
        if self.asked is not None:
            self._remote.give_up(self.asked)


def look_up(wanted: Iterable[tuple[Finder, Question]]) -> list[ConnectedHit]:
    """The hits, in the order of ``wanted``. It all takes no longer than the longest ``patience_s`` among the
    stores. When anything raises (``wanted`` itself included), nothing stays held."""
    began = time.monotonic()
    searches: list[Search] = []
    hits: list[ConnectedHit] = []
    try:
        for finder, question in wanted:  # the daemon works on the first while the next is made
            search = Search(finder, question, began)
            searches.append(search)
            if search.registering is None:
                _ask_next(searches, len(searches) - 1)
        for at, search in enumerate(searches):
            if search.registering is not None:
                search.registering.wait()
                _ask_next(searches, at)
        for search in searches:
            hits.append(search.hit())
    except BaseException:
        for hit in hits:
            hit.release()
        for search in searches[len(hits) :]:
            search.give_up()
        raise
    return hits


def _ask_next(searches: list[Search], at: int) -> None:
    """Send one, when there are not too many on their way."""
    before = searches[at - _AT_ONCE].asked if at >= _AT_ONCE else None
    if before is not None:
        before.call.wait()
    searches[at].ask(led=True)
