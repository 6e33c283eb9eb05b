"""A sample of the pages in order of their last use, and how far back in that order a page is found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

_KEPT = 7 / 8  # of the most pages, when there are more: the others are not cut off one by one

Hashes = npt.NDArray[np.uint64]
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Uses:
    """A batch of uses in the order in which they happened; columns of one length.

    ``request`` ascends; uses of one request are found as it began, and ordered so that the last ones count as
    the most recent. ``asks`` says which of them are to be measured, ``brings`` which bring their page in if
    it is not known, ``widens`` how many times as large it becomes in :meth:`Recency.widen`. Bytes are a real
    number for a page of the sample, which stands for others, and an imaginary one for a page that stands for
    itself: both are summed up together. Of the uses of the latter only so many (0 to 1) are ``seen``."""

    hashes: Hashes
    widens: npt.NDArray[np.int64]
    request: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.complex128]
    asks: npt.NDArray[np.bool_]
    brings: npt.NDArray[np.bool_]
    seen: float


class Recency:
    """Pages by hash, in order of hashes and in order of time. Not thread-safe."""

    def __init__(self) -> None:
        self._now = 0
        self._hashes: Hashes = np.zeros(0, np.uint64)  # ascending …
        self._widens = np.zeros(0, np.uint8)  # … what widen() makes of each …
        self._last = np.zeros(0, np.int64)  # … and the time of each one's last use
        self._times = np.zeros(0, np.int64)  # the same times ascending …
        self._nbytes = np.zeros(0, np.complex64)  # … and the size of the page that each belongs to

    def __len__(self) -> int:
        return len(self._hashes)

    def use(self, uses: Uses) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.complex128]]:
        """Take note of a batch. Returns which of its uses asked for a page that is known, and how many bytes
        of other pages had been used since that page was."""
        order = np.argsort(uses.hashes, kind="stable")
        at, found = self._find(uses.hashes[order])
        known = found | _brought_before(uses.hashes[order], uses.brings[order])
        order, at, found = order[known], at[known], found[known]
        hashes = uses.hashes[order]
        again = np.zeros(len(order), np.bool_)
        again[1:] = hashes[1:] == hashes[:-1]
        before = np.full(len(uses.hashes), -1, np.int64)  # the time of the use before this one
        before[order[found]] = self._last[at[found]]
        before[order[again]] = self._now + order[np.flatnonzero(again) - 1]
        touched = np.zeros(len(uses.hashes), np.bool_)
        touched[order] = True
        asked = np.flatnonzero(touched & uses.asks & (before >= 0))
        distances = self._since(uses, touched, before, asked)
        last = np.ones(len(order), np.bool_)
        last[:-1] = ~again[1:]
        first = ~again
        self._move(uses, order[last], at[first], found[first])
        return asked, distances

    def pages_within(self, nbytes: float) -> float:
        """How many pages that stand for others have so many bytes together. Where they are of different
        sizes, the large ones decide."""
        sizes = self._nbytes.real.astype(np.float64)
        squares = float((sizes**2).sum())
        return nbytes * float(sizes.sum()) / squares if squares else 0.0

    def limit(self, most: int) -> int | None:
        """Keep no more than ``most`` pages: those of the smallest hashes. Returns the smallest hash that has
        been given up; None when there was room for all."""
        if len(self) <= most:
            return None
        kept = int(most * _KEPT)
        border = int(self._hashes[kept])
        self.forget(border)
        return border

    def forget(self, border: int) -> None:
        """Give up the pages whose hashes are ``border`` or more."""
        kept = int(self._hashes.searchsorted(np.uint64(border)))
        self._drop_times(self._last[kept:])
        self._hashes, self._last = self._hashes[:kept].copy(), self._last[:kept].copy()
        self._widens = self._widens[:kept].copy()

    def widen(self) -> None:
        """Each page is ``widens`` times as large from now on (see :class:`Uses`); those of which nothing
        remains are given up."""
        by_time = np.argsort(self._last)
        self._nbytes = self._nbytes * self._widens[by_time].astype(np.float32)
        gone = self._widens == 0
        self._drop_times(self._last[gone])
        self._keep(~gone)
        self._widens = np.ones_like(self._widens)

    def forget_behind(self, nbytes: float, rate: float) -> None:
        """Give up the pages that lie more than ``nbytes`` back, for a sample of so many of all pages."""
        newer = in_full(np.cumsum(self._nbytes[::-1], dtype=np.complex128), rate)
        kept = int(newer.searchsorted(nbytes, side="right"))
        if kept == len(self):
            return
        self._times, self._nbytes = self._times[-kept or len(self) :], self._nbytes[-kept or len(self) :]
        self._keep(self._last >= (self._times[0] if kept else self._now))

    # -- inside --------------------------------------------------------------------------------------

    def _keep(self, kept: npt.NDArray[np.bool_]) -> None:
        self._hashes, self._widens, self._last = self._hashes[kept], self._widens[kept], self._last[kept]

    def _find(self, hashes: Hashes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Where each hash is or would be, and whether it is there."""
        at = self._hashes.searchsorted(hashes)
        found = np.zeros(len(hashes), np.bool_)
        if len(self):
            found = self._hashes[np.minimum(at, len(self) - 1)] == hashes
        return at, found

    def _above(self, before: npt.NDArray[np.int64]) -> npt.NDArray[np.complex128]:
        """Bytes of pages used after these times, as it was when the batch began."""
        newer = np.zeros(len(self) + 1, np.complex128)
        np.cumsum(self._nbytes[::-1], out=newer[1:])
        return newer[len(self) - self._times.searchsorted(before, side="right")]

    def _since(
        self,
        uses: Uses,
        touched: npt.NDArray[np.bool_],
        before: npt.NDArray[np.int64],
        asked: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.complex128]:
        """Bytes of other pages that were used since the page of each of the uses ``asked`` was.

        Where not all uses of some pages are seen, the time between two that are is longer than that between
        two uses, by as much as some are missing on average: as many *of them* were used in all of it as in
        truth were in the last part, but of the others only those count that were used in that part. And what
        of them was used in the short time between two uses of another page takes a longer time to be seen."""
        risen = self._risen(uses, touched, before)
        request, since = uses.request[asked], before[asked]
        found = self._above(since) + risen.above(request, since)
        if uses.seen < 1:
            common = uses.nbytes[asked].imag > 0  # those of which some are missing
            ago = self._now + asked - since
            later = since + ((1 - uses.seen) * ago).astype(np.int64)
            earlier = since - ((1 / uses.seen - 1) * ago).astype(np.int64)
            groups = self._above(later) + risen.above(request, later)
            stretches = self._above(earlier) + risen.above(request, earlier)
            found.real = np.where(common, groups.real, found.real)
            found.imag = np.where(common, found.imag, stretches.imag)
        return found

    def _risen(self, uses: Uses, touched: npt.NDArray[np.bool_], before: npt.NDArray[np.int64]) -> _Risen:
        columns = np.flatnonzero(touched)
        nbytes = np.where(touched, uses.nbytes, 0.0)
        since = np.sort(before[columns])
        # By request, and by time of the use before: bytes of earlier requests, used before not since then.
        risen = np.zeros((int(uses.request[-1]) + 2, len(columns) + 1), np.complex64)
        np.add.at(
            risen, (uses.request[columns] + 1, since.searchsorted(before[columns]) + 1), nbytes[columns]
        )
        np.cumsum(risen, axis=0, out=risen)
        np.cumsum(risen, axis=1, out=risen)
        up_to = np.zeros(len(uses.hashes) + 1, np.complex128)
        np.cumsum(nbytes, out=up_to[1:])
        return _Risen(risen, since, up_to, self._now)

    def _move(
        self,
        uses: Uses,
        latest: npt.NDArray[np.int64],
        at: npt.NDArray[np.int64],
        found: npt.NDArray[np.bool_],
    ) -> None:
        """The pages of the uses ``latest``, in order of hashes, have been used last in these. They are or
        belong at ``at``."""
        self._drop_times(self._last[at[found]])
        used = self._now + latest
        self._last[at[found]] = used[found]
        if not found.all():
            new = at[~found] + np.arange(len(found) - np.count_nonzero(found))
            old = np.ones(len(self) + len(new), np.bool_)
            old[new] = False
            self._hashes = _merged(self._hashes, old, uses.hashes[latest[~found]])
            self._widens = _merged(self._widens, old, uses.widens[latest[~found]].astype(np.uint8))
            self._last = _merged(self._last, old, used[~found])
        by_time = np.sort(latest)
        self._times = np.concatenate([self._times, self._now + by_time])
        self._nbytes = np.concatenate([self._nbytes, uses.nbytes[by_time].astype(np.complex64)])
        self._now += len(uses.hashes)

    def _drop_times(self, times: npt.NDArray[np.int64]) -> None:
        kept = np.ones(len(self._times), np.bool_)
        kept[self._times.searchsorted(times)] = False
        self._times, self._nbytes = self._times[kept], self._nbytes[kept]

    # -- checking ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that both orders hold the same pages."""
        assert len(self._hashes) == len(self._widens), "columns differ"
        assert len(self._hashes) == len(self._last) == len(self._times) == len(self._nbytes), "columns differ"
        assert (self._hashes[1:] > self._hashes[:-1]).all(), "hashes do not ascend"
        assert (np.sort(self._last) == self._times).all(), "times are not those of the pages"


@dataclass(frozen=True, slots=True)
class _Risen:
    """Bytes of pages that a batch has brought above others: by request and time of the use before, and up to
    each use."""

    by_request: npt.NDArray[np.complex64]
    since: npt.NDArray[np.int64]
    up_to: npt.NDArray[np.complex128]
    began: int

    def above(
        self, request: npt.NDArray[np.int64], times: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.complex128]:
        """Of pages that requests before these have used, and that nobody had used since ``times``."""
        above = self.by_request[request, self.since.searchsorted(times)].astype(np.complex128)
        # Where that is in this batch, all that came before it is not above it.
        return above - self.up_to[np.maximum(times - self.began + 1, 0)]


def in_full(nbytes: npt.NDArray[np.complex128], rate: float) -> npt.NDArray[np.float64]:
    """Of all pages, from the bytes in a sample of so many of them."""
    full: npt.NDArray[np.float64] = nbytes.real / rate + nbytes.imag
    return full


def _brought_before(hashes: Hashes, brings: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Of uses in order of hashes: whether this one, or one of the same page before it, brings it in."""
    at = np.arange(len(hashes))
    starts = np.ones(len(hashes), np.bool_)
    starts[1:] = hashes[1:] != hashes[:-1]
    start = np.maximum.accumulate(np.where(starts, at, 0))
    brought: npt.NDArray[np.bool_] = np.maximum.accumulate(np.where(brings, at, -1)) >= start
    return brought


def _merged(
    column: npt.NDArray[Number], old: npt.NDArray[np.bool_], values: npt.NDArray[Number]
) -> npt.NDArray[Number]:
    """``column`` where ``old``, and ``values`` in between."""
    merged = np.empty(len(old), column.dtype)
    merged[old] = column
    merged[~old] = values
    return merged
