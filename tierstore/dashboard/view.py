"""The types of a dashboard's content. A server makes a :class:`Sample` once a second, and ``assets/page.js``
draws it, without knowledge of daemons or engines.

All text is shown as text, never as markup. Servers pass names that clients have chosen through
:func:`~tierstore.printable.printable`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Number: TypeAlias = float | None  # None: no value, which a plot shows as a gap


class ViewState(str, enum.Enum):
    """How good or bad the state of a component is."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


class Unit(str, enum.Enum):
    """The unit of a plot's values, which determines how they are formatted."""

    PERCENT = "percent"
    PER_SECOND = "per_second"
    GB_PER_S = "gb_per_s"
    SECONDS = "seconds"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class ConditionRow:
    """The state of one component, with the reason if it is not good."""

    name: str
    state: ViewState
    text: str


@dataclass(frozen=True, slots=True)
class Tile:
    """A number in large digits, with a label and a note."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Meter:
    """A bar that shows a ``share`` from 0 to 1."""

    label: str
    share: float
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over time. :attr:`Sample.values` has their values under ``key``."""

    key: str
    title: str
    unit: Unit
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """The current capacity of a tier, marked on a curve."""

    label: str
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Curve:
    """The hit rate (0 to 1) by capacity. ``ceiling`` is the hit rate with unlimited memory. If the curve has
    no points, ``note`` says why."""

    capacity_bytes: tuple[int, ...]
    hit_rate: tuple[float, ...]
    marks: tuple[Mark, ...]
    ceiling: float
    note: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. Columns from number ``left`` on are aligned as numbers. ``empty`` is shown if the table
    has no rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    empty: str
    left: int = 1
    note: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """The content of the dashboard at one moment, except the values of the plots."""

    title: str
    about: str
    version: str  # the server's version; if it changes, the browser reloads the dashboard
    conditions: tuple[ConditionRow, ...]
    tiles: tuple[Tile, ...]
    meters: tuple[Meter, ...]
    plots: tuple[Plot, ...]
    curve: Curve | None
    tables: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """The dashboard's content at the time ``at_s`` (seconds since 1970). ``values`` has the values of each
    plot's lines, by the plot's key."""

    at_s: float
    view: View
    values: Mapping[str, tuple[Number, ...]] = field(default_factory=dict)
