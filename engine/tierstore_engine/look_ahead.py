"""What waits is looked up and prepared: its pages on disk come to host memory before it is admitted. Those
that another engine has promised are waited for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierstore.transfer import Transfer
from tierstore_connectors.base import ConnectorHit
from tierstore_engine.keeper import PageKeeper
from tierstore_engine.outputs import RequestId
from tierstore_engine.sequence import Sequence

_AHEAD_BYTES = 256 << 20  # on their way or held, for requests that wait
_AHEAD_REQUESTS = 16  # that are prepared; those behind them are not


@dataclass(slots=True)
class _Ahead:
    """``hit`` holds what was prefetched until the request is admitted."""

    hit: ConnectorHit
    transfer: Transfer[int] | None
    nbytes: int
    fetching: Transfer[int] | None = None


class LookAhead:
    """Prefetches what is on disk for the first requests that wait, once each, in their order, as far as that
    is worth loading. Belongs to the engine's thread."""

    def __init__(self, keeper: PageKeeper) -> None:
        self._keeper = keeper
        self._connector = keeper.connector
        self._token_bytes = self._connector.pool.spec.page_bytes / self._connector.pool.spec.chunk_tokens
        self._ahead: dict[RequestId, _Ahead] = {}
        self._promised: dict[RequestId, Transfer[None]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._ahead)

    def look(self, waiting: Iterable[Sequence]) -> None:
        """Prepare those of ``waiting``, first ones first, that there is room for."""
        if not self._connector.keeps:
            return
        for sequence in waiting:
            if self.promised(sequence) or sequence.request_id in self._ahead:
                continue
            if len(self._ahead) >= _AHEAD_REQUESTS or self._bytes >= _AHEAD_BYTES:
                return
            self._begin(sequence)

    def promised(self, sequence: Sequence) -> bool:
        """Whether pages of it are on their way that another engine has promised: it is not admitted before
        they have come, or the promise's time is over. That is waited for once. To be asked before it is
        admitted."""
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
        """One of the things that are waited for."""
        return next(iter(self._promised.values()), None)

    def fetching(self, sequence: Sequence) -> bool:
        """Whether pages of other hosts are on their way for it: it is better admitted when they have come. To
        be asked before it is admitted; where there are no other hosts this is free."""
        if not self._connector.remote or not self._connector.keeps:
            return False
        if sequence.request_id not in self._ahead:
            self._begin(sequence)
        fetching = self._ahead[sequence.request_id].fetching
        return fetching is not None and not fetching.done

    def give_up(self) -> bool:
        """Give up what is prefetched for those that wait, since the pages that it holds are wanted. Whether
        there was anything."""
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
        nbytes = round(wanted * self._token_bytes)
        self._ahead[sequence.request_id] = _Ahead(hit, transfer, nbytes, fetching)
        self._bytes += nbytes

    def forget(self, sequence: Sequence) -> None:
        """It has been admitted, or has gone: what has not come by now is not brought for its sake."""
        promised = self._promised.pop(sequence.request_id, None)
        if promised is not None:
            promised.cancel()
        ahead = self._ahead.pop(sequence.request_id, None)
        if ahead is not None:
            self._drop(ahead)
