"""What became of reading pages: damage is not failure, and a failure says nothing about the page."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class PageRead(enum.Enum):
    """How one page came back."""

    GOOD = "good"  # byte for byte what was saved
    DAMAGED = "damaged"  # the disk gave what it has, and that is not the page: it will never be read again
    FAILED = "failed"  # the disk gave an error: the page may well be there


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """The outcomes of one read, page by page, and one of the errors if there were any."""

    outcomes: Sequence[PageRead]
    error: OSError | None = None

    @property
    def good(self) -> int:
        """How many pages are as they were saved."""
        return sum(outcome is PageRead.GOOD for outcome in self.outcomes)

    @property
    def all_good(self) -> bool:
        return self.good == len(self.outcomes)
