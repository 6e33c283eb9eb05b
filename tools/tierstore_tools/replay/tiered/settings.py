"""The engine of ``replay --hbm … --host … --disk …``, as it was asked for."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from pathlib import Path

from tierstore.errors import UsageError
from tierstore.spec import KVSpec
from tierstore_tools.replay.capacity import Capacity
from tierstore_tools.replay.tiered.machine import Bandwidths, Machine, Prefill, read_bandwidths, read_prefill


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
