"""Settings that an engine hands to a connector as JSON: each is a field of a dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tierstore.errors import UsageError


def checked_options(where: str, settings: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the dataclass ``settings`` that are ``given``. Numbers are from 0 on, ``threads`` from 1.
    Raises :class:`UsageError`, which says ``where``, for an unknown key or a wrong value."""
    known = {each.name: str(each.type) for each in fields(settings)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise UsageError(f"{where} has no {names} (known: {', '.join(known)})")
    return {name: _checked(where, name, known[name], value) for name, value in given.items()}


def _checked(where: str, name: str, kind: str, value: Any) -> Any:
    if kind.startswith("str"):
        if not isinstance(value, str):
            raise UsageError(f"{where}: {name} is a string, not {value!r}")
        return value
    whole = kind == "int"
    valid = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    least = 1 if name == "threads" else 0
    if not valid or not least <= value < 1e9:
        what = "a whole number" if whole else "a number of seconds"
        raise UsageError(f"{where}: {name} is {what} from {least} on, not {value!r}")
    return value
