"""What a page shows, as types. A server makes a :class:`Sample` once a second; the page draws it and knows
nothing of daemons or engines.

All text is shown as text, never as markup. What has a name that somebody else chose goes through
:func:`~tierstore.printable.printable` first.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Number: TypeAlias = float | None  # None: there is nothing to show, and a line has a gap


class ViewState(str, enum.Enum):
    """How somebody who looks should feel about something."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


class Unit(str, enum.Enum):
    """Of a plot's values. The page writes them out."""

    PERCENT = "percent"
    PER_SECOND = "per_second"
    GB_PER_S = "gb_per_s"
    SECONDS = "seconds"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class ConditionRow:
    """One thing that can be in order or not, and why it is not."""

    name: str
    state: ViewState
    text: str


@dataclass(frozen=True, slots=True)
class Tile:
    """One number, large."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Meter:
    """How full something is: a bar of ``share`` (0 to 1)."""

    label: str
    share: float
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over time. Their values come with each sample, under ``key``."""

    key: str
    title: str
    unit: Unit
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A capacity that there is today."""

    label: str
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Curve:
    """Hit rate (0 to 1) over capacity. ``ceiling`` is what no more memory could improve. Without points
    ``note`` says why there are none."""

    capacity_bytes: tuple[int, ...]
    hit_rate: tuple[float, ...]
    marks: tuple[Mark, ...]
    ceiling: float
    note: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. Columns from ``left`` on are numbers. ``empty`` is shown where there are no rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    empty: str
    left: int = 1
    note: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """Everything but the lines of the plots."""

    title: str
    about: str
    version: str  # of what serves the page: with another one the page loads itself again
    conditions: tuple[ConditionRow, ...]
    tiles: tuple[Tile, ...]
    meters: tuple[Meter, ...]
    plots: tuple[Plot, ...]
    curve: Curve | None
    tables: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment. ``at_s`` is since 1970; ``values`` are of the plots' lines, by the plots' keys."""

    at_s: float
    view: View
    values: Mapping[str, tuple[Number, ...]] = field(default_factory=dict)
