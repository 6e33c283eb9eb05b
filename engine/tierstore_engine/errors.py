"""What the engine raises at its boundary: one line that says what is wrong and what to do about it."""

from __future__ import annotations

from tierstore.errors import TierStoreError, UsageError


class ModelError(TierStoreError):
    """A model folder that cannot be run: something is missing, unsupported or of the wrong shape."""


class RequestError(UsageError):
    """A request that can never be served: too long for the model or the pool, impossible parameters."""


class DeadlineError(TierStoreError):
    """A request whose first token cannot be there in time. ``retry_after_s`` is when what waits now will have
    been computed; None where the prompt alone takes too long."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnknownModelError(ModelError, UsageError):
    """A name that is neither a preset nor a model folder."""
