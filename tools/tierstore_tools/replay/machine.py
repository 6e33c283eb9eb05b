"""The simulated engine: its tiers, their bandwidths, its prefill speed, and the options for them."""

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
    """Bandwidths between the tiers, in GB (10⁹ bytes) per second."""

    host_to_hbm_gb_per_s: float
    disk_read_gb_per_s: float
    disk_write_gb_per_s: float


@dataclass(frozen=True, slots=True)
class Machine:
    """Capacities in blocks of ``block_bytes`` (0: no such tier), and speeds."""

    hbm_blocks: int
    host_blocks: int
    disk_blocks: int
    block_bytes: int
    bandwidths: Bandwidths
    prefill: Prefill


def read_bandwidths(path: Path, page_bytes: int) -> Bandwidths:
    """Read a document of ``tierstore-bench tiers --json``: the rows with the page size closest to
    ``page_bytes``. Raises :class:`UsageError` for another document."""
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
    """Read a document of ``tierstore-bench longctx --json``: one speed, or with ``--sweep`` separate speeds
    of tokens and attention. Raises :class:`UsageError` for another document."""
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
        raise UsageError(f"{path} is not a document of {what}: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} is not a document of {what}")
    return document


@dataclass(frozen=True, slots=True)
class Tiers:
    """The options for tiers; None if not given. ``bandwidths_file`` and ``prefill_file`` were written by
    ``tierstore-bench tiers`` and ``longctx``. A speed given as a number has precedence over the one in a
    file."""

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
        """Return the machine, in the trace's blocks. Raises :class:`UsageError` if an option is missing."""
        if self.disk is not None and self.host is None:
            raise UsageError("pages reach the disk through the host tier: --disk needs --host")
        if spec is None:
            raise UsageError(
                "a replay through tiers moves bytes: --model must say how many bytes a token takes"
            )
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
            raise UsageError("the speed of prefill is missing: --longctx or --prefill-tokens-per-s")
        return read_prefill(self.prefill_file)


def parse_prefetch(text: str) -> tuple[bool, ...]:
    """Return the modes to replay. Raises :class:`UsageError` for another word."""
    modes = {"both": (False, True), "off": (False,), "on": (True,)}
    if text not in modes:
        raise UsageError(f"--prefetch takes both, off or on, got {text!r}")
    return modes[text]


def _known(said: float | None, measured: float | None, option: str, needed: bool) -> float:
    """Return the rate given as an option, or else the measured one. Only a rate that is ``needed`` must be
    known."""
    rate = said if said is not None else measured
    if rate is None:
        if needed:
            raise UsageError(f"a bandwidth is missing: --tiers with a file, or {option}")
        return 1.0
    if not 0 < rate < math.inf:
        raise UsageError(f"{option} must be more than 0, got {rate}")
    return rate
