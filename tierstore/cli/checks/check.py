"""One line of the doctor's report."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path


class Status(str, enum.Enum):
    OK = "ok"
    WARN = "warn"  # it works, and could be faster or safer
    FAIL = "fail"  # it will not work


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. ``figures`` are for programs; their names contain the units."""

    name: str
    status: Status
    found: str
    advice: str = ""  # what to change; empty if nothing
    figures: dict[str, int] = field(default_factory=dict)


def ok(name: str, found: str, **figures: int) -> Check:
    return Check(name, Status.OK, found, figures=figures)


def warn(name: str, found: str, advice: str, **figures: int) -> Check:
    return Check(name, Status.WARN, found, advice, figures)


def fail(name: str, found: str, advice: str, **figures: int) -> Check:
    return Check(name, Status.FAIL, found, advice, figures)


def read_text(path: str) -> str | None:
    """Return the content of a kernel file; None if this kernel or container does not have it."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
