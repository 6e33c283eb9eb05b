"""The answer to a lookup in a connected store: leading pages in this process's HBM, the rest the daemon's."""

from __future__ import annotations

from collections.abc import Callable

from tierstore.daemon import protocol
from tierstore.daemon.remembered import Question
from tierstore.daemon.remote import Remote, RemoteLease
from tierstore.index import Match, Page, Tier
from tierstore.store.base import Hit
from tierstore.store.leases import Lease
from tierstore.store.state import StoreState
from tierstore.transfer import Transfer, TransferState

LABELS = tuple(tier.label for tier in Tier)

_PREFETCH_S = 10.0  # how long the daemon is asked to try, where there is no deadline


class ConnectedHit(Hit):
    """``local`` are its leading pages that are in HBM, under a lease of this process's own state. All the
    others are under the daemon's lease (which covers those before them, too)."""

    def __init__(
        self,
        state: StoreState,
        remote: Remote,
        question: Question,
        match: Match,
        local_lease: Lease,
        lease: RemoteLease | None,
    ) -> None:
        self._state = state
        self._remote = remote
        self._local_lease = local_lease
        self._lease = lease
        self._holds = 0  # guarded by the state's lock, as is the next
        self._released = False  # while somebody held it
        self.chunk_tokens = question.chunk_tokens
        below = lease.tokens if lease is not None else 0
        self.tokens = max(match.tokens, below)
        self._question = question
        whole = match.tokens // self.chunk_tokens
        self.local: tuple[Page, ...] = match.pages if match.tokens >= below else match.pages[:whole]
        self.by_tier = self._count()

    @property
    def question(self) -> Question:
        """What was found of the prompt. Made when it is wanted: most hits are loaded, or let go, without."""
        return self._question.cut(self.tokens)

    def _count(self) -> dict[str, int]:
        lease = self._lease
        if lease is not None and len(lease.runs) == 1 and not self.local:  # as nearly always
            return {lease.runs[0][0]: self.tokens}
        counts = dict.fromkeys(LABELS, 0)
        position = len(self.local)
        counts[LABELS[Tier.HBM]] = min(position * self.chunk_tokens, self.tokens)
        while lease is not None and position < lease.pages:
            tier, run = lease.run_at(position)
            start = position * self.chunk_tokens
            counts[tier] = counts.get(tier, 0) + min(run * self.chunk_tokens, self.tokens - start)
            position += run
        return {tier: count for tier, count in counts.items() if count}

    def with_lease(self, then: Callable[[RemoteLease | None], None]) -> None:
        """Call ``then`` with the daemon's lease, or with a new one where that has ended; None if there is
        none to be had."""
        lease = self._lease
        if lease is not None and lease.session.current and self._remote.clock() < lease.ends:
            then(lease)
        else:
            self._remote.renew(self.question, lambda lease: then(self._adopt(lease)))

    def _adopt(self, lease: RemoteLease | None) -> RemoteLease | None:
        with self._state.lock:
            old, self._lease = self._lease, lease
        if old is not None:
            self._remote.release(old)
        return lease

    @property
    def lease_left_s(self) -> float:
        """Seconds until the daemon's lease ends."""
        lease = self._lease
        return lease.ends - self._remote.clock() if lease is not None else 0.0

    def hold(self) -> bool:
        """Keep the daemon's lease until :meth:`let_go`, even if the hit is released before. False when there
        is none any more."""
        with self._state.lock:
            self._holds += self._lease is not None
            return self._lease is not None

    def renew(self, then: Callable[[], None]) -> None:
        """Exchange the daemon's lease for one that ends later, if it gives one and the hit is still held.
        ``then`` is called at the end, on whatever thread knows it."""

        def adopt(lease: RemoteLease | None) -> None:
            with self._state.lock:
                if lease is not None and lease.tokens >= self.tokens and self._holds:
                    lease, self._lease = self._lease, lease
            if lease is not None:
                self._remote.release(lease)
            then()

        self._remote.renew(self.question, adopt)

    def let_go(self) -> bool:
        """Undo :meth:`hold`. False when the lease has ended meanwhile."""
        left_s = self.lease_left_s
        with self._state.lock:
            self._holds -= 1
            released = self._released and not self._holds
        if released:
            self.release()
        return left_s > 0

    def prefetch(self, *, deadline_s: float | None = None) -> Transfer[int]:
        counts = dict(self.by_tier)
        above = self.tokens - counts.get(Tier.DISK.label, 0)

        def settle(_: TransferState) -> int:
            return above

        nbytes = self.num_pages * self._remote.page_bytes
        transfer = Transfer(settle, pages=self.num_pages, nbytes=nbytes, deadline_s=deadline_s)

        def ask(lease: RemoteLease | None) -> None:
            if lease is None:
                transfer.finish()
                return
            wait_s = _PREFETCH_S if transfer.remaining_s is None else transfer.remaining_s
            message = protocol.Prefetch(0, lease.number, wait_s)
            call = self._remote.connection.call(lease.session, message, protocol.Prefetched, wait_s=wait_s)

            def note() -> None:
                nonlocal above
                answer = call.wait()
                if answer is not None:
                    tokens = min(answer.pages * self.chunk_tokens, lease.tokens, self.tokens)
                    above = max(tokens, min(len(self.local) * self.chunk_tokens, self.tokens))
                transfer.finish()

            call.on_end(note)

        if above == self.tokens:
            transfer.finish()
        else:
            self.with_lease(ask)
        return transfer

    def release(self) -> None:
        with self._state.lock:
            self._state.leases.release(self._local_lease)
            self._released = self._holds > 0
            if self._released:
                return
            lease, self._lease = self._lease, None
        if lease is not None:
            self._remote.release(lease)
