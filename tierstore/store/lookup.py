"""Lookups: what is in HBM, what the backend has, and the longest hit that all layer groups can serve.

The groups with chained pages are asked first. How far all of them go is the *branch*, and the longest hit
that there can be. What the other groups need of that is asked for next, which mostly is the answer: a prompt
goes on where an earlier one ended. If it is not, names are asked for from there towards the front, further
each time, until the longest hit is known (:func:`tierstore.groups.search`). It is a whole number of chunks,
or ends inside of the branch's own, where all groups have a page that ends at that token.

Where chains go on at other hosts, or named pages are lacking here, the same search is made once more, with
what other hosts seem to have counted as held: :meth:`Store.bring <tierstore.Store.bring>` has that come.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import TypeAlias

from tierstore.arguments import whole_number
from tierstore.backend import Backend, Lease, LookupRequest
from tierstore.errors import UsageError
from tierstore.groups import Group, groups_of, search
from tierstore.index.leases import PageLease
from tierstore.keys import Identity, Prompt, TokenIds, encode_tokens
from tierstore.spec import KVSpec
from tierstore.store.hbm import HbmTier
from tierstore.store.hit import Hit, NamedMatch, Part
from tierstore.store.prompts import PromptCache
from tierstore.transfer import Transfer, joined
from tierstore.types import Promise


class Finder:
    """Says what a prompt's pages are in each layer group, as requests to a backend, and begins lookups."""

    def __init__(
        self, hbm: HbmTier, backend: Backend, spec: KVSpec, identity: Identity, lookup_s: float
    ) -> None:
        self.hbm = hbm
        self.backend = backend
        self.identity = identity
        self.lookup_s = lookup_s
        self.chunk_tokens = spec.chunk_tokens
        self.groups = groups_of(spec)
        self.rules = tuple(group.rule for group in self.groups)
        self.prompts = PromptCache(spec.chunk_tokens)
        self._layout = spec.describe()  # compared at every lookup
        self._by_layout = {group.spec.describe(): group for group in self.groups}
        self._only = self.groups[0] if len(self.groups) == 1 and not self.groups[0].named else None

    @property
    def chained(self) -> list[Group]:
        """The groups with chained pages."""
        return [group for group in self.groups if not group.named]

    @property
    def named(self) -> list[Group]:
        """The groups with named pages."""
        return [group for group in self.groups if group.named]

    # -- prompts -------------------------------------------------------------------------------------

    def prompt(self, prompt: Prompt | TokenIds) -> Prompt:
        """A prompt of the model's, or pages of one group. Raises :class:`UsageError` for those of another
        layout."""
        if not isinstance(prompt, Prompt):
            return self.prompts.prompt(self.identity, encode_tokens(prompt))
        layout = prompt.identity.layout
        known = layout == self._layout or layout in self._by_layout
        if prompt.chunk_tokens != self.chunk_tokens or not known:
            raise UsageError("the prompt was made for another page layout than this store's")
        return prompt

    def single(self, prompt: Prompt | TokenIds) -> tuple[Group, LookupRequest] | None:
        """The one request that asks for a prompt: where the model has one group with chained pages, and where
        the prompt is pages of one group (:meth:`Prompt.pages_of`, :meth:`Prompt.named_pages`). None where
        what is asked for depends on what is held."""
        if not isinstance(prompt, Prompt):
            if self._only is None:
                return None
            data = encode_tokens(prompt)
            return self._only, self.prompts.request_of(self.identity, self._only.page_bytes, data)
        layout = self.prompt(prompt).identity.layout
        group = self._by_layout.get(layout)
        if group is None:
            return None
        if prompt.named:
            return group, self._named_pages(prompt, group)
        if group.named:
            raise UsageError("pages of this layer group are found by name: use Prompt.named_pages")
        return group, self.prompts.request(
            prompt.identity, group.page_bytes, prompt.token_bytes, list(prompt.keys)
        )

    def chain(self, prompt: Prompt, group: Group) -> LookupRequest:
        """A model's prompt in a group with chained pages."""
        identity = prompt.identity.groups[group.number]
        keys = list(prompt.keys_of(group.number))
        return self.prompts.request(identity, group.page_bytes, prompt.token_bytes, keys)

    def pages_at(self, prompt: Prompt, group: Group, ends: Sequence[int]) -> LookupRequest:
        """The pages of a group with named pages that end behind so many of a model's prompt's tokens."""
        return self._named_pages(prompt.pages_at(group.number, ends), group)

    def _named_pages(self, pages: Prompt, group: Group) -> LookupRequest:
        data = pages.token_bytes
        return LookupRequest(
            pages.identity,
            group.page_bytes,
            pages.chunk_tokens,
            data,
            len(data),
            list(pages.keys),
            loose=True,
            depth=pages.pages_before,
        )

    # -- lookups -------------------------------------------------------------------------------------

    def begin(
        self, prompt: Prompt | TokenIds, *, max_tokens: int | None, began: float, gain: int = 0
    ) -> Lookup:
        """A lookup, which has not asked yet. It has until ``lookup_s`` after ``began`` (by
        ``time.monotonic()``), whatever comes before its own request: lookups that began together end
        together. ``gain``: see :func:`tierstore.lookup_all`."""
        limit = None if max_tokens is None else max(whole_number("max_tokens", max_tokens), 0)
        return Lookup(self, prompt, limit, began + self.lookup_s, gain)

    def expect(self, prompt: Prompt | TokenIds, promise: Promise) -> Transfer[None]:
        """See :meth:`Store.expect <tierstore.Store.expect>`."""
        chunk_tokens = self.chunk_tokens
        chunks = promise.tokens // chunk_tokens
        single = self.single(prompt)
        if single is not None:
            group, request = single
            chunks = min(chunks, len(request.keys))
            request = request if request.loose else request.cut(chunks * chunk_tokens)
            return self._expect(group, request, promise.until_s) if chunks else Transfer.completed(None)
        prompt = self.prompt(prompt)
        length = min(chunks, len(prompt) // chunk_tokens) * chunk_tokens
        needed = self.needed(prompt, length)
        expected = [self._expect(group, request, promise.until_s) for group, request in needed]
        return joined(expected, lambda _: None, deadline_s=promise.until_s, clock=self.hbm.clock)

    def needed(self, prompt: Prompt, tokens: int) -> list[tuple[Group, LookupRequest]]:
        """What a hit of so many tokens of a model's prompt needs of each group."""
        requests = []
        for group in self.groups if tokens else ():
            if not group.named:
                requests.append((group, self.chain(prompt, group).cut(tokens)))
            elif ends := group.rule.ends(tokens, self.chunk_tokens):
                requests.append((group, self.pages_at(prompt, group, ends)))
        return requests

    def _expect(self, group: Group, request: LookupRequest, until_s: float) -> Transfer[None]:
        if request.loose:
            here = len(self.hbm.match_named(request, group.number)) * request.chunk_tokens
        else:
            here = self.hbm.match(request, group.number).tokens
        if here >= request.num_tokens:
            return Transfer.completed(None)
        return self.backend.expect(request, wait_s=until_s)


Round: TypeAlias = "list[PartLookup]"
Rounds: TypeAlias = "Generator[Round, None, Hit]"


class Lookup:
    """One lookup, from the moment that it is asked to its hit: rounds of requests, each of which depends on
    the answers to the one before. Belongs to one thread (or task)."""

    def __init__(
        self, finder: Finder, prompt: Prompt | TokenIds, limit: int | None, ends: float, gain: int
    ) -> None:
        self._finder = finder
        self._ends = ends
        self._asked: Round = []  # all so far
        self._parts: list[Part] = []  # their answers
        single = finder.single(prompt)
        self._rounds: Rounds
        if single is None:
            self._rounds = self._all_groups(finder.prompt(prompt), limit)
        else:
            group, request = single
            request = request if limit is None or request.loose else request.cut(limit)
            self._rounds = self._one_group(group, request, gain)
        self._round: Round = []

    def ask(self, *, caller_receives: bool = False) -> Hit | None:
        """Ask what is to be asked next, once all answers of the last round are there (or are to be waited
        for); the hit when there is nothing left to ask. ``caller_receives``: this thread waits."""
        try:
            self._round = next(self._rounds)
        except StopIteration as end:
            hit: Hit = end.value
            return hit
        self._asked += self._round
        for each in self._round:
            each.ask(self._ends - time.monotonic(), caller_receives=caller_receives)
        return None

    @property
    def answers(self) -> list[Transfer[Lease | None]]:
        """Of the last round, those that are waited for."""
        return [each.answer for each in self._round if each.answer is not None]

    def hit(self) -> Hit:
        """What was found; waits for it."""
        while True:
            hit = self.ask(caller_receives=True)
            if hit is not None:
                return hit

    def give_up(self) -> None:
        """Nobody wants to know any more: what is held for the answers is given back, now or when they
        come."""
        for part in self._parts:
            part.release()
        for each in self._asked[len(self._parts) :]:
            each.give_up()

    # -- what is asked -------------------------------------------------------------------------------

    def _one_group(self, group: Group, request: LookupRequest, gain: int) -> Rounds:
        yield [PartLookup(self._finder, group, request, gain=gain)]
        part = self._found(self._round)[0]
        tokens, others = part.tokens, [part]
        return self._hit(request.num_tokens, tokens, others, tokens, part.remote_tokens, others)

    def _all_groups(self, prompt: Prompt, limit: int | None) -> Rounds:
        finder = self._finder
        limit = len(prompt) if limit is None else min(limit, len(prompt))
        yield [PartLookup(finder, group, finder.chain(prompt, group).cut(limit)) for group in finder.chained]
        chains = self._found(self._round)
        branch = min((part.tokens for part in chains), default=limit)
        tokens, named = yield from self._find(prompt, branch)
        remote_tokens, others = yield from self._find_elsewhere(prompt, chains, limit, tokens)
        for part in chains:
            part.shorten(tokens)
        parts = sorted([*chains, *named], key=lambda part: part.group) if tokens else []
        for part in self._parts:
            if part not in parts:
                part.release()
        for group in finder.named if tokens else ():
            prompt.points[group.number] = sorted({*prompt.points.get(group.number, ()), tokens})
        return self._hit(limit, tokens, parts, branch if chains else tokens, remote_tokens, others)

    def _find(
        self, prompt: Prompt, branch: int, *, gain: int = 0
    ) -> Generator[Round, None, tuple[int, list[Part]]]:
        """The longest hit of at most ``branch`` tokens, and what it needs of the groups with named pages.
        ``gain``: with what other hosts seem to have, which is worth so many tokens."""
        finder = self._finder
        groups = {group.number: group for group in finder.named}
        looking = search(
            {number: group.rule for number, group in groups.items()}, branch, finder.chunk_tokens
        )
        parts: list[Part] = []
        try:
            wanted = next(looking)
            while True:
                asked = [(groups[number], ends) for number, ends in wanted.items()]
                yield [
                    PartLookup(finder, group, finder.pages_at(prompt, group, ends), ends=ends, gain=gain)
                    for group, ends in asked
                ]
                parts = self._found(self._round)
                wanted = looking.send({part.group: [*part.ends, *part.remote_ends] for part in parts})
        except StopIteration as end:
            return int(end.value), parts if end.value else []

    def _find_elsewhere(
        self, prompt: Prompt, chains: Sequence[Part], limit: int, tokens: int
    ) -> Generator[Round, None, tuple[int, list[Part]]]:
        """By how many tokens a hit of ``tokens`` would be longer with what other hosts seem to have, and in
        what that is."""
        chunk_tokens = self._finder.chunk_tokens
        reach = min((part.found + part.remote_tokens for part in chains), default=limit)
        reach = min(reach, limit) // chunk_tokens * chunk_tokens
        if not self._finder.backend.remote or reach <= tokens:
            return 0, []
        length, parts = yield from self._find(prompt, reach, gain=reach - tokens)
        if length <= tokens:
            return 0, []
        others = [part for part in [*parts, *chains] if any(end <= length for end in part.remote_ends)]
        return length - tokens, others

    def _found(self, asked: Round) -> list[Part]:
        parts = []
        for each in asked:
            parts.append(each.part())
            self._parts.append(parts[-1])
        return parts

    def _hit(
        self,
        limit: int,
        tokens: int,
        parts: Sequence[Part],
        branch: int,
        remote_tokens: int,
        others: Sequence[Part],
    ) -> Hit:
        finder, hbm = self._finder, self._finder.hbm
        hit = Hit(
            hbm,
            finder.backend,
            finder.chunk_tokens,
            tokens,
            parts,
            branch=branch,
            remote_tokens=remote_tokens,
            others=others,
        )
        with hbm.lock:
            counters = hbm.counters
            counters.lookups += 1
            counters.lookup_tokens += limit
            for label, count in hit.by_tier.items():
                counters.hit_tokens[label] += count
        return hit


class PartLookup:
    """The request for one group's pages, from the moment that it is asked to its answer. ``ends``: see
    :class:`~tierstore.store.hit.Part`. ``gain``: see :func:`tierstore.lookup_all`."""

    def __init__(
        self,
        finder: Finder,
        group: Group,
        request: LookupRequest,
        *,
        ends: Sequence[int] | None = None,
        gain: int = 0,
    ) -> None:
        self._finder = finder
        self._group = group
        self._request = request
        self._ends = ends
        self._gain = gain
        self._asked: Sequence[int] = ()  # of named pages, those that the backend is asked for
        self.answer: Transfer[Lease | None] | None = None

    def ask(self, patience_s: float, *, caller_receives: bool) -> None:
        """Ask for what is below HBM, if there is something to ask for and still time."""
        request, hbm, group = self._request, self._finder.hbm, self._group.number
        if request.loose:
            here = hbm.match_named(request, group)
            self._asked = [at for at in range(request.num_chunks) if at not in here]
            if here and self._asked:
                request = request.part(self._asked)
            request.gain = self._gain
            lacking = bool(self._asked)
        else:
            lacking = hbm.match(request, group).tokens < request.num_tokens
        if lacking and patience_s > 0:
            backend = self._finder.backend
            self.answer = backend.find(request, patience_s=patience_s, caller_receives=caller_receives)

    def part(self) -> Part:
        """What was found; waits for it."""
        finder, request, group = self._finder, self._request, self._group
        hbm, backend = finder.hbm, finder.backend
        lease = self.answer.wait() if self.answer is not None else None
        remote_tokens, others = 0, []
        if lease is not None:
            remote_tokens = lease.remote_tokens
            others = [self._asked[at] for at in lease.remote_positions]
            if not request.loose:
                finder.prompts.remember(request, lease.handle)
            lease = lease if lease.tokens else None
        # Looked at again, because the answer took its time and nothing was held meanwhile.
        if request.loose:
            asked = set(self._asked)
            here = {
                at: page for at, page in hbm.match_named(request, group.number).items() if at not in asked
            }
            with hbm.lock:
                held = hbm.use_named(here, request, backend.lease_s)
            named = NamedMatch(here, self._asked, others)
            return Part(hbm, backend, group, request, named, held, lease, finder.lookup_s, ends=self._ends)
        match, held = hbm.match(request, group.number), PageLease()
        if match.pages:
            with hbm.lock:
                held = hbm.use(match.pages, backend.lease_s)
        return Part(hbm, backend, group, request, match, held, lease, finder.lookup_s, remote_tokens)

    def give_up(self) -> None:
        """Give back what is held for the answer, now or when it comes."""
        answer = self.answer
        if answer is not None and not answer.cancel():
            lease = answer.wait()
            if lease is not None and lease.tokens:
                self._finder.backend.release(lease)
