"""The curve of a live store: fed by its lookups and saves, read by its stats."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from tierstore.curve.asked import Asked, StoodFor
from tierstore.curve.batch import Batch, Sample
from tierstore.curve.beginnings import Beginnings
from tierstore.curve.groups import ALL, CELL_GROUPS
from tierstore.curve.notes import MOST, Notes, Taken, groups_in
from tierstore.curve.recency import Recency, in_full
from tierstore.curve.stats import CurveStats
from tierstore.curve.table import points, worth

MOST_PAGES: Final = 8192  # in the sample
_LOWEST = 1 << 44  # no border is below it: that is a sample of one page in a million
_MEAN_IN_A_PROMPT = 12.0  # sampled groups of a prompt: more cost time and say little …
_CLOSE_LOOKS = 1 << 15  # … except of the first ones that there are, after which the sample may grow thinner …
_FEW = 1 / 4  # … and twice as many while the sample is not as full as this
_THINNER = 1 / 4  # times as many in the sample at least, the next time: a burst may be over soon
_MOST_USES = 512  # sampled ones that are worked off together: all of them are compared with each other
_NOTES_OF_A_REQUEST = 2  # a lookup and a save, of which one will do to know of a use
_HALF_LIFE_S = 6 * 3600.0


class ReuseCurve:
    """Thread-safe. ``horizon_bytes`` is how far back it looks: what has not been used while so many bytes of
    other pages were is as good as new."""

    def __init__(
        self,
        *,
        horizon_bytes: float = math.inf,
        most_pages: int = MOST_PAGES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.horizon_bytes = horizon_bytes
        self._most_pages = most_pages
        self._clock = clock
        self._lock = threading.Lock()
        self._sample = Sample()
        self._recency = Recency()
        self._beginnings = Beginnings()
        self._asked = Asked()
        self._stood_for = StoodFor()
        self._weighed_s = clock()
        self.notes = Notes()
        self.notes.sample_below(self._sample.border)
        self._looks = 0  # groups and stretches worked off so far

    # -- working it off (from any thread) -------------------------------------------------------------

    def work(self) -> None:
        """Work off some of what waits."""
        with self._lock:
            self._work()

    def _work(self) -> bool:
        """Whether there was something. Under the lock."""
        taken = self.notes.take(_MOST_USES / self._rate)
        if taken.notes:
            self._work_off(taken)
            self._weigh()
        return bool(taken.notes)

    def _work_all(self) -> None:
        while self._work():
            pass

    def _work_off(self, taken: Taken) -> None:
        batch = Batch(taken.notes, self._beginnings, self._sample)
        self._asked.tokens += batch.asked_tokens
        self._asked.left_out += batch.asked_tokens * taken.left_out / len(taken.notes)
        self._asked.sampled_from += batch.sampled_from
        self._stood_for.add(batch)
        if len(batch):
            self._looks += len(batch)
            self._measure(batch, taken.came)
            self._fit(batch, len(taken.notes))
        if taken.left_out:
            self._thin_out(taken)

    def _measure(self, batch: Batch, came: int) -> None:
        rate = self._rate * self._stood_for.too_much
        seen = min(_NOTES_OF_A_REQUEST * max(batch.checks, 1) / came, 1.0)
        asked, above = self._recency.use(batch.uses(seen))
        self._asked.note(batch, asked, in_full(above, rate) + batch.nbytes[asked], 1 / self._rate)
        self._recency.forget_behind(self.horizon_bytes, rate)

    def _fit(self, batch: Batch, notes: int) -> None:
        """Keep the sample as small as it may be."""
        border = self._recency.limit(self._most_pages)
        if border is not None:
            self._lower(border)
        elif self._looks > _CLOSE_LOOKS and self._too_many(batch, notes):
            self._lower(self._sample.border // 2)

    def _too_many(self, batch: Batch, notes: int) -> bool:
        mean = int(np.count_nonzero(~batch.common)) / notes
        few = len(self._recency) < _FEW * self._most_pages
        return mean > _MEAN_IN_A_PROMPT * (1 + few)

    def _thin_out(self, taken: Taken) -> None:
        """More came than there was room for. Where it took too long to work off what the sample has of each
        prompt, less of each will do; else fewer prompts must have a cell in the sample at all."""
        share = len(taken.notes) / taken.came
        if len(taken.notes) < MOST:
            enough = self._rate * share
        else:
            self._use_cells()
            cells = np.searchsorted(CELL_GROUPS, [groups_in(note) for note in taken.notes])
            enough = share * len(taken.notes) / max(int(cells.sum()), 1)
        if enough < self._rate:
            self._lower(int(max(enough, self._rate * _THINNER) * ALL))

    def _use_cells(self) -> None:
        if not self._sample.in_cells:
            self._sample = Sample(self._sample.border, in_cells=True)
            self._recency.widen()
            self._stood_for = StoodFor()

    def _lower(self, border: int) -> None:
        border = max(min(border, self._sample.border), _LOWEST)
        self._sample = Sample(border, self._sample.in_cells)
        self._recency.forget(border)
        self.notes.sample_below(border)

    @property
    def _rate(self) -> float:
        """The share of all groups that is in the sample."""
        return self._sample.rate

    def _weigh(self) -> None:
        """What is long past counts less."""
        now = self._clock()
        if now - self._weighed_s >= _HALF_LIFE_S / 64:
            factor = 0.5 ** ((now - self._weighed_s) / _HALF_LIFE_S)
            self._asked.scale(factor)
            self._stood_for.scale(factor)
            self._weighed_s = now

    # -- reading (from any thread) -------------------------------------------------------------------

    def hit_rates(self, capacities: Sequence[float]) -> list[float]:
        """The hit rates of caches of these many bytes."""
        with self._lock:
            self._work_all()
            return [self._asked.hit_rate(capacity) for capacity in capacities]

    def errors(self, capacities: Sequence[float]) -> list[float]:
        """How far each of these hit rates may be off: as a rule they are not."""
        with self._lock:
            self._work_all()
            return [self._error(capacity) for capacity in capacities]

    def _error(self, capacity: float) -> float:
        whole = self._rate == 1 and not self._sample.in_cells
        return self._asked.error(
            capacity, math.inf if whole else self._recency.pages_within(capacity * self._rate)
        )

    def stats(self, tiers: Mapping[str, int], measured_hit_rate: float) -> CurveStats:
        """A snapshot, for a store whose ``tiers`` have these capacities in bytes, fastest first."""
        with self._lock:
            self._work_all()
            return CurveStats(
                asked_tokens=round(self._asked.tokens),
                sampled=len(self._recency),
                rate=self._rate,
                left_out=self.notes.left_out,
                measured_hit_rate=measured_hit_rate,
                ceiling=self._asked.hit_rate(math.inf),
                horizon_bytes=0 if math.isinf(self.horizon_bytes) else int(self.horizon_bytes),
                points=points(self._asked.hit_rate, self._error, tiers),
                tiers=worth(self._asked.hit_rate, tiers),
            )

    def check(self) -> None:
        """Assert that what is counted twice agrees."""
        with self._lock:
            self._recency.check()
            assert len(self._recency) <= self._most_pages, "the sample is too large"
