"""Estimate the hit rates that a store would have with more memory, from the store's own traffic.

The *reuse distance* of a page is the number of bytes of other pages that were used since its last use. A
cache that evicts the least recently used page hits exactly those uses whose distance fits its capacity. So
one pass over the traffic gives the hit rate of every capacity (Mattson et al., 1970). SHARDS does this with a
sample: C. Waldspurger, N. Park, A. Garthwaite, I. Ahmad, "Efficient MRC Construction with SHARDS", FAST '15.
This module implements SHARDS with a sample of fixed size, weighted by bytes:

* A page is in the sample if its key, an XXH3-128, is below a threshold. When the sample exceeds
  ``sample_pages``, the threshold falls. If a share R of all keys is below the threshold, distances are
  divided by R, and each sampled use stands for 1/R uses.
* The number of sampled uses, divided by R, differs from the number of all uses. The difference is added to
  the uses at the shortest distance (SHARDS-adj in the paper), because a few hot pages cause most of it.

**Prefixes.** A hit needs the whole prefix. The pages of a prompt count as used from the last to the first,
which is the order of their eviction. So distances never fall along a prompt, and if one page is a hit, all
pages before it are hits.

**Lookups and saves.** A lookup measures the distances of its pages, and marks the known pages as used. A page
is known after a save of it or of a page behind it, and after a lookup that finds it in the store. A save that
finds no room also counts, because a store with more room would have stored its pages.

**Cost.** :meth:`ReuseCurve.looked_up` and :meth:`ReuseCurve.saved` append to a queue, which takes 1 µs. A
separate thread processes the queue: 30 to 80 µs a prompt, 400 µs for a prompt of 100K tokens while R is 1,
and at most 1/20 of one core's time. Lookups and saves that find the queue full are left out and counted. The
estimate is then too low for large capacities, because related uses are separated. ``python
benchmarks/curve.py`` measures all of this.

The estimate is lost when the store is closed. Traffic that is half a day old has a weight of 1/4. The
threshold never rises again, because a page that entered the sample late would count as never used before.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.keys import PageKey
from tierstore.units import GIB

SAMPLE_PAGES: Final = 8192
HORIZON: Final = 32  # a store's curve looks back over this many times the bytes of its largest tier
QUEUED: Final = 64  # most prompts in the queue, which keeps their keys in memory
BATCH: Final = 16  # number of queued prompts that wakes the thread
DUTY: Final = 1 / 20  # largest share of one core's time that the thread uses
_HALF_LIFE_S: Final = 6 * 3600.0
_ALL_KEYS: Final = 1 << 64  # number of different values of a key's first 8 bytes
_BINS_PER_OCTAVE: Final = 16
_OCTAVES: Final = 56  # up to 64 PiB
_SMALLER, _LARGER = 6, 5  # the curve's points are up to this many octaves below and above the largest tier
_ADDED: Final = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)  # shares of a tier's capacity that are added to it


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The estimated hit rate (tokens found over tokens requested) of an LRU cache of ``capacity_bytes``."""

    capacity_bytes: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class AddedRoom:
    """The gain in hit rate from ``added_bytes``, a ``share`` of the tier's capacity."""

    share: float
    added_bytes: int
    added_hit_rate: float


@dataclass(frozen=True, slots=True)
class TierWorth:
    """The hit rate of a tier together with all faster tiers, at its present capacity and with more."""

    # The largest capacity among these tiers, because a colder tier also holds the pages of faster tiers.
    capacity_bytes: int
    hit_rate: float
    more: tuple[AddedRoom, ...]


@dataclass(frozen=True, slots=True)
class CurveStats:
    """The estimate of a :class:`ReuseCurve`. All rates are 0 before the first lookup."""

    asked_tokens: int = 0  # requested tokens that the estimate is based on; old tokens count less
    sampled: int = 0  # pages in the sample
    rate: float = 1.0  # share of all pages that are in the sample
    left_out: int = 0  # lookups and saves that found the queue full
    measured_hit_rate: float = 0.0  # hit rate of the store itself since it was opened
    ceiling: float = 0.0  # hit rate of a cache of ``horizon_bytes``
    horizon_bytes: int = 0  # largest reuse distance that counts as reuse; 0: no limit
    points: tuple[CurvePoint, ...] = ()
    tiers: Mapping[str, TierWorth] = field(default_factory=dict)


class _Use(NamedTuple):
    """A prompt that was requested or saved. The prompt's owner may append keys meanwhile."""

    keys: Sequence[PageKey]
    tokens: int
    held_tokens: int
    page_tokens: int
    page_bytes: int
    is_save: bool


class ReuseCurve:
    """The curve of one store. Thread-safe.

    A page that was not used while ``horizon_bytes`` of other pages were used counts as new. While all pages
    are in the sample, the estimate is exact except for the bins of distances, which are 4 % wide::

        curve = ReuseCurve()
        curve.looked_up(prompt.keys, len(prompt), 0, prompt.chunk_tokens, spec.page_bytes)
        curve.saved(prompt.keys, len(prompt), prompt.chunk_tokens, spec.page_bytes)
        curve.hit_rates([1 << 30, 1 << 34])
    """

    def __init__(
        self,
        *,
        horizon_bytes: float = math.inf,
        sample_pages: int = SAMPLE_PAGES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.left_out = 0
        """Lookups and saves that found the queue full. Approximate, because several threads may count at the
        same moment."""
        self.worked_s = 0.0
        """Processor time in seconds that the thread has used."""
        self._queue: deque[_Use] = deque()
        self._horizon_bytes = horizon_bytes
        self._clock = clock
        self._lock = threading.Lock()  # guards everything below
        self._sample = _Sample(sample_pages, horizon_bytes)
        self._asked_tokens = 0.0
        self._whole_tokens = 0.0  # requested tokens in whole pages
        self._sampled_tokens = 0.0  # the same number, estimated from the uses of sampled pages
        self._again = np.zeros(_BINS_PER_OCTAVE * _OCTAVES)  # reused tokens by reuse distance
        self._weighed_s = clock()
        self._enough = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    # -- events (from any thread, without a lock) ----------------------------------------------------

    def looked_up(
        self, keys: Sequence[PageKey], tokens: int, held_tokens: int, page_tokens: int, page_bytes: int
    ) -> None:
        """Record that ``tokens`` tokens of a prompt were requested, and that the first ``held_tokens`` were
        found. ``keys`` has a key for each whole page. The caller may append keys later, but must not change
        any."""
        self._add(_Use(keys, tokens, held_tokens, page_tokens, page_bytes, False))

    def saved(self, keys: Sequence[PageKey], tokens: int, page_tokens: int, page_bytes: int) -> None:
        """Record a save of the first ``tokens`` tokens of a prompt, also if they are stored already."""
        self._add(_Use(keys, tokens, tokens, page_tokens, page_bytes, True))

    def _add(self, use: _Use) -> None:
        queue = self._queue
        waiting = len(queue)
        if waiting >= QUEUED:
            self.left_out += 1
            return
        queue.append(use)
        if waiting >= BATCH and not self._enough.is_set():
            self._enough.set()

    # -- the thread ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that processes the queue. Without the thread, methods that read the curve process
        it."""
        self._thread = threading.Thread(target=self._run, name="tierstore-curve", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after the prompts that it is processing now, and wait until it has ended."""
        self._stopped.set()
        self._enough.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._enough.wait()
            if self._stopped.is_set():
                return
            self._enough.clear()
            began = time.thread_time()
            self.work()
            took = time.thread_time() - began
            self.worked_s += took
            self._stopped.wait(took * (1 / DUTY - 1))
            if len(self._queue) > BATCH:
                self._enough.set()

    def work(self, prompts: int = BATCH) -> None:
        """Process the oldest ``prompts`` prompts of the queue."""
        with self._lock:
            self._work(prompts)

    def _work(self, prompts: int) -> None:
        for _ in range(prompts):
            try:
                use = self._queue.popleft()
            except IndexError:  # empty
                break
            self._measure(use)
        self._weigh()

    def _measure(self, use: _Use) -> None:
        pages = use.tokens // use.page_tokens
        rate = self._sample.rate
        distances, sampled = self._sample.use(
            use.keys[:pages], use.held_tokens // use.page_tokens, use.page_bytes
        )
        if not use.is_save:
            stands_for = use.page_tokens / rate
            self._asked_tokens += use.tokens
            self._whole_tokens += pages * use.page_tokens
            self._sampled_tokens += sampled * stands_for
            at = np.rint(np.log2(distances) * _BINS_PER_OCTAVE).astype(np.int64)
            np.add.at(self._again, np.clip(at, 0, len(self._again) - 1), stands_for)

    def _weigh(self) -> None:
        """Reduce the weight of old traffic."""
        now = self._clock()
        if now - self._weighed_s < _HALF_LIFE_S / 64:
            return
        factor = 0.5 ** ((now - self._weighed_s) / _HALF_LIFE_S)
        self._asked_tokens *= factor
        self._whole_tokens *= factor
        self._sampled_tokens *= factor
        self._again *= factor
        self._weighed_s = now

    # -- results (from any thread) -------------------------------------------------------------------

    def hit_rates(self, capacities: Sequence[float]) -> list[float]:
        """Return the hit rates that LRU caches of these capacities in bytes would have had."""
        with self._lock:
            self._work(QUEUED)
            return [self._hit_rate(capacity) for capacity in capacities]

    def _hit_rate(self, capacity_bytes: float) -> float:
        if not self._asked_tokens or capacity_bytes < 1:
            return 0.0
        bins = len(self._again)
        if not math.isinf(capacity_bytes):
            bins = round(math.log2(capacity_bytes) * _BINS_PER_OCTAVE) + 1
        hits = float(self._again[:bins].sum()) + self._whole_tokens - self._sampled_tokens
        return min(max(hits / self._asked_tokens, 0.0), 1.0)

    def stats(self, tiers: Mapping[str, int], measured_hit_rate: float) -> CurveStats:
        """Return a snapshot. ``tiers`` are the capacities of the store's tiers in bytes, fastest first."""
        with self._lock:
            self._work(QUEUED)
            return CurveStats(
                asked_tokens=round(self._asked_tokens),
                sampled=len(self._sample),
                rate=self._sample.rate,
                left_out=self.left_out,
                measured_hit_rate=measured_hit_rate,
                ceiling=self._hit_rate(math.inf),
                horizon_bytes=0 if math.isinf(self._horizon_bytes) else int(self._horizon_bytes),
                points=self._points(tiers),
                tiers=self._worth(tiers),
            )

    def _points(self, tiers: Mapping[str, int]) -> tuple[CurvePoint, ...]:
        largest = max(tiers.values(), default=0) or GIB
        capacities = {largest >> step for step in range(1, _SMALLER + 1)}
        capacities |= {largest << step for step in range(_LARGER + 1)}
        capacities |= set(tiers.values())
        return tuple(
            CurvePoint(capacity, self._hit_rate(capacity)) for capacity in sorted(capacities) if capacity
        )

    def _worth(self, tiers: Mapping[str, int]) -> dict[str, TierWorth]:
        found = {}
        faster = 0
        for name, capacity in tiers.items():
            largest = max(capacity, faster)
            now = self._hit_rate(largest)
            more = []
            for share in _ADDED:
                added = int(capacity * share)
                then = self._hit_rate(max(capacity + added, faster))
                more.append(AddedRoom(share, added, max(then - now, 0.0)))
            found[name] = TierWorth(largest, now, tuple(more))
            faster = largest
        return found

    def check(self) -> None:
        """Assert that the sample's redundant bookkeeping agrees."""
        with self._lock:
            self._sample.check()


class _Sample:
    """The sampled pages in order of last use, oldest first, and the distances between uses.

    Each page has a slot in an array of sizes, and moves to the next free slot when it is used. So the bytes
    used since a page's last use are the sum of the slots behind the page's own. A full array is packed: gaps
    between slots are closed.
    """

    def __init__(self, limit: int, horizon_bytes: float) -> None:
        self.rate = 1.0
        """The share of all keys that are below the threshold."""
        self._threshold = b"\xff" * 17  # above all keys
        self._limit = limit
        self._horizon_bytes = horizon_bytes
        self._slots: dict[PageKey, int] = {}  # ascending
        self._sizes = np.zeros(2 * limit)  # bytes by slot; 0 for a free slot
        self._next = 0

    def __len__(self) -> int:
        return len(self._slots)

    def use(self, keys: Sequence[PageKey], held: int, page_bytes: int) -> tuple[npt.NDArray[np.float64], int]:
        """Record a use of a prompt's pages. The store has the first ``held`` pages. Return the distances in
        bytes of the known pages (each includes the page's own size), and the number of sampled pages in the
        prompt."""
        threshold = self._threshold
        stored = [key for key in keys[:held] if key < threshold]
        others = [key for key in keys[held:] if key < threshold]
        used = stored + [key for key in others if key in self._slots]
        if self._next + len(used) > len(self._sizes):
            self._pack(len(used))
        popped = [self._slots.pop(key, -1) for key in used]
        slots = np.array([slot for slot in popped if slot >= 0], np.int64)
        distances = self._behind(slots) / self.rate + page_bytes
        self._sizes[slots] = 0.0
        end = self._next + len(used)
        self._slots.update(zip(reversed(used), range(self._next, end), strict=True))
        self._sizes[self._next : end] = page_bytes
        self._next = end
        if len(self._slots) > self._limit:
            self._shrink()
        return distances[distances <= self._horizon_bytes], len(stored) + len(others)

    def _behind(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return for each of ``slots`` the sum of the sizes in all later slots."""
        if not len(slots):
            return np.zeros(0)
        first = int(slots.min())
        up_to = np.cumsum(self._sizes[first : self._next])
        behind: npt.NDArray[np.float64] = up_to[-1] - up_to[slots - first]
        return behind

    def _pack(self, room: int) -> None:
        """Close the gaps between slots, make ``room`` free slots at the end, and forget pages beyond the
        horizon."""
        sizes = self._sizes[list(self._slots.values())]
        behind = sizes.sum() - np.cumsum(sizes)
        gone = int(np.count_nonzero(behind >= self._horizon_bytes * self.rate))
        kept = sizes[gone:]
        self._next = len(kept)
        self._sizes = np.zeros(max(2 * self._limit, len(kept) + room))
        self._sizes[: self._next] = kept
        self._slots = dict(zip(itertools.islice(self._slots, gone, None), itertools.count(), strict=False))

    def _shrink(self) -> None:
        """Forget pages beyond the horizon. If more pages than the limit remain, lower the threshold until at
        most 7/8 of the limit remain."""
        self._pack(0)
        if len(self._slots) <= self._limit:
            return
        self._threshold = sorted(self._slots)[self._limit * 7 // 8][:8]
        self.rate = int.from_bytes(self._threshold, "big") / _ALL_KEYS
        self._sizes[[slot for key, slot in self._slots.items() if key >= self._threshold]] = 0.0
        self._slots = {key: slot for key, slot in self._slots.items() if key < self._threshold}

    def check(self) -> None:
        """Assert that slots and sizes agree."""
        slots = list(self._slots.values())
        assert slots == sorted(set(slots)), "slots do not ascend"
        assert np.flatnonzero(self._sizes).tolist() == slots, "sizes are not those of the slots"
        assert len(slots) <= self._limit, "the sample is too large"
        assert all(key < self._threshold for key in self._slots), "a page above the threshold"
