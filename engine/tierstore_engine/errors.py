"""What the engine raises at its boundary: one line that says what is wrong and what to do about it."""

from __future__ import annotations

from tierstore.errors import TierStoreError, UsageError


class ModelError(TierStoreError):
    """A model folder that cannot be run: something is missing, unsupported or of the wrong shape."""


class RequestError(UsageError):
    """A request that can never be served: too long for the model or the pool, impossible parameters."""


class UnknownModelError(ModelError, UsageError):
    """A name that is neither a preset nor a model folder."""
