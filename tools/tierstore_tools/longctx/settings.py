"""The options of one run, and the sizes of its tiers."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tierstore.errors import UsageError
from tierstore.spec import DEFAULT_CHUNK_TOKENS, KVSpec
from tierstore.units import MIB, format_size

ANSWER_TOKENS = 32
TAIL_TOKENS = 1024


@dataclass(frozen=True)
class LongContext:
    """The options. The store is made in ``directory``. ``prompt_text`` replaces the standard library as text.
    ``ranks`` processes share the heads of each of ``parts`` parts of the tokens."""

    model: str
    tokens: int
    directory: Path
    device: str = "auto"
    dtype: str | None = None
    kv_dtype: str = "auto"
    kv_scales: str = "dynamic"
    ranks: int = 1
    parts: int = 1
    prompt_text: str | None = None
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    prefill_chunk: int = 2048
    sweep: tuple[int, ...] = ()
    throttle: Mapping[str, float] = field(default_factory=dict)  # bytes per second by tier


@dataclass(frozen=True)
class Sizes:
    """Capacities that hold the longest conversation of the run in every tier."""

    pool_pages: int
    host_bytes: int
    disk_bytes: int

    @classmethod
    def for_tokens(cls, spec: KVSpec, tokens: int) -> Sizes:
        """Return the sizes for a prompt of ``tokens`` tokens."""
        pages = -(-(tokens + TAIL_TOKENS + 4 * ANSWER_TOKENS) // spec.chunk_tokens) + 8
        nbytes = pages * spec.page_bytes
        # Half of the host tier may wait for the disk, so the whole prompt is written.
        return cls(pages, 2 * nbytes + 16 * MIB, nbytes + nbytes // 4 + 64 * MIB)

    def check_disk(self, directory: Path) -> None:
        """Raise :class:`UsageError` if the store does not fit on the file system."""
        free = shutil.disk_usage(directory).free
        if free < self.disk_bytes:
            raise UsageError(
                f"the store needs {format_size(self.disk_bytes)} in {directory}, "
                f"which has {format_size(free)} left: choose another --store"
            )
