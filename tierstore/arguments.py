"""Checks of what callers hand in, once, at the boundary: inside, arguments are what their types say.

Each returns its argument as the inside takes it, and raises :class:`UsageError` with one line that names it.
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

LONGEST_S = 10 * 365 * 86_400.0  # of a wait: the clocks of the platform take no more than some centuries


def whole_number(name: str, value: object, *, least: int | None = None) -> int:
    """An ``int``, or what can stand for one (``numpy.int64``)."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # that is what is found out here
    except TypeError:
        raise UsageError(f"{name} is a whole number, not {_shown(value)}") from None
    if least is not None and number < least:
        raise UsageError(f"{name} is at least {least}, not {_shown(number)}")
    return number


def whole_numbers(name: str, values: object) -> list[int]:
    """A sequence of them."""
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise UsageError(f"{name} are whole numbers, not {_shown(values)}")
    return [whole_number(f"one of {name}", value) for value in values]


def seconds(name: str, value: object) -> float:
    """A number of seconds. One beyond all measure (``math.inf``) is ten years."""
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # an int beyond all floats
        number = math.inf
    if math.isnan(number):
        raise UsageError(f"{name} is a number of seconds, not {_shown(value)}")
    return min(max(number, -LONGEST_S), LONGEST_S)


def optional_seconds(name: str, value: object) -> float | None:
    """The same, or None."""
    return None if value is None else seconds(name, value)


def text(name: str, value: object) -> str:
    """A ``str`` that can be sent and stored: without lone surrogates."""
    if not isinstance(value, str):
        raise UsageError(f"{name} is a string, not {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is no valid Unicode at character {error.start}") from None
    return value


def json_object(name: str, value: str) -> dict[str, Any]:
    """The JSON object in a text, such as an option's."""
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
    except Exception:  # noqa: BLE001  # whatever it is, what is said of it must not raise
        return f"a {type(value).__name__}"
