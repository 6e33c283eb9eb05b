"""Explain that a device's memory ran out during a step.

The pool took its part when the engine was made. Computing shares the rest with the weights and the captured
steps. So the remedy is a smaller pool or smaller steps. A failed step changes nothing for its sequences, and
the engine can continue with other requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tierstore.tiers.device import DeviceMemoryError
from tierstore.tiers.device_pool import DevicePool
from tierstore.units import format_size
from tierstore_engine.settings import EngineSettings


@contextmanager
def shortage_explained(pool: DevicePool, settings: EngineSettings) -> Iterator[None]:
    """Turn torch's out-of-memory error into a :class:`DeviceMemoryError` with the relevant numbers."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        memory = pool.runtime.memory()
        raise DeviceMemoryError(
            f"{pool.device} has no memory left to compute a step of up to {settings.batch_tokens} tokens: "
            f"{format_size(memory.free)} of its {format_size(memory.total)} are free, and the page pool has "
            f"{format_size(pool.large_pages.nbytes)}. Give it fewer pages, or a smaller "
            f"prefill_chunk ({settings.prefill_chunk}) or max_sequences ({settings.max_sequences}), or take "
            "prefill_backend kernels, which needs no gathered copy"
        ) from error
