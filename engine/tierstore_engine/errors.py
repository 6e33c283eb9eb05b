"""The engine's errors. Each message says in one line what is wrong and what to do about it."""

from __future__ import annotations

from tierstore.errors import TierStoreError, UsageError


class ModelError(TierStoreError):
    """A model folder that cannot be used: a file or tensor is missing, unsupported or of the wrong shape."""


class KernelError(ModelError):
    """The CUDA kernels cannot be built or loaded on this machine. The message says what to install or
    change."""


class RequestError(UsageError):
    """A request that can never be served: it is too long for the model or the pool, or has invalid
    parameters."""


class RankLostError(TierStoreError):
    """A process of ``--tensor-parallel`` has died or hangs, and the engine cannot continue."""


class DeadlineError(TierStoreError):
    """A request whose first token would be late. ``retry_after_s`` is the number of seconds after which a
    retry may succeed; None if the prompt alone takes too long."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnknownModelError(ModelError, UsageError):
    """A name that is neither a preset nor a model folder."""
