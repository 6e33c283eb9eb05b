"""Output of commands: tables and lines of text, one JSON document with ``--json``, progress on a terminal.

Text is escaped, because it may contain control characters in names that other users have chosen.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
    """Write one line to stdout."""
    sys.stdout.write(printable(words) + "\n")


def text(value: str, style: str = "") -> Text:
    """Return styled text. Brackets in ``value`` are not interpreted as rich's markup."""
    from rich.text import Text

    return Text(printable(value), style)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Write a table to stdout. The first ``left`` columns are text, the others numbers."""
    print_table(columns, rows, left=left)


def percent(part: float, whole: float) -> str:
    """Format ``part`` of ``whole`` as a percentage; "–" if ``whole`` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def age(at_s: float | None) -> str:
    """Format the age of something that happened at ``at_s`` (seconds since 1970), such as "3 h"."""
    if not at_s:
        return "–"
    seconds = max(time.time() - at_s, 0)
    for unit, length in _AGES:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return "now"


class ProgressMeter:
    """A progress bar for pages on stderr. Thread-safe. Shows nothing if stderr is not a terminal."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._lock = Lock()
        self._pages = 0

    def phase(self, text: str) -> None:
        """Show the name of the current phase."""
        self._progress.update(self._task, description=text)

    def expect(self, pages: int, nbytes: int) -> None:
        """Set the total of pages and bytes."""
        self._progress.update(self._task, total=nbytes, all_pages=f"{pages:,}")

    def advance(self, pages: int, nbytes: int) -> None:
        """Add finished pages and bytes."""
        with self._lock:
            self._pages += pages
            done = f"{self._pages:,}"
        self._progress.update(self._task, advance=nbytes, pages=done)


@contextmanager
def meter(text: str) -> Iterator[ProgressMeter]:
    """Show a bar with pages, bytes and bytes per second while the block runs."""
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
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[pages]}/{task.fields[all_pages]} pages"),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    # Without a terminal the bar is not started, because rich 13 prints an empty line even for a disabled bar.
    with progress if console.is_terminal else nullcontext():
        yield ProgressMeter(progress, progress.add_task(text, total=None, pages="0", all_pages="?"))


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show a spinner on stderr while the block runs, if stderr is a terminal."""
    console = _console()
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)
