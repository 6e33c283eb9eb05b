"""``tierstore-bench packs``: export, verification and import of a pack beside plain writing and reading of a
file, with each hash of pages.

The store is embedded and has a host tier only, so that the file and the hashing are what is measured. All
cases run in turn, ``rounds`` times; medians are shown. Files leave the page cache before they are read.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

import tierstore
from tierstore.keys import Identity, Prompt
from tierstore.packs import PageHash, export_pack, import_pack, open_pack, verify_pack
from tierstore.spec import KVSpec
from tierstore.units import MIB, format_size
from tierstore_tools import machine, report

_SPEC = KVSpec.uniform(layers=16, kv_heads=4, head_dim=64, dtype="float16")  # 1 MiB pages
_IDENTITY = Identity.of(_SPEC, model="packs")
_PIECE = 16 * MIB
_SAMPLES = 64  # different pages


@dataclass(frozen=True)
class PackRow:
    """One case. ``of_plain`` is its speed beside plain writing (of an export) or plain reading."""

    case: str
    gb_per_s: float
    of_plain: float
    core_s_per_gb: float


def run(directory: Path, total_bytes: int, *, rounds: int, json: str | None) -> list[PackRow]:
    """Measure, show, write. Removes what it makes under ``directory``."""
    report.require_targets(json)
    pages = max(total_bytes // _SPEC.page_bytes, 1)
    with (
        tempfile.TemporaryDirectory(dir=directory) as own,
        report.phases() as shown,
        shown.phase("packs") as phase,
    ):
        rows = _Run(Path(own), pages).rows(rounds, phase.update)
    report.table(
        f"packs of {format_size(total_bytes)}, {rounds} rounds: medians",
        ("case", "GB/s", "of plain", "core-s/GB"),
        [
            (row.case, report.rate(row.gb_per_s), f"{row.of_plain:.2f}", f"{row.core_s_per_gb:.2f}")
            for row in rows
        ],
        to_stderr=json == "-",
    )
    report.write_json({"machine": machine.describe(), "rows": [asdict(row) for row in rows]}, json)
    return rows


class _Run:
    def __init__(self, directory: Path, pages: int) -> None:
        self._plain, self._pack = directory / "plain", directory / "a.tskv"
        self._pages = pages
        self._host_bytes = pages * _SPEC.page_bytes + 64 * MIB
        samples = np.random.default_rng(1).integers(0, 256, (_SAMPLES, _SPEC.page_bytes), dtype=np.uint8)
        self._samples = [bytes(sample) for sample in samples]
        self._tokens = np.arange(pages * _SPEC.chunk_tokens)

    def rows(self, rounds: int, progress: Callable[[float], None]) -> list[PackRow]:
        times: dict[str, list[tuple[float, float]]] = {}
        with tierstore.open(None, _SPEC, identity=_IDENTITY, host_bytes=self._host_bytes) as store:
            pages = [self._samples[at % _SAMPLES] for at in range(self._pages)]
            assert store.save(self._tokens, pages).wait() == len(self._tokens)
            for number in range(rounds):
                self._round(store, times)
                progress((number + 1) / rounds)
        walls = {case: [wall for wall, _ in taken] for case, taken in times.items()}
        rows = []
        for case, taken in times.items():
            writes = case.startswith(("plain write", "export"))
            plain = walls["plain write" if writes else "plain read"]
            shares = [one / other for one, other in zip(plain, walls[case], strict=True)]
            gigabytes = self._pages * _SPEC.page_bytes / 1e9
            core_s = statistics.median(core for _, core in taken) / gigabytes
            speed = gigabytes / statistics.median(walls[case])
            rows.append(PackRow(case, speed, statistics.median(shares), core_s))
        return rows

    def _round(self, store: tierstore.Store, times: dict[str, list[tuple[float, float]]]) -> None:
        def timed(case: str, do: Callable[[], object]) -> None:
            began, cores = time.perf_counter(), _core_s()
            do()
            times.setdefault(case, []).append((time.perf_counter() - began, _core_s() - cores))

        prompt = store.prompt(self._tokens)
        timed("plain write", self._write_plain)
        _leave_cache(self._plain)
        timed("plain read", self._read_plain)
        self._plain.unlink()
        for hash in reversed(PageHash):
            name = hash.name.lower()
            timed(f"export, {name}", partial(self._export, store, prompt, hash))
            _leave_cache(self._pack)
            timed(f"verify, {name}", lambda: asyncio.run(self._verify()))
            with tierstore.open(None, _SPEC, identity=_IDENTITY, host_bytes=self._host_bytes) as other:
                other.wait_ready()
                _leave_cache(self._pack)
                timed(f"import, {name}", lambda: asyncio.run(self._import(other)))
            self._pack.unlink()

    def _export(self, store: tierstore.Store, prompt: Prompt, hash: PageHash) -> None:
        asyncio.run(export_pack(store, [prompt], self._pack, hash=hash))

    async def _verify(self) -> None:
        async with open_pack(self._pack) as reader:
            await verify_pack(reader)

    async def _import(self, store: tierstore.Store) -> None:
        async with open_pack(self._pack) as reader:
            await import_pack(store, reader)

    def _write_plain(self) -> None:
        with open(self._plain, "wb", buffering=0) as file:
            for at in range(self._pages):
                file.write(self._samples[at % _SAMPLES])
            os.fsync(file.fileno())

    def _read_plain(self) -> None:
        piece = bytearray(_PIECE)
        with open(self._plain, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass


def _leave_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _core_s() -> float:
    times = os.times()
    return times.user + times.system
