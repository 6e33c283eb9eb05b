"""How many tokens were asked for again at which distance."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_BINS_PER_OCTAVE = 16  # a bin ends 4.4 % above its start
_OCTAVES = 56  # up to 64 PiB
_BINS = _BINS_PER_OCTAVE * _OCTAVES


class Histogram:
    """Tokens by reuse distance in bytes, in bins whose width grows with the distance."""

    def __init__(self) -> None:
        self._tokens = np.zeros(_BINS)

    def add(self, distances: npt.NDArray[np.float64], tokens: npt.NDArray[np.float64]) -> None:
        """``tokens[i]`` tokens were asked for at ``distances[i]`` bytes."""
        at = (np.log2(np.maximum(distances, 1.0)) * _BINS_PER_OCTAVE).astype(np.int64)
        np.minimum(at, _BINS - 1, out=at)
        self._tokens += np.bincount(at, weights=tokens, minlength=_BINS)

    def scale(self, factor: float) -> None:
        """Weigh what has been counted so far with ``factor``."""
        self._tokens *= factor

    def total(self) -> float:
        """All tokens that were asked for again."""
        return float(self._tokens.sum())

    def within(self, nbytes: float) -> float:
        """Tokens that were asked for at distances of up to ``nbytes``."""
        if nbytes < 1:
            return 0.0
        if math.isinf(nbytes):
            return self.total()
        at = math.log2(nbytes) * _BINS_PER_OCTAVE
        whole = min(int(at), _BINS)
        within = float(self._tokens[:whole].sum())
        if whole < _BINS:
            within += float(self._tokens[whole]) * (at - whole)
        return within
