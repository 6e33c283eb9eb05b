"""Sizes in bytes and durations as people write them: ``64KiB``, ``1.5 GiB``, ``100GB``, a number of bytes,
``90 s``."""

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
_MOST_BYTES = 1 << 60  # more than any machine has
_SHOWN_CHARACTERS = 40

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Return the number of bytes in ``text``. Raise :class:`UsageError` for a text that is not a size, and
    for a size that is too large."""
    written = str(text)
    shown = repr(written if len(written) <= _SHOWN_CHARACTERS else f"{written[:_SHOWN_CHARACTERS]}…")
    match = _SIZE.fullmatch(written)
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None:
        raise UsageError(f"not a size: {shown} (write for example 512MiB, 8GiB or a number of bytes)")
    nbytes = float(match.group(1)) * factor
    if nbytes > _MOST_BYTES:
        raise UsageError(f"not a size: {shown} is more than {format_size(_MOST_BYTES)}")
    return int(nbytes)


def format_size(nbytes: float) -> str:
    """Return ``nbytes`` in the largest binary unit that gives a number of at least 1, with at most three
    digits."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= factor:
            return (
                f"{nbytes / factor:.3g} {unit}" if nbytes < 1000 * factor else f"{nbytes / factor:.0f} {unit}"
            )
    return f"{nbytes:.0f} B"


def written_size(nbytes: float) -> str:
    """Return the result of :func:`format_size` as it is written on a command line.

    >>> written_size(8 << 30)
    '8GiB'
    """
    return format_size(nbytes).replace(" ", "")


def format_duration(seconds: float) -> str:
    """Return ``seconds`` in the largest unit that gives a number of at least 2.

    >>> format_duration(90), format_duration(7200)
    ('90 s', '2 h')
    """
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple
