"""Explain why the tokens after a hit are missed.

The pages of a prompt after its hit are examined one by one. A page in the tree may be damaged, or still being
saved. The table of departures knows pages that have left. Other identities of the same tenant may hold the
prompt. If other prompts continue differently at the end of the hit, their pages show where the prompt
diverges. The result divides the missed tokens into consecutive spans, each with one reason.

A tenant learns nothing about the prompts of other tenants: a tenant is part of an identity, departures are
found by identity, and other identities are only compared within one tenant.

All functions and methods of this module need the state's lock, except :meth:`Misses.explain`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import TypeAlias

import numpy as np
import xxhash

from tierstore.backend import NamedGroup, Registration
from tierstore.core.clients import Client, Refusal
from tierstore.core.departures import Cause, Departure
from tierstore.core.find import find
from tierstore.core.hits import HitSearch, HitView
from tierstore.core.prompts import ChainView, FoundPages, NamedView, PromptView
from tierstore.core.state import StoreState
from tierstore.errors import SpecError
from tierstore.explanation import CONTEXT_TOKENS, Miss, MissedRequest, MissReason
from tierstore.index import Page, Tier, common_tokens
from tierstore.keys import TOKEN_BYTES, TOKEN_DTYPE, Identity, Prompt, chunk_keys, root_key
from tierstore.spec import KVSpec, is_hashed

_MOST_IDENTITIES = 32  # other identities that are searched for the prompt
_MOST_ENDS = 512  # most lengths of a hit that are considered
_MOST_LENGTHS = 8  # most lengths of a hit for which all pages are looked up
_ONE_BY_ONE = 512  # missing pages that are examined one by one: takes a millisecond
_MOST_RECENT = 256  # requests that are remembered
_HOUR = 60  # minutes
_MOST_SIBLINGS = 256  # siblings of a missing page that are compared with it

_REASONS = {
    Cause.EVICTED: MissReason.EVICTED,
    Cause.BY_REQUEST: MissReason.EVICTED,
    Cause.EXPIRED: MissReason.EXPIRED,
    Cause.SUPERSEDED: MissReason.SUPERSEDED,
    Cause.LET_GO: MissReason.LET_GO,
    Cause.DAMAGED: MissReason.DAMAGED,
}
_NOT_WRITTEN = {
    Cause.BUDGET: "the disk's write budget was used up",
    Cause.QUEUE: "the queue of writes to disk was full",
    Cause.WORTH: "computing such pages is faster than reading them from disk",
    Cause.READ_ONLY: "the disk could not be written",
    Cause.NO_ROOM: "there was no room in host memory",
}


_Request: TypeAlias = "tuple[float, str, str, Identity, int, int, dict[str, int]]"
"""A request: time, tenant, client, identity, tokens of the prompt and of the hit, missed tokens by reason."""

# The values of reasons as constants, because reading ``value`` from an enumeration takes ten times as long.
_NEVER, _DIVERGED, _GROUP = (
    reason.value for reason in (MissReason.NEVER_SAVED, MissReason.DIVERGED, MissReason.GROUP)
)
_TAIL, _DECLINED = MissReason.TAIL.value, MissReason.DECLINED.value
_BY_CAUSE = {cause: _REASONS.get(cause, MissReason.NOT_WRITTEN).value for cause in Cause}


class Misses:
    """Explains the misses of one store. ``policy`` is the name of its eviction policy."""

    def __init__(self, state: StoreState, policy: str) -> None:
        self._state = state
        self._policy = policy
        self._minutes: deque[tuple[int, dict[str, int]]] = deque(maxlen=_HOUR + 1)
        self._minute_ends = 0.0
        self._recent: deque[_Request] = deque(maxlen=_MOST_RECENT)

    def explain(self, search: HitSearch, tokens: int) -> list[Miss]:
        """Return why the tokens after a hit of ``tokens`` tokens are missed. ``search`` must be concluded.
        Must run without the lock, because it reads the disk."""
        if (group := search.view.caller_named) is not None:
            misses = self._page_misses(search.view, group, tokens)
        else:
            with self._state.lock:
                misses = self._known_misses(search, tokens)
        misses += self._elsewhere(search, _end(misses, tokens))
        with self._state.lock:
            return self._completed(search, tokens, misses)

    def count(self, search: HitSearch, tokens: int) -> list[Miss]:
        """Return the same as :meth:`explain`, but without reading the disk."""
        return self._completed(search, tokens, self._known_misses(search, tokens))

    # -- counting --------------------------------------------------------------------------------------

    def missed(self, search: HitSearch, tokens: int, client: Client) -> None:
        """Count the missed tokens of a concluded search by reason, and remember the request. Counting takes
        several microseconds, because only the first missing page of the shortest chain is examined. If that
        page's departure is known, all following pages with a known departure are counted with the same
        cause."""
        view = search.view
        counts: dict[str, int] = {}
        if tokens < search.branch:
            _add(counts, _GROUP, search.branch - tokens)
        at, shortest = max(tokens, search.branch), search.shortest
        if at < view.num_tokens:
            if shortest is None:
                _add(counts, _NEVER, view.num_tokens - at)
            else:
                self._examine(view.chains[shortest], search.founds[shortest], at, view.num_tokens, counts)
        registered = view.chains[0].registration if view.chains else view.named[0].registration
        self._note(client, registered.identity, view.num_tokens, tokens, counts)

    def _examine(
        self, chain: ChainView, found: FoundPages, at: int, limit: int, counts: dict[str, int]
    ) -> None:
        """Count why the tokens of a chain from ``at`` on are missed."""
        chunk_tokens, identity = chain.chunk_tokens, chain.registration.identity
        first, whole = at // chunk_tokens, min(chain.whole_chunks, limit // chunk_tokens)
        tail = limit - max(whole * chunk_tokens, at) if identity.whole_pages else 0
        reason = _NEVER
        if first <= len(found.pages):
            parent = found.pages[first - 1] if first else self._state.index.tree.known_root(identity.digest)
            if at % chunk_tokens or (first and parent is not None and parent.children):
                reason = _DIVERGED
        if first < whole:
            departure = self._state.departures.of(identity.digest, chain.chunk(first)[0])
            if departure is not None:
                known = self._known(chain, first + 1, whole)
                end = min((first + 1 + known) * chunk_tokens, limit)
                if end == whole * chunk_tokens < limit == chain.num_tokens and not tail:
                    key = chain.chunk(whole)[0]  # key of the incomplete page at the prompt's end
                    end = end if self._state.departures.of(identity.digest, key) is None else limit
                _add(counts, _BY_CAUSE[departure.cause], end - at)
                at, reason = end, _NEVER
        if at < limit - tail:
            _add(counts, reason, limit - tail - at)
        if tail:
            _add(counts, _TAIL, tail)

    def _known(self, chain: ChainView, first: int, stop: int) -> int:
        """Return how many consecutive chunks from ``first`` on have a known departure. Later pages leave
        before earlier ones, so a binary search finds the last of them."""
        identity, keys = chain.registration.identity.digest, chain.all_keys()
        departures = self._state.departures
        return bisect_left(
            range(first, stop), True, key=lambda chunk: departures.of(identity, keys[chunk]) is None
        )

    def missed_pages(self, view: PromptView, found: FoundPages, limit: int, client: Client) -> None:
        """Count the missed tokens of a request for the pages of one group. Each missing named page is
        examined, but only the first missing page of a chain."""
        missed = limit - found.tokens
        identity = view.registration.identity
        missing = view.missing(found, limit)
        counts: dict[str, int] = {}
        for position in missing if view.named else missing[:1]:
            departure = self._state.departures.of(identity.digest, view.chunk(position)[0])
            tokens = min(view.chunk_tokens, missed) if view.named else missed
            _add(counts, _NEVER if departure is None else _BY_CAUSE[departure.cause], tokens)
            missed -= tokens
        if missed > 0:
            _add(counts, _TAIL, missed)
        self._note(client, identity, limit, found.tokens, counts)

    def declined(self, tokens: int) -> None:
        """Count tokens that a client found but did not load, because computing them is faster."""
        if tokens > 0:
            for counts in (self._state.counters.missed_tokens, self._this_minute()):
                _add(counts, _DECLINED, tokens)

    def last_hour(self) -> dict[str, int]:
        """Return the missed tokens of the last hour by reason, in descending order of their number."""
        since = int(self._state.clock() // 60) - _HOUR
        total: Counter[str] = Counter()
        for minute, counts in self._minutes:
            if minute > since:
                total.update(counts)
        return dict(total.most_common())

    def recent(self, tenant: str | None = None) -> list[MissedRequest]:
        """Return the last requests with missed tokens of ``tenant`` (None: of all tenants), newest first."""
        names = self._state.names
        return [
            MissedRequest(
                int(at_s),
                client,
                names.get(identity.digest) or identity.model or identity.digest.hex()[:8],
                prompt_tokens,
                hit_tokens,
                {MissReason(reason): tokens for reason, tokens in Counter(counts).most_common()},
            )
            for at_s, owner, client, identity, prompt_tokens, hit_tokens, counts in reversed(self._recent)
            if tenant is None or owner == tenant
        ]

    def _note(
        self,
        client: Client,
        identity: Identity,
        prompt_tokens: int,
        hit_tokens: int,
        counts: dict[str, int],
    ) -> None:
        counted, lately = self._state.counters.missed_tokens, self._this_minute()
        for reason, tokens in counts.items():
            _add(counted, reason, tokens)
            _add(lately, reason, tokens)
        # A plain tuple, because a NamedTuple takes four times as long.
        self._recent.append(
            (time.time(), client.tenant, client.name, identity, prompt_tokens, hit_tokens, counts)
        )

    def _this_minute(self) -> dict[str, int]:
        now_s = self._state.clock()
        if now_s >= self._minute_ends:
            minute = int(now_s // 60)
            self._minute_ends = 60.0 * (minute + 1)
            self._minutes.append((minute, {}))
        return self._minutes[-1][1]

    # -- the spans -----------------------------------------------------------------------------------

    def _known_misses(self, search: HitSearch, tokens: int) -> list[Miss]:
        """Return why the tokens after a hit are missed, up to the first page that memory does not know."""
        view = search.view
        if (group := view.caller_named) is not None:
            return self._first_page_misses(view, group, tokens)
        misses: list[Miss] = []
        if tokens < search.branch:
            misses += self._group_misses(view, tokens, search.branch)
        at, chain = max(tokens, search.branch), _shortest(search)
        if chain is not None and at < view.num_tokens:
            misses += self._left(chain, at, view.num_tokens)
        return misses

    def _completed(self, search: HitSearch, tokens: int, misses: list[Miss]) -> list[Miss]:
        """Return ``misses`` and the miss of the remaining tokens of the request."""
        at, chain = _end(misses, tokens), _shortest(search)
        if chain is not None and at < search.view.num_tokens:
            following = at > max(tokens, search.branch)
            misses = [*misses, *self._new(search, chain, at, following=following)]
        elif chain is None and at < search.branch:
            misses = [*misses, Miss(MissReason.NEVER_SAVED, at, search.branch - at)]
        return _by_group(search, misses)

    # -- pages that the caller has named -----------------------------------------------------------------

    def _page_misses(self, view: HitView, group: NamedGroup, hit: int) -> list[Miss]:
        """Return why named pages after a hit are missed, up to the last page with a known reason. A request
        may have very many pages, so the lock is released after each batch of pages."""
        misses: list[Miss] = []
        for ends in _batches(view, hit):
            with self._state.lock:
                self._examine_pages(view, group, ends, misses)
            self._state.yield_lock()
        return _without_new(misses)

    def _first_page_misses(self, view: HitView, group: NamedGroup, hit: int) -> list[Miss]:
        """Return the misses of the first batch of pages, with its last reason for all later pages."""
        misses: list[Miss] = []
        for ends in islice(_batches(view, hit), 1):
            self._examine_pages(view, group, ends, misses)
            rest = view.num_tokens - view.num_tokens % view.chunk_tokens - ends[-1]
            misses[-1] = replace(misses[-1], tokens=misses[-1].tokens + rest)
        return _without_new(misses)

    def _examine_pages(
        self, view: HitView, group: NamedGroup, ends: Sequence[int], misses: list[Miss]
    ) -> None:
        """Append to ``misses`` why the named pages that end at ``ends`` are missed. Needs the lock."""
        chunk_tokens = view.chunk_tokens
        pages, here = view.pages(group, ends), frozenset(group.here)
        identity = group.registration.identity.digest
        in_tree = pages.tree_pages(self._state, range(len(ends)))
        for end, key, page in zip(ends, pages.keys, in_tree, strict=True):
            first = end - chunk_tokens
            if end in here and misses:
                miss = replace(misses[-1], first=first, tokens=chunk_tokens)  # useless without earlier pages
            else:
                known = self._in_tree(page, misses, first, chunk_tokens) if page is not None else None
                departure = self._state.departures.of(identity, key) if known is None else None
                miss = known or (
                    self._of(departure, first, chunk_tokens)
                    if departure is not None
                    else Miss(MissReason.NEVER_SAVED, first, chunk_tokens)
                )
            _append(misses, miss)

    # -- a layer group that lacks pages ----------------------------------------------------------------

    def _group_misses(self, view: HitView, hit: int, branch: int) -> Iterator[Miss]:
        """Yield why the hit is shorter than the stored prefix of the groups with chained pages. Up to the
        last length whose named pages were all stored once, the reason is that these pages have left. For the
        tokens after that length, the reason is that the pages were never saved."""
        chunk = view.chunk_tokens
        whole = branch - branch % chunk
        ends = [branch, *range(whole - (whole == branch) * chunk, hit, -chunk)]
        at = hit
        likely = (end for end in islice(ends, _MOST_ENDS) if self._may_have_been_held(view, end))
        for end in islice(likely, _MOST_LENGTHS):
            lacking = self._lacking(view, end)
            if lacking and all(departure is not None for _, departure in lacking):
                group, departure = max(lacking, key=lambda pair: pair[1].at_s if pair[1] else 0)
                assert departure is not None
                yield self._group_miss(view, hit, end - hit, group, departure)
                at = end
                break
        if at < branch:
            lacking = self._lacking(view, branch)
            yield self._group_miss(view, at, branch - at, lacking[0][0] if lacking else 0, None)

    def _may_have_been_held(self, view: HitView, length: int) -> bool:
        """Return whether, for every named group, the last page that a hit of this length needs has a known
        departure or is stored. This check is fast, and its result is False for most lengths."""
        return all(
            departure is not None
            for group in view.named
            for departure in self._missing(view, group, group.rule.ends(length, view.chunk_tokens)[-1:])
        )

    def _missing(self, view: HitView, group: NamedGroup, ends: Sequence[int]) -> list[Departure | None]:
        """Return the departures of those pages of a group at ``ends`` that neither the store nor the client
        has, with None for a page without a known departure."""
        pages = view.pages(group, [end for end in ends if end not in group.here])
        missing = pages.missing(pages.find(self._state, pages.num_tokens), pages.num_tokens)
        identity = group.registration.identity.digest
        return [self._state.departures.of(identity, pages.keys[each]) for each in missing]

    def _group_miss(
        self, view: HitView, first: int, tokens: int, group: int, departure: Departure | None
    ) -> Miss:
        """Return a miss that one named group causes. In a model that also has chained groups, the reason of
        the miss is ``GROUP``."""
        if departure is None:
            miss = Miss(MissReason.NEVER_SAVED, first, tokens)
        else:
            miss = self._of(departure, first, tokens)
        number = len(view.chains) + group
        if not view.chains:
            return replace(miss, group=number)
        return replace(miss, reason=MissReason.GROUP, group=number, cause=miss.reason)

    def _lacking(self, view: HitView, length: int) -> list[tuple[int, Departure | None]]:
        """Return the numbers of the named groups that lack a page for a hit of this length. Each number has
        the last of the lacking pages' departures, or None if one of these pages has no known departure."""
        lacking: list[tuple[int, Departure | None]] = []
        for at, group in enumerate(view.named):
            known = self._missing(view, group, group.rule.ends(length, view.chunk_tokens))
            if known:
                seen = [each for each in known if each is not None]
                last = max(seen, key=lambda each: each.at_s) if len(seen) == len(known) else None
                lacking.append((at, last))
        return lacking

    # -- a chain -------------------------------------------------------------------------------------

    def _left(self, chain: ChainView, first: int, limit: int) -> list[Miss]:
        """Return why the pages of a chain from token ``first`` on are missed, up to the first page that
        neither the tree nor the table of departures knows."""
        state, chunk_tokens = self._state, chain.chunk_tokens
        identity = chain.registration.identity.digest
        start, stop = first // chunk_tokens, min(chain.whole_chunks, limit // chunk_tokens)
        in_tree = chain.in_tree(state, range(start, stop))
        keys = chain.all_keys()
        misses: list[Miss] = []
        at, cut_off = first, False
        for chunk in range(start, min(stop, start + _ONE_BY_ONE)):
            page = in_tree[chunk - start] if chunk - start < len(in_tree) else None
            end = (chunk + 1) * chunk_tokens
            miss = self._in_tree(page, misses, at, end - at) if page is not None else None
            if miss is None:
                departure = state.departures.of(identity, keys[chunk])
                if departure is not None:
                    miss = self._of(departure, at, end - at)
                    cut_off = departure.cause is Cause.NO_ROOM
                elif cut_off:  # the save ended before this page, so the store was never offered it
                    miss = replace(misses[-1], first=at, tokens=end - at)
                else:
                    break
            _append(misses, miss)
            at = end
        if at == (start + _ONE_BY_ONE) * chunk_tokens:
            known = self._known(chain, start + _ONE_BY_ONE, stop)
            _append(misses, replace(misses[-1], first=at, tokens=known * chunk_tokens))
            at += known * chunk_tokens
        if at < limit and not chain.registration.identity.whole_pages:
            if cut_off:
                _append(misses, replace(misses[-1], first=at, tokens=limit - at))
            else:
                self._left_inside(chain, at, limit, misses)
        return misses

    def _left_inside(self, chain: ChainView, at: int, limit: int, misses: list[Miss]) -> None:
        """Append the miss of an incomplete page that has left. The key of an incomplete page depends on its
        length, so all lengths are tried, the longest first."""
        chunk = at // chain.chunk_tokens
        start = chunk * chain.chunk_tokens
        tokens, before = chain.chunk(chunk)[1], chain.key_before(chunk)
        identity = chain.registration.identity.digest
        for count in range(
            min(len(tokens) // TOKEN_BYTES, limit - start, chain.chunk_tokens - 1), at - start, -1
        ):
            key = xxhash.xxh3_128_digest(before + tokens[: count * TOKEN_BYTES])
            departure = self._state.departures.of(identity, key)
            if departure is not None:
                _append(misses, self._of(departure, at, start + count - at))
                return

    def _in_tree(self, page: Page, before: Sequence[Miss], first: int, tokens: int) -> Miss | None:
        """Return why a page in the tree is missed; None if its state does not show the reason."""
        copies = [copy for copy in page.copies if copy is not None]
        if any(copy.damaged for copy in copies) or page.tombstone:
            return Miss(MissReason.DAMAGED, first, tokens)
        if any(copy.ready for copy in copies):
            if not self._state.health.readable and page.ready_tier() is Tier.DISK:
                return Miss(MissReason.LATE, first, tokens, tier="disk", why="the disk is offline")
            # The page is intact, but useless after a missing page.
            return replace(before[-1], first=first, tokens=tokens) if before else None
        if copies:
            return Miss(MissReason.LATE, first, tokens, why="the page is being saved")
        return None

    def _of(self, departure: Departure, first: int, tokens: int) -> Miss:
        cause, tier, at_s = departure
        age_s = float(max(self._state.departures.now_s() - at_s, 0))
        label = tier.label if tier is not None else ""
        if cause in _NOT_WRITTEN:
            why = _NOT_WRITTEN[cause]
            return Miss(MissReason.NOT_WRITTEN, first, tokens, tier=label, age_s=age_s, why=why)
        evicted = cause is Cause.EVICTED
        policy = self._policy if evicted else "request" if cause is Cause.BY_REQUEST else ""
        more = self._state.departures.left_since(at_s) if evicted else 0
        return Miss(
            _REASONS[cause], first, tokens, tier=label, age_s=age_s, policy=policy, more_bytes=more or None
        )

    # -- pages that were never seen ------------------------------------------------------------------

    def _new(self, search: HitSearch, chain: ChainView, first: int, *, following: bool) -> Iterator[Miss]:
        """Yield why a prompt's tokens from ``first`` on are missed, if their first page is neither stored nor
        known. With ``following``, missed pages precede it, so no stored page shows how other prompts
        continue."""
        chunk_tokens, limit = chain.chunk_tokens, search.view.num_tokens
        whole = limit // chunk_tokens * chunk_tokens
        tail = limit - max(whole, first) if chain.registration.identity.whole_pages else 0
        if first + tail < limit:
            rest = limit - tail - first
            yield (None if following else self._diverged(chain, first, rest)) or Miss(
                MissReason.NEVER_SAVED, first, rest
            )
        if tail > 0:
            yield Miss(MissReason.TAIL, limit - tail, tail)

    def _diverged(self, chain: ChainView, first: int, tokens: int) -> Miss | None:
        """Return the miss if stored prompts continue differently at ``first``; None if no stored prompt has
        anything in common with this one, or all of them end there."""
        chunk = first // chain.chunk_tokens
        pages = chain.first_pages(self._state, chunk)
        if pages is None:
            return None
        parent = pages[-1] if pages else chain.root(self._state)
        beside = [page for page in islice(parent.all_children(), _MOST_SIBLINGS) if any(page.copies)]
        if is_hashed(chain.registration.identity.layout):
            return Miss(MissReason.DIVERGED, first, tokens) if chunk and beside else None
        own = chain.chunk(chunk)[1]
        common, best = max(
            ((common_tokens(page.tokens, own), at) for at, page in enumerate(beside)), default=(0, -1)
        )
        if best < 0:
            table, serial = self._state.page_table, parent.serial
            more = chunk and table is not None and serial and table.children(serial)
            return Miss(MissReason.DIVERGED, first, tokens) if more else None
        ends = common == beside[best].num_tokens or common * TOKEN_BYTES == len(own)
        if ends or (not chunk and not common):
            return None
        at = chunk * chain.chunk_tokens + common
        held = _continuation(beside[best], common)
        return Miss(MissReason.DIVERGED, first, tokens, at=at, held_tokens=held)

    # -- other identities ----------------------------------------------------------------------------

    def _elsewhere(self, search: HitSearch, first: int) -> list[Miss]:
        """Return the miss of the tokens from ``first`` on that another identity of the tenant holds, with the
        fields in which the identities differ; an empty list if no other identity holds them."""
        view, chain = search.view, _shortest(search)
        group = view.caller_named
        if first >= view.num_tokens:
            return []
        if chain is not None:
            own, whole = chain.registration.identity, chain.whole()
            width = chain.chunk_tokens * TOKEN_BYTES
            by_engine = whole.keys[:1] != chunk_keys(root_key(own), whole.token_bytes[:width], width)
            held_under = partial(self._held, prompt=whole, by_engine=by_engine)
        elif group is not None:
            own = group.registration.identity
            held_under = partial(self._held_by_name, view=view, group=group, first=first)
        else:
            return []
        most = first - first % view.chunk_tokens
        fields: tuple[str, ...] = ()
        for other in self._others(own, view):
            held = held_under(other)
            if held > most:
                most, fields = held, _differing(own, other)
        tokens = min(most, view.num_tokens) - first
        return [Miss(MissReason.OTHER_IDENTITY, first, tokens, fields=fields)] if tokens > 0 else []

    def _others(self, own: Identity, view: HitView) -> list[Identity]:
        """Return the tenant's identities that a request does not name, in descending order of similarity."""
        state = self._state
        named = [group.registration for group in view.named]
        ours = {each.identity.digest for each in [*named, *(chain.registration for chain in view.chains)]}
        with state.lock:
            known = dict(state.identities)
            if state.disk is not None:
                known.update(state.disk.serials.identities())
        others = [each for each in known.values() if each.tenant == own.tenant and each.digest not in ours]
        others.sort(key=lambda each: len(_differing(own, each)))
        return others[:_MOST_IDENTITIES]

    def _held(self, identity: Identity, prompt: Prompt, *, by_engine: bool) -> int:
        """Return how many leading tokens of a prompt are stored under an identity. With ``by_engine``, the
        engine has made the prompt's keys, and they do not depend on the identity."""
        spec = _spec_of(identity)
        if spec is None or (by_engine and spec.chunk_tokens != prompt.chunk_tokens):
            return 0
        tokens, keys = prompt.token_bytes, prompt.keys
        if not by_engine:
            keys = chunk_keys(root_key(identity), tokens, spec.chunk_tokens * TOKEN_BYTES)
        other = Prompt.with_keys(identity, tokens, keys, chunk_tokens=spec.chunk_tokens)
        with find(self._state, other, len(keys) * spec.chunk_tokens, spec.page_bytes) as match:
            return match.tokens

    def _held_by_name(self, identity: Identity, view: HitView, group: NamedGroup, first: int) -> int:
        """Return the end of the last of the stored named pages that follow token ``first`` without a gap."""
        spec = _spec_of(identity)
        if spec is None or not spec.hashed or spec.chunk_tokens != view.chunk_tokens:
            return 0
        registration = Registration(identity, spec.page_bytes, spec.chunk_tokens)
        group = replace(group, registration=registration)
        for ends in _batches(view, first):
            try:
                missing = self._first_missing(view.pages(group, ends))
            except Refusal:  # another page size
                return 0
            if missing is not None:
                return ends[missing] - view.chunk_tokens
        return view.num_tokens - view.num_tokens % view.chunk_tokens

    def _first_missing(self, pages: NamedView) -> int | None:
        """Return the position of the first page that is neither in memory nor on disk; None without one."""
        state = self._state
        with state.lock:
            state.require_open()
            found = pages.find(state, pages.num_tokens)
        if found.look_on_disk:
            hold = pages.disk_look(state, pages.num_tokens)()
            with state.lock:
                try:
                    found = pages.find(state, pages.num_tokens)
                finally:
                    state.leases.release(hold)
        return next(iter(pages.missing(found, pages.num_tokens)), None)


def _batches(view: HitView, first: int) -> Iterator[range]:
    """Yield the ends of a request's whole pages from token ``first`` on, in batches for one hold of the
    lock."""
    ends = range(first + view.chunk_tokens, view.num_tokens + 1, view.chunk_tokens)
    for start in range(0, len(ends), _ONE_BY_ONE):
        yield ends[start : start + _ONE_BY_ONE]


def _without_new(misses: list[Miss]) -> list[Miss]:
    """Return the misses without a last one with the reason ``NEVER_SAVED``: another identity may have its
    pages."""
    return misses[:-1] if misses and misses[-1].reason is MissReason.NEVER_SAVED else misses


def _append(misses: list[Miss], miss: Miss) -> None:
    """Append a miss, or lengthen the last one if it has the same reason and details. Pages that left one
    after the other get the age of the first, because later pages are useless without it."""
    last = misses[-1] if misses else None
    if last is not None:
        same = replace(
            miss, first=last.first, tokens=last.tokens, age_s=last.age_s, more_bytes=last.more_bytes
        )
        if same == last:
            misses[-1] = replace(last, tokens=last.tokens + miss.tokens)
            return
    misses.append(miss)


def _by_group(search: HitSearch, misses: Sequence[Miss]) -> list[Miss]:
    """Attribute ``misses`` of the shortest chain to its layer group, as far as all other chains reach."""
    number, reached = search.shortest, list(search.reached)
    if number is None or len(reached) == 1:
        return list(misses)
    del reached[number]
    reach = min([*reached, search.view.num_tokens])
    found: list[Miss] = []
    for miss in misses:
        own = max(min(miss.end, reach) - miss.first, 0) if miss.first >= search.branch else 0
        if own:
            found.append(replace(miss, tokens=own, reason=MissReason.GROUP, cause=miss.reason, group=number))
        if own < miss.tokens:
            found.append(replace(miss, first=miss.first + own, tokens=miss.tokens - own))
    return found


def _shortest(search: HitSearch) -> ChainView | None:
    """Return the chain that limits the hit; None if there are no chains."""
    return search.view.chains[search.shortest] if search.shortest is not None else None


def _end(misses: Sequence[Miss], hit: int) -> int:
    """Return the position of the first token after a hit and the given misses."""
    return misses[-1].end if misses else hit


def _add(counts: dict[str, int], reason: str, tokens: int) -> None:
    counts[reason] = counts.get(reason, 0) + tokens


def _continuation(page: Page, first: int) -> tuple[int, ...]:
    """Return a page's tokens from ``first`` on, followed by the tokens of its newest descendants."""
    tokens = page.tokens[first * TOKEN_BYTES :]
    while len(tokens) < CONTEXT_TOKENS * TOKEN_BYTES and page.children:
        page = next(reversed(page.children.values()))
        tokens += page.tokens
    return tuple(np.frombuffer(tokens[: CONTEXT_TOKENS * TOKEN_BYTES], TOKEN_DTYPE).tolist())


def _spec_of(identity: Identity) -> KVSpec | None:
    """Return the spec of an identity; None if its layout was not made from one."""
    try:
        return KVSpec.parse(identity.layout)
    except SpecError:
        return None


def _differing(own: Identity, other: Identity) -> tuple[str, ...]:
    """Return the fields in which two identities of one tenant differ; layouts are compared field by field."""
    ours, theirs = asdict(own), asdict(other)
    names = [name for name in ours if ours[name] != theirs[name]]
    if "layout" in names:
        try:
            pair = [asdict(KVSpec.parse(each.layout)) for each in (own, other)]
        except SpecError:
            return tuple(names)
        at = names.index("layout")
        names[at : at + 1] = [f"layout {name}" for name in pair[0] if pair[0][name] != pair[1][name]]
    return tuple(names)
