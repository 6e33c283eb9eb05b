"""Prepare waiting requests: read their pages from disk to host memory before admission, and wait for pages
that other engines have promised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierstore.transfer import Transfer
from tierstore_connectors.base import ConnectorHit
from tierstore_engine.keeper import PageKeeper
from tierstore_engine.outputs import RequestId
from tierstore_engine.sequence import Sequence

_AHEAD_BYTES = 256 << 20  # the most bytes of waiting requests that are being prefetched or are held
_AHEAD_REQUESTS = 16  # how many requests are prepared; later ones are not


@dataclass(slots=True)
class _Ahead:
    """The preparation of a request. ``hit`` holds the prefetched pages until the request is admitted."""

    hit: ConnectorHit
    transfer: Transfer[int] | None
    nbytes: int
    fetching: Transfer[int] | None = None


class LookAhead:
    """Prefetches pages on disk for the first waiting requests, in their order and once each, if that saves
    time. Belongs to the engine's thread."""

    def __init__(self, keeper: PageKeeper) -> None:
        self._keeper = keeper
        self._connector = keeper.connector
        self._ahead: dict[RequestId, _Ahead] = {}
        self._promised: dict[RequestId, Transfer[None]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._ahead)

    def look(self, waiting: Iterable[Sequence]) -> None:
        """Prepare the first requests of ``waiting``, as far as the limits allow."""
        if not self._connector.keeps:
            return
        for sequence in waiting:
            if self.promised(sequence) or sequence.request_id in self._ahead:
                continue
            if len(self._ahead) >= _AHEAD_REQUESTS or self._bytes >= _AHEAD_BYTES:
                return
            self._begin(sequence)

    def promised(self, sequence: Sequence) -> bool:
        """Return whether pages that another engine has promised are still awaited. The sequence is not
        admitted before they have arrived or the promise's time is over. Each promise is waited for once. Call
        it before admission."""
        promise = sequence.promise
        if promise is None:
            return False
        expected = self._promised.get(sequence.request_id)
        if expected is None:
            expected = self._connector.expect(sequence.prompt, promise)
            self._promised[sequence.request_id] = expected
        if not expected.done:
            return True
        sequence.promise = None
        del self._promised[sequence.request_id]
        return False

    def awaited(self) -> Transfer[None] | None:
        """Return one of the awaited transfers."""
        return next(iter(self._promised.values()), None)

    def fetching(self, sequence: Sequence) -> bool:
        """Return whether pages of other hosts are being fetched for the sequence, so that it should be
        admitted later. Call it before admission. This takes no time if there are no other hosts."""
        if not self._connector.remote or not self._connector.keeps:
            return False
        if sequence.request_id not in self._ahead:
            self._begin(sequence)
        fetching = self._ahead[sequence.request_id].fetching
        return fetching is not None and not fetching.done

    def give_up(self) -> bool:
        """Drop prefetched pages of waiting requests, because the memory is needed. Return whether any page
        was dropped."""
        held = [ahead for ahead in self._ahead.values() if ahead.transfer is not None]
        for ahead in held:
            self._drop(ahead)
        return bool(held)

    def _drop(self, ahead: _Ahead) -> None:
        if ahead.transfer is not None:
            ahead.transfer.cancel()
            ahead.hit.release()
            ahead.transfer = None
        self._bytes -= ahead.nbytes
        ahead.nbytes = 0

    def _begin(self, sequence: Sequence) -> None:
        hit = self._keeper.look_up(sequence)
        plan = self._connector.plan(hit, len(sequence.tokens), block=0)
        wanted = max(hit.by_tier.get("disk", 0) - plan.declined.get("disk", 0), 0)
        transfer = hit.prefetch() if wanted else None
        fetching = self._connector.fetch_remote(hit)
        if transfer is None:
            hit.release()
        spec = self._connector.pool.spec
        nbytes = len(self._connector.rules[0].pages(wanted, spec.chunk_tokens)) * spec.page_bytes
        self._ahead[sequence.request_id] = _Ahead(hit, transfer, nbytes, fetching)
        self._bytes += nbytes

    def forget(self, sequence: Sequence) -> None:
        """Drop the preparation of a sequence that was admitted or has left. Pages that have not arrived are
        not fetched for it."""
        promised = self._promised.pop(sequence.request_id, None)
        if promised is not None:
            promised.cancel()
        ahead = self._ahead.pop(sequence.request_id, None)
        if ahead is not None:
            self._drop(ahead)
