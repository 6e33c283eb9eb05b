"""The answer to a lookup: leading pages in the engine's HBM, the rest the backend's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from tierstore.arguments import optional_seconds
from tierstore.backend import Backend, Lease, LookupRequest
from tierstore.index import LABELS, Match, Page, Tier
from tierstore.index.leases import PageLease
from tierstore.store.hbm import HbmTier
from tierstore.transfer import Transfer, TransferState


@dataclass(frozen=True, slots=True)
class LooseHit:
    """Of a request for loose pages: the ones that are ``here``, in HBM, by their positions, those that the
    backend was asked for, and those of them that ``others``, of other hosts, seem to have."""

    here: Mapping[int, Page]
    asked: Sequence[int]
    others: Sequence[int] = ()


class Hit:
    """``tokens`` leading tokens of a prompt can be loaded. The pages stay where they are until
    :meth:`release`, the end of the load, or the end of the lease; a later load brings what is still there.

    ``by_tier`` counts the tokens by the fastest tier that held them at the lookup, fastest first.
    """

    def __init__(
        self,
        hbm: HbmTier,
        backend: Backend,
        request: LookupRequest,
        match: Match,
        hbm_lease: PageLease,
        lease: Lease | None,
        patience_s: float,
        remote_tokens: int = 0,
        loose: LooseHit | None = None,
    ) -> None:
        self._hbm = hbm
        self.backend = backend
        self._request = request
        self._patience_s = patience_s
        self._hbm_lease = hbm_lease
        self._lease = lease  # guarded by the store's lock
        self.chunk_tokens = request.chunk_tokens
        self.page_bytes = request.page_bytes
        below = lease.tokens if lease is not None else 0
        self.tokens = max(match.tokens, below)
        whole = match.tokens // self.chunk_tokens
        # Leading pages that are in HBM, under a lease of this process's own. (The backend's lease covers
        # them, too.)
        self.local: tuple[Page, ...] = match.pages if match.tokens >= below else match.pages[:whole]
        self.positions: Sequence[int] = ()
        """Of loose pages: which of those asked for the hit's pages are, those in HBM first. Empty for a
        prompt's prefix."""
        self.remote_positions: Sequence[int] = ()
        """Of loose pages: those that are not held, and other hosts seem to have. See :meth:`bring`."""
        self.leased_from = 0
        """The first page that the backend's lease is on: of loose pages, the ones before it are in HBM."""
        if loose is not None:
            there = [loose.asked[at] for at in lease.positions] if lease is not None else []
            self.positions = [*loose.here, *there]
            self.tokens = len(self.positions) * self.chunk_tokens
            self.remote_positions = loose.others
            self.local = tuple(loose.here.values())
            self.leased_from = len(self.local)
        self.by_tier = self._count()
        self.found = self.tokens
        """Tokens that it had before anybody made it shorter."""
        self.remote_tokens = max(below + remote_tokens - self.tokens, 0)
        """Behind what was found, that other hosts seem to have. See :meth:`Store.bring`."""

    def shorten(self, tokens: int) -> None:
        """Have it be one of the first ``tokens`` tokens of a prompt: what is behind them is not wanted. The
        lease stays as it is."""
        if tokens < self.tokens:
            self.tokens = tokens
            self.local = self.local[: self.num_pages]
            self.by_tier = self._count()

    def __repr__(self) -> str:
        return f"Hit({self.tokens} tokens, {self.by_tier})"

    @property
    def branch(self) -> int:
        """How far all layer groups of which every token is needed go: of one group, as far as the hit."""
        return self.tokens

    @property
    def num_pages(self) -> int:
        """Pages of the hit, the one it ends inside of included: as many buffers take a load."""
        return -(-self.tokens // self.chunk_tokens)

    @property
    def hbm_pages(self) -> int:
        """Whole leading pages that are in HBM."""
        return self.by_tier.get(Tier.HBM.label, 0) // self.chunk_tokens

    @property
    def leased(self) -> bool:
        """Whether the backend was asked for it, and holds some of it."""
        return self._lease is not None

    @property
    def request(self) -> LookupRequest:
        """What was found of the prompt. Made when it is wanted: most hits are loaded, or let go, without."""
        return self._request.part(self.positions) if self._request.loose else self._request.cut(self.tokens)

    def _count(self) -> dict[str, int]:
        lease = self._lease
        if lease is not None and len(lease.runs) == 1 and not self.local:  # as nearly always
            return {lease.runs[0][0]: self.tokens}
        counts = dict.fromkeys(LABELS, 0)
        for tier, tokens in self.by_runs():
            counts[tier] = counts.get(tier, 0) + tokens
        return {tier: count for tier, count in counts.items() if count}

    def by_runs(self) -> list[tuple[str, int]]:
        """The hit's tokens by tier, run by run along the prompt."""
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

    def with_lease(self, then: Callable[[Lease | None], None]) -> None:
        """Call ``then`` with the backend's lease, or with a new one where that has ended; None if there is
        none to be had."""
        lease = self._lease
        if lease is not None and self.backend.holds(lease):
            then(lease)
            return
        wanted = self.request
        if self._request.loose:
            if self.leased_from == self.num_pages:
                then(None)
                return
            wanted = self._request.part(self.positions[self.leased_from :])
        found = self.backend.find(wanted, patience_s=self._patience_s)
        found.on_end(lambda: then(self._adopt(found.wait())))

    def _adopt(self, lease: Lease | None) -> Lease | None:
        lease = lease if lease is not None and lease.tokens else None
        below = self.tokens - self.leased_from * self.chunk_tokens
        if lease is not None and self._request.loose and lease.tokens < below:
            self.backend.release(lease)  # some have left, and the others are not where the hit's were
            lease = None
        with self._hbm.lock:
            old, self._lease = self._lease, lease
        if old is not None:
            self.backend.release(old)
        return lease

    def prefetch(self, *, first: int = 0, deadline_s: float | None = None) -> Transfer[int]:
        """Bring what is on disk into host memory, in prefix order, and hold it there. The result is the
        number of leading tokens that are then above the disk; at the deadline it is what has arrived. Pages
        before ``first`` are not wanted, and count as if they were there."""
        self._hbm.require_process()
        deadline_s = optional_seconds("deadline_s", deadline_s)
        above = self.tokens - self.by_tier.get(Tier.DISK.label, 0)

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
            brought = self.backend.prefetch(lease, first=start, wait_s=transfer.remaining_s)
            transfer.watch(brought)

            def not_wanted() -> None:
                brought.cancel()

            transfer.on_end(not_wanted)

            def note() -> None:
                nonlocal above
                there = before + min(start + brought.wait(), lease.pages)
                tokens = min(
                    there * self.chunk_tokens, before * self.chunk_tokens + lease.tokens, self.tokens
                )
                above = max(tokens, min(len(self.local) * self.chunk_tokens, self.tokens))
                transfer.finish()

            brought.on_end(note)

        if above == self.tokens:
            transfer.finish()
        else:
            self.with_lease(ask)
        return transfer

    def bring(self, deadline_s: float, *, tokens: int | None = None) -> Transfer[int]:
        """:meth:`Store.bring <tierstore.Store.bring>` of what other hosts seem to have behind it, up to
        ``tokens`` (None: all); of loose pages, of those that it lacks. The hit may have been released."""
        if self._request.loose:
            wanted = self._request.part(self.remote_positions)
            first, count = 0, wanted.num_chunks
        else:
            wanted, first = self._request, self.found // self.chunk_tokens
            stop = self.found + self.remote_tokens
            stop = stop if tokens is None else min(stop, tokens)
            count = -(-stop // self.chunk_tokens) - first
        if count <= 0:
            return Transfer.completed(0)
        return self.backend.bring(wanted, first, count, wait_s=deadline_s)

    def release(self) -> None:
        """Give the lease back. Repeating it is harmless."""
        if self._hbm.forked:
            return  # the leases are another process's
        with self._hbm.lock:
            self._hbm.leases.release(self._hbm_lease)
            lease, self._lease = self._lease, None
        if lease is not None:
            self.backend.release(lease)

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
