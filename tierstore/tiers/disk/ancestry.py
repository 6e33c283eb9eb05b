"""Who is below whom, for a whole directory at once: pure arithmetic over the facts of its pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def parent_rows(facts: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """For each row the row of its parent; -1 where that is not among them. Parents have the lower serials:
    any other (that is damage) is none, so that no row is its own ancestor."""
    serials = facts["serial"].astype(np.int64)
    parents = facts["parent"].astype(np.int64)
    if not len(serials):
        return parents
    rows = np.searchsorted(serials, parents).astype(np.int64)
    rows[rows == len(serials)] = 0
    rows[(serials[rows] != parents) | (parents >= serials)] = -1
    return rows


def depths(parents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many ancestors each row has, by doubling: log₂ of the deepest prompt's chunks passes."""
    depth = (parents >= 0).astype(np.int64)
    jump = parents.copy()
    while (jumping := np.flatnonzero(jump >= 0)).size:
        depth[jumping] += depth[jump[jumping]]
        jump[jumping] = jump[jump[jumping]]
    return depth


def reachable(parents: npt.NDArray[np.int64], good: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which rows are good and have only good ancestors."""
    good = good.copy()
    jump = parents.copy()
    while (jumping := np.flatnonzero(jump >= 0)).size:
        good[jumping] &= good[jump[jumping]]
        jump[jumping] = jump[jump[jumping]]
    return good
