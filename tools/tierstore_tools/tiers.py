"""``tierstore-bench tiers``: the speed of each tier by page size, beside the machine's limit.

A *put* moves pages into a tier, a *get* moves them out:

* ``hbm``: host slots → pool pages (a load), and back (a save).
* ``host``: caller's buffers → host slots (a save), and back (a load).
* ``disk``: host slots → durable on disk; disk with a dropped page cache → host slots.

A put into the disk tier begins when all pages are in the host tier. No page is written before that, but the
first pages already have their places on disk. A *save* is both steps together, for an engine that waits for
the disk: caller's buffers → durable on disk. A *scatter* reads pages that are not adjacent on disk: eight
prompts are saved page by page in turn, and loaded one after the other.

All work goes through the store's public methods, with index, leases, checksums and commits. The benchmark
first finds the fastest raw way to write to this disk and to read from it. In every round it then measures
this limit directly before and after each operation. A reported fraction is the median over all rounds.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tierstore.errors import UsageError
from tierstore.memory import Memory
from tierstore.spec import KVSpec
from tierstore.store import Store
from tierstore.testing.faulty_io import Fault, FaultyIO, Stall
from tierstore.testing.opening import open_store
from tierstore.tiers.disk import FileIO
from tierstore.tiers.hbm import PagePool
from tierstore.units import format_size
from tierstore_tools import limits, machine, report
from tierstore_tools.limits import RawDisk

LAYER_BYTES = 16 << 10  # a layer of the spec below: K and V, one head, 64 tokens × 64 values, float16
_ROUNDS = 5
_WAIT_S = 300.0
_SCATTERED_PROMPTS = 8
_SURVEY_PASSES = 3


@dataclass(frozen=True, slots=True)
class TierRow:
    """One row of the result. ``limit`` names the limit that ``limit_fraction`` refers to."""

    tier: str
    op: str
    page_bytes: int
    gb_per_s: float
    us_per_page: float
    limit_fraction: float
    limit: str
    core_s_per_gb: float  # all threads of this process


@dataclass(frozen=True, slots=True)
class TiersResult:
    """All rows. ``limits`` are the medians of the limits beside the rows, and the speed of each raw way to
    use the disk (``disk_read_direct_gb_per_s`` …)."""

    limits: dict[str, float]
    rows: tuple[TierRow, ...]

    def to_json(self) -> dict[str, object]:
        return {"limits": self.limits, "rows": [asdict(row) for row in self.rows]}


Progress = Callable[[str], None]


def command(
    directory: Path, page_sizes: Sequence[int], *, total_bytes: int, rounds: int, json: str | None
) -> None:
    """Measure with a store under ``directory``, print the table, write JSON."""
    report.require_targets(json)
    with report.phases() as shown, shown.phase("tiers", measurable=False) as phase:
        result = run(
            directory,
            page_sizes,
            total_bytes=total_bytes,
            rounds=rounds,
            progress=lambda text: phase.update(text=text),
        )
    report.table(
        "tiers: GB/s beside the same machine's limit",
        ("tier", "op", "page", "GB/s", "µs/page", "of limit", "limit", "core-s/GB"),
        [
            (
                row.tier,
                row.op,
                format_size(row.page_bytes),
                report.rate(row.gb_per_s),
                f"{row.us_per_page:.0f}",
                report.percent(row.limit_fraction),
                row.limit.removesuffix("_gb_per_s"),
                f"{row.core_s_per_gb:.2f}",
            )
            for row in result.rows
        ],
        to_stderr=json == "-",
    )
    report.write_json({"machine": machine.describe(), **result.to_json()}, json)


def run(
    directory: Path,
    page_sizes: Sequence[int],
    *,
    total_bytes: int = 256 << 20,
    rounds: int = _ROUNDS,
    progress: Progress = lambda _: None,
) -> TiersResult:
    """Measure all tiers with each of ``page_sizes`` (multiples of 16 KiB). A measurement moves
    ``total_bytes``. The store is made under ``directory``. Raises :class:`UsageError` for another size."""
    for page_bytes in page_sizes:
        if page_bytes % LAYER_BYTES or not 0 < page_bytes <= total_bytes:
            raise UsageError(
                f"a page size must be a multiple of 16KiB and at most {total_bytes}, got {page_bytes}"
            )
    beside: dict[str, list[float]] = {}
    rows: list[TierRow] = []
    with RawDisk(directory, total_bytes) as raw:
        progress("raw ways to use this disk")
        survey = raw.survey(_SURVEY_PASSES)
        for page_bytes in page_sizes:
            bench = _PageSize(directory, raw, page_bytes, total_bytes)
            samples: dict[_Op, list[RateSample]] = {}
            for round_ in range(rounds):
                progress(f"{page_bytes >> 10} KiB pages, round {round_ + 1} of {rounds}")
                for op, sample in bench.round().items():
                    samples.setdefault(op, []).append(sample)
                    beside.setdefault(_LIMIT_OF[op], []).append(sample.limit)
            rows += [row_of(op, page_bytes, values, _LIMIT_OF[op]) for op, values in samples.items()]
    medians = {name: statistics.median(values) for name, values in beside.items()}
    ways = {f"disk_{name}": value for name, value in asdict(survey).items()}
    return TiersResult(medians | ways, tuple(rows))


_Op = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Rate:
    """The speed of an operation, and its core-seconds per GB."""

    gb_per_s: float
    core_s_per_gb: float

    @classmethod
    def of(cls, work: Callable[[], object], nbytes: int) -> Rate:
        """Run ``work``, which moves ``nbytes``, and return its rate."""
        gb = nbytes / 1e9
        start, start_cpu = time.perf_counter(), time.process_time()
        work()
        return cls(gb / (time.perf_counter() - start), (time.process_time() - start_cpu) / gb)


_LIMIT_OF = {
    ("hbm", "put"): "memcpy_gb_per_s",
    ("hbm", "get"): "memcpy_gb_per_s",
    ("host", "put"): "memcpy_gb_per_s",
    ("host", "get"): "memcpy_gb_per_s",
    ("disk", "put"): "disk_write_gb_per_s",
    ("disk", "save"): "disk_write_gb_per_s",
    ("disk", "get"): "disk_read_gb_per_s",
    ("disk", "scatter"): "disk_read_gb_per_s",
}


@dataclass(frozen=True, slots=True)
class RateSample:
    """A rate, and the limit in GB/s around the same moment."""

    rate: Rate
    limit: float

    @classmethod
    def of(cls, work: Callable[[], object], nbytes: int, limit: Callable[[], float]) -> RateSample:
        """Run ``work``, which moves ``nbytes``, with a measurement of the limit before and after."""
        before = limit()
        rate = Rate.of(work, nbytes)
        return cls(rate, statistics.mean((before, limit())))

    @property
    def fraction(self) -> float:
        return self.rate.gb_per_s / self.limit


def row_of(op: _Op, page_bytes: int, samples: Sequence[RateSample], limit: str) -> TierRow:
    """Return the row with the medians of ``samples``."""
    rate = statistics.median(sample.rate.gb_per_s for sample in samples)
    cores = statistics.median(sample.rate.core_s_per_gb for sample in samples)
    fraction = statistics.median(sample.fraction for sample in samples)
    return TierRow(*op, page_bytes, rate, page_bytes / rate / 1e3, fraction, limit, cores)


class _PageSize:
    """The measurements for one page size."""

    def __init__(self, directory: Path, raw: RawDisk, page_bytes: int, total_bytes: int) -> None:
        self._directory = directory
        self._raw = raw
        self._spec = KVSpec.uniform(
            layers=page_bytes // LAYER_BYTES, kv_heads=1, head_dim=64, dtype="float16"
        )
        self._count = total_bytes // page_bytes
        self._nbytes = self._count * page_bytes
        self._tokens = np.arange(self._count * self._spec.chunk_tokens)
        self._memcpy = limits.Memcpy(self._nbytes, piece=page_bytes)
        self._source = self._buffers(fill=True)
        self._target = self._buffers(fill=False)

    def _buffers(self, *, fill: bool) -> list[memoryview]:
        memory = Memory(self._nbytes, shared=False)
        memory.populate()
        if fill:
            np.frombuffer(memory.view(0, self._nbytes), np.uint32)[:] = np.arange(
                self._nbytes // 4, dtype=np.uint32
            )
        page = self._spec.page_bytes
        return [memory.view(i * page, page) for i in range(self._count)]

    def round(self) -> dict[_Op, RateSample]:
        """Measure all tiers once, each beside its limit."""
        return {
            **self._host(),
            **self._hbm(),
            **self._from_host(),
            **self._whole_prompt(),
            **self._scattered(),
        }

    def _host(self) -> dict[_Op, RateSample]:
        with self._open(None) as store:
            put = self._copies(lambda: store.save(self._tokens, self._source).wait(_WAIT_S))
            get = self._copies(lambda: store.load(store.lookup(self._tokens), self._target).wait(_WAIT_S))
            self._verify()
        return {("host", "put"): put, ("host", "get"): get}

    def _hbm(self) -> dict[_Op, RateSample]:
        pool = PagePool(self._spec, self._count)
        with self._open(None, pool) as store:
            store.save(self._tokens, self._source).wait(_WAIT_S)
            put = self._copies(lambda: store.load(store.lookup(self._tokens)).wait(_WAIT_S))
            store.evict("host")
            prompt = store.prompt(self._tokens)
            get = self._copies(lambda: store.save_hbm(prompt, range(self._count)).wait(_WAIT_S))
        return {("hbm", "put"): put, ("hbm", "get"): get}

    def _from_host(self) -> dict[_Op, RateSample]:
        io, held = FaultyIO(), Stall()
        with self._open_on_disk(io) as (_, store):
            io.set(Fault(lambda call: call.kind in ("allocate", "pwritev"), held))
            store.save(self._tokens, self._source).wait(_WAIT_S)

            def write() -> None:
                held.release()
                store.flush(_WAIT_S)

            try:
                put = RateSample.of(write, self._nbytes, self._raw.write)
            finally:
                held.release()  # closing the store waits for these writes, also after an error
            assert store.stats().tiers["disk"].pages == self._count, "not all pages were written"
        return {("disk", "put"): put}

    def _whole_prompt(self) -> dict[_Op, RateSample]:
        with self._open_on_disk() as (path, store):

            def save_durably() -> None:
                store.save(self._tokens, self._source).wait(_WAIT_S)
                store.flush(_WAIT_S)

            save = RateSample.of(save_durably, self._nbytes, self._raw.write)
            _make_cold(store, path)
            hit = store.lookup(self._tokens)
            get = RateSample.of(lambda: hit.prefetch().wait(_WAIT_S), self._nbytes, self._raw.read)
            store.load(hit, self._target).wait(_WAIT_S)
            self._verify()
        return {("disk", "save"): save, ("disk", "get"): get}

    def _scattered(self) -> dict[_Op, RateSample]:
        pages = self._count // _SCATTERED_PROMPTS
        if not pages:
            return {}
        tokens = [self._tokens[: pages * self._spec.chunk_tokens] + i for i in range(_SCATTERED_PROMPTS)]
        with self._open_on_disk() as (path, store):
            for page in range(pages):
                for i in range(_SCATTERED_PROMPTS):
                    store.save(tokens[i], [self._source[page * _SCATTERED_PROMPTS + i]], first=page)
            store.flush(_WAIT_S)
            _make_cold(store, path)
            hits = [store.lookup(each) for each in tokens]
            nbytes = pages * _SCATTERED_PROMPTS * self._spec.page_bytes
            sample = RateSample.of(
                lambda: [hit.prefetch().wait(_WAIT_S) for hit in hits], nbytes, self._raw.read
            )
            for i, hit in enumerate(hits):
                store.load(hit, self._target[i : pages * _SCATTERED_PROMPTS : _SCATTERED_PROMPTS]).wait(
                    _WAIT_S
                )
            self._verify(pages * _SCATTERED_PROMPTS)
        return {("disk", "scatter"): sample}

    @contextmanager
    def _open_on_disk(self, io: FileIO | None = None) -> Iterator[tuple[Path, Store]]:
        path = Path(tempfile.mkdtemp(prefix="tierstore-tiers-", dir=self._directory))
        try:
            with self._open(path, io=io) as store:
                # free the arena of the last round now, so that the measured time does not include it
                gc.collect()
                os.sync()  # let the device discard deleted blocks now, outside of the measured time
                yield path, store
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _open(
        self, path: Path | None, pool: PagePool | None = None, io: FileIO | None = None
    ) -> Iterator[Store]:
        room = 2 * self._nbytes + (16 << 20)  # half of the host tier may wait to be written
        # stall_s is long, because _from_host holds writes back, and these must not count as a broken disk.
        with open_store(
            path, self._spec, pools=pool, host_bytes=room, disk_bytes=room, stall_s=_WAIT_S, io=io
        ) as store:
            store.wait_ready()
            yield store

    def _copies(self, work: Callable[[], object]) -> RateSample:
        """Measure ``work``, which copies all pages in memory."""
        return RateSample.of(work, self._nbytes, self._memcpy.gb_per_s)

    def _verify(self, count: int | None = None) -> None:
        """Compare the loaded pages with the saved ones, and spoil them for the next comparison."""
        for source, target in zip(self._source[:count], self._target[:count], strict=True):
            if source != target:
                raise AssertionError("a loaded page differs from the saved one")
            target[:64] = os.urandom(64)


def _make_cold(store: Store, path: Path) -> None:
    """Evict the host tier and drop the page cache of the store's files."""
    store.evict("host")
    os.sync()
    limits.drop_page_cache(path)
