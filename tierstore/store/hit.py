"""The result of a lookup: the pages of each layer group that a hit needs, their tiers, and leases on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tierstore.arguments import optional_seconds
from tierstore.backend import Backend, Lease, LookupRequest, NamedRequest
from tierstore.errors import UsageError
from tierstore.groups import Group, GroupRule
from tierstore.index import LABELS, Match, Page, Tier
from tierstore.index.leases import PageLease
from tierstore.store.hbm import HbmTier
from tierstore.transfer import Transfer, TransferState, joined


@dataclass(frozen=True, slots=True)
class Source:
    """Where a part's pages are: in the engine's HBM under ``hbm_lease``, and in the backend under ``lease``
    (None: the backend has none of them). If a lease has expired, a new one is requested, for at most
    ``patience_s`` seconds."""

    hbm: HbmTier
    backend: Backend
    group: Group
    hbm_lease: PageLease
    lease: Lease | None
    patience_s: float


class HitPart(ABC):
    """The pages of one layer group that a hit needs, at positions 0, 1, …. The first pages are in the
    engine's HBM, the remaining pages in the backend. The pages stay there until :meth:`release` or the end of
    the leases."""

    leading: ClassVar[bool] = True
    """Whether the pages form a prefix, so that the number of leading pages limits the length of the hit."""
    of_caller: ClassVar[bool] = False
    """Whether the caller has named the pages."""

    def __init__(
        self,
        source: Source,
        request: LookupRequest,
        *,
        tokens: int,
        local: Sequence[Page],
        leased_from: int = 0,
    ) -> None:
        self.group = source.group.number
        self.page_bytes = request.page_bytes
        self.chunk_tokens = request.chunk_tokens
        self.backend = source.backend
        self._hbm = source.hbm
        self._patience_s = source.patience_s
        self._hbm_lease = source.hbm_lease
        self._lease = source.lease  # needs the store's lock
        self.rule = GroupRule.all()
        """The rule that says which pages a hit needs."""
        self.tokens = tokens
        self.local = tuple(local)
        """The leading pages that are in HBM, under a lease of this process."""
        self.leased_from = leased_from
        """The position of the first page that the backend's lease covers."""
        self.positions: Sequence[int] = ()
        """For named pages: the positions of the part's pages among the requested pages. Pages in HBM come
        first."""

    # -- different for each kind of pages --------------------------------------------------------------

    @property
    @abstractmethod
    def request(self) -> LookupRequest:
        """The request for the found pages. The request is made on demand, because most hits are loaded or
        released without it."""

    @abstractmethod
    def _below(self) -> LookupRequest | None:
        """Return the request that the backend's lease covers; None if all pages are in HBM."""

    @abstractmethod
    def to_tell(self) -> tuple[LookupRequest, int] | None:
        """Return a request for pages whose use the daemon does not see in its own lookups, and the first used
        chunk of that request. Return None if the daemon has seen the use."""

    def _covers(self, lease: Lease) -> bool:
        """Return whether a renewed lease covers the same pages at the same positions."""
        return True

    @property
    def ends(self) -> Sequence[int]:
        """The position in the prompt at which each page ends, in tokens."""
        return self.rule.ends(self.tokens, self.chunk_tokens)

    @property
    def chunks(self) -> Sequence[int]:
        """The first chunk of the prompt for which a hit needs the page, for each page."""
        return [self.rule.chunk_of(end, self.chunk_tokens) for end in self.ends]

    def fetched(self, first: int, stop: int, *, last: bool) -> range | None:
        """Return the positions of the pages that a load of chunks ``first`` to ``stop - 1`` loads; None if it
        loads none. ``last`` says that it is the last load of the hit."""
        return range(first, stop)

    def kept(self, length: int, first: int) -> tuple[int, Sequence[int]]:
        """Return the pages that a load of chunks from ``first`` on keeps for a hit of ``length`` tokens: the
        chunk of the first such page, and the positions of all such pages."""
        return first, range(first, max(-(-length // self.chunk_tokens), first))

    def supports(self, above: int, tokens: int) -> int:
        """Return how many of the hit's ``tokens`` can be loaded without the disk, if the first ``above``
        tokens of this part can."""
        return min(above, tokens)

    # -- common to all kinds ---------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """The number of pages, including a partly used last page."""
        return -(-self.tokens // self.chunk_tokens)

    def shorten(self, tokens: int) -> None:
        """Shorten the part to the first ``tokens`` tokens of the prompt. The lease does not change."""
        if tokens < self.tokens:
            self.tokens = tokens
            self.local = self.local[: self.num_pages]

    def by_tier(self) -> dict[str, int]:
        """Return the part's tokens by tier, fastest tier first."""
        lease = self._lease
        if lease is not None and len(lease.runs) == 1 and not self.local:  # the usual case
            return {lease.runs[0][0]: self.tokens} if self.tokens else {}
        counts = dict.fromkeys(LABELS, 0)
        for tier, tokens in self.by_runs():
            counts[tier] = counts.get(tier, 0) + tokens
        return {tier: count for tier, count in counts.items() if count}

    def by_runs(self) -> list[tuple[str, int]]:
        """Return the part's tokens by tier, for each run of pages in one tier."""
        lease = self._lease
        local = len(self.local)
        runs = [(Tier.HBM.label, min(local * self.chunk_tokens, self.tokens))] if local else []
        position = local
        before = self.leased_from
        while lease is not None and position < min(before + lease.pages, self.num_pages):
            tier, run = lease.run_at(position - before)
            start = position * self.chunk_tokens
            runs.append((tier, min(run * self.chunk_tokens, self.tokens - start)))
            position += run
        return runs

    def page_runs(self) -> list[tuple[str, int]]:
        """Return the part's pages by tier, for each run of pages in one tier."""
        left, found = self.num_pages, []
        for tier, tokens in self.by_runs():
            pages = min(-(-tokens // self.chunk_tokens), left)
            left -= pages
            found.append((tier, pages))
        return found

    def with_lease(self, then: Callable[[Lease | None], None]) -> None:
        """Call ``then`` with the backend's lease, or with a new lease if that has expired; with None if there
        is neither."""
        lease = self._lease
        if lease is not None and self.backend.holds(lease):
            then(lease)
            return
        wanted = self._below()
        if wanted is None:
            then(None)
            return
        found = self.backend.find(wanted, patience_s=self._patience_s)
        found.on_end(lambda: then(self._adopt(found.wait())))

    def _adopt(self, lease: Lease | None) -> Lease | None:
        lease = lease if lease is not None and lease.tokens else None
        if lease is not None and not self._covers(lease):
            self.backend.release(lease)
            lease = None
        with self._hbm.lock:
            old, self._lease = self._lease, lease
        if old is not None:
            self.backend.release(old)
        return lease

    def prefetch(self, *, first: int = 0, deadline_s: float | None = None) -> Transfer[int]:
        """Load pages from disk into host memory, in order, and hold them there. The result is the number of
        leading tokens that are not only on disk then. Pages before ``first`` are not loaded and count as not
        only on disk."""
        above = self.tokens - self.by_tier().get(Tier.DISK.label, 0)
        nbytes = self.num_pages * self.page_bytes
        transfer = Transfer(
            lambda _: above,
            pages=self.num_pages,
            nbytes=nbytes,
            deadline_s=deadline_s,
            clock=self._hbm.clock,
        )

        def ask(lease: Lease | None) -> None:
            if lease is None:
                transfer.finish()
                return
            before = self.leased_from
            start = max(first - before, 0)
            fetched = self.backend.prefetch(lease, first=start, wait_s=transfer.remaining_s)
            transfer.watch(fetched)

            def not_wanted() -> None:
                fetched.cancel()

            transfer.on_end(not_wanted)

            def note() -> None:
                nonlocal above
                there = before + min(start + fetched.wait(), lease.pages)
                tokens = min(
                    there * self.chunk_tokens, before * self.chunk_tokens + lease.tokens, self.tokens
                )
                above = max(tokens, min(len(self.local) * self.chunk_tokens, self.tokens))
                transfer.finish()

            fetched.on_end(note)

        if above == self.tokens:
            transfer.finish()
        else:
            self.with_lease(ask)
        return transfer

    def release(self) -> None:
        """Release the leases. Repeated calls do nothing."""
        with self._hbm.lock:
            self._hbm.leases.release(self._hbm_lease)
            lease, self._lease = self._lease, None
        if lease is not None:
            self.backend.release(lease)


class ChainPart(HitPart):
    """The leading pages of a prompt. The backend's lease covers them from the first page on, including the
    pages that ``match`` found in HBM."""

    def __init__(self, source: Source, request: LookupRequest, match: Match) -> None:
        below = source.lease.tokens if source.lease is not None else 0
        here = match.tokens
        local = match.pages if here >= below else match.pages[: here // request.chunk_tokens]
        super().__init__(source, request, tokens=max(here, below), local=local)
        self._request = request

    @property
    def request(self) -> LookupRequest:
        return self._request.cut(self.tokens)

    def _below(self) -> LookupRequest | None:
        return self.request

    def to_tell(self) -> tuple[LookupRequest, int] | None:
        if self._lease is not None or not self.tokens:
            return None
        request = self.request
        return request, len(request.keys)


class NamedHitPart(HitPart):
    """Pages that the caller has named. ``here`` has the pages in HBM, by position. The backend's lease covers
    some of the positions ``asked``."""

    of_caller = True

    def __init__(
        self,
        source: Source,
        request: NamedRequest,
        here: Mapping[int, Page],
        asked: Sequence[int],
    ) -> None:
        there = [asked[at] for at in source.lease.positions] if source.lease is not None else []
        super().__init__(
            source,
            request,
            tokens=(len(here) + len(there)) * request.chunk_tokens,
            local=tuple(here.values()),
            leased_from=len(here),
        )
        self._request = request
        self.positions = [*here, *there]

    @property
    def request(self) -> LookupRequest:
        return self._request.part(self.positions)

    def _below(self) -> LookupRequest | None:
        below = self.positions[self.leased_from :]
        return self._request.part(below) if below else None

    def _covers(self, lease: Lease) -> bool:
        # If the new lease covers fewer tokens, pages were evicted, and the others are at other positions.
        return lease.tokens >= self.tokens - self.leased_from * self.chunk_tokens

    def to_tell(self) -> tuple[LookupRequest, int] | None:
        return self.request, 0


class RulePart(NamedHitPart):
    """Named pages that a group's rule needs. ``asked_ends`` has the end in the prompt of each page in
    ``asked``."""

    leading = of_caller = False

    def __init__(
        self,
        source: Source,
        request: NamedRequest,
        here: Mapping[int, Page],
        asked: Sequence[int],
        asked_ends: Sequence[int],
    ) -> None:
        super().__init__(source, request, here, asked)
        self.rule = source.group.rule
        self._asked_ends = asked_ends

    @property
    def ends(self) -> Sequence[int]:
        return [self._asked_ends[at] for at in self.positions]

    def fetched(self, first: int, stop: int, *, last: bool) -> range | None:
        return range(self.num_pages) if last else None

    def kept(self, length: int, first: int) -> tuple[int, Sequence[int]]:
        ends, chunk_tokens = self.ends, self.chunk_tokens
        whole = length > first * chunk_tokens or not first
        needed = set(self.rule.ends(length, chunk_tokens)) if whole else ()
        kept = sorted((at for at, end in enumerate(ends) if end in needed), key=lambda at: ends[at])
        return (ends[kept[0]] - 1) // chunk_tokens if kept else first, kept

    def prefetch(self, *, first: int = 0, deadline_s: float | None = None) -> Transfer[int]:
        return super().prefetch(deadline_s=deadline_s)  # all pages, because the end of the hit needs them

    def supports(self, above: int, tokens: int) -> int:
        if above >= self.tokens:
            return tokens
        return min(tokens, self.chunks[0] * self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class RemotePages:
    """Pages of one layer group that other hosts probably have: the chunks of a request from ``first`` on.
    The pages end at the tokens ``remote_ends``."""

    backend: Backend
    request: LookupRequest
    page_bytes: int
    first: int
    remote_ends: Sequence[int]

    def fetch_remote(self, deadline_s: float, *, tokens: int | None = None) -> Transfer[int]:
        """Fetch the pages that a hit of ``tokens`` tokens needs (None: all pages)."""
        count = sum(tokens is None or end <= tokens for end in self.remote_ends)
        if not count:
            return Transfer.completed(0)
        return self.backend.fetch_remote(self.request, self.first, count, wait_s=deadline_s)


class Hit:
    """``tokens`` leading tokens of a prompt that can be loaded, because all layer groups support a hit of
    that length (:mod:`tierstore.groups`). ``parts`` are the pages of each group that the hit needs; a group
    without needed pages has no part. The pages stay where they are until :meth:`release`, the end of the
    load, or the end of the leases. A load after the end of the leases returns the pages that are still
    stored.

    ``branch`` is the length of the prefix that all groups with chained pages have, at least ``tokens``.
    ``by_tier`` counts tokens by tier, fastest tier first. A token counts for the slowest tier that had one of
    its needed pages at the lookup. Other hosts probably have the pages in ``others``, with which the hit
    would be ``remote_tokens`` longer.
    """

    def __init__(
        self,
        hbm: HbmTier,
        backend: Backend,
        chunk_tokens: int,
        tokens: int,
        parts: Sequence[HitPart],
        *,
        branch: int,
        remote_tokens: int = 0,
        others: Sequence[RemotePages] = (),
    ) -> None:
        self._hbm = hbm
        self.backend = backend
        self.chunk_tokens = chunk_tokens
        self.tokens = tokens
        self.parts = parts
        self.branch = branch
        self.remote_tokens = remote_tokens
        self.others = others
        self.by_tier: Mapping[str, int] = parts[0].by_tier() if self.simple else self._count()

    @property
    def simple(self) -> bool:
        """Whether the hit has one part, whose pages form a prefix."""
        return len(self.parts) == 1 and self.parts[0].leading

    def __repr__(self) -> str:
        return f"Hit({self.tokens} tokens, {self.by_tier})"

    def _slowest(self) -> npt.NDArray[np.uint8]:
        """Return the rank of the slowest tier of the pages that each chunk needs."""
        slowest = np.zeros(self.num_pages, np.uint8)
        for part in self.parts:
            start, chunks = 0, np.asarray(part.chunks, np.int64)
            for tier, pages in part.page_runs():
                run = chunks[start : start + pages]
                slowest[run] = np.maximum(slowest[run], rank(tier))
                start += pages
        return slowest

    def _count(self) -> dict[str, int]:
        tiers = {tier for part in self.parts for tier, _ in part.page_runs()}
        if len(tiers) == 1:  # the usual case: everything in one tier
            return dict.fromkeys(tiers, self.tokens)
        slowest = self._slowest()
        counts = np.bincount(slowest, minlength=len(LABELS)) * self.chunk_tokens
        if self.num_pages:
            counts[slowest[-1]] -= self.num_pages * self.chunk_tokens - self.tokens
        pairs = zip(LABELS, counts.tolist(), strict=True)
        return {label: count for label, count in pairs if count}

    @property
    def num_pages(self) -> int:
        """The number of chunks of the hit, including a partly used last chunk."""
        return -(-self.tokens // self.chunk_tokens)

    def chunks(self, group: int) -> range:
        """Return the chunks whose pages a load of the hit loads for a group. A load into buffers needs one
        buffer for each of these chunks."""
        for part in self.parts:
            if part.group == group:
                return part.rule.pages(self.tokens, self.chunk_tokens)
        return range(0)

    @property
    def hbm_pages(self) -> int:
        """The number of whole leading pages of group 0 in HBM. Other groups' pages may be in other tiers."""
        first = self.parts[0] if self.parts else None
        if first is None or first.group or not first.leading:
            return 0
        runs = first.page_runs()
        in_hbm = runs[0][1] if runs and runs[0][0] == Tier.HBM.label else 0
        return min(in_hbm, self.tokens // self.chunk_tokens)

    # For hits of pages that the caller has named (`Prompt.named_pages`), and for hits of one group:

    @property
    def positions(self) -> Sequence[int]:
        """For pages that the caller has named: the positions of the hit's pages among the requested pages;
        pages in HBM come first. Empty for a prompt's prefix."""
        return self.parts[0].positions if self.simple else ()

    @property
    def remote_positions(self) -> Sequence[int]:
        """For pages that the caller has named: the positions of pages that this host does not have, but other
        hosts probably have. See :meth:`fetch_remote`."""
        if not self.simple or not self.parts[0].of_caller:
            return ()
        return [end // self.chunk_tokens - 1 for other in self.others for end in other.remote_ends]

    @property
    def whole_chunks(self) -> Sequence[int]:
        """The whole chunks of the request that the hit has, in order. For a prompt, these are the leading
        chunks."""
        return sorted(self.positions) or range(self.tokens // self.chunk_tokens)

    @property
    def request(self) -> LookupRequest:
        """The request for the found part of the prompt. Only a hit with one part has such a request."""
        if len(self.parts) != 1:
            raise UsageError(f"a hit over {len(self.parts)} layer groups has no single request")
        return self.parts[0].request

    def by_runs(self) -> list[tuple[str, int]]:
        """Return the hit's tokens by tier, for each run of tokens in one tier."""
        if self.simple:
            return self.parts[0].by_runs()
        runs, start = [], 0
        for slowest, run in groupby(self._slowest().tolist()):
            end = min(start + sum(1 for _ in run) * self.chunk_tokens, self.tokens)
            runs.append((LABELS[slowest], end - start))
            start = end
        return runs

    # -- use -------------------------------------------------------------------------------------------

    def prefetch(self, *, first: int = 0, deadline_s: float | None = None) -> Transfer[int]:
        """Load pages from disk into host memory, in prefix order, and hold them there. The result is the
        number of leading tokens that are not only on disk then, or at the deadline. Pages before ``first``
        are not loaded and count as not only on disk."""
        self._hbm.require_process()
        deadline_s = optional_seconds("deadline_s", deadline_s)
        if self.simple:
            return self.parts[0].prefetch(first=first, deadline_s=deadline_s)
        fetched = [(part, part.prefetch(first=first, deadline_s=deadline_s)) for part in self.parts]

        def settle(state: TransferState) -> int:
            tokens = self.tokens
            for part, transfer in fetched:
                if state is TransferState.CANCELLED:
                    transfer.cancel()
                tokens = part.supports(transfer.wait(), tokens)
            return tokens if tokens == self.tokens else tokens // self.chunk_tokens * self.chunk_tokens

        return joined(
            [transfer for _, transfer in fetched], settle, deadline_s=deadline_s, clock=self._hbm.clock
        )

    def fetch_remote(self, deadline_s: float, *, tokens: int | None = None) -> Transfer[int]:
        """Fetch the missing pages that other hosts probably have, up to ``tokens`` tokens of the prompt
        (None: all), even if computing them is faster (see :meth:`Store.fetch_remote
        <tierstore.Store.fetch_remote>`). The hit may have been released."""
        if len(self.others) == 1:
            return self.others[0].fetch_remote(deadline_s, tokens=tokens)
        fetched = [part.fetch_remote(deadline_s, tokens=tokens) for part in self.others]

        def settle(_: TransferState) -> int:
            for transfer in fetched:
                transfer.cancel()  # has no effect on transfers that have ended
            return sum(transfer.wait() for transfer in fetched)

        return joined(fetched, settle, deadline_s=deadline_s, clock=self._hbm.clock)

    def release(self) -> None:
        """Release the leases. Repeated calls do nothing."""
        if self._hbm.forked:
            return  # the leases belong to another process
        for part in self.parts:
            part.release()

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def rank(tier: str) -> int:
    """Return the rank of a tier, 0 for the fastest."""
    return LABELS.index(tier) if tier in LABELS else len(LABELS) - 1
