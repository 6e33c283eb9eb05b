"""What waits is prepared: pages on disk come to host memory before their request is admitted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierstore.transfer import Transfer
from tierstore_connectors.base import Connector, Hit
from tierstore_engine.outputs import RequestId
from tierstore_engine.sequence import Sequence

_AHEAD_BYTES = 256 << 20  # on their way or held, for requests that wait
_AHEAD_REQUESTS = 16  # that are looked up; those behind them are not


@dataclass(slots=True)
class _Ahead:
    """``hit`` holds what was prefetched until the request is admitted."""

    hit: Hit
    transfer: Transfer[int] | None
    nbytes: int
    bringing: Transfer[int] | None = None


class LookAhead:
    """Looks up the oldest waiting requests, once each, and prefetches what is on disk, in their order, as
    far as that is worth loading. Belongs to the engine's thread."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._token_bytes = connector.pool.spec.page_bytes / connector.pool.spec.chunk_tokens
        self._ahead: dict[RequestId, _Ahead] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._ahead)

    def look(self, waiting: Iterable[Sequence]) -> None:
        """Prepare those of ``waiting``, oldest first, that there is room for."""
        if not self._connector.keeps:
            return
        for sequence in waiting:
            if sequence.request_id in self._ahead:
                continue
            if len(self._ahead) >= _AHEAD_REQUESTS or self._bytes >= _AHEAD_BYTES:
                return
            self._begin(sequence)

    def bringing(self, sequence: Sequence) -> bool:
        """Whether pages of other hosts are on their way for it: it is better admitted when they have come. To
        be asked before it is admitted; where there are no other hosts this is free."""
        if not self._connector.remote or not self._connector.keeps:
            return False
        if sequence.request_id not in self._ahead:
            self._begin(sequence)
        bringing = self._ahead[sequence.request_id].bringing
        return bringing is not None and not bringing.done

    def _begin(self, sequence: Sequence) -> None:
        hit = self._connector.lookup(sequence.prompt, max_tokens=len(sequence.tokens) - 1)
        plan = self._connector.plan(hit, len(sequence.tokens), block=0)
        wanted = max(hit.by_tier.get("disk", 0) - plan.declined.get("disk", 0), 0)
        transfer = hit.prefetch() if wanted else None
        bringing = self._connector.bring(hit)
        if transfer is None:
            hit.release()
        nbytes = round(wanted * self._token_bytes)
        self._ahead[sequence.request_id] = _Ahead(hit, transfer, nbytes, bringing)
        self._bytes += nbytes

    def forget(self, sequence: Sequence) -> None:
        """It has been admitted, or has gone: what has not come by now is not brought for its sake."""
        ahead = self._ahead.pop(sequence.request_id, None)
        if ahead is None:
            return
        self._bytes -= ahead.nbytes
        if ahead.transfer is not None:
            ahead.transfer.cancel()
            ahead.hit.release()
