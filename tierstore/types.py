"""What a store gives back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought: the first ``tokens`` tokens. ``pages`` are HBM pages, each owned once by the
    caller (none for buffers); ``moved_bytes`` is the payload that had to be copied."""

    tokens: int
    pages: tuple[int, ...] = ()
    moved_bytes: int = 0
