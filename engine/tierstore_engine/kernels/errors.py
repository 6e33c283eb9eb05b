"""The error of building and loading kernels."""

from __future__ import annotations

from tierstore_engine.errors import ModelError


class KernelError(ModelError):
    """The CUDA kernels cannot be built or loaded here; the message says what to install or change."""
