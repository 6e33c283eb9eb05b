"""Lookups: find the longest hit that all layer groups support, in HBM and in the backend.

The store matches a prompt with the pages in HBM. The store's request to the backend says which pages are in
HBM, and the backend finds the longest hit of all layer groups (:meth:`Backend.find_hit
<tierstore.backend.Backend.find_hit>`). A hit usually ends at the end of a chunk. A hit may also end inside
the last chunk that the chained groups have, if every group has a page that ends at that token. Pages that the
caller has named are found individually (:meth:`Backend.find <tierstore.backend.Backend.find>`).

Other hosts may have pages that would make the hit longer. :meth:`Store.fetch_remote
<tierstore.Store.fetch_remote>` fetches them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tierstore.arguments import whole_number
from tierstore.backend import (
    Backend,
    GroupLease,
    HitLease,
    HitRequest,
    Lease,
    LookupRequest,
    NamedGroup,
    NamedRequest,
    Registration,
)
from tierstore.errors import UsageError
from tierstore.explanation import Miss
from tierstore.groups import Group, GroupRule, Past, by_kind, groups_of, search
from tierstore.index import Match, Page
from tierstore.index.leases import PageLease
from tierstore.keys import (
    NAME_BYTES,
    Identity,
    Prompt,
    PromptInput,
    TokenIds,
    encode_tokens,
    named_chunks,
)
from tierstore.spec import KVSpec
from tierstore.store.hbm import HbmTier
from tierstore.store.hit import ChainPart, Hit, HitPart, NamedHitPart, RemotePages, RulePart, Source
from tierstore.store.prompts import PromptCache
from tierstore.transfer import Transfer, joined
from tierstore.types import Promise

_NOTHING = GroupLease(Lease(0, 0, 0, (), 0.0))


class Finder:
    """Makes requests to a backend from prompts, one for each layer group, and begins lookups."""

    def __init__(
        self,
        hbm: HbmTier,
        backend: Backend,
        spec: KVSpec,
        identity: Identity,
        lookup_s: float,
        groups: Sequence[Group] | None = None,
    ) -> None:
        self.hbm = hbm
        self.backend = backend
        self.identity = identity
        self.lookup_s = lookup_s
        self.chunk_tokens = spec.chunk_tokens
        self.of_inputs = spec.of_inputs
        self.groups = groups_of(spec) if groups is None else tuple(groups)
        self.rules = tuple(group.rule for group in self.groups)
        self.chained, self.named = by_kind(self.groups)
        self.prompts = PromptCache(spec.chunk_tokens)
        self._layout = spec.describe()  # stored, because every lookup compares it
        # Groups that the engine defines may have equal layouts, so a layout does not identify such a group.
        single = self.groups if groups is None else ()
        self._by_layout = {group.spec.describe(): group for group in single}
        self._only = self.chained[0] if len(single) == 1 and self.chained else None

    def group(self, number: int) -> Group:
        """Return a layer group. Raise :class:`UsageError` if the model does not have it."""
        number = whole_number("group", number)
        if not 0 <= number < len(self.groups):
            raise UsageError(
                f"group must lie between 0 and {len(self.groups) - 1}, the model's layer groups, got {number}"
            )
        return self.groups[number]

    def named_group(self, prompt: Prompt, group: Group, here: Sequence[int]) -> NamedGroup:
        """Return the request for a model's prompt in a group with named pages. The caller already has the
        pages that end at the tokens ``here``."""
        identity, names = prompt.identity_of(group.number), list[bytes]()
        if group.rule.inputs:
            names = prompt.names_of(group.number, group.rule.ends(len(prompt), self.chunk_tokens))
        registration = Registration(identity, group.page_bytes, self.chunk_tokens)
        return NamedGroup(registration, group.rule, here, names)

    def source(self, group: Group, held: PageLease, lease: Lease | None) -> Source:
        """Return the source of a group's pages that a lookup has found."""
        return Source(self.hbm, self.backend, group, held, lease, self.lookup_s)

    # -- prompts -------------------------------------------------------------------------------------

    def prompt(self, prompt: Prompt | TokenIds, inputs: Sequence[PromptInput] = ()) -> Prompt:
        """Return a prompt for this store. With ``inputs``, return a copy that has them. Raise
        :class:`UsageError` if the prompt has another layout than the model and its groups."""
        if inputs:
            prompt = self.prompt(prompt).copy()
            prompt.place(inputs)
        if not isinstance(prompt, Prompt):
            if self.of_inputs:
                raise UsageError("embeddings are found by their input, not by tokens: use Store.embedding")
            return self.prompts.prompt(self.identity, encode_tokens(prompt))
        layout = prompt.identity.layout
        known = layout == self._layout or layout in self._by_layout
        if prompt.chunk_tokens != self.chunk_tokens or not known:
            raise UsageError("the prompt has another page layout than this store: make it with this store")
        return prompt

    def embedding(self, content: bytes, rows: int) -> Prompt:
        """See :meth:`Store.embedding <tierstore.Store.embedding>`."""
        self.hbm.require_process()
        if not self.of_inputs:
            raise UsageError(
                "this store has pages of prompts: for embeddings, open a store with KVSpec.embedding"
            )
        return Prompt.of_input(self.identity, content, rows, chunk_tokens=self.chunk_tokens)

    def single(self, prompt: Prompt | TokenIds) -> tuple[Group, LookupRequest] | None:
        """Return the request for a prompt if it concerns one group with known pages: the model has only one
        group, with chained pages, or the caller has chosen the group (:meth:`Prompt.pages_of`,
        :meth:`Prompt.named_pages`). Otherwise return None."""
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
            raise UsageError("this layer group has named pages: use Prompt.named_pages")
        return group, self.prompts.request(
            prompt.identity, group.page_bytes, prompt.token_bytes, list(prompt.keys)
        )

    def chain(self, prompt: Prompt, group: Group) -> LookupRequest:
        """Return the request for a model's prompt in a group with chained pages."""
        identity = prompt.identities[group.number]
        keys = list(prompt.keys_of(group.number))
        return self.prompts.request(identity, group.page_bytes, prompt.token_bytes, keys)

    def pages_at(self, prompt: Prompt, group: Group, ends: Sequence[int]) -> NamedRequest:
        """Return the request for the named pages of a group that end at these tokens of a model's prompt."""
        keys, data = named_chunks(prompt.names_of(group.number, ends), self.chunk_tokens)
        identity = prompt.identity_of(group.number)
        return NamedRequest(identity, group.page_bytes, self.chunk_tokens, data, len(data), keys)

    def _named_pages(self, pages: Prompt, group: Group) -> NamedRequest:
        data = pages.token_bytes
        return NamedRequest(
            pages.identity,
            group.page_bytes,
            pages.chunk_tokens,
            data,
            len(data),
            list(pages.keys),
            depth=pages.pages_before,
        )

    # -- lookups -------------------------------------------------------------------------------------

    def begin(
        self,
        prompt: Prompt | TokenIds,
        *,
        max_tokens: int | None,
        began: float,
        gain: int = 0,
        counted: bool = True,
    ) -> Lookup:
        """Return a lookup that has not been sent yet. The lookup's time limit is ``lookup_s`` seconds after
        ``began`` (by ``time.monotonic()``), whenever its request is sent, so that lookups which began
        together end together. ``gain`` and ``counted``: see :func:`tierstore.lookup_all`."""
        return Lookup(self, prompt, _limit(max_tokens), began + self.lookup_s, gain, counted=counted)

    def explain(self, prompt: Prompt | TokenIds, max_tokens: int | None, timeout_s: float) -> Lookup:
        """Return a lookup that has not been sent yet, and that also requests why tokens are missed."""
        ends = time.monotonic() + timeout_s
        return Lookup(self, prompt, _limit(max_tokens), ends, 0, counted=False, explain=True)

    def expect(self, prompt: Prompt | TokenIds, promise: Promise) -> Transfer[None]:
        """See :meth:`Store.expect <tierstore.Store.expect>`."""
        chunk_tokens = self.chunk_tokens
        chunks = promise.tokens // chunk_tokens
        single = self.single(prompt)
        if single is not None:
            group, request = single
            chunks = min(chunks, len(request.keys))
            request = request.limited(chunks * chunk_tokens)
            return self._expect(group, request, promise.until_s) if chunks else Transfer.completed(None)
        prompt = self.prompt(prompt)
        length = min(chunks, len(prompt) // chunk_tokens) * chunk_tokens
        needed = self.needed(prompt, length)
        expected = [self._expect(group, request, promise.until_s) for group, request in needed]
        return joined(expected, lambda _: None, deadline_s=promise.until_s, clock=self.hbm.clock)

    def needed(self, prompt: Prompt, tokens: int) -> list[tuple[Group, LookupRequest]]:
        """Return the requests for all pages that a hit of ``tokens`` tokens of a model's prompt needs."""
        if not tokens:
            return []
        chains = [(group, self.chain(prompt, group).cut(tokens)) for group in self.chained]
        return [*chains, *self.named_needed(prompt, tokens)]

    def named_needed(self, prompt: Prompt, tokens: int) -> list[tuple[Group, LookupRequest]]:
        """Return the requests for the named pages that a hit of ``tokens`` tokens needs."""
        groups = [prompt.bound(group) for group in self.named]
        ends = [(group, group.rule.ends(tokens, self.chunk_tokens)) for group in groups]
        return [(group, self.pages_at(prompt, group, each)) for group, each in ends if each]

    def _expect(self, group: Group, request: LookupRequest, until_s: float) -> Transfer[None]:
        if self.hbm.has_all(request, group.number):
            return Transfer.completed(None)
        return self.backend.expect(request, wait_s=until_s)


def _caller_named(pages: tuple[Group, LookupRequest]) -> Group:
    """Return the layer group of pages that the caller has named, with the rule that all of them are needed.
    Raise :class:`UsageError` if the pages' keys are not the beginning of their names."""
    group, request = pages
    names = [request.chunk(at)[:NAME_BYTES] for at in range(request.num_chunks)]
    if named_chunks(names, request.chunk_tokens) != (request.keys, request.data):
        raise UsageError("only pages that have names of 32 bytes are explained: use Prompt.named_pages")
    return replace(group, rule=GroupRule.all())


def _limit(max_tokens: int | None) -> int | None:
    return None if max_tokens is None else max(whole_number("max_tokens", max_tokens), 0)


class Lookup:
    """One lookup, from its request to its hit. Only one thread (or task) may use it."""

    def __init__(
        self,
        finder: Finder,
        prompt: Prompt | TokenIds,
        limit: int | None,
        ends: float,
        gain: int,
        *,
        counted: bool,
        explain: bool = False,
    ) -> None:
        self._finder = finder
        self._counted = counted
        self._ends = ends
        self._asked = False
        self._hit: Hit | None = None
        self._request: NamedLookup | HitLookup
        single = finder.single(prompt)
        if single is None:
            prompt = finder.prompt(prompt)
            chains = [finder.chain(prompt, group) for group in finder.chained]
            self._request = HitLookup(
                finder, finder.chained, chains, limit, prompt, finder.named, counted=counted, explain=explain
            )
        elif not isinstance(single[1], NamedRequest):
            chained = [single[0]]
            self._request = HitLookup(finder, chained, [single[1]], limit, counted=counted, explain=explain)
        elif explain:
            prompt, group = finder.prompt(prompt), _caller_named(single)
            whole = None if limit is None else limit - limit % finder.chunk_tokens
            self._request = HitLookup(finder, [], [], whole, prompt, [group], counted=counted, explain=True)
        else:
            self._request = NamedLookup(finder, single[0], single[1], gain, counted=counted)
        self.limit = self._request.limit
        """The number of the prompt's tokens that are looked up."""
        self.prompt_tokens = self._request.prompt_tokens
        """The number of tokens in the whole prompt."""

    def ask(self, *, caller_receives: bool = False) -> None:
        """Send the request. Call it only once. ``caller_receives`` says that this thread waits for the
        answer."""
        self._asked = True
        self._request.ask(self._ends - time.monotonic(), caller_receives=caller_receives)

    @property
    def answer(self) -> Transfer[Any] | None:
        """The running request; None if there is none."""
        return self._request.answer

    @property
    def misses(self) -> Sequence[Miss] | None:
        """The reasons why tokens are missed, after :meth:`hit`; None if there was no answer."""
        return self._request.misses

    def hit(self) -> Hit:
        """Wait for the answer and return the hit. Send the request first if :meth:`ask` was not called."""
        if not self._asked:
            self.ask(caller_receives=True)
        hit = self._hit = self._request.found()
        if self._counted:
            hbm = self._finder.hbm
            with hbm.lock:
                counters = hbm.counters
                counters.lookups += 1
                counters.lookup_tokens += self.limit
                for label, count in hit.by_tier.items():
                    counters.hit_tokens[label] += count
        return hit

    async def hit_async(self) -> Hit:
        """Send the request, await its answer and return the hit."""
        self.ask()
        while self.answer is not None:
            await self.answer
            if isinstance(self._request, NamedLookup) or not self._request.ask_again():
                break
        return self.hit()

    def give_up(self) -> None:
        """Release the leases of the answer, now or as soon as the answer arrives."""
        if self._hit is None:
            self._request.give_up()
        else:
            self._hit.release()


class NamedLookup:
    """The request for pages that the caller has named, and its answer. ``gain`` and ``counted``: see
    :func:`tierstore.lookup_all`."""

    def __init__(
        self, finder: Finder, group: Group, request: NamedRequest, gain: int, *, counted: bool
    ) -> None:
        self.limit = self.prompt_tokens = request.num_tokens
        self.answer: Transfer[Lease | None] | None = None
        self.misses: Sequence[Miss] | None = None  # never known for such a request
        self._finder = finder
        self._group = group
        self._request = request
        self._gain = gain
        self._counted = counted
        self._asked: Sequence[int] = ()  # positions of the pages that the backend is requested to find

    def ask(self, patience_s: float, *, caller_receives: bool) -> None:
        """Request the pages that are not in HBM, if there are any and ``patience_s`` is not over."""
        finder, request = self._finder, self._request
        here = finder.hbm.match_named(request, self._group.number)
        self._asked = [at for at in range(request.num_chunks) if at not in here]
        if not self._asked or patience_s <= 0:
            return
        if here:
            request = request.part(self._asked)
        request.gain, request.counted = self._gain, self._counted
        self.answer = finder.backend.find(request, patience_s=patience_s, caller_receives=caller_receives)

    def found(self) -> Hit:
        """Wait for the answer and return the hit. Match HBM again, because its pages were not leased while
        the request was running."""
        finder, request, group = self._finder, self._request, self._group
        hbm, backend = finder.hbm, finder.backend
        answer = self.answer.wait() if self.answer is not None else None
        asked = set(self._asked)
        found = hbm.match_named(request, group.number)
        here = {at: page for at, page in found.items() if at not in asked}
        with hbm.lock:
            held = hbm.use(request, list(here.values()), backend.lease_s, positions=here)
        lease = answer if answer is not None and answer.tokens else None
        part = NamedHitPart(finder.source(group, held, lease), request, here, self._asked)
        others = []
        if answer is not None and answer.remote_positions:
            far = [self._asked[at] for at in answer.remote_positions]
            ends = [(at + 1) * request.chunk_tokens for at in far]
            others.append(RemotePages(backend, request.part(far), request.page_bytes, 0, ends))
        return Hit(hbm, backend, request.chunk_tokens, part.tokens, [part], branch=part.tokens, others=others)

    def give_up(self) -> None:
        """Release the leases of the answer, now or as soon as the answer arrives."""
        answer = self.answer
        if answer is not None and not answer.cancel():
            lease = answer.wait()
            if lease is not None and lease.tokens:
                self._finder.backend.release(lease)


class HitLookup:
    """The request for the longest hit of a prompt, and its answer. ``chains`` are the requests for the
    ``chained`` groups of the prompt. ``named`` are the groups whose pages are found by name."""

    def __init__(
        self,
        finder: Finder,
        chained: Sequence[Group],
        chains: Sequence[LookupRequest],
        limit: int | None,
        prompt: Prompt | None = None,
        named: Sequence[Group] = (),
        *,
        counted: bool = True,
        explain: bool = False,
    ) -> None:
        self._counted = counted
        self._explain = explain
        self.prompt_tokens = tokens = chains[0].num_tokens if prompt is None else len(prompt)
        self.limit = tokens if limit is None else min(limit, tokens)
        self.answer: Transfer[HitLease | None] | None = None
        self.misses: Sequence[Miss] | None = None  # known after found(), if they were requested
        self._finder = finder
        self._prompt = prompt
        self._chained = chained
        self._named = named if prompt is None else [prompt.bound(group) for group in named]
        self._chains = [chain.cut(self.limit) for chain in chains]
        self._matches: Sequence[Match] = ()
        self._here: Mapping[int, Mapping[int, Page]] = {}  # named pages in HBM, by group and by their ends
        self._held = PageLease()  # a lease on all matched pages in HBM, until the hit is known
        self._local = 0  # length of the hit that the pages in HBM support
        self._branch = 0
        self._ends = 0.0
        self._shorter: HitLease | None = None  # the first answer, if there is a second request

    def ask(self, patience_s: float, *, caller_receives: bool) -> None:
        """Request the pages that are not in HBM, if there are any and ``patience_s`` is not over."""
        finder, hbm = self._finder, self._finder.hbm
        self._ends = time.monotonic() + patience_s
        groups = zip(self._chains, self._chained, strict=True)
        self._matches = [hbm.match(chain, group.number) for chain, group in groups]
        self._branch = min([*(match.tokens for match in self._matches), self.limit])
        self._here = {group.number: self._pages_here(group) for group in self._named}
        with hbm.lock:
            # A lease on the last page of a match also keeps the pages before it.
            last = (page for match in self._matches for page in match.pages[-1:])
            named = (page for pages in self._here.values() for page in pages.values())
            self._held = hbm.hold([*last, *named], finder.lookup_s)
        self._local = self._longest_here()
        if self._local < self.limit and patience_s > 0:
            self.answer = finder.backend.find_hit(
                self._hit_request(), patience_s=patience_s, caller_receives=caller_receives
            )

    def _hit_request(self) -> HitRequest:
        finder, prompt = self._finder, self._prompt
        here = [match.tokens for match in self._matches]
        request = HitRequest(
            finder.chunk_tokens,
            self.limit,
            self._chains,
            here,
            counted=self._counted,
            explain=self._explain,
        )
        if prompt is not None and self._named:
            chunks = self.limit // finder.chunk_tokens
            request.named = [
                finder.named_group(prompt, group, sorted(self._here[group.number])) for group in self._named
            ]
            request.names, request.tail = prompt.names(chunks), prompt.chunk(chunks)
            request.root = prompt.root
        return request

    def _pages_here(self, group: Group) -> Mapping[int, Page]:
        """Return the pages of a group that are in HBM, by the token at which they end: whole pages, and pages
        that end inside the last chunk of the prompt or of the chains."""
        chunk_tokens = self._finder.chunk_tokens
        if not self._in_hbm(group):
            return {}
        if group.rule.past is Past.CROSS:
            asked = list(group.rule.ends(self.limit, chunk_tokens))
        else:
            ends = {*range(chunk_tokens, self.limit + 1, chunk_tokens)}
            for end in (self.limit, self._branch):
                ends.update(_inside(end, chunk_tokens))
            asked = sorted(ends)
        return self._match_ends(group, asked)

    def _in_hbm(self, group: Group) -> bool:
        """Return whether HBM may have pages of this group."""
        hbm = self._finder.hbm
        return bool(hbm.pools and hbm.published[group.number])

    def _match_ends(self, group: Group, ends: Sequence[int]) -> dict[int, Page]:
        """Return the pages of a group that are in HBM and end at these tokens, by their ends."""
        found = self._finder.hbm.match_named(self._pages_at(group, ends), group.number)
        return {ends[at]: page for at, page in found.items()}

    def _pages_at(self, group: Group, ends: Sequence[int]) -> NamedRequest:
        assert self._prompt is not None, "named pages need a prompt"
        return self._finder.pages_at(self._prompt, group, ends)

    def _longest_here(self) -> int:
        if not self._named:
            return self._branch
        rules = {group.number: group.rule for group in self._named}
        looking = search(rules, self._branch, self._finder.chunk_tokens)
        try:
            wanted = next(looking)
            while True:
                here = self._here
                wanted = looking.send(
                    {group: [end for end in ends if end in here[group]] for group, ends in wanted.items()}
                )
        except StopIteration as end:
            return int(end.value)

    def ask_again(self) -> bool:
        """Wait for the answer. If HBM has named pages that end in the chunk where the backend's chains end,
        send one more request, which includes these pages. Only the first answer shows which chunk that is.
        Return whether the request was sent."""
        found = self.answer.wait() if self.answer is not None else None
        patience_s = self._ends - time.monotonic()
        if found is None or found.tokens >= found.branch or self._shorter is not None or patience_s <= 0:
            return False
        hbm, more = self._finder.hbm, list[Page]()
        for group in self._named:
            here = self._here[group.number]
            ends = [end for end in _inside(found.branch, self._finder.chunk_tokens) if end > found.tokens]
            if ends and group.rule.past is not Past.CROSS and self._in_hbm(group):
                new = {end: page for end, page in self._match_ends(group, ends).items() if end not in here}
                self._here = {**self._here, group.number: {**here, **new}}
                more += new.values()
        if not more:
            return False
        with hbm.lock:
            self._held = hbm.leases.joined(self._held, hbm.hold(more, self._finder.lookup_s))
        self._shorter, self._counted = found, False
        self.answer = self._finder.backend.find_hit(self._hit_request(), patience_s=patience_s)
        return True

    def found(self) -> Hit:
        """Wait for the answer and return the hit."""
        finder, hbm = self._finder, self._finder.hbm
        self.ask_again()
        found = self.answer.wait() if self.answer is not None else None
        if found is None:
            found, self._shorter = self._shorter, None
        self._release(self._shorter)
        answered = self.answer is None or found is not None
        if found is not None:
            for chain, each in zip(self._chains, found.chains, strict=True):
                finder.prompts.remember(chain, each.lease.handle)
        else:
            chains, others = [_NOTHING] * len(self._chains), [_NOTHING] * len(self._named)
            found = HitLease(self._local, self._branch, chains, others)
        self.misses = self._misses(found) if self._explain and answered else None
        tokens, branch = found.tokens, found.branch if self._chained else found.tokens
        parts: list[HitPart] = []
        if tokens:
            parts += [self._chain_part(at, tokens, each.lease) for at, each in enumerate(found.chains)]
            named = zip(self._named, found.named, strict=True)
            parts += [
                self._named_part(group, ends, each.lease)
                for group, each in named
                if (ends := group.rule.ends(tokens, finder.chunk_tokens))
            ]
            parts.sort(key=lambda part: part.group)
        with hbm.lock:
            hbm.leases.release(self._held)
        if tokens and self._prompt is not None:
            points = self._prompt.points
            for group in self._named:
                if group.rule.past is Past.CROSS:
                    continue
                points[group.number] = sorted({*points.get(group.number, ()), tokens})
        return Hit(
            hbm,
            finder.backend,
            finder.chunk_tokens,
            tokens,
            parts,
            branch=branch,
            remote_tokens=found.remote_tokens,
            others=self._others(found) if found.remote_tokens else (),
        )

    def _misses(self, found: HitLease) -> Sequence[Miss]:
        """Return why tokens are missed, with the model's numbers of the layer groups."""
        numbers = [group.number for group in (*self._chained, *self._named)]
        return [
            miss if miss.group is None else replace(miss, group=numbers[miss.group])
            for miss in found.misses
            if miss.group is None or 0 <= miss.group < len(numbers)
        ]

    def _chain_part(self, at: int, tokens: int, lease: Lease) -> HitPart:
        """Return the pages of chain ``at`` that a hit of ``tokens`` tokens needs."""
        finder, hbm, match = self._finder, self._finder.hbm, self._matches[at]
        chain, group = self._chains[at], self._chained[at]
        used = match.pages[: -(-min(tokens, match.tokens) // finder.chunk_tokens)]
        with hbm.lock:
            held = hbm.use(chain, used, finder.backend.lease_s)
        part = ChainPart(finder.source(group, held, lease if lease.tokens else None), chain, match)
        part.shorten(tokens)
        return part

    def _named_part(self, group: Group, ends: Sequence[int], lease: Lease) -> HitPart:
        finder, hbm, pages = self._finder, self._finder.hbm, self._here[group.number]
        request = self._pages_at(group, ends)
        here = {at: pages[end] for at, end in enumerate(ends) if end in pages}
        with hbm.lock:
            held = hbm.use(request, list(here.values()), finder.backend.lease_s, positions=here)
        asked = [at for at in range(len(ends)) if at not in here]
        source = finder.source(group, held, lease if lease.tokens else None)
        return RulePart(source, request, here, asked, ends)

    def _others(self, found: HitLease) -> list[RemotePages]:
        finder, others = self._finder, []
        for chain, each in zip(self._chains, found.chains, strict=True):
            if ends := each.remote_ends:
                first = ends[0] // finder.chunk_tokens - 1
                others.append(RemotePages(finder.backend, chain, chain.page_bytes, first, ends))
        for group, each in zip(self._named, found.named, strict=True):
            if ends := each.remote_ends:
                named, chunk_tokens = self._pages_at(group, ends), finder.chunk_tokens
                if group.rule.past is Past.CROSS:  # hits that reach into this chunk need the page
                    ends = [group.rule.chunk_of(end, chunk_tokens) * chunk_tokens + 1 for end in ends]
                others.append(RemotePages(finder.backend, named, group.page_bytes, 0, ends))
        return others

    def give_up(self) -> None:
        """Release the leases of the answer, now or as soon as the answer arrives."""
        hbm, answer = self._finder.hbm, self.answer
        with hbm.lock:
            hbm.leases.release(self._held)
        self._release(self._shorter)
        if answer is not None and not answer.cancel():
            self._release(answer.wait())

    def _release(self, found: HitLease | None) -> None:
        """Release the leases of an answer; nothing for None."""
        for group in found.groups if found is not None else ():
            if group.lease.tokens:
                self._finder.backend.release(group.lease)


def _inside(end: int, chunk_tokens: int) -> range:
    """Return the positions in the chunk of ``end``, up to ``end``, at which a partial page may end."""
    return range(end - end % chunk_tokens + 1, end + 1)
