"""Room under the cap for an index that has to be written anew: what is given up for it.

The new index needs as much again as the old one until it takes its place, and a full store has little to
spare. Nothing may be kept in memory meanwhile, and the cap comes first. So the end of the extent space makes
way: an index is a few hundredths of a store, and the pages that lie there are as good as any. A store that is
nearly all index has no such end; of its pages those stay that were used last. (Where its trees are in order
it loses nothing: then the index is edited as it is, see repair.py.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.memory import ALIGNMENT
from tierstore.tiers.disk.catalog import IndexUsage
from tierstore.tiers.disk.fsck.examination import Examination
from tierstore.tiers.disk.fsck.findings import Category
from tierstore.tiers.disk.records import INLINE
from tierstore.tiers.disk.space import index_cost, tree_headroom
from tierstore.units import KIB, round_up

_EMPTY_INDEX = 96 * KIB  # with its lock file, and lists of free pages
_WHY = "it gives way: the index has to be written anew, which needs room under the cap"


@dataclass(slots=True)
class IndexRoom:
    """``room_bytes`` are free under the cap, ``extent_bytes`` are taken by the extents, ``usage`` is what the
    old index holds."""

    found: Examination
    room_bytes: int
    extent_bytes: int
    usage: IndexUsage

    def make(self) -> int | None:
        """Condemn the pages that have to give way. Returns where the extent space is to be cut off; None when
        there is no room, and the index has to be edited."""
        costs = self._costs()
        lacking = round_up(max(self._lacking(costs), 0), ALIGNMENT)
        if lacking > self.extent_bytes and not self.found.inventory.misfiled:
            return None
        end = max(self.extent_bytes - lacking, 0)
        self._condemn(self._beyond(end))
        lacking = self._lacking(costs) - (self.extent_bytes - end)
        if lacking > 0:
            self._condemn(self._least_recently_used(costs, lacking))
        return end

    def _costs(self) -> npt.NDArray[np.int64]:
        """What each page takes of an index."""
        rows = self.found.inventory.rows
        pairs = zip(rows["nbytes"].tolist(), rows["place"].tolist(), strict=True)
        costs = np.fromiter((index_cost(nbytes, place) for nbytes, place in pairs), np.int64, len(rows))
        # Records with many tokens take more than is reserved for them: what is there tells.
        more = max(self.usage.used_bytes / max(int(costs.sum()), 1), 1.0)
        rounded: npt.NDArray[np.int64] = np.ceil(costs * more).astype(np.int64)
        return rounded

    def _lacking(self, costs: npt.NDArray[np.int64]) -> int:
        needed = int(costs[self.found.good].sum()) + tree_headroom(self.usage.tree_bytes) + _EMPTY_INDEX
        return needed - self.room_bytes

    def _beyond(self, end: int) -> npt.NDArray[np.intp]:
        rows = self.found.inventory.rows
        stop = rows["place"] + -(-rows["nbytes"].astype(np.int64) // ALIGNMENT) * ALIGNMENT
        return np.flatnonzero(self.found.good & (rows["place"] != INLINE) & (stop > end))

    def _least_recently_used(self, costs: npt.NDArray[np.int64], lacking: int) -> npt.NDArray[np.intp]:
        rows = np.flatnonzero(self.found.good)
        serials = self.found.inventory.rows["serial"][rows].tolist()
        ticks = np.array([self.found.use(serial, 0.0).tick for serial in serials], np.int64)
        # Of pages that were used together the last of a prompt goes first: serials ascend along it.
        order = rows[np.lexsort((-rows, ticks))]
        return order[: int(np.searchsorted(np.cumsum(costs[order]), lacking)) + 1]

    def _condemn(self, rows: npt.NDArray[np.intp]) -> None:
        self.found.condemn(rows, Category.MISPLACED, "room", _WHY)
        self.found.drop_unreachable()
