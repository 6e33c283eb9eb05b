"""What a directory's index holds: read once after open, so that pages can leave and free space is known.

Lookups do not wait for it: they find their pages in the index itself. Writing and evicting do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierstore.tiers.disk.ancestry import parent_rows, reachable
from tierstore.tiers.disk.catalog import Catalog
from tierstore.tiers.disk.ledger import Ledger
from tierstore.tiers.disk.space import Space

_log = logging.getLogger(__name__)

_SERIALS = 1 << 63


@dataclass(frozen=True, slots=True)
class Survey:
    """The pages that are there, and the serials of those that cannot be: their parents are gone, or their
    places are outside of this life's space or taken."""

    ledger: Ledger
    lost: Sequence[int]


def take_survey(catalog: Catalog, space: Space) -> Survey:
    """Read the facts of every page and claim the places they name. Raises :class:`OSError`."""
    facts = catalog.facts()
    facts = facts[facts["serial"] < _SERIALS]  # any other key is damage
    serials = facts["serial"].astype(np.int64)
    parents = parent_rows(facts)
    roots = np.fromiter(catalog.roots(), np.int64)
    rooted = (parents >= 0) | np.isin(facts["parent"].astype(np.int64), roots)
    good = reachable(parents, rooted & (facts["parent"] < facts["serial"]))
    rows = np.flatnonzero(good)
    claimed = space.claim(facts["place"][rows].tolist(), facts["nbytes"][rows].tolist())
    good[rows] = claimed
    kept = reachable(parents, good)
    unclaimed = np.flatnonzero(good & ~kept)
    space.unclaim(facts["place"][unclaimed].tolist(), facts["nbytes"][unclaimed].tolist())
    return Survey(Ledger(facts[kept]), serials[~kept].tolist())


class SurveyThread:
    """A survey under way beside lookups. ``ledger`` is None until it has succeeded."""

    def __init__(self, catalog: Catalog, space: Space) -> None:
        self.ledger: Ledger | None = None
        self.error: Exception | None = None
        self._catalog = catalog
        self._space = space
        self._thread = threading.Thread(target=self._run, name="tierstore-survey", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended within ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            survey = take_survey(self._catalog, self._space)
            self._forget(survey.lost)
            self.ledger = survey.ledger
        except Exception as error:  # noqa: BLE001  # an index that cannot be read: then nothing is written to it
            self.error = error
            _log.error("disk tier: the index could not be read, nothing will be written", exc_info=error)

    def _forget(self, lost: Sequence[int]) -> None:
        try:
            self._catalog.forget(lost)
        except OSError as error:  # an index so full that not even deletions fit: the next life tries again
            _log.warning("disk tier: %d lost pages stay in the index: %s", len(lost), error)
