"""Print progress and tables, and write JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from tierstore.errors import UsageError
from tierstore.tables import print_table

stdout = Console(width=None if sys.stdout.isatty() else 120)
stderr = Console(stderr=True)


class Phase:
    """One line of live progress."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def update(self, done: float | None = None, text: str | None = None) -> None:
        """Show a share from 0 to 1, or a new text."""
        if done is not None:
            self._progress.update(self._task, completed=done)
        if text is not None:
            self._progress.update(self._task, description=text)


@contextmanager
def phases() -> Iterator[Phases]:
    """Show phases on stderr while the block runs."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr) as progress:
        yield Phases(progress)


class Phases:
    """The lines of progress."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    @contextmanager
    def phase(self, text: str, *, measurable: bool = True) -> Iterator[Phase]:
        """Show a line until the block ends. Without a terminal it is printed once, at its end."""
        task = self._progress.add_task(text, total=1.0 if measurable else None)
        yield Phase(self._progress, task)
        self._progress.update(task, total=1.0, completed=1.0)


def write_json(document: Mapping[str, object], target: str | None) -> None:
    """Write to a file, or to stdout for ``-``. Raises :class:`UsageError` if the file cannot be written."""
    if target is None:
        return
    text = json.dumps(document, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from error


def require_targets(json: str | None, plot: Path | None = None) -> None:
    """Check before a long run that its files can be written. Raises :class:`UsageError`."""
    for target in filter(None, (plot, Path(json) if json and json != "-" else None)):
        if not target.absolute().parent.is_dir():
            raise UsageError(f"cannot write {target}: no such directory")
    if plot is not None:
        import_module("matplotlib")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, to_stderr: bool) -> None:
    """Print a table below ``title``. The first column is aligned left, the others right."""
    print_table(columns, rows, title=title, stream=sys.stderr if to_stderr else sys.stdout)


def seconds(value: float | None) -> str:
    """Return seconds or milliseconds with a unit; a dash for None."""
    if value is None:
        return "–"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def rate(value: float | None) -> str:
    """Return two decimals; a dash for None."""
    return "–" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    """Return a share as whole percent; a dash for None."""
    return "–" if value is None else f"{100 * value:.0f} %"
