"""A day of traffic of mixed page sizes over a store's own parts: index, leases, write-behind, disk. Only the
engine is missing, and with it the bytes' meaning: whatever is in the arena is written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tierstore.errors import TierStoreError, UsageError
from tierstore.mover import Mover
from tierstore.policy import LRU
from tierstore.store.find import find
from tierstore.store.save import SaveJob
from tierstore.store.state import StoreState
from tierstore.store.write_behind import WriteBehind
from tierstore.testing.traffic import CHUNK_TOKENS, Request, Traffic
from tierstore.tiers.disk import DiskTier
from tierstore.tiers.host import HostTier
from tierstore.units import KIB, MIB, format_size

PAGE_SIZES = (16 * KIB, 64 * KIB, 160 * KIB, 512 * KIB, 1792 * KIB, 4392 * KIB)
_TENTHS = 10
_BATCH_FRACTION = 32  # of the capacity, at most 64 MiB: what is written between two looks
_MOST_BATCH = 64 * MIB
_ARENA_BATCHES = 4
_FLUSH_S = 120.0
_LEAST_LARGEST = 16  # pages of the largest size that have to fit


@dataclass(slots=True)
class Tenth:
    """A tenth of the day."""

    written_bytes: int = 0
    write_s: float = 0.0
    cpu_s: float = (
        0.0  # of this process while it wrote: says more than the clock where others use the machine
    )
    moved_bytes: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    utilisation: list[float] = field(default_factory=list)  # of the cap, after each batch

    @property
    def gb_per_s(self) -> float:
        return self.written_bytes / self.write_s / 1e9 if self.write_s else 0.0

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / self.written_bytes * 1e9 if self.written_bytes else 0.0

    @property
    def write_amplification(self) -> float:
        return 1 + self.moved_bytes / self.written_bytes if self.written_bytes else 1.0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0


class _AsItIs:
    """Pages whose bytes are whatever is in their slots."""

    def read_into(self, wanted: Sequence[tuple[int, int]]) -> None: ...


class Day:
    """One store, and the traffic of one day that goes through it."""

    def __init__(
        self,
        path: Path,
        *,
        capacity_bytes: int,
        times: float,
        page_sizes: Sequence[int] = PAGE_SIZES,
        seed: int = 0,
        seen: Callable[[Request], None] = lambda request: None,
    ) -> None:
        """``times`` the capacity is written, after the store was filled. ``seen`` is told every request.
        Raises :class:`UsageError` for a capacity that cannot hold a page of each size."""
        self.evening = Tenth()  # before: until the first page had to leave
        self.tenths = [Tenth() for _ in range(_TENTHS)]
        self.most_taken_bytes = 0
        self._seen = seen
        self._path = path
        self._capacity_bytes = capacity_bytes
        self._total_bytes = int(capacity_bytes * times)
        self._batch_bytes = min(capacity_bytes // _BATCH_FRACTION, _MOST_BATCH)
        self._traffic = Traffic(
            page_sizes,
            seed=seed,
            recent_bytes=capacity_bytes // 4,
            prompt_bytes=min(max(capacity_bytes // 256, max(page_sizes)), 16 * MIB),
        )
        largest = max(page_sizes)
        if capacity_bytes < _LEAST_LARGEST * largest:
            least = format_size(_LEAST_LARGEST * largest)
            raise UsageError(
                f"pages of {format_size(largest)} cannot churn in {format_size(capacity_bytes)}: give {least}"
            )
        self._disk = DiskTier.open(path, capacity_bytes=capacity_bytes, page_bytes=sorted(page_sizes)[1])
        self._host = HostTier(max(self._batch_bytes, largest) * _ARENA_BATCHES)
        self._state = StoreState([LRU(), LRU(), LRU()], host=self._host, pool=None, disk=self._disk)
        self._write_behind = WriteBehind(
            self._state, self._disk, queue_bytes=max(self._batch_bytes, largest) * _ARENA_BATCHES
        )
        self._mover = Mover(2)
        self._full = False

    def __enter__(self) -> Day:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mover.close()
        self._write_behind.close()
        self._disk.close()
        self._host.close()

    @property
    def written_pages(self) -> int:
        return self._disk.stats().written_pages

    @property
    def mean_bytes(self) -> float:
        """What the pages on disk held on average, once it was full."""
        samples = [sample for tenth in self.tenths for sample in tenth.utilisation]
        return sum(samples) / len(samples) * self._capacity_bytes if samples else 0.0

    @property
    def dropped_pages(self) -> int:
        """Pages that were to be written and were not."""
        return self._state.counters.disk_dropped_pages

    def run(self, progress: Callable[[float, Tenth], None]) -> None:
        """Fill the store, and write ``times`` its capacity. ``progress`` is told the share that is done, and
        of the present tenth. Raises :class:`TierStoreError` when the disk fails."""
        while not self._full:
            left = max(self._capacity_bytes - self.evening.written_bytes, 0)
            self._write(self.evening, -left / self._total_bytes)
            progress(0.0, self.evening)
        written = 0
        while written < self._total_bytes:
            tenth = self.tenths[written * _TENTHS // self._total_bytes]
            written += self._write(tenth, written / self._total_bytes)
            progress(written / self._total_bytes, tenth)
        self._state.check()
        self._disk.check()

    def _write(self, tenth: Tenth, time_of_day: float) -> int:
        """One batch. Returns its bytes."""
        before = self._disk.stats().written_bytes
        self._serve(tenth, time_of_day)
        nbytes = self._disk.stats().written_bytes - before
        if not nbytes:
            raise TierStoreError(f"nothing was written: {self._disk} takes no pages")
        tenth.written_bytes += nbytes
        self._look(tenth)
        return nbytes

    def _serve(self, tenth: Tenth, time_of_day: float) -> None:
        """Requests until a batch of new pages has come together, which is then written."""
        jobs = []
        new = 0
        while new < self._batch_bytes:
            request = self._traffic.next(time_of_day)
            self._seen(request)
            job = self._save(request, tenth)
            new += len(job.fills) * request.page_bytes
            jobs.append(job)
        for job in jobs:
            job.transfer.wait(_FLUSH_S)
        before = self._write_behind.move_stats()
        started, cpu = time.perf_counter(), time.process_time()
        with self._state.lock:
            for job in jobs:
                self._write_behind.enqueue([fill.page for fill in job.fills])
            if not self._state.changed.wait_for(lambda: not self._write_behind.pending, _FLUSH_S):
                raise TierStoreError(f"a batch was not written within {_FLUSH_S:g} s")
        tenth.write_s += time.perf_counter() - started
        tenth.cpu_s += time.process_time() - cpu
        tenth.moved_bytes += self._write_behind.move_stats().moved_bytes - before.moved_bytes

    def _save(self, request: Request, tenth: Tenth) -> SaveJob:
        state = self._state
        prompt = request.prompt
        with find(state, prompt, len(prompt), request.page_bytes) as match:
            state.uses.touch(match.pages, hit=True)
            state.let_sleep()
            first = match.tokens // CHUNK_TOKENS
            chunks = range(first, len(prompt.keys))
            job = SaveJob(state, _AsItIs(), None, prompt, chunks, request.page_bytes)
            job.begin(match)
        job.run(self._mover)
        tenth.lookup_tokens += len(prompt)
        tenth.hit_tokens += first * CHUNK_TOKENS
        return job

    def _look(self, tenth: Tenth) -> None:
        self.most_taken_bytes = max(self.most_taken_bytes, taken_bytes(self._path))
        ledger = self._disk.ledger
        assert ledger is not None, "nothing is written before the disk is surveyed"
        self._full = self._full or self._state.counters.evicted_pages["disk"] > 0
        tenth.utilisation.append(ledger.payload_bytes() / self._capacity_bytes)


def taken_bytes(path: Path) -> int:
    """What a directory takes from its file system, itself included."""
    total = 0
    for root, _, names in os.walk(path):
        for each in (root, *(os.path.join(root, name) for name in names)):
            total += os.lstat(each).st_blocks * 512
    return total
