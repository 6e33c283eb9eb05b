"""How results look: a table or a line for people, one JSON document for machines, progress on a terminal.

What goes into a table or a line is escaped here: it may hold names that somebody else chose.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from tierstore.printable import printable
from tierstore.tables import print_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.text import Text

_AGES = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def write_json(document: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def line(words: str) -> None:
    """One line for people, on stdout."""
    sys.stdout.write(printable(words) + "\n")


def text(value: str, style: str = "") -> Text:
    """Text as it is: brackets in it are no markup."""
    from rich.text import Text

    return Text(printable(value), style)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Write a table to stdout. The first ``left`` columns are words, the others numbers."""
    print_table(columns, rows, left=left)


def percent(part: float, whole: float) -> str:
    """A share, as it is written; – of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def age(at_s: float | None) -> str:
    """How long ago a time of the wall clock was, in its largest unit."""
    if not at_s:
        return "–"
    seconds = max(time.time() - at_s, 0)
    for unit, length in _AGES:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return "now"


class ProgressMeter:
    """Progress of a run through pages, on stderr. Thread-safe; off a terminal it shows nothing."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._lock = Lock()
        self._pages = 0

    def phase(self, text: str) -> None:
        """What is being done now."""
        self._progress.update(self._task, description=text)

    def expect(self, pages: int, nbytes: int) -> None:
        """How much there is to do."""
        self._progress.update(self._task, total=nbytes, all_pages=f"{pages:,}")

    def advance(self, pages: int, nbytes: int) -> None:
        """This much more is done."""
        with self._lock:
            self._pages += pages
            done = f"{self._pages:,}"
        self._progress.update(self._task, advance=nbytes, pages=done)


@contextmanager
def meter(text: str) -> Iterator[ProgressMeter]:
    """A bar with pages, bytes and bytes per second, for as long as the block runs."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = _console()
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[pages]}/{task.fields[all_pages]} pages"),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield ProgressMeter(progress, progress.add_task(text, total=None, pages="0", all_pages="?"))


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """A spinner on stderr for as long as the block runs; off a terminal nothing."""
    console = _console()
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)
