"""The answer to a lookup: what a hit needs of each layer group, where it lies, and a lease on it."""

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
    """What a part's pages come from: the engine's HBM, under ``hbm_lease``, and the backend, under ``lease``
    (None: nothing does). A lease that has ended is asked for again, for ``patience_s`` seconds."""

    hbm: HbmTier
    backend: Backend
    group: Group
    hbm_lease: PageLease
    lease: Lease | None
    patience_s: float


class HitPart(ABC):
    """What a hit has of one layer group: pages at positions 0, 1, …, the leading ones in the engine's HBM,
    the rest the backend's. They stay where they are until :meth:`release`, or the end of the leases."""

    leading: ClassVar[bool] = True
    """Whether the pages follow one another: a hit has as many tokens as its leading pages."""
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
        self._lease = source.lease  # guarded by the store's lock
        self.rule = GroupRule.all()
        """What a hit needs of these pages."""
        self.tokens = tokens
        self.local = tuple(local)
        """The leading pages that are in HBM, under a lease of this process's own."""
        self.leased_from = leased_from
        """The first page that the backend's lease is on."""
        self.positions: Sequence[int] = ()
        """Of named pages: which of those asked for the part's pages are, those in HBM first."""

    # -- by the kind of its pages ----------------------------------------------------------------------

    @property
    @abstractmethod
    def request(self) -> LookupRequest:
        """What was found. Made when it is wanted: most hits are loaded, or released, without."""

    @abstractmethod
    def _below(self) -> LookupRequest | None:
        """What the backend's lease is on; None where all of it is in HBM."""

    @abstractmethod
    def to_tell(self) -> tuple[LookupRequest, int] | None:
        """What a daemon cannot know to be used by its own lookups: a request, and the first chunk of it that
        is not. None where it knows."""

    def _covers(self, lease: Lease) -> bool:
        """Whether a lease that was taken again is on pages at the same places."""
        return True

    @property
    def ends(self) -> Sequence[int]:
        """Where in the prompt each page ends."""
        return self.rule.ends(self.tokens, self.chunk_tokens)

    def fetched(self, first: int, stop: int, *, last: bool) -> range | None:
        """The pages that a load of chunks ``first … stop`` brings; None for none. It is the ``last`` of the
        hit's loads."""
        return range(first, stop)

    def kept(self, length: int, first: int) -> tuple[int, Sequence[int]]:
        """What a load of chunks from ``first`` on keeps for a hit of ``length`` tokens: the chunk of its
        first page, and the positions."""
        return first, range(first, max(-(-length // self.chunk_tokens), first))

    def supports(self, above: int, tokens: int) -> int:
        """How many of the hit's ``tokens`` can be loaded from above the disk, when the first ``above`` of
        this part can."""
        return min(above, tokens)

    # -- of all kinds ----------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """The one that it ends inside of included."""
        return -(-self.tokens // self.chunk_tokens)

    def shorten(self, tokens: int) -> None:
        """Have it be of the first ``tokens`` tokens of a prompt. The lease stays as it is."""
        if tokens < self.tokens:
            self.tokens = tokens
            self.local = self.local[: self.num_pages]

    def by_tier(self) -> dict[str, int]:
        """Its tokens by tier, fastest first."""
        lease = self._lease
        if lease is not None and len(lease.runs) == 1 and not self.local:  # as nearly always
            return {lease.runs[0][0]: self.tokens} if self.tokens else {}
        counts = dict.fromkeys(LABELS, 0)
        for tier, tokens in self.by_runs():
            counts[tier] = counts.get(tier, 0) + tokens
        return {tier: count for tier, count in counts.items() if count}

    def by_runs(self) -> list[tuple[str, int]]:
        """Its tokens by tier, run by run along the pages."""
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
        """Its pages by tier, likewise."""
        left, found = self.num_pages, []
        for tier, tokens in self.by_runs():
            pages = min(-(-tokens // self.chunk_tokens), left)
            left -= pages
            found.append((tier, pages))
        return found

    def with_lease(self, then: Callable[[Lease | None], None]) -> None:
        """Call ``then`` with the backend's lease, or with a new one where that has ended; None if there is
        none to be had."""
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
        """Bring what is on disk into host memory, in order, and hold it there. The result is how many leading
        tokens are then above the disk. Pages before ``first`` are not wanted, and count as if they were
        there."""
        above = self.tokens - self.by_tier().get(Tier.DISK.label, 0)

        def settle(_: TransferState) -> int:
            return above

        nbytes = self.num_pages * self.page_bytes
        transfer = Transfer(
            settle, pages=self.num_pages, nbytes=nbytes, deadline_s=deadline_s, clock=self._hbm.clock
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
        """Give the leases back. Repeating it is harmless."""
        with self._hbm.lock:
            self._hbm.leases.release(self._hbm_lease)
            lease, self._lease = self._lease, None
        if lease is not None:
            self.backend.release(lease)


class ChainPart(HitPart):
    """The leading pages of a prompt. ``lease`` is on those from the first one on, whatever ``match`` has of
    them in HBM."""

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
    """Pages that the caller has named: those ``here`` in HBM, by their positions, and those of ``asked`` that
    the lease is on."""

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
        # Where some have left, the others are not where the hit's were.
        return lease.tokens >= self.tokens - self.leased_from * self.chunk_tokens

    def to_tell(self) -> tuple[LookupRequest, int] | None:
        return self.request, 0


class RulePart(NamedHitPart):
    """Named pages that a group's rule asks for: each ends at one of ``asked_ends`` in the prompt."""

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
        return super().prefetch(deadline_s=deadline_s)  # all of them, whatever of the prompt is not wanted

    def supports(self, above: int, tokens: int) -> int:
        if above >= self.tokens:
            return tokens
        return min(tokens, (self.ends[0] - 1) // self.chunk_tokens * self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class RemotePages:
    """Pages of one layer group that other hosts seem to have: chunks ``first …`` of a request, which end at
    the tokens ``remote_ends``."""

    backend: Backend
    request: LookupRequest
    page_bytes: int
    first: int
    remote_ends: Sequence[int]

    def fetch_remote(self, deadline_s: float, *, tokens: int | None = None) -> Transfer[int]:
        """Have those come that a hit of ``tokens`` tokens (None: of any length) needs."""
        count = sum(tokens is None or end <= tokens for end in self.remote_ends)
        if not count:
            return Transfer.completed(0)
        return self.backend.fetch_remote(self.request, self.first, count, wait_s=deadline_s)


class Hit:
    """``tokens`` leading tokens of a prompt can be loaded: all layer groups can serve a hit of that length
    (:mod:`tierstore.groups`), and ``parts`` are what it needs of each, as far as it needs anything. The pages
    stay where they are until :meth:`release`, the end of the load, or the end of the leases; a later load
    brings what is still there.

    ``branch`` is how far the groups go of which every token is needed: at least ``tokens``. ``by_tier``
    counts the tokens by the slowest tier that a page of theirs which is needed lay in at the lookup, fastest
    first. Other hosts seem to have what a hit of ``remote_tokens`` more lacks here: in ``others``.
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
        """Whether it has one part, whose pages follow one another."""
        return len(self.parts) == 1 and self.parts[0].leading

    def __repr__(self) -> str:
        return f"Hit({self.tokens} tokens, {self.by_tier})"

    def _slowest(self) -> npt.NDArray[np.uint8]:
        """For each chunk the slowest tier that a page of it which is needed lies in."""
        slowest = np.zeros(self.num_pages, np.uint8)
        for part in self.parts:
            start, chunks = 0, (np.asarray(part.ends, np.int64) - 1) // self.chunk_tokens
            for tier, pages in part.page_runs():
                run = chunks[start : start + pages]
                slowest[run] = np.maximum(slowest[run], rank(tier))
                start += pages
        return slowest

    def _count(self) -> dict[str, int]:
        tiers = {tier for part in self.parts for tier, _ in part.page_runs()}
        if len(tiers) == 1 and self.parts[0].leading:  # all of it in one tier, as nearly always
            return dict.fromkeys(tiers, self.tokens)
        slowest = self._slowest()
        counts = np.bincount(slowest, minlength=len(LABELS)) * self.chunk_tokens
        if self.num_pages:
            counts[slowest[-1]] -= self.num_pages * self.chunk_tokens - self.tokens
        pairs = zip(LABELS, counts.tolist(), strict=True)
        return {label: count for label, count in pairs if count}

    @property
    def num_pages(self) -> int:
        """Chunks of the hit, the one that it ends inside of included."""
        return -(-self.tokens // self.chunk_tokens)

    def chunks(self, group: int) -> range:
        """The chunks whose pages a load brings of a group: as many buffers as it takes."""
        for part in self.parts:
            if part.group == group:
                return part.rule.pages(self.tokens, self.chunk_tokens)
        return range(0)

    @property
    def hbm_pages(self) -> int:
        """Whole leading pages of group 0 that are in HBM, however cold those of the others are."""
        first = self.parts[0] if self.parts else None
        if first is None or first.group or not first.leading:
            return 0
        runs = first.page_runs()
        in_hbm = runs[0][1] if runs and runs[0][0] == Tier.HBM.label else 0
        return min(in_hbm, self.tokens // self.chunk_tokens)

    # Of pages that the caller has named (`Prompt.named_pages`), and of one group's:

    @property
    def positions(self) -> Sequence[int]:
        """Of pages that the caller has named: which of those asked for the hit's pages are, those in HBM
        first. Empty for a prompt's prefix."""
        return self.parts[0].positions if self.simple else ()

    @property
    def remote_positions(self) -> Sequence[int]:
        """Likewise, those that are not held, and other hosts seem to have. See :meth:`fetch_remote`."""
        if not self.simple or not self.parts[0].of_caller:
            return ()
        return [end // self.chunk_tokens - 1 for other in self.others for end in other.remote_ends]

    @property
    def whole_chunks(self) -> Sequence[int]:
        """Which whole chunks of what was asked for the hit has, in order: of a prompt the leading ones."""
        return sorted(self.positions) or range(self.tokens // self.chunk_tokens)

    @property
    def request(self) -> LookupRequest:
        """What was found of a prompt, where the hit has one part."""
        if len(self.parts) != 1:
            raise UsageError(f"a hit over {len(self.parts)} layer groups is no single request")
        return self.parts[0].request

    def by_runs(self) -> list[tuple[str, int]]:
        """The hit's tokens by tier, run by run along the prompt."""
        if self.simple:
            return self.parts[0].by_runs()
        runs, start = [], 0
        for slowest, run in groupby(self._slowest().tolist()):
            end = min(start + sum(1 for _ in run) * self.chunk_tokens, self.tokens)
            runs.append((LABELS[slowest], end - start))
            start = end
        return runs

    # -- what is done with it --------------------------------------------------------------------------

    def prefetch(self, *, first: int = 0, deadline_s: float | None = None) -> Transfer[int]:
        """Bring what is on disk into host memory, in prefix order, and hold it there. The result is the
        number of leading tokens that are then above the disk; at the deadline it is what has arrived. Pages
        before ``first`` are not wanted, and count as if they were there."""
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
        """:meth:`Store.fetch_remote <tierstore.Store.fetch_remote>` of what other hosts seem to have and this
        lacks, up to ``tokens`` of its prompt (None: all), whatever it costs. The hit may have been
        released."""
        if len(self.others) == 1:
            return self.others[0].fetch_remote(deadline_s, tokens=tokens)
        fetched = [part.fetch_remote(deadline_s, tokens=tokens) for part in self.others]

        def settle(_: TransferState) -> int:
            for transfer in fetched:
                transfer.cancel()  # what has not ended by now
            return sum(transfer.wait() for transfer in fetched)

        return joined(fetched, settle, deadline_s=deadline_s, clock=self._hbm.clock)

    def release(self) -> None:
        """Give the leases back. Repeating it is harmless."""
        if self._hbm.forked:
            return  # the leases are another process's
        for part in self.parts:
            part.release()

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def rank(tier: str) -> int:
    """Where a tier is, the fastest first."""
    return LABELS.index(tier) if tier in LABELS else len(LABELS) - 1
