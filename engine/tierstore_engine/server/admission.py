"""How many requests are worked on at a time, and how many tokens wait: what is too much is sent away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tierstore_engine.server.errors import ApiError

_RETRY_S = 1


class AdmissionLimits(Protocol):
    """How many requests, and prompt tokens of these (a single one may have more)."""

    @property
    def max_requests(self) -> int: ...

    @property
    def max_queued_tokens(self) -> int: ...


class AdmissionPlace:
    """One request's. ``tokens`` are what its prompts hold of the queue."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.tokens = 0

    def take(self, tokens: int) -> None:
        """Raises :class:`ApiError` (429) when there are too many with these, beside other requests'."""
        admission = self._admission
        if admission.tokens and admission.tokens + tokens > admission.settings.max_queued_tokens:
            raise ApiError(
                429,
                f"{admission.tokens} prompt tokens are being worked on, and with the {tokens} of this "
                f"request there would be more than {admission.settings.max_queued_tokens}: try again in a "
                "moment",
                retry_after_s=_RETRY_S,
            )
        admission.tokens += tokens
        self.tokens += tokens


class Admission:
    """Counts requests and tokens. Used on one event loop."""

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
        """Hold a place. Raises :class:`ApiError`: 503 when the server is about to end, 429 when all are
        taken."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", retry_after_s=_RETRY_S)
        if self.requests >= self.settings.max_requests:
            self.refused += 1
            raise ApiError(
                429,
                f"{self.requests} requests are being worked on, which is as many as there may be: "
                "try again in a moment",
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
        """Let nobody in any more and wait for the others. False when some are left after ``timeout_s``."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True
