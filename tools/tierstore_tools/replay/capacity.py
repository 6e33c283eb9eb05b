"""Parse capacities: ``5859blocks``, ``3Mtokens``, ``10%`` of the trace, ``8GiB`` of a model.

A list has commas. An entry without a unit takes the unit of the next entry that has one: ``1,5,10%`` is three
shares, and ``3M,50M`` is tokens. ``k M G T`` count in thousands. Bytes always end in ``B`` (``8GiB``,
``8GB``) or ``bytes``, because ``8G`` is ambiguous.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tierstore.errors import UsageError
from tierstore.spec import KVSpec
from tierstore.units import parse_size

_ENTRY = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([kKMGT]?)\s*(blocks?|tokens?|bytes|%|)")
_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*[KMGTkmgt]?i?[Bb]")
_WRITE = "examples: 5859blocks, 3Mtokens, 10%, 8GiB"


@dataclass(frozen=True, slots=True)
class Capacity:
    """One capacity, not yet converted to a trace's blocks. ``unit`` is ``blocks``, ``tokens``, ``%`` or
    ``bytes``. ``text`` is the user's text."""

    text: str
    amount: float
    unit: str

    def blocks(self, *, block_tokens: int, unique_blocks: int | None, spec: KVSpec | None) -> int:
        """Return whole blocks of ``block_tokens`` tokens. ``unique_blocks`` is the trace's (None: unknown),
        ``spec`` the model's. A share of a tiny trace is at least one block. Raises :class:`UsageError` if the
        unit needs a missing value, and for less than one block."""
        count = int(self._blocks(block_tokens, unique_blocks, spec))
        if self.unit == "%" and self.amount:
            return max(count, 1)
        if count < 1:
            raise UsageError(f"{self.text} is less than one block of {block_tokens} tokens")
        return count

    def _blocks(self, block_tokens: int, unique_blocks: int | None, spec: KVSpec | None) -> float:
        if self.unit == "blocks":
            return self.amount
        if self.unit == "tokens":
            return self.amount / block_tokens
        if self.unit == "%":
            if unique_blocks is None:
                raise UsageError(f"{self.text}: a share of the unique blocks needs a trace with hash_ids")
            return unique_blocks * self.amount / 100
        if spec is None:
            raise UsageError(f"{self.text} is in bytes: --model must say how many bytes a token takes")
        return self.amount / (spec.token_bytes * block_tokens)


def parse_capacities(text: str) -> tuple[Capacity, ...]:
    """Parse a comma-separated list of capacities. Raise :class:`UsageError` for other text."""
    entries = [entry.strip() for entry in text.split(",")]
    capacities: list[Capacity] = []
    unit = ""
    for entry in reversed(entries):
        capacity = _parse(entry, unit or "tokens")
        unit = unit if _is_bare(entry) else capacity.unit
        capacities.append(capacity)
    return tuple(reversed(capacities))


def parse_capacity(text: str) -> Capacity:
    """Return a single capacity. Raises :class:`UsageError` for a list and for other text."""
    return _parse(text.strip(), "tokens")


def _parse(entry: str, unit_of_bare: str) -> Capacity:
    if _BYTES.fullmatch(entry):
        return Capacity(entry, float(parse_size(entry)), "bytes")
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise UsageError(f"not a capacity: {entry!r} ({_WRITE})")
    amount = float(match.group(1)) * _FACTORS[match.group(2)]
    unit = match.group(3)
    if not unit:
        return Capacity(f"{entry}{unit_of_bare}", amount, unit_of_bare)
    return Capacity(entry, amount, unit if unit in ("%", "bytes") else unit.rstrip("s") + "s")


def _is_bare(entry: str) -> bool:
    match = _ENTRY.fullmatch(entry)
    return match is not None and not match.group(3)
