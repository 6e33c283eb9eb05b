"""What was asked for, and what of it caches of different sizes would have had."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tierstore.curve.batch import Batch
from tierstore.curve.histogram import Histogram
from tierstore.curve.spread import ERRORS, Spread


class StoodFor:
    """How many pages prompts have, and how many by the groups (or cells) that they have."""

    def __init__(self) -> None:
        self._pages = 0.0
        self._by_groups = 0.0

    def add(self, batch: Batch) -> None:
        """Prompts were asked for."""
        self._pages += batch.sampled_from
        self._by_groups += batch.stood_for

    def scale(self, factor: float) -> None:
        """Weigh all of it with ``factor``."""
        self._pages *= factor
        self._by_groups *= factor

    @property
    def too_much(self) -> float:
        """How many times as many pages there seem to be as there are: where many prompts end in the same
        part of a group, that is not 1."""
        return self._by_groups / self._pages if self._pages and self._by_groups else 1.0


class Asked:
    """What was asked for, and at which distance it was asked for again. In tokens."""

    def __init__(self) -> None:
        self.tokens = 0.0  # in all
        self.left_out = 0.0  # about so many more, in notes that found no room
        self.sampled_from = 0.0  # in whole pages that are in no common beginning
        self._sampled = 0.0  # the same by the sample
        self._common = Histogram()
        self._groups = Histogram()
        self._spread = Spread()

    def note(
        self,
        batch: Batch,
        again: npt.NDArray[np.int64],
        distances: npt.NDArray[np.float64],
        stands_for: float,
    ) -> None:
        """The uses ``again`` of a batch found their page at these distances. Each sampled group stands for so
        many of them."""
        common, tokens = batch.common[again], batch.tokens[again]
        self._common.add(distances[common], tokens[common])
        self._groups.add(distances[~common], tokens[~common] * stands_for)
        single = ~batch.common & batch.asks
        self._sampled += float(batch.tokens[single].sum()) * stands_for
        counted = np.where(single, batch.tokens, 0.0) * stands_for
        self._spread.note(batch.hashes, counted, again[~common], distances[~common])

    def hit_rate(self, capacity_bytes: float) -> float:
        """Of a cache of so many bytes."""
        if not self.tokens:
            return 0.0
        groups = self._groups.within(capacity_bytes)
        if self._sampled:
            # The sample has a little more or less than its share. How much is known.
            groups *= self.sampled_from / self._sampled
        return min((self._common.within(capacity_bytes) + groups) / self.tokens, 1.0)

    def error(self, capacity_bytes: float, sampled: float) -> float:
        """How far off that may be, when ``sampled`` pages of the sample fit in there (infinitely many: when
        all pages are in it). Because of which they are, because distances are made of their sizes, and
        because of what was left out."""
        if not self.tokens:
            return 0.0
        # Who looks for the use before, which was left out, finds an older one or none.
        torn = self.left_out / (self.tokens + self.left_out)
        if math.isinf(sampled):
            return torn
        part = self.sampled_from / self.tokens * self._spread.error(capacity_bytes)
        few = math.sqrt(sampled)
        here = self.hit_rate(capacity_bytes)
        smaller = self.hit_rate(capacity_bytes * max(1 - few / sampled, 0.0)) if sampled > 1 else 0.0
        larger = self.hit_rate(capacity_bytes * (1 + (few + 0.5) / max(sampled, 0.1)))
        return min(ERRORS * math.hypot(part, max(here - smaller, larger - here)) + torn, 1.0)

    def scale(self, factor: float) -> None:
        """Weigh all of it with ``factor``."""
        self.tokens *= factor
        self.left_out *= factor
        self._spread.scale(factor)
        self.sampled_from *= factor
        self._sampled *= factor
        self._common.scale(factor)
        self._groups.scale(factor)
