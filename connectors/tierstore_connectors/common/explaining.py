"""Reasons for the missed tokens of an engine's requests, for the engine's counters and log.

A background thread asks the store for the reasons after the lookup, so no request waits for them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tierstore.errors import StoreClosedError
from tierstore.explanation import Explanation, Miss, MissReason, behind
from tierstore_connectors.common.counters import ConnectorCounters
from tierstore_connectors.common.guard import ErrorLog

MISSED = "missed_tokens:"
"""The prefix of the counters' names. A reason follows it."""
UNEXPLAINED = "unexplained"
"""The reason for tokens that were not explained because of too many requests or an error."""

_MOST_WAITING = 16  # requests; after a longer wait the engine has saved the missed tokens itself
_MOST_SPANS = 6  # misses in one line of the log
_COMPUTED = "tokens were stored when the request arrived, but were computed before they could be loaded"
_COMPUTES = "the engine computes every prompt"


def missed(explanation: Explanation, reused: int, *, computes: bool = False) -> tuple[Miss, ...]:
    """Return the misses after the first ``reused`` tokens, up to the end of the prompt.

    Between the engine's lookup and the explanation, other requests may have saved tokens, or the engine may
    have computed tokens instead of loading them. ``computes`` is True for an engine that loads nothing.

    >>> late = Explanation(100, 64, (Miss(MissReason.NEVER_SAVED, 64, 36),))
    >>> [(miss.reason.value, miss.first, miss.tokens) for miss in missed(late, 48)]
    [('late', 48, 16), ('never_saved', 64, 36)]
    """
    misses = []
    if reused < explanation.hit_tokens:
        reason, why = (MissReason.DECLINED, _COMPUTES) if computes else (MissReason.LATE, _COMPUTED)
        misses.append(Miss(reason, reused, explanation.hit_tokens - reused, why=why))
    return (*misses, *behind(explanation.misses, max(reused, explanation.hit_tokens)))


class MissReporter:
    """Count the missed tokens of requests by reason, and log one line for each request with misses.
    Thread-safe."""

    def __init__(self, logger: logging.Logger, counters: ConnectorCounters, errors: ErrorLog) -> None:
        self._logger = logger
        self._counters = counters
        self._errors = errors
        self._waiting = threading.BoundedSemaphore(_MOST_WAITING)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tierstore-explain")

    def explain(self, request: str, tokens: int, reused: int, ask: Callable[[], Explanation]) -> None:
        """Report a request with ``tokens`` prompt tokens. The engine reuses the first ``reused`` tokens.

        ``ask`` is called on the background thread, and explains the whole chunks of the prompt. Tokens after
        the whole chunks get the reason :attr:`MissReason.TAIL`.
        """
        if not self._waiting.acquire(blocking=False):
            self._add(UNEXPLAINED, tokens - reused)
            return
        try:
            self._thread.submit(self._explain, request, tokens, reused, ask)
        except RuntimeError:  # closed
            self._waiting.release()

    def report(self, request: str, tokens: int, reused: int, misses: Sequence[Miss]) -> None:
        """Report a request whose ``misses`` are known. The misses begin after the ``reused``
        tokens. Tokens after the last miss get the reason :attr:`MissReason.TAIL`."""
        end = misses[-1].end if misses else reused
        if end < tokens:
            misses = [*misses, Miss(MissReason.TAIL, end, tokens - end)]
        for miss in misses:
            self._add(miss.reason.value, miss.tokens)
        if all(miss.reason is MissReason.TAIL for miss in misses):
            return
        spans = [str(miss) for miss in misses[:_MOST_SPANS]]
        if len(misses) > _MOST_SPANS:
            spans.append(f"and {len(misses) - _MOST_SPANS} more")
        self._logger.info(
            "tierstore: request %s: %s tokens, %s reused; missed: %s",
            request,
            f"{tokens:,}",
            f"{reused:,}",
            "; ".join(spans),
        )

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _explain(self, request: str, tokens: int, reused: int, ask: Callable[[], Explanation]) -> None:
        try:
            self.report(request, tokens, reused, missed(ask(), reused))
        except StoreClosedError:  # the connection was replaced
            self._add(UNEXPLAINED, tokens - reused)
        except Exception as error:  # noqa: BLE001  # the executor would discard it
            self._errors.caught("explaining missed tokens", error)
            self._add(UNEXPLAINED, tokens - reused)
        finally:
            self._waiting.release()

    def _add(self, reason: str, tokens: int) -> None:
        self._counters.add(MISSED + reason, tokens)
