"""How far off the estimate may be, by the sample that it is made of."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tierstore.curve.histogram import Histogram

_PARTS = 8
ERRORS: Final = 2.0
"""Standard errors that are said to be the error."""


class Spread:
    """The estimate once more, from each eighth of the sample. Which pages are in which is decided by their
    hashes, as the sample itself is: so what another sample would have said differs from this one as the
    eighths do from each other, but by less, as there is more in all of them together."""

    def __init__(self) -> None:
        self._asked = np.zeros(_PARTS)
        self._again = tuple(Histogram() for _ in range(_PARTS))

    def note(
        self,
        hashes: npt.NDArray[np.uint64],
        tokens: npt.NDArray[np.float64],
        again: npt.NDArray[np.int64],
        distances: npt.NDArray[np.float64],
    ) -> None:
        """``tokens`` were asked for in uses of pages with these ``hashes``; the uses ``again`` found their
        page at these ``distances``."""
        parts = (hashes % np.uint64(_PARTS)).astype(np.int64)
        self._asked += np.bincount(parts, weights=tokens, minlength=_PARTS)
        of_again = parts[again]
        for part in np.unique(of_again).tolist():
            mine = of_again == part
            self._again[part].add(distances[mine], tokens[again][mine])

    def error(self, nbytes: float) -> float:
        """The standard error of the share of tokens that a cache of so many bytes would have had. 1 where
        there is too little to tell."""
        if np.count_nonzero(self._asked) < _PARTS:
            return 1.0
        found = np.array([part.within(nbytes) for part in self._again])
        share = found.sum() / self._asked.sum()
        # Of a ratio: eighths in which more was asked for count for more.
        apart = (found - share * self._asked) / self._asked.mean()
        return float(np.sqrt((apart**2).sum() / (_PARTS - 1) / _PARTS))

    def scale(self, factor: float) -> None:
        """Weigh all of it with ``factor``."""
        self._asked *= factor
        for part in self._again:
            part.scale(factor)
