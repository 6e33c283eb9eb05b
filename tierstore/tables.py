"""Tables of text for terminals, pipes and logs. No cell is ever shortened.

A table wider than the terminal is printed in blocks, one below the other. Each block has the columns of words
and as many columns of numbers as fit. If no column of numbers fits beside the words, each row is printed as a
list of names and values. In a pipe or a log every row is one line.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.cells import cell_len

from tierstore.printable import printable

_GAP = "  "


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Return the number of columns of the terminal behind ``stream`` (default: stdout); None if ``stream`` is
    not a terminal."""
    stream = sys.stdout if stream is None else stream
    return shutil.get_terminal_size().columns if stream.isatty() else None


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, width: int | None = None
) -> list[str]:
    """Return the lines of a table. The first ``left`` columns have words, all other columns have numbers.

    ``width`` is the longest line, in terminal cells (None: no limit). A longer cell is still printed in one
    line. Control characters in cells are escaped.

    >>> for line in table_lines(("tier", "pages", "used"), [("host", "1,024", "8 GiB"), ("disk", "7", "–")]):
    ...     print(line)
    tier  pages   used
    host  1,024  8 GiB
    disk      7      –
    >>> for line in table_lines(("tier", "pages", "used"), [("host", "1,024", "8 GiB")], width=12):
    ...     print(line)
    tier  pages
    host  1,024
    <BLANKLINE>
    tier   used
    host  8 GiB
    """
    cells = [[printable(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    words, numbers = list(range(min(left, len(columns)))), list(range(left, len(columns)))
    taken = _total([widths[column] for column in words])
    if (
        width is not None
        and taken + max((len(_GAP) + widths[column] for column in numbers), default=0) > width
    ):
        return list(_records(cells))
    lines: list[str] = []
    while True:
        block, numbers = _that_fit(numbers, widths, None if width is None else width - taken)
        if lines:
            lines.append("")
        lines.extend(_line(row, widths, words, block) for row in cells)
        if not numbers:
            return lines


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    title: str = "",
    stream: TextIO | None = None,
) -> None:
    """Write a table under its ``title`` to ``stream`` (default: stdout), at most as wide as the terminal."""
    stream = sys.stdout if stream is None else stream
    lines = table_lines(columns, rows, left=left, width=terminal_width(stream))
    stream.write("\n".join([*([title] if title else []), *lines]) + "\n")


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * max(len(widths) - 1, 0)


def _that_fit(columns: Sequence[int], widths: Sequence[int], room: int | None) -> tuple[list[int], list[int]]:
    """Split ``columns`` into the columns that fit into ``room`` beside the words (at least one) and the
    rest."""
    fitting: list[int] = []
    for column in columns:
        used = sum(len(_GAP) + widths[each] for each in (*fitting, column))
        if fitting and room is not None and used > room:
            break
        fitting.append(column)
    return fitting, list(columns[len(fitting) :])


def _line(row: Sequence[str], widths: Sequence[int], words: Sequence[int], numbers: Sequence[int]) -> str:
    cells = [row[column] + " " * (widths[column] - cell_len(row[column])) for column in words]
    cells += [" " * (widths[column] - cell_len(row[column])) + row[column] for column in numbers]
    return _GAP.join(cells).rstrip()


def _records(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield each row as a list: one line for each column, with its name and the row's cell. An empty line
    separates rows."""
    names = cells[0]
    longest = max(map(cell_len, names))
    for number, row in enumerate(cells[1:]):
        if number:
            yield ""
        for name, cell in zip(names, row, strict=True):
            yield f"{name}{' ' * (longest - cell_len(name))}{_GAP}{cell}".rstrip()
