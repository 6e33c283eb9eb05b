"""What an engine has: tiers, the ways between them, and how fast it computes; and how that is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import msgspec

from tierstore.errors import UsageError
from tierstore.planner import Prefill, fit_prefill
from tierstore.spec import KVSpec
from tierstore_tools.replay.capacity import Capacity
from tierstore_tools.replay.formats import whole


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Of the ways between the tiers, in GB (10⁹ bytes) per second."""

    host_to_hbm_gb_per_s: float
    disk_read_gb_per_s: float
    disk_write_gb_per_s: float


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
    return fit_prefill([(tokens, 0, seconds) for tokens, seconds in points])


def _document(path: Path, what: str) -> Mapping[str, Any]:
    try:
        document = msgspec.json.decode(whole(path))
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is not what {what} writes: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} is not what {what} writes")
    return document


@dataclass(frozen=True, slots=True)
class Tiers:
    """What was said of the tiers; None is what was not. ``bandwidths_file`` and ``prefill_file`` were
    written by ``tierstore-bench tiers`` and ``longctx``; a number beside them goes before them."""

    hbm: Capacity | None = None
    host: Capacity | None = None
    disk: Capacity | None = None
    bandwidths_file: Path | None = None
    host_gb_per_s: float | None = None
    disk_read_gb_per_s: float | None = None
    disk_write_gb_per_s: float | None = None
    prefill_file: Path | None = None
    prefill_tokens_per_s: float | None = None
    prefetch: tuple[bool, ...] = (False, True)

    def machine(self, spec: KVSpec | None, *, block_tokens: int, unique_blocks: int) -> Machine:
        """Counted in the trace's blocks. Raises :class:`UsageError` when something is missing."""
        if self.disk is not None and self.host is None:
            raise UsageError("pages reach the disk through the host tier: say --host as well")
        if spec is None:
            raise UsageError("a replay through tiers moves bytes: say with --model how many a token takes")
        block_bytes = round(spec.token_bytes * block_tokens)
        hbm, host, disk = (
            0
            if capacity is None
            else capacity.blocks(block_tokens=block_tokens, unique_blocks=unique_blocks, spec=spec)
            for capacity in (self.hbm, self.host, self.disk)
        )
        return Machine(hbm, host, disk, block_bytes, self._bandwidths(block_bytes), self._prefill())

    def _bandwidths(self, block_bytes: int) -> Bandwidths:
        said = (self.host_gb_per_s, self.disk_read_gb_per_s, self.disk_write_gb_per_s)
        options = ("--host-gb-per-s", "--disk-read-gb-per-s", "--disk-write-gb-per-s")
        there = (True, self.disk is not None, self.disk is not None)
        measured: tuple[float | None, ...] = (None, None, None)
        if self.bandwidths_file is not None:
            measured = astuple(read_bandwidths(self.bandwidths_file, block_bytes))
        return Bandwidths(*map(_known, said, measured, options, there))

    def _prefill(self) -> Prefill:
        if self.prefill_tokens_per_s is not None:
            return Prefill(1 / _known(self.prefill_tokens_per_s, None, "--prefill-tokens-per-s", True))
        if self.prefill_file is None:
            raise UsageError("say how fast the model computes: --longctx or --prefill-tokens-per-s")
        return read_prefill(self.prefill_file)


def parse_prefetch(text: str) -> tuple[bool, ...]:
    """The modes to replay. Raises :class:`UsageError` for another word."""
    modes = {"both": (False, True), "off": (False,), "on": (True,)}
    if text not in modes:
        raise UsageError(f"--prefetch is both, off or on, not {text!r}")
    return modes[text]


def _known(said: float | None, measured: float | None, option: str, needed: bool) -> float:
    """The one that there is. What is not needed may be missing."""
    rate = said if said is not None else measured
    if rate is None:
        if needed:
            raise UsageError(f"say how fast bytes move: --tiers with a file, or {option}")
        return 1.0
    if not 0 < rate < math.inf:
        raise UsageError(f"{option} is more than 0, not {rate}")
    return rate
