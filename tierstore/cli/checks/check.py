"""The result of one check of ``tierstore doctor``, and helpers for the checks."""

from __future__ import annotations

import enum
import re
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path


class Status(str, enum.Enum):
    OK = "ok"
    WARN = "warn"  # the checked thing works, but could be faster or safer
    FAIL = "fail"  # the checked thing will not work


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. ``figures`` are additional fields of ``--json``, whose names contain the
    units.
    """

    name: str
    status: Status
    found: str
    advice: str = ""  # what the user should change; empty if nothing
    figures: dict[str, int] = field(default_factory=dict)


def ok(name: str, found: str, **figures: int) -> Check:
    return Check(name, Status.OK, found, figures=figures)


def warn(name: str, found: str, advice: str, **figures: int) -> Check:
    return Check(name, Status.WARN, found, advice, figures)


def fail(name: str, found: str, advice: str, **figures: int) -> Check:
    return Check(name, Status.FAIL, found, advice, figures)


def installed(*packages: str) -> str | None:
    """Return the version of the first installed package of ``packages``; None if none is installed. Do not
    import the package, because some imports take seconds."""
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return None


def numbers(version: str, count: int = 3) -> tuple[int, ...]:
    """Return the first ``count`` numbers in a version string."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:count])


def read_text(path: str) -> str | None:
    """Return the content of a file in /proc or /sys; None if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
