"""Limit the running and waiting requests and their prompt tokens. Requests beyond the limits are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tierstore_engine.server.errors import ApiError

_RETRY_S = 1


class AdmissionLimits(Protocol):
    """The limits on the number of requests and on the sum of their prompt tokens. A request that is alone may
    have more tokens."""

    @property
    def max_requests(self) -> int: ...

    @property
    def max_queued_tokens(self) -> int: ...


class AdmissionPlace:
    """One request's place among the running and waiting requests. ``tokens`` is the number of its prompt
    tokens."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.tokens = 0

    def take(self, tokens: int) -> None:
        """Add prompt tokens. Raises :class:`ApiError` (429) if other requests' tokens and these exceed the
        limit."""
        admission = self._admission
        if admission.tokens and admission.tokens + tokens > admission.settings.max_queued_tokens:
            raise ApiError(
                429,
                f"running and waiting requests have {admission.tokens} prompt tokens and this "
                f"request has {tokens}, but the limit is {admission.settings.max_queued_tokens} together: "
                "try again in a moment",
                retry_after_s=_RETRY_S,
            )
        admission.tokens += tokens
        self.tokens += tokens


class Admission:
    """Counts requests and their tokens. Use it on one event loop."""

    def __init__(self, settings: AdmissionLimits) -> None:
        self.settings = settings
        self.requests = 0
        self.tokens = 0
        self.refused = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def place(self) -> Iterator[AdmissionPlace]:
        """Hold a place. Raises :class:`ApiError`: 503 during shutdown, 429 if all places are taken."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", retry_after_s=_RETRY_S)
        if self.requests >= self.settings.max_requests:
            self.refused += 1
            raise ApiError(
                429,
                f"{self.requests} requests are running or waiting, which is the limit: try again in a moment",
                retry_after_s=_RETRY_S,
            )
        place = AdmissionPlace(self)
        self.requests += 1
        self._idle.clear()
        try:
            yield place
        finally:
            self.requests -= 1
            self.tokens -= place.tokens
            if not self.requests:
                self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and wait for the running and waiting ones. Return False if some of them are
        left after ``timeout_s``."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True
