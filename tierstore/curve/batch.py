"""Lookups and saves as columns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.curve.beginnings import Beginnings
from tierstore.curve.groups import (
    ALL,
    STRETCH_GROUPS,
    STRETCHES,
    Groups,
    cell_groups,
    covered_pages,
    group_counts,
    group_sizes,
)
from tierstore.curve.groups import groups as groups_of
from tierstore.curve.notes import Note
from tierstore.curve.recency import Hashes, Uses
from tierstore.keys import KEY_BYTES

_HASH = np.dtype(">u8")  # what a key begins with
_STRETCH_PAGES = np.diff(STRETCHES, prepend=0)
_STRETCH_ENDS = np.array((0, *STRETCHES))
_STRETCH_GROUPS = np.array((0, *STRETCH_GROUPS))


@dataclass(frozen=True, slots=True)
class Sample:
    """The groups with a hash below ``border``; ``in_cells``: of those that stand for cells, and for all of
    the cell."""

    border: int = ALL
    in_cells: bool = False

    @property
    def rate(self) -> float:
        """The share of all groups, or cells, that is in it."""
        return self.border / ALL


class Batch:
    """Notes as columns of one length: the common stretches and the sampled groups. In each note, what is
    last in the prompt comes first: a page counts as used after those behind it, which leave a tier before it
    does."""

    request: npt.NDArray[np.int64]
    hashes: Hashes
    widens: npt.NDArray[np.int64]  # how many times as much of it a page stands for under load
    common: npt.NDArray[np.bool_]
    nbytes: npt.NDArray[np.float64]
    stands_for: npt.NDArray[np.int64]
    """For how many uses one of a common stretch stands: spot checks stand for others. Of the sampled groups
    no use is missing, and it is 1."""
    tokens: npt.NDArray[np.float64]  # that all these uses have together
    asks: npt.NDArray[np.bool_]
    brings: npt.NDArray[np.bool_]
    asked_tokens: int
    checks: int  # notes that stand for others, too: all of them, or spot checks
    sampled_from: float
    """Tokens that were asked for in whole pages behind the common beginnings: what the sample is one of."""
    stood_for: float
    """The same by the groups, or cells, that these prompts have: a little more or less, by where they end."""

    def __init__(self, notes: Sequence[Note], beginnings: Beginnings, sample: Sample) -> None:
        noted, whole, *numbers = zip(*notes, strict=True)
        tokens, held, page_tokens, page_bytes, saves, stands_for = np.array(numbers, np.int64)
        counts = group_counts(tokens // page_tokens)
        groups = [
            groups_of(keys[:pages]) if of_all else keys[:count]
            for keys, of_all, pages, count in zip(
                noted, whole, (tokens // page_tokens).tolist(), counts.tolist(), strict=True
            )
        ]
        asks = saves == 0
        self.asked_tokens = int((tokens * stands_for)[asks].sum())
        counts_for_all = asks & (stands_for > 0)
        common = [
            beginnings.asked(each) if counts else beginnings.common(each)
            for each, counts in zip(groups, counts_for_all.tolist(), strict=True)
        ]
        stretches = np.array([len(each) for each in common])
        checked = np.where(stands_for > 0, stretches, 0)
        self.checks = int(np.count_nonzero(stands_for))
        request, number, hashes = _sampled(groups, sample)
        found = [stretch for each, count in zip(common, checked, strict=True) for stretch in each[:count]]
        of_common = np.repeat(np.arange(len(notes)), checked)
        nth = np.arange(len(found)) - np.repeat(np.cumsum(checked) - checked, checked)
        # A group in a common stretch counts for nothing, but is kept up to date: it may not stay one.
        widens = cell_groups(number)
        single = group_sizes(number) * (number >= _STRETCH_GROUPS[stretches][request])
        if sample.in_cells:
            single, widens = single * widens, np.ones_like(widens)
        sizes = np.concatenate([_STRETCH_PAGES[nth], single])
        last = np.concatenate([_STRETCH_GROUPS[nth + 1] - 1, number])
        request = np.concatenate([of_common, request])
        # All of it backwards, and then by notes.
        order = len(request) - 1 - np.argsort(request[::-1], kind="stable")
        self.request = request[order]
        self.common = order < len(found)
        self.hashes = np.concatenate([np.array(found, np.uint64), hashes])[order]
        self.widens = np.concatenate([np.ones(len(found), np.int64), widens])[order]
        self.nbytes = sizes[order] * page_bytes[self.request].astype(np.float64)
        self.stands_for = np.where(self.common, stands_for[self.request], 1)
        self.tokens = (sizes[order] * page_tokens[self.request] * self.stands_for).astype(np.float64)
        self.asks = asks[self.request]
        self.brings = last[order] < group_counts(held // page_tokens)[self.request]
        behind = tokens // page_tokens - _STRETCH_ENDS[stretches]
        self.sampled_from = float((np.maximum(behind, 0) * page_tokens * stands_for)[asks].sum())
        covered, of_stretches = (
            covered_pages(each, in_cells=sample.in_cells) for each in (counts, _STRETCH_GROUPS[stretches])
        )
        covered = np.maximum(covered - of_stretches, 0)
        self.stood_for = float((covered * page_tokens * stands_for)[asks].sum())

    def __len__(self) -> int:
        return len(self.hashes)

    def uses(self, seen: float) -> Uses:
        """The same to be put in order; of the uses of a common stretch so many are ``seen``."""
        nbytes = (self.nbytes * np.where(self.common, 1j, 1.0)).astype(np.complex128)
        return Uses(self.hashes, self.widens, self.request, nbytes, self.asks, self.brings, seen)


def _sampled(
    groups: Sequence[Groups], sample: Sample
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Hashes]:
    """The sampled groups of all prompts: which prompt, the group's number in it, its hash."""
    lengths = np.array([len(each) for each in groups])
    hashes = np.frombuffer(_joined(groups, int(lengths.sum())), _HASH)[::2]
    ends = np.cumsum(lengths)
    border = sample.border
    below = np.flatnonzero(hashes < np.uint64(border)) if border < ALL else np.arange(len(hashes))
    request = ends.searchsorted(below, side="right")
    number = below - (ends - lengths)[request]
    if sample.in_cells:
        stand = cell_groups(number) > 0
        request, number, below = request[stand], number[stand], below[stand]
    return request, number, hashes[below].astype(np.uint64)


def _joined(groups: Sequence[Groups], keys: int) -> bytes:
    """These many keys one after the other, each of ``KEY_BYTES``."""
    joined = b"".join(itertools.chain.from_iterable(groups))
    if len(joined) != keys * KEY_BYTES:  # somebody makes his own
        joined = b"".join(
            [key[:KEY_BYTES].ljust(KEY_BYTES, b"\0") for key in itertools.chain.from_iterable(groups)]
        )
    return joined
