"""Which pages lie where no page can lie: what ``slabs.py`` never does, whatever the capacity.

How many slots a slab has depends on the capacity that the last life was opened with, and that is not in the
directory. What always holds: a slab begins at the border of a unit, its slots follow one another, and no two
pages share bytes. Nothing sharper is asked for here, since a page that is misplaced is dropped by a repair.
One that passes here and that the store's next life cannot place is dropped then, and is a miss.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierstore.memory import ALIGNMENT
from tierstore.tiers.disk.records import INLINE

_MOST_SLOTS_TRIED = 64  # by slabs.py, which then fills the last unit of the slab


def impossible(rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Rows whose places nothing could be read from: not on a block's border."""
    result: npt.NDArray[np.bool_] = (rows["place"] != INLINE) & (rows["place"] % ALIGNMENT != 0)
    return result


def misplaced(rows: npt.NDArray[np.void], unit_bytes: int) -> npt.NDArray[np.bool_]:
    """Rows (in order of serials) whose places are no slots of their size, or overlap with another row's. As
    at open, the row with the lower serial is right."""
    outside = np.flatnonzero(rows["place"] != INLINE)
    places = rows["place"][outside]
    sizes = -(-rows["nbytes"][outside] // ALIGNMENT) * ALIGNMENT
    wrong = np.zeros(len(outside), np.bool_)
    for size in np.unique(sizes).tolist():
        members = np.flatnonzero(sizes == size)
        wrong[members] = ~_can_be_slots(places[members], size, unit_bytes)
    right = np.flatnonzero(~wrong)
    wrong[right] = _overlapping(places[right], sizes[right])
    result = np.zeros(len(rows), np.bool_)
    result[outside] = wrong
    return result


def _can_be_slots(places: npt.NDArray[np.int64], size: int, unit_bytes: int) -> npt.NDArray[np.bool_]:
    """Whether places are a whole number of slots after the border of some unit."""
    most = _MOST_SLOTS_TRIED + unit_bytes // size
    beyond = np.unique(np.arange(most + 1, dtype=np.int64) * size % unit_bytes)
    result: npt.NDArray[np.bool_] = np.isin(places % unit_bytes, beyond)
    return result


def _overlapping(places: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """All but the first (in the order given) of those that share bytes."""
    result = np.zeros(len(places), np.bool_)
    order = np.argsort(places, kind="stable")
    ends = np.maximum.accumulate((places + sizes)[order])
    shared = np.flatnonzero(places[order][1:] < ends[:-1]) + 1
    # What shares bytes with its neighbour is in one group with it.
    groups: list[list[int]] = []
    for at in shared.tolist():
        if not groups or groups[-1][-1] != at - 1:
            groups.append([at - 1])
        groups[-1].append(at)
    for group in groups:
        taken: list[tuple[int, int]] = []
        for row in sorted(order[group].tolist()):
            start, stop = int(places[row]), int(places[row] + sizes[row])
            if any(start < other_stop and other_start < stop for other_start, other_stop in taken):
                result[row] = True
            else:
                taken.append((start, stop))
    return result
