"""One prompt's pages by layer group: a store for each group of a model, and one hit over all of them.

A model whose layers remember the past alike has one kind of pages, and a :class:`~tierstore.Store` keeps
them. Where layers differ (:mod:`tierstore.groups`) each group has pages of a size of its own, a pool of its
own in HBM, and a store of its own; the stores share one backend's tiers. What makes them one:

**Names.** Groups of which a hit needs every token are chains, found by tokens like any prompt. Of the others
only some pages are kept, so what comes before one cannot be asked for: their pages are *loose*. A loose page
is named by SHA-256, chained over the model's identity and the tokens of all chunks up to its own. The name
stands where a page has its tokens, so all of its 256 bits are compared. (XXH3 would not do: it can be made to
collide on purpose, and a chunk's own tokens say nothing of what is before them.) A page that is saved before
it is full, the last of a prompt, is named in the same way over the tokens that it has: it is found for a hit
that ends behind the last of these, and for no other.

**A lookup** asks the chains first. How far all of them go is the ``branch``, and the longest hit that there
can be. What the other groups need of that is asked for next, which mostly is the answer: a prompt goes on
where an earlier one ended. If it is not, names are asked for from there towards the front, further each
time, until the longest hit is known (:func:`tierstore.groups.search`). It is a whole number of chunks, or
ends inside of the branch's own, where all groups have a page that ends at that token.

**A load** is one transfer over all groups. What has come in time decides, by the same rule, how long the hit
is; pages that this needs not are given back. So a group that is late, or whose daemon has gone, shortens the
hit, and pages of different lengths are never mixed. Of a hit that ends inside of a page that page is the
caller's own in chains. Those of the other groups are shared: whoever goes on writes to a copy.

**Other hosts.** Where chains go on there, or loose pages are lacking here, the same search is made once more,
with what other hosts seem to have counted as held. What such a hit lacks here is brought all together
(:meth:`GroupedStore.bring`), and then found like anything else. The pages of a hit that is loaded are
offered to other hosts: the daemon cannot know which of the loose ones that it is asked for are used.

**Retention.** A turn's end is superseded once the same session has been saved to a later one: see
:mod:`tierstore.retention`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from tierstore.arguments import optional_seconds, whole_number
from tierstore.errors import UsageError
from tierstore.groups import GroupRule, Past, longest_of_pages, search
from tierstore.index import LABELS, Tier
from tierstore.keys import LEAST_NAMED_TOKENS, TOKEN_BYTES, Identity, Prompt, TokenIds
from tierstore.planner import Part, Plan
from tierstore.retention import checkpoint_tokens, superseded
from tierstore.spec import KVSpec
from tierstore.stats import StoreStats
from tierstore.store.hit import Hit
from tierstore.store.store import Store, lookup_all
from tierstore.tiers.frames import PoolSize
from tierstore.tiers.group_pools import room_for
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.two_level import SmallPages
from tierstore.tiers.two_level import check as check_pools
from tierstore.transfer import Transfer, TransferState
from tierstore.types import GroupPages, Hint, Loaded, Promise

R = TypeVar("R")


def group_specs(spec: KVSpec) -> tuple[KVSpec, ...]:
    """How the pages of each layer group are kept: of groups that need every token as chains, of the others by
    names. Raises :class:`UsageError` for chunks that are too short for a name."""
    parts = [part if _is_chain(part) else replace(part, hashed=True) for part in spec.split()]
    if any(part.hashed for part in parts) and spec.chunk_tokens < LEAST_NAMED_TOKENS:
        raise UsageError(
            f"pages of windows and states are named by {LEAST_NAMED_TOKENS} tokens' worth of bytes: "
            f"chunks of {spec.chunk_tokens} tokens are too short"
        )
    return tuple(parts)


def group_identity(model: Identity, part: KVSpec) -> Identity:
    """The identity of one layer group's pages: its model's, with the layout of its own."""
    return replace(model, layout=part.describe())


def _is_chain(part: KVSpec) -> bool:
    return GroupRule.of(part.groups[0]).past is Past.ALL


class GroupedPrompt(Prompt):
    """A prompt with what names its pages in every layer group. Grows like any; not thread-safe."""

    __slots__ = ("_identities", "_model", "_names", "_others", "points")

    def __init__(self, model: Identity, identities: Sequence[Identity], first: Prompt) -> None:
        """``identities`` are those of the groups; ``first`` is the prompt under the first of them, whose keys
        are taken over."""
        self._model = model
        self._identities = identities
        self._others: dict[int, Prompt] = {}  # of further chains, by group
        self._names: list[bytes] = []  # of whole chunks
        self.points: dict[int, list[int]] = {}
        """Save points of the conversation that this prompt goes on from, by group, in tokens."""
        super().__init__(identities[0], chunk_tokens=first.chunk_tokens)
        self._data += first.token_bytes
        self.keys.extend(first.keys)

    def extend(self, tokens: TokenIds) -> None:
        super().extend(tokens)
        for other in self._others.values():
            other.extend(tokens)

    def copy(self) -> GroupedPrompt:
        twin = GroupedPrompt(self._model, self._identities, super().copy())
        twin._others = {group: other.copy() for group, other in self._others.items()}
        twin._names = list(self._names)
        twin.points = {group: list(points) for group, points in self.points.items()}
        return twin

    def chain(self, group: int) -> Prompt:
        """The prompt as a group keeps it of which every token is needed."""
        if not group:
            return self
        other = self._others.get(group)
        if other is None:
            identity = self._identities[group]
            other = self._others[group] = Prompt(identity, self.tokens, chunk_tokens=self.chunk_tokens)
        return other

    def pages_of(self, group: int, rule: GroupRule) -> Prompt:
        """All of its whole chunks, as a group of that rule keeps them."""
        if rule.past is Past.ALL or not self.keys:
            return self.chain(group)
        whole = len(self.keys) * self.chunk_tokens
        return self.named(group, range(self.chunk_tokens, whole + 1, self.chunk_tokens))

    def named(self, group: int, ends: Sequence[int]) -> Prompt:
        """The pages that end behind so many of its tokens each, as a group keeps them that needs not every
        token."""
        names = [self._name(end) for end in ends]
        # And no place in the prompt: which of them leave is said by what is let go of.
        return Prompt.named_pages(self._identities[group], names, chunk_tokens=self.chunk_tokens)

    def _name(self, end: int) -> bytes:
        chunks, tokens = divmod(end, self.chunk_tokens)
        while len(self._names) < chunks:
            chunk = self.chunk(len(self._names))
            self._names.append(hashlib.sha256(self._name_before(len(self._names)) + chunk).digest())
        if not tokens:
            return self._names[chunks - 1]
        # Fewer tokens than a chunk has: no other page's name is made of so many bytes behind the same ones.
        return hashlib.sha256(self._name_before(chunks) + self.chunk(chunks)[: tokens * TOKEN_BYTES]).digest()

    def _name_before(self, chunk: int) -> bytes:
        return self._names[chunk - 1] if chunk else self._model.digest


@dataclass(frozen=True, slots=True)
class _Part:
    """What a hit needs of one group: pages that end behind these tokens. Where the group is a chain they are
    its first."""

    group: int
    chain: bool
    asked: Sequence[int]
    hit: Hit

    @property
    def ends(self) -> Sequence[int]:
        """Of each page, in the order of the hit's."""
        return self.asked if self.chain else [self.asked[at] for at in self.hit.positions]

    @property
    def remote_ends(self) -> Sequence[int]:
        """Likewise of the pages that other hosts seem to have."""
        if not self.chain:
            return [self.asked[at] for at in self.hit.remote_positions]
        return self.asked[self.hit.found // self.hit.chunk_tokens :]

    def runs(self) -> list[tuple[str, int]]:
        """Pages by tier, in the order of the hit's."""
        left, found = len(self.asked), []
        for tier, tokens in self.hit.by_runs():
            pages = min(-(-tokens // self.hit.chunk_tokens), left)
            left -= pages
            found.append((tier, pages))
        return found


class GroupedHit:
    """``tokens`` leading tokens of a prompt can be loaded, and of each group what a hit of that length needs:
    see :mod:`tierstore.groups`. ``branch`` is how far the groups go of which every token is needed.
    ``by_tier`` counts each token by the slowest tier that a page of its chunk which is needed lies in.
    Other hosts seem to have what one of ``remote_tokens`` more needs and is lacking here: in ``others``."""

    def __init__(
        self,
        tokens: int,
        branch: int,
        parts: Sequence[_Part],
        chunk_tokens: int,
        clock: Callable[[], float],
        remote_tokens: int = 0,
        others: Sequence[_Part] = (),
    ) -> None:
        self.tokens = tokens
        self.branch = branch
        self.parts = parts
        self.remote_tokens = remote_tokens
        self.others = others
        self.chunk_tokens = chunk_tokens
        self._clock = clock
        self.by_tier = self._count()

    def __repr__(self) -> str:
        return f"GroupedHit({self.tokens} tokens, {self.by_tier})"

    @property
    def num_pages(self) -> int:
        """Pages of a group of which every token is needed, the one that the hit ends inside of included."""
        return -(-self.tokens // self.chunk_tokens)

    @property
    def hbm_pages(self) -> int:
        """Whole leading pages of group 0 that are in HBM, however cold those of the others are."""
        if not self.parts or self.parts[0].group or not self.parts[0].chain:
            return 0
        runs = self.parts[0].runs()
        in_hbm = runs[0][1] if runs and runs[0][0] == Tier.HBM.label else 0
        return min(in_hbm, self.tokens // self.chunk_tokens)

    def _count(self) -> dict[str, int]:
        slowest = np.zeros(self.num_pages, np.uint8)
        for part in self.parts:
            start, chunks = 0, (np.asarray(part.ends, np.int64) - 1) // self.chunk_tokens
            for tier, pages in part.runs():
                run = chunks[start : start + pages]
                slowest[run] = np.maximum(slowest[run], _rank(tier))
                start += pages
        counts = np.bincount(slowest, minlength=len(LABELS)) * self.chunk_tokens
        if self.num_pages:
            counts[slowest[-1]] -= self.num_pages * self.chunk_tokens - self.tokens
        pairs = zip(LABELS, counts.tolist(), strict=True)
        return {label: count for label, count in pairs if count}

    def prefetch(self, *, deadline_s: float | None = None) -> Transfer[int]:
        """Bring what is on disk into host memory. The result is how many leading tokens are above the disk
        then: all, or those before the first pages that are not."""
        brought = [(part, part.hit.prefetch(deadline_s=deadline_s)) for part in self.parts]

        def settle(state: TransferState) -> int:
            tokens = self.tokens
            for part, transfer in brought:
                if state is TransferState.CANCELLED:
                    transfer.cancel()
                above = transfer.wait()
                if part.chain:
                    tokens = min(tokens, above)
                elif above < part.hit.tokens:
                    tokens = min(tokens, (part.asked[0] - 1) // self.chunk_tokens * self.chunk_tokens)
            return tokens if tokens == self.tokens else tokens // self.chunk_tokens * self.chunk_tokens

        return _together([transfer for _, transfer in brought], settle, deadline_s, self._clock)

    def release(self) -> None:
        """Give the leases of all groups back. Repeating it is harmless."""
        for part in self.parts:
            part.hit.release()

    def __enter__(self) -> GroupedHit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class GroupedStore:
    """The stores of a model's layer groups, as one. Thread-safe.

    Made by :func:`tierstore.open_groups` or :func:`tierstore.connect_groups`. Group ``i`` is the spec's
    ``i``-th, its pool ``pools[i]``. Everything behaves as a :class:`~tierstore.Store` does: what is full,
    slow, broken or away is a shorter hit or a miss.

    >>> import tierstore
    >>> from tierstore.spec import LayerGroup, LayerKind
    >>> full, window = LayerGroup(LayerKind.FULL_ATTENTION, (1,), 1, 64), LayerGroup(
    ...     LayerKind.SLIDING_WINDOW, (0,), 1, 64, window=64
    ... )
    >>> spec = tierstore.KVSpec((full, window), "float16")
    >>> pools = [tierstore.open_pool(part, 4) for part in spec.split()]
    >>> with tierstore.open_groups(None, spec, pools=pools, host_bytes=1 << 20) as store:
    ...     prompt = store.prompt(range(150))
    ...     for group, first, pages in ((0, 0, [0, 1]), (1, 1, [0])):
    ...         pages = store.allocate_hbm(len(pages), group=group)
    ...         _ = store.save_hbm(prompt, pages, first=first, group=group).wait()
    ...     with store.lookup(prompt) as hit:
    ...         hit.tokens, hit.branch
    (128, 128)
    """

    def __init__(
        self, stores: Sequence[Store], spec: KVSpec, *, identity: Identity, checkpoint: int | None = None
    ) -> None:
        """``stores`` are those of :func:`group_specs`, which this closes, the first one last. ``checkpoint``
        is how far apart save points are kept (None: :func:`~tierstore.retention.checkpoint_tokens`)."""
        self.spec = spec
        self.stores = tuple(stores)
        self.rules = tuple(GroupRule.of(part.groups[0]) for part in spec.split())
        self.identity = identity
        self.checkpoint_tokens = checkpoint_tokens(spec) if checkpoint is None else checkpoint
        self._identities = [store.identity for store in stores]
        self._chains = [group for group, rule in enumerate(self.rules) if rule.past is Past.ALL]
        self._loose = [group for group, rule in enumerate(self.rules) if rule.past is not Past.ALL]
        self.clock = self.stores[0].clock
        self.planner = self.stores[0].planner
        for store in self.stores:
            store.planner = self.planner  # what one group's loads tell of a tier is true of it for all

    def __repr__(self) -> str:
        return f"GroupedStore({', '.join(map(repr, self.stores))})"

    @property
    def pools(self) -> tuple[PagePool, ...]:
        """By group. Raises :class:`UsageError` where there are none."""
        return tuple(store.checked_pool() for store in self.stores)

    # -- finding -------------------------------------------------------------------------------------

    def prompt(self, tokens: TokenIds) -> GroupedPrompt:
        """``tokens`` under the model's identity, with what names their pages in each group."""
        return GroupedPrompt(self.identity, self._identities, self.stores[0].prompt(tokens))

    def lookup(self, prompt: Prompt | TokenIds, *, max_tokens: int | None = None) -> GroupedHit:
        """The longest hit of at most ``max_tokens`` that all groups can serve, leased in all of them until it
        is loaded or released, or the leases end."""
        prompt = self._checked(prompt)
        limit = len(prompt)
        if max_tokens is not None:
            limit = min(max(whole_number("max_tokens", max_tokens), 0), limit)
        hits = lookup_all(
            [(self.stores[each], prompt.chain(each)) for each in self._chains], max_tokens=limit
        )
        held = [hits]
        try:
            branch = min((hit.tokens for hit in hits), default=limit)
            tokens, loose = self._find(prompt, branch, held)
            for hit in hits:
                hit.shorten(tokens)
            ends = GroupRule.all().ends(tokens, self.spec.chunk_tokens)
            chains = [_Part(group, True, ends, hit) for group, hit in zip(self._chains, hits, strict=True)]
            parts = sorted([*chains, *loose], key=lambda part: part.group) if tokens else []
            remote_tokens, others = self._find_elsewhere(prompt, hits, limit, tokens, held)
        except BaseException:
            _release(hit for some in held for hit in some)
            raise
        needed = {id(part.hit) for part in parts}
        _release(hit for some in held for hit in some if id(hit) not in needed)
        for group in self._loose if tokens else ():
            prompt.points[group] = sorted({*prompt.points.get(group, ()), tokens})
        branch = branch if self._chains else tokens
        chunk_tokens = self.spec.chunk_tokens
        return GroupedHit(tokens, branch, parts, chunk_tokens, self.clock, remote_tokens, others)

    def expect(self, prompt: Prompt | TokenIds, promise: Promise) -> Transfer[None]:
        """:meth:`Store.expect <tierstore.Store.expect>` of what a hit of the promised tokens needs of each
        group."""
        prompt = self._checked(prompt)
        chunk_tokens, until_s = self.spec.chunk_tokens, promise.until_s
        length = min(promise.tokens, len(prompt)) // chunk_tokens * chunk_tokens
        parts = [self.stores[group].expect(prompt.chain(group), promise) for group in self._chains]
        for group in self._loose if length else ():
            ends = self.rules[group].ends(length, chunk_tokens)
            needed = Promise(len(ends) * chunk_tokens, until_s)
            parts.append(self.stores[group].expect(prompt.named(group, ends), needed))
        return _together(parts, lambda _: None, deadline_s=until_s, clock=self.clock)

    def _find(
        self, prompt: GroupedPrompt, branch: int, held: list[list[Hit]], *, gain: int = 0
    ) -> tuple[int, list[_Part]]:
        """The longest hit that the chains leave, and what it needs of the other groups. Every hit of a store
        on the way is in ``held``. ``gain``: with what other hosts seem to have, which is worth so many
        tokens."""
        looking = search({group: self.rules[group] for group in self._loose}, branch, self.spec.chunk_tokens)
        parts: list[_Part] = []
        try:
            wanted = next(looking)
            while True:
                parts = self._look(prompt, wanted, gain)
                held.append([part.hit for part in parts])
                wanted = looking.send({part.group: [*part.ends, *part.remote_ends] for part in parts})
        except StopIteration as end:
            return int(end.value), parts if end.value else []

    def _find_elsewhere(
        self, prompt: GroupedPrompt, chains: Sequence[Hit], limit: int, tokens: int, held: list[list[Hit]]
    ) -> tuple[int, list[_Part]]:
        """By how many tokens a hit of ``tokens`` would be longer with what other hosts seem to have, and in
        what that is."""
        chunk_tokens = self.spec.chunk_tokens
        reach = min((hit.found + hit.remote_tokens for hit in chains), default=limit)
        reach = min(reach, limit) // chunk_tokens * chunk_tokens
        if not self.remote or reach <= tokens:
            return 0, []
        length, parts = self._find(prompt, reach, held, gain=reach - tokens)
        if length <= tokens:
            return 0, []
        ends = GroupRule.all().ends(length, chunk_tokens)
        parts += [_Part(group, True, ends, hit) for group, hit in zip(self._chains, chains, strict=True)]
        return length - tokens, [part for part in parts if part.remote_ends]

    def _look(self, prompt: GroupedPrompt, wanted: Mapping[int, Sequence[int]], gain: int) -> list[_Part]:
        """What is held of the pages of each group that end there. ``gain``: as above; 0: other hosts are not
        asked."""
        named = [(self.stores[group], prompt.named(group, ends)) for group, ends in wanted.items()]
        hits = zip(wanted.items(), lookup_all(named, gain=gain), strict=True)
        return [_Part(group, False, ends, hit) for (group, ends), hit in hits]

    def _checked(self, prompt: Prompt | TokenIds) -> GroupedPrompt:
        if isinstance(prompt, GroupedPrompt):
            return prompt
        if isinstance(prompt, Prompt):
            raise UsageError("a store of several layer groups names pages itself: use its prompt()")
        return self.prompt(prompt)

    # -- loading -------------------------------------------------------------------------------------

    def load(self, hit: GroupedHit, *, deadline_s: float | None = None) -> Transfer[Loaded]:
        """Bring a hit into the pools: of each group the pages that the hit needs (``Loaded.groups``). At the
        deadline it ends with the longest hit that all groups can serve with what has arrived, after
        ``cancel()`` with none. The hit is released when it ends."""
        return self.load_part(hit, 0, hit.num_pages, deadline_s=deadline_s, last=True)

    def load_part(
        self, hit: GroupedHit, first: int, stop: int, *, deadline_s: float | None = None, last: bool = False
    ) -> Transfer[Loaded]:
        """:meth:`load` of chunks ``first … stop`` of the groups of which every token is needed. What the
        others need comes with the part that ends the hit; if that comes short of what any shorter hit needs,
        its result has no pages. The hit is released with its ``last`` load, or by the caller."""
        if not 0 <= first <= stop <= hit.num_pages:
            raise UsageError(f"a hit of {hit.num_pages} pages has no pages {first} … {stop}")
        deadline_s = optional_seconds("deadline_s", deadline_s)
        return _Load(self, hit, first, stop).start(deadline_s, last=last)

    # -- other hosts ---------------------------------------------------------------------------------

    @property
    def remote(self) -> bool:
        """Whether other hosts may have pages of every group."""
        return all(store.backend.remote for store in self.stores)

    def bring(self, hit: GroupedHit, *, deadline_s: float | None = None) -> Transfer[int] | None:
        """:meth:`Store.bring <tierstore.Store.bring>` of what a hit of ``hit.remote_tokens`` more needs of
        each group; the result is how many pages came in time."""
        if not hit.others:
            return None
        nbytes = sum(len(part.remote_ends) * self.stores[part.group].spec.page_bytes for part in hit.others)
        store = self.stores[hit.others[0].group]
        within_s = store.worth_bringing(hit.tokens, hit.remote_tokens, nbytes)
        if within_s is None:
            return None
        within_s = within_s if deadline_s is None else deadline_s
        length = hit.tokens + hit.remote_tokens
        brought = [part.hit.bring(within_s, tokens=length) for part in hit.others]

        def settle(_: TransferState) -> int:
            for transfer in brought:
                transfer.cancel()  # what has not ended by now
            return sum(transfer.wait() for transfer in brought)

        return _together(brought, settle, within_s, self.clock)

    # -- planning ------------------------------------------------------------------------------------

    def computed(self, tokens: int, behind: int, seconds: float) -> None:
        """An engine tells how long a prefill step took: see :meth:`tierstore.Store.computed`."""
        self.planner.computed(tokens, behind, seconds)

    def plan(self, hit: GroupedHit, prompt_tokens: int | None = None, *, block: int = 0) -> Plan:
        """Whether to load a hit, by what loads and prefill steps have taken lately: all of it or nothing,
        since the other groups serve its end only. See :meth:`Store.plan <tierstore.Store.plan>`."""
        now_s = self.clock()
        for tier, way in self.stores[0].backend.ways().items():
            self.planner.told(tier, way, now_s=now_s)
        nbytes: dict[str, float] = {}
        for part in hit.parts:
            page_bytes = self.stores[part.group].spec.page_bytes
            for tier, pages in part.runs():
                if tier != Tier.HBM.label:
                    nbytes[tier] = nbytes.get(tier, 0) + pages * page_bytes
        tiers = sorted(nbytes, key=_rank) or [Tier.HBM.label]
        # All tokens are the last tier's: there are none before all that is needed has come.
        parts = [Part(tier, 0, nbytes[tier]) for tier in tiers[:-1]]
        parts.append(Part(tiers[-1], hit.tokens, nbytes.get(tiers[-1], 0)))
        length = hit.tokens + 1 if prompt_tokens is None else prompt_tokens
        return self.planner.plan(parts, length, now_s=now_s, block=block)

    def meet(self, hit: GroupedHit, front: int, back: int) -> int:
        """See :meth:`Store.meet <tierstore.Store.meet>`: for pages of groups of which every token is needed,
        since the others come with the hit's end."""
        for part in hit.parts:
            if part.chain:
                return self.stores[part.group].meet(part.hit, front, back)
        return back

    def decline(self, hit: GroupedHit, plan: Plan) -> None:
        """Count what a plan does not use."""
        for part in hit.parts:
            if part.chain:
                self.stores[part.group].decline(part.hit, plan)
                return

    # -- saving --------------------------------------------------------------------------------------

    def save_hbm(
        self,
        prompt: Prompt | TokenIds,
        hbm_pages: Sequence[int],
        *,
        first: int = 0,
        group: int = 0,
        hint: Hint | None = None,
        session: str | None = None,
    ) -> Transfer[int]:
        """Publish pages of a group's pool as chunks ``first, first + 1, …`` of ``prompt``, and copy them to
        the colder tiers. Of a group of which every token is needed, the chunks before ``first`` must have
        been saved or loaded before. Of the others the end of the last page is taken for a save point of
        ``session``, and what it supersedes leaves. Where prompts part, save without a session: such a place
        is nobody's turn. The last page may hold the prompt's incomplete last chunk: a hit may end there
        then, if all groups are saved to that end."""
        prompt = self._checked(prompt)
        store = self.stores[group]
        if group in self._chains:
            return store.save_hbm(prompt.chain(group), hbm_pages, first=first, hint=hint, session=session)
        stop, chunk_tokens = first + len(hbm_pages), self.spec.chunk_tokens
        if not 0 <= first <= stop <= -(-len(prompt) // chunk_tokens):
            raise UsageError(f"chunks {first} … {stop} do not lie within a prompt of {len(prompt)} tokens")
        if not hbm_pages:
            return Transfer.completed(0)
        ends = [min((chunk + 1) * chunk_tokens, len(prompt)) for chunk in range(first, stop)]
        saved = store.save_hbm(prompt.named(group, ends), hbm_pages, hint=hint, session=session)
        if session is not None:
            self._supersede(prompt, group, ends[-1], session)
        return saved

    def _supersede(self, prompt: GroupedPrompt, group: int, end: int, session: str) -> None:
        """Let go of what is not worth keeping since a session has been saved to ``end``. The end of the last
        whole chunk before it stays: who goes on with other tokens than the last few goes on from there."""
        points = prompt.points.get(group, [])
        whole = end - end % self.spec.chunk_tokens
        gone = superseded([point for point in points if point != whole], end, self.checkpoint_tokens)
        prompt.points[group] = kept = sorted({*points, end}.difference(gone))
        needed = {page for point in kept for page in self._ends(group, point)}
        ends = sorted({page for point in gone for page in self._ends(group, point)} - needed)
        if ends:
            self.stores[group].let_go(prompt.named(group, ends), session)

    def _ends(self, group: int, length: int) -> Sequence[int]:
        return self.rules[group].ends(length, self.spec.chunk_tokens)

    def finish(self, session: str) -> None:
        """A session is over: the pages that only it has used leave first from now on, in all groups."""
        for store in self.stores:
            store.finish(session)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was saved is on disk (or was given up); False when ``timeout`` seconds pass for
        any group."""
        return all(store.flush(timeout) for store in self.stores)

    # -- room in HBM ---------------------------------------------------------------------------------

    def allocate_hbm(self, count: int, *, group: int = 0, near: Sequence[int] = ()) -> list[int] | None:
        """``count`` private pages of a group's pool, evicting cached ones; None when they cannot be had.
        Where the groups share a memory, those leave of whichever has most that nobody uses, and ``near``
        are pages of the same sequence to put these beside."""
        for _ in range(2):  # after the first nothing of its own is idle: then the others' is looked at
            self._make_room(group, count)
            pages = self.stores[group].allocate_hbm(count, near=near)
            if pages is not None:
                return pages
        return None

    def available_hbm(self, *, group: int = 0) -> int:
        """Pages that :meth:`allocate_hbm` could find for a group: free ones and cached ones that may leave,
        of the others as far as they make up whole large pages."""
        available = self.stores[group].available_hbm()
        for other, pool in enumerate(self.pools):
            if other != group:
                idle, books = self._idle(other), pool.books
                whole = books.taken if idle == pool.used_pages else idle // books.per_frame
                available += whole * self.pools[group].books.per_frame
        return available

    def has_room_hbm(self, counts: Sequence[int]) -> bool:
        """Return whether :meth:`allocate_hbm` could find so many pages of each group together."""
        pools = self.pools

        def idle_frames(group: int) -> int:
            return pools[group].books.emptied_by(self.stores[group].idle_hbm())

        return room_for(pools, counts, [self._idle(group) for group in range(len(pools))], idle_frames)

    def _make_room(self, group: int, count: int) -> None:
        """Have the other groups give large pages back, as long as one of them has more idle bytes than
        ``group`` has, or ``group`` has too few."""
        pool = self.pools[group]
        others = [other for other in range(len(self.pools)) if other != group]
        while others and pool.free_pages < count:
            enough = pool.free_pages + self._idle(group) >= count
            if enough and max(map(self._idle_bytes, others)) <= self._idle_bytes(group):
                break
            if not self._empty_any(others):
                break

    def make_room_for(self, parts: Sequence[_Part]) -> None:
        """A load takes pages one by one, of its own group's: have the others make room for it first."""
        for part in parts if self.stores[0].pool is not None else ():
            runs = part.runs()
            taken = sum(pages for tier, pages in runs if tier != Tier.HBM.label)
            if part.chain and part.hit.tokens % self.spec.chunk_tokens and runs[-1][0] == Tier.HBM.label:
                taken += 1  # the page that the hit ends inside of is copied
            self._make_room(part.group, taken)

    def _idle(self, group: int) -> int:
        """Cached pages of a group that nobody uses."""
        return self.stores[group].available_hbm() - self.pools[group].free_pages

    def _idle_bytes(self, group: int) -> int:
        return self._idle(group) * self.pools[group].spec.page_bytes

    def _empty_any(self, groups: Sequence[int]) -> bool:
        """:meth:`_empty_one` of the group with most idle bytes, or of the next that can."""
        return any(self._empty_one(each) for each in sorted(groups, key=self._idle_bytes, reverse=True))

    def _empty_one(self, group: int) -> bool:
        """Let cached pages of a group leave until a large page of it is empty, or given back."""
        books = self.pools[group].books
        if not books.emptied_by(self.stores[group].idle_hbm()):
            return False  # what is in use lies everywhere
        before = books.taken
        while self.stores[group].evict(Tier.HBM.label, books.per_frame):
            if books.taken < before:
                return True
        return False

    def resize_hbm(self, nbytes: int) -> PoolSize:
        """:meth:`Store.resize_hbm <tierstore.Store.resize_hbm>` of the memory that the groups share."""
        pools = self.pools
        pools[0].resize(whole_number("nbytes", nbytes, least=1))
        while pools[0].excess and self._empty_any(range(len(pools))):
            pass
        pools[0].settle(wait=True)
        return pools[0].frames.size

    def release_hbm(self, hbm_pages: Sequence[int], *, group: int = 0) -> None:
        """The caller is done with these pages (once for each time it came to own one)."""
        self.stores[group].release_hbm(hbm_pages)

    # -- seeing and ending ---------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """The first group's, with the HBM of all and what is open in any. Those of each group are its
        store's."""
        each = [store.stats() for store in self.stores]
        hbm = [stats.tiers[Tier.HBM.label] for stats in each if Tier.HBM.label in stats.tiers]
        tiers = dict(each[0].tiers)
        if hbm:
            tiers[Tier.HBM.label] = replace(
                hbm[0],
                capacity_bytes=self.pools[0].frames.nbytes,
                used_bytes=sum(tier.used_bytes for tier in hbm),
                pages=sum(tier.pages for tier in hbm),
                leased_pages=sum(tier.leased_pages for tier in hbm),
            )
        return replace(each[0], tiers=tiers, pending_saves=sum(stats.pending_saves for stats in each))

    def check(self) -> None:
        """Assert that everything that is counted twice agrees, in every group."""
        for store in self.stores:
            store.check()
        books = [store.pool.books for store in self.stores if store.pool is not None]
        shared = [each for each in books if isinstance(each, SmallPages)]
        if shared:
            check_pools(shared)

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait until the backend answers for every group; False when ``timeout`` seconds pass first."""
        return all(store.wait_connected(timeout) for store in self.stores)

    @property
    def connected(self) -> bool:
        """Whether the backend answers for every group."""
        return all(store.connected for store in self.stores)

    def close(self) -> None:
        """Finish what is under way and give everything back. Idempotent."""
        for store in reversed(self.stores):
            store.close()

    def __enter__(self) -> GroupedStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True)
class _Load:
    """Chunks ``first … stop`` of a hit's chains, and with its end what the other groups need."""

    store: GroupedStore
    hit: GroupedHit
    first: int
    stop: int
    under_way: list[tuple[_Part, Transfer[Loaded]]] = field(default_factory=list)

    def start(self, deadline_s: float | None, *, last: bool) -> Transfer[Loaded]:
        ends = self.stop == self.hit.num_pages
        self.store.make_room_for(self.hit.parts)
        try:
            for part in self.hit.parts:
                store = self.store.stores[part.group]
                if ends:
                    store.offer(part.hit)
                if part.chain:
                    load = store.load_part(part.hit, self.first, self.stop, deadline_s=deadline_s, last=last)
                elif ends:
                    pages = part.hit.num_pages
                    load = store.load_part(part.hit, 0, pages, deadline_s=deadline_s, last=True)
                else:
                    continue
                self.under_way.append((part, load))
        except BaseException:
            for part, load in self.under_way:
                load.cancel()
                self._give_back(part, load.wait().pages)
            raise
        return _together([load for _, load in self.under_way], self._settle, deadline_s, self.store.clock)

    def _settle(self, state: TransferState) -> Loaded:
        if state is TransferState.CANCELLED:
            for _, load in self.under_way:
                load.cancel()
        arrived = [(part, load.wait()) for part, load in self.under_way]
        chunk_tokens = self.hit.chunk_tokens
        front = self.first * chunk_tokens
        length = 0 if state is TransferState.CANCELLED else self._length(arrived)
        if length <= front:
            length = 0  # there is nothing behind the front
        groups = [GroupPages(self.first) for _ in self.store.stores]
        moved = 0
        for part, loaded in arrived:
            wanted = self.store.rules[part.group].ends(length, chunk_tokens)
            if part.chain:
                wanted = wanted[self.first :]
            ends = part.ends[self.first : self.stop] if part.chain else part.ends
            by_end = dict(zip(ends, loaded.pages, strict=False))
            kept = tuple(by_end.pop(end) for end in wanted)
            groups[part.group] = GroupPages((wanted[0] - 1) // chunk_tokens if kept else self.first, kept)
            self._give_back(part, list(by_end.values()))
            moved += loaded.moved_bytes
        tokens = 0 if state is TransferState.CANCELLED else max(length, front)
        return Loaded(tokens, groups[0].pages, moved, tuple(groups))

    def _length(self, arrived: Sequence[tuple[_Part, Loaded]]) -> int:
        """The longest hit that all groups can serve with what has arrived."""
        chunk_tokens = self.hit.chunk_tokens
        there: dict[int, Sequence[int]] = {}
        if self.stop == self.hit.num_pages:
            there = {group: () for group, rule in enumerate(self.store.rules) if rule.past is not Past.ALL}
        for part, loaded in arrived:
            count = len(loaded.pages)
            # Of a chain, what is before the first of these is loaded, or computed, by others.
            there[part.group] = part.ends[: self.first + count] if part.chain else part.ends[:count]
        held = [(self.store.rules[group], frozenset(ends)) for group, ends in there.items()]
        return longest_of_pages(held, min(self.stop * chunk_tokens, self.hit.tokens), chunk_tokens)

    def _give_back(self, part: _Part, pages: Sequence[int]) -> None:
        if pages:
            self.store.stores[part.group].release_hbm(pages)


def _together(
    transfers: Sequence[Transfer[Any]],
    settle: Callable[[TransferState], R],
    deadline_s: float | None,
    clock: Callable[[], float],
) -> Transfer[R]:
    """One transfer that ends when all of these have."""
    progress = [transfer.progress for transfer in transfers]
    joined: Transfer[R] = Transfer(
        settle,
        pages=sum(each.pages for each in progress),
        nbytes=sum(each.nbytes for each in progress),
        deadline_s=deadline_s,
        clock=clock,
    )
    lock = threading.Lock()
    left = len(transfers)

    def ended() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            joined.finish()

    for transfer in transfers:
        joined.watch(transfer)
        transfer.on_end(ended)
    if not transfers:
        joined.finish()
    return joined


def _release(hits: Iterable[Hit]) -> None:
    for hit in hits:
        hit.release()


def _rank(tier: str) -> int:
    return LABELS.index(tier) if tier in LABELS else len(LABELS) - 1
