"""The goals ("lines") that must be reached on a GPU, and the verdict on each, from the results of a check's
steps.

A line is *not measured* unless all of its figures were measured. The document has every figure beside its
bound, so a reader can check the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Result = Any
"""The parsed JSON of a step."""

_LARGE_KV_BYTES = 1e9
# the bound for differences of bfloat16 outputs below 1: a few roundings in each of the two computations
_LARGEST_DIFFERENCE = 0.02
_MISSING = (LookupError, ValueError, TypeError)
"""Errors of a missing row, a missing figure, or a null."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure. A measured figure. ``value`` must be at least ``least``, or at most ``most``; only one of the
    two is set."""

    what: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def holds(self) -> bool:
        above = self.least is None or self.value >= self.least
        return above and (self.most is None or self.value <= self.most)  # NaN holds nothing

    def __str__(self) -> str:
        bound = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        return f"{self.what} {self.value:.3g} ({bound})"


@dataclass(frozen=True, slots=True)
class Line:
    """A line. ``figures`` makes the figures from the result of ``step``, and raises one of ``_MISSING`` if a
    part is missing."""

    name: str
    must: str
    step: str
    figures: Callable[[Result], Iterator[Figure]]

    def outcome(self, result: Result, why_not: str) -> dict[str, Any]:
        """Return the line's entry in the document. ``why_not`` is the reason if ``result`` is None."""
        told: dict[str, Any] = {"line": self.name, "must": self.must}
        if result is None:
            return told | {"state": f"not measured: {why_not}"}
        try:
            found = list(self.figures(result))
        except _MISSING as error:
            return told | {"state": f"not measured: the result of {self.step} is incomplete ({error!r})"}
        figures = [asdict(figure) | {"holds": figure.holds} for figure in found]
        wrong = [str(figure) for figure in found if not figure.holds]
        state = f"does not hold: {'; '.join(wrong)}" if wrong else "holds"
        return told | {"state": state, "figures": figures}


def _decode(rows: Result) -> Iterator[Figure]:
    measured = [row for row in rows if "fraction" in row]
    large = [row["fraction"] for row in measured if row["kv_bytes"] >= _LARGE_KV_BYTES]
    yield Figure("fraction of the copy's speed, from 1 GB of KV on", min(large), least=0.85)
    theirs = [row["best_torch_s"] / row["kernel_s"] for row in measured if row["best_torch_s"] is not None]
    yield Figure("times as fast as torch's attention", min(theirs), least=1.0)
    yield _difference(measured)


def _prefill(rows: Result) -> Iterator[Figure]:
    yield Figure("fraction of flash attention's speed", min(row["fraction"] for row in rows), least=0.9)
    yield Figure("added by gathering", max(row["library_overhead"] for row in rows), most=0.03)
    yield _difference(rows)


def _difference(rows: Result) -> Figure:
    found = [row["largest_difference"] for row in rows]
    worst = math.nan if any(map(math.isnan, found)) else max(found)
    return Figure("largest difference from torch", worst, most=_LARGEST_DIFFERENCE)


def _transfers(rows: Result) -> Iterator[Figure]:
    of = {row["case"]: row["fraction"] for row in rows if "case" in row}
    (slowdown,) = (row["slowdown"] for row in rows if "slowdown" in row)
    yield Figure("fraction of one plain copy, loading", of["load"], least=0.9)
    yield Figure("fraction of plain copies, both directions", of["both"], least=0.85)
    yield Figure("decoding slower while loading", slowdown, most=0.03)


def _longctx(result: Result) -> Iterator[Figure]:
    rows: Mapping[str, Any] = {row["case"]: row for row in result["rows"]}
    yield Figure("times faster from host memory", rows["host"]["speedup"], least=20)
    yield Figure("fraction of the disk's limit", float(rows["disk"]["limit_fraction"]), least=0.9)
    tiers = [rows[tier] for tier in ("hbm", "host", "disk")]
    yield Figure("answers other than cold", sum(not row["identical"] for row in tiers), most=0)
    yield Figure(
        "tiers with other page bytes",
        sum(not row["pages_identical"] for row in tiers),
        most=0,
    )
    yield Figure("added by saving", result["save_overhead"], most=0.02)


LINES = (
    Line(
        "decode",
        "K+V bytes/s at least 0.85 of a large copy within the device from 1 GB of KV on; never slower than "
        "torch's attention, nor further from it than 0.02",
        "decode",
        _decode,
    ),
    Line(
        "prefill",
        "at least 0.9 of torch's flash attention on contiguous tensors; the library backend within 3 % of "
        "calling the library; no further from torch's than 0.02",
        "prefill",
        _prefill,
    ),
    Line(
        "transfers",
        "a 100K-token hit at 0.9 of one plain pinned copy, both directions at once at 0.85 of both, decoding "
        "of others at most 3 % slower meanwhile",
        "transfers",
        _transfers,
    ),
    Line(
        "longctx",
        "TTFT of 100,000 tokens from host memory 20 times below cold, from disk within 10 % of the disk's "
        "limit, pages and tokens as cold, saving at most 2 %",
        "longctx",
        _longctx,
    ),
)


def judged(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return every line's entry, from the outcomes of ``steps``."""
    outcomes = {step["step"]: step for step in steps}
    told = []
    for line in LINES:
        outcome = outcomes.get(line.step, {"state": "not requested"})
        told.append(line.outcome(outcome.get("result"), f"step {line.step}: {outcome['state']}"))
    return told


def not_measured(why: str) -> list[dict[str, Any]]:
    """Return every line's entry for a machine without measurements."""
    return [line.outcome(None, why) for line in LINES]


def shown(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return one line of text per entry."""
    return "".join(f"{number}. {line['line']}: {line['state']}\n" for number, line in enumerate(lines, 1))
