"""What a check found, in words that a person can act on and a script can count."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field


class Category(str, enum.Enum):
    """What is wrong with a thing."""

    DAMAGED = "damaged"  # it is there, and it is not what was written
    ORPHANED = "orphaned"  # it is whole, and no lookup can reach it
    MISPLACED = "misplaced"  # it says that it lies where no page lies, or where another one does
    UNACCOUNTED = "unaccounted"  # it takes space, and nothing refers to it


@dataclass(frozen=True, slots=True)
class PageName:
    """Which page that is, for a person. The tokens are positions in the prompt; None where a chain is so
    broken that they cannot be told."""

    serial: int
    model: str
    tenant: str
    start_tokens: int | None
    stop_tokens: int | None

    def __str__(self) -> str:
        owner = f"{self.model} (tenant {self.tenant})" if self.tenant else self.model
        span = (
            "tokens unknown"
            if self.start_tokens is None
            else f"tokens {self.start_tokens}–{self.stop_tokens}"
        )
        return f"page {self.serial} of {owner}, {span}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. ``serial`` is the page's, if it is one; ``name`` names a file or an entry."""

    category: Category
    what: str  # record, payload, facts, link, identity, page, place, pieces, extent file, file, …
    why: str
    serial: int | None = None
    name: str = ""
    mendable: bool = True  # False: a person must look at it


@dataclass(slots=True)
class Findings:
    """All that was found: every one is counted, the first ``limit`` are kept."""

    limit: int
    counts: Counter[tuple[Category, str]] = field(default_factory=Counter)
    kept: list[Finding] = field(default_factory=list)
    unmendable: int = 0

    def add(self, finding: Finding) -> None:
        self.counts[finding.category, finding.what] += 1
        self.unmendable += not finding.mendable
        if len(self.kept) < self.limit:
            self.kept.append(finding)

    def clear(self) -> None:
        self.counts.clear()
        self.kept.clear()
        self.unmendable = 0

    def total(self, category: Category | None = None) -> int:
        """How many there are, kept or not."""
        return sum(count for (each, _), count in self.counts.items() if category in (None, each))


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What a check of a directory found, did, and took. Sizes are in bytes, times in seconds."""

    directory: str
    store: str  # the store's own identity; empty when there is no index yet
    pages: int  # records in the index, damaged ones too
    good_pages: int  # that are served, or will be after a repair
    findings: list[Finding]  # the first of them
    pages_named: dict[int, PageName]  # by serial: those that the findings are about
    counts: dict[Category, dict[str, int]]  # of all findings, by what is wrong
    repaired: bool
    unmended: int  # findings that are still true after this run
    verified_pages: int
    verified_bytes: int  # of payload
    index_bytes: int
    allocated_bytes: int  # everything under the directory, as it is now
    capacity_bytes: int | None  # its cap, where that was written down
    seconds: float
    payload_seconds: float  # of which reading and hashing payloads took this

    @property
    def clean(self) -> bool:
        """Nothing is wrong (any more)."""
        return self.unmended == 0

    @property
    def index_lost(self) -> bool:
        """The index cannot be used at all, and so no page can be found."""
        return "index" in self.counts.get(Category.DAMAGED, {})

    @property
    def gb_per_s(self) -> float:
        """Payload bytes verified in the time of the whole run, in 10⁹ bytes per second."""
        return self.verified_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def total(self, category: Category) -> int:
        """Findings of one category."""
        return sum(self.counts.get(category, {}).values())
