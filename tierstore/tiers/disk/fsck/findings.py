"""The findings of a check."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field


class Category(str, enum.Enum):
    """The kind of a finding."""

    DAMAGED = "damaged"  # the contents are not as they were written
    ORPHANED = "orphaned"  # the page is intact, but no lookup can reach it
    MISPLACED = "misplaced"  # the page's place is impossible, or belongs to another page
    UNACCOUNTED = "unaccounted"  # takes space, but nothing refers to it


@dataclass(frozen=True, slots=True)
class PageName:
    """The description of a page for people. The tokens are positions in the prompt; None if an ancestor of
    the page is missing."""

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
    """One defect. ``serial`` is that of a damaged page, and ``name`` is the name of a file or an entry."""

    category: Category
    what: str  # record, payload, facts, link, identity, page, place, pieces, extent file, file, …
    why: str
    serial: int | None = None
    name: str = ""
    mendable: bool = True  # False: a repair cannot remove the defect


@dataclass(slots=True)
class Findings:
    """The findings of a check. All are counted, and the first ``limit`` are kept."""

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
        """Return the number of findings, kept or not."""
        return sum(count for (each, _), count in self.counts.items() if category in (None, each))


@dataclass(frozen=True, slots=True)
class FsckReport:
    """The result of a check of a directory. Sizes are in bytes, times in seconds."""

    directory: str
    store: str  # the store's id; empty if there is no index yet
    pages: int  # records in the index, including damaged records
    good_pages: int  # pages that lookups can find, or can find after a repair
    findings: list[Finding]  # the first ``limit`` findings
    pages_named: dict[int, PageName]  # descriptions of the pages in ``findings``, by serial
    counts: dict[Category, dict[str, int]]  # number of all findings, by category and kind
    repaired: bool
    unmended: int  # number of findings that remain after this run
    verified_pages: int
    verified_bytes: int  # of payload
    index_bytes: int
    allocated_bytes: int  # disk space of the directory with everything in it
    capacity_bytes: int | None  # the store's capacity; None if it is not stored
    seconds: float
    payload_seconds: float  # the part of ``seconds`` for reading and hashing payloads

    @property
    def clean(self) -> bool:
        """Whether there are no findings, or all were repaired."""
        return self.unmended == 0

    @property
    def index_lost(self) -> bool:
        """Whether the whole index is damaged, so that no page can be found."""
        return "index" in self.counts.get(Category.DAMAGED, {})

    @property
    def gb_per_s(self) -> float:
        """Verified payload bytes per second of the whole run, in GB/s."""
        return self.verified_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def total(self, category: Category) -> int:
        """Return the number of findings of one category."""
        return sum(self.counts.get(category, {}).values())
