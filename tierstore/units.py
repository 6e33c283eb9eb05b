"""Byte sizes as people write them: ``64KiB``, ``1.5 GiB``, ``100GB`` or a bare number of bytes."""

from __future__ import annotations

import re

from tierstore.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {
    "": 1,
    "B": 1,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Bytes in ``text``. Raises :class:`UsageError` for anything that is not a size."""
    match = _SIZE.fullmatch(str(text))
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None:
        raise UsageError(f"not a size: {text!r} (write for example 512MiB, 8GiB or a number of bytes)")
    return int(float(match.group(1)) * factor)


def format_size(nbytes: float) -> str:
    """``nbytes`` in the largest binary unit that keeps it at 1 or more, three digits at most."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= factor:
            return (
                f"{nbytes / factor:.3g} {unit}" if nbytes < 1000 * factor else f"{nbytes / factor:.0f} {unit}"
            )
    return f"{nbytes:.0f} B"


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple
