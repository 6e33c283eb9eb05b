"""What an engine has: tiers, the ways between them, and how fast it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tierstore.errors import UsageError
from tierstore_tools.replay.formats.lines import whole


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Of the ways between the tiers, in GB (10⁹ bytes) per second."""

    host_to_hbm_gb_per_s: float
    disk_read_gb_per_s: float
    disk_write_gb_per_s: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """How long computing takes: ``token_s`` seconds per token, and ``pair_s`` per token and token before it
    (attention), which is 0 where only one speed is known."""

    token_s: float
    pair_s: float = 0.0

    def seconds(self, tokens: int, behind: int = 0) -> float:
        """For ``tokens`` tokens after ``behind`` others whose KV is there."""
        return tokens * self.token_s + tokens * (behind + tokens / 2) * self.pair_s


@dataclass(frozen=True, slots=True)
class Machine:
    """Capacities in blocks of ``block_bytes``; 0 is a tier that is not there."""

    hbm_blocks: int
    host_blocks: int
    disk_blocks: int
    block_bytes: int
    bandwidths: Bandwidths
    prefill: Prefill


def read_bandwidths(path: Path, page_bytes: int) -> Bandwidths:
    """From what ``tierstore-bench tiers --json`` wrote, measured with the page size next to ``page_bytes``.
    Raises :class:`UsageError` when it is something else."""
    document = _document(path, "tierstore-bench tiers --json")
    rows = document.get("rows")
    return Bandwidths(
        _rate(rows, "hbm", "put", page_bytes, path),
        _rate(rows, "disk", "get", page_bytes, path),
        _rate(rows, "disk", "put", page_bytes, path),
    )


def _rate(rows: Any, tier: str, op: str, page_bytes: int, path: Path) -> float:
    try:
        fitting = [row for row in rows if row["tier"] == tier and row["op"] == op]
        nearest = min(fitting, key=lambda row: abs(row["page_bytes"] - page_bytes))
        return float(nearest["gb_per_s"])
    except (TypeError, KeyError, ValueError):
        raise UsageError(
            f"{path} has no measurement of {tier} {op}: make it with tierstore-bench tiers --json"
        ) from None


def read_prefill(path: Path) -> Prefill:
    """From what ``tierstore-bench longctx --json`` wrote: a single speed, or with ``--sweep`` that of the
    tokens and that of the attention apart. Raises :class:`UsageError` when it is something else."""
    document = _document(path, "tierstore-bench longctx --json")
    try:
        cold = next(row for row in document["rows"] if row["case"] == "cold")
        points = [(int(cold["prompt_tokens"]), float(cold["ttft_s"]))]
        points += [(int(row["prompt_tokens"]), float(row["cold_s"])) for row in document.get("sweep") or ()]
    except (TypeError, KeyError, ValueError, StopIteration):
        raise UsageError(f"{path} has no cold run: make it with tierstore-bench longctx --json") from None
    return _fitted(points)


def _fitted(points: Sequence[tuple[int, float]]) -> Prefill:
    """Least squares of the relative errors, with neither speed below 0."""
    alone = Prefill(sum(s / n for n, s in points) / len(points))
    if len({n for n, _ in points}) < 2:
        return alone
    # seconds/n = token_s + n/2 * pair_s, divided by seconds/n for errors that are relative
    rows = [(n / s, n * n / 2 / s) for n, s in points]
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    if determinant <= 0:
        return alone
    token_s, pair_s = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    if pair_s < 0:
        return Prefill(a1 / aa)
    return Prefill(token_s, pair_s) if token_s >= 0 else Prefill(0.0, b1 / bb)


def _document(path: Path, what: str) -> Mapping[str, Any]:
    try:
        document = msgspec.json.decode(whole(path))
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is not what {what} writes: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} is not what {what} writes")
    return document
