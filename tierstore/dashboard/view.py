"""The content of a dashboard, as types. A server makes a :class:`Sample` once a second. The dashboard draws
it and does not depend on daemons or engines.

All text is shown as text, never as markup. Names chosen by clients go through
:func:`~tierstore.printable.printable` first.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Number: TypeAlias = float | None  # None: no value, shown as a gap in a line


class ViewState(str, enum.Enum):
    """How good or bad something is."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


class Unit(str, enum.Enum):
    """The unit of a plot's values. The dashboard formats them."""

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
    """One large number."""

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
    """Lines over time. Each sample has their values under ``key``."""

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
    """Hit rate (0 to 1) by capacity. ``ceiling`` is the hit rate with unlimited memory. Without points,
    ``note`` says why."""

    capacity_bytes: tuple[int, ...]
    hit_rate: tuple[float, ...]
    marks: tuple[Mark, ...]
    ceiling: float
    note: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. Columns from ``left`` on are numbers. ``empty`` is shown if there are no rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    empty: str
    left: int = 1
    note: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """Everything that the dashboard shows at one moment, except the lines of the plots."""

    title: str
    about: str
    version: str  # the server's version; the dashboard reloads itself when it changes
    conditions: tuple[ConditionRow, ...]
    tiles: tuple[Tile, ...]
    meters: tuple[Meter, ...]
    plots: tuple[Plot, ...]
    curve: Curve | None
    tables: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A view of the dashboard at one moment. ``at_s`` is the time since 1970. ``values`` has the values of
    each plot's lines, by the plot's key."""

    at_s: float
    view: View
    values: Mapping[str, tuple[Number, ...]] = field(default_factory=dict)
