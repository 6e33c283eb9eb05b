"""The findings of a check, in words that a person can act on and a script can count."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field


class Category(str, enum.Enum):
    """The kind of a finding."""

    DAMAGED = "damaged"  # there, but not as it was written
    ORPHANED = "orphaned"  # intact, but no lookup can reach it
    MISPLACED = "misplaced"  # its place is impossible, or another page's
    UNACCOUNTED = "unaccounted"  # takes space, but nothing refers to it


@dataclass(frozen=True, slots=True)
class PageName:
    """The name of a page, for a person. The tokens are positions in the prompt, or None if its chain is too
    broken to know them."""

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
    """One defect. ``serial`` is the page's, if it is about a page; ``name`` names a file or an entry."""

    category: Category
    what: str  # record, payload, facts, link, identity, page, place, pieces, extent file, file, …
    why: str
    serial: int | None = None
    name: str = ""
    mendable: bool = True  # False: a person must look at it


@dataclass(slots=True)
class Findings:
    """All findings of a check: every one is counted, the first ``limit`` are kept."""

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
    store: str  # the store's own identity; empty if there is no index yet
    pages: int  # records in the index, including damaged ones
    good_pages: int  # pages that are served, or will be after a repair
    findings: list[Finding]  # the first ones
    pages_named: dict[int, PageName]  # pages in the findings, by serial
    counts: dict[Category, dict[str, int]]  # all findings by category
    repaired: bool
    unmended: int  # findings that remain after this run
    verified_pages: int
    verified_bytes: int  # of payload
    index_bytes: int
    allocated_bytes: int  # everything under the directory now
    capacity_bytes: int | None  # the cap, if it is stored
    seconds: float
    payload_seconds: float  # part of ``seconds`` spent on reading and hashing payloads

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong, or everything was repaired."""
        return self.unmended == 0

    @property
    def index_lost(self) -> bool:
        """Whether the index cannot be used at all, so that no page can be found."""
        return "index" in self.counts.get(Category.DAMAGED, {})

    @property
    def gb_per_s(self) -> float:
        """Payload bytes verified per second of the whole run, in 10⁹ bytes per second."""
        return self.verified_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def total(self, category: Category) -> int:
        """Return the number of findings of one category."""
        return sum(self.counts.get(category, {}).values())
