"""Check the settings that an engine passes to a connector as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tierstore.errors import UsageError


def checked_options(where: str, settings: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` after checking its values against the fields of the dataclass ``settings``.

    Numbers must be at least 0, and ``threads`` at least 1; ``hash_weights`` must be "whole" or "sample".
    Raise :class:`UsageError` with ``where``, the name of the configuration, for an unknown key or an invalid
    value.
    """
    known = {each.name: str(each.type) for each in fields(settings)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise UsageError(f"{where} has no {names} (known: {', '.join(known)})")
    return {name: _checked(where, name, known[name], value) for name, value in given.items()}


def _checked(where: str, name: str, kind: str, value: Any) -> Any:
    if kind.startswith("str"):
        if not isinstance(value, str):
            raise UsageError(f"{where}: {name} must be a string, got {value!r}")
        if name == "hash_weights" and value not in ("whole", "sample"):
            raise UsageError(f'{where}: hash_weights must be "whole" or "sample", got {value!r}')
        return value
    if kind == "bool":
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {name} must be true or false, got {value!r}")
        return value
    whole = kind == "int"
    valid = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    least = 1 if name == "threads" else 0
    if not valid or not least <= value < 1e9:
        what = "a whole number" if whole else "a number of seconds"
        raise UsageError(f"{where}: {name} must be {what} of at least {least}, got {value!r}")
    return value
