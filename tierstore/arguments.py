"""Check callers' arguments once, at the boundary; code behind it relies on the declared types.

Each function returns its argument in the internal form, or raises :class:`UsageError` with one line that
names the argument.
"""

from __future__ import annotations

import json
import math
import operator
import reprlib
from collections.abc import Iterable
from numbers import Real
from typing import Any

from tierstore.errors import UsageError

_MOST_DAYS = 36_500
LONGEST_S = 10 * 365 * 86_400.0  # longest wait; the platform's clocks overflow after a few centuries


def whole_number(name: str, value: object, *, least: int | None = None) -> int:
    """Return an ``int``, from an ``int`` or a similar type (``numpy.int64``)."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # checked here
    except TypeError:
        raise UsageError(f"{name} must be a whole number, got {_shown(value)}") from None
    if least is not None and number < least:
        raise UsageError(f"{name} must be at least {least}, got {_shown(number)}")
    return number


def whole_numbers(name: str, values: object) -> list[int]:
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise UsageError(f"{name} must be whole numbers, got {_shown(values)}")
    return [whole_number(f"one of {name}", value) for value in values]


def seconds(name: str, value: object) -> float:
    """Return a number of seconds, limited to ten years (also for ``math.inf``)."""
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # an int beyond all floats
        number = math.inf
    if math.isnan(number):
        raise UsageError(f"{name} must be a number of seconds, got {_shown(value)}")
    return min(max(number, -LONGEST_S), LONGEST_S)


def optional_seconds(name: str, value: object) -> float | None:
    """Return a number of seconds, or None."""
    return None if value is None else seconds(name, value)


def text(name: str, value: object) -> str:
    """Return a ``str`` that can be sent and stored: without lone surrogates."""
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a string, got {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} must be valid Unicode, but is not at character {error.start}") from None
    return value


def json_object(name: str, value: str) -> dict[str, Any]:
    """Return the JSON object in a text, such as an option's value."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} must be a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{name} must be a JSON object, got {_shown(found)}")
    return found


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except Exception:  # noqa: BLE001  # the repr of a caller's object may raise anything
        return f"a {type(value).__name__}"


def max_age_s(days: float) -> float:
    """Return the maximum age of pages in seconds; inf for 0 days. Raise :class:`UsageError` for a number of
    days that is out of range.

    >>> max_age_s(30), max_age_s(0)
    (2592000.0, inf)
    """
    if isinstance(days, bool) or not isinstance(days, int | float) or not 0 <= days <= _MOST_DAYS:
        raise UsageError(f"max_age_days is {days!r}: give 0 (no limit) to {_MOST_DAYS} days")
    return days * 86400.0 or math.inf
