"""Lookups and saves that wait to be worked off, and the same as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.curve.beginnings import Beginnings
from tierstore.curve.groups import STRETCH_GROUPS, STRETCHES, Groups, group_count, group_sizes
from tierstore.curve.recency import Hashes, Uses
from tierstore.keys import KEY_BYTES

ALL: Final = 1 << 64  # the border that every hash is below
_HASH = np.dtype(">u8")  # what a key begins with
_STRETCH_PAGES = np.diff(STRETCHES, prepend=0)
_STRETCH_ENDS = np.array((0, *STRETCHES))
_STRETCH_GROUPS = np.array((0, *STRETCH_GROUPS))


class Event(NamedTuple):
    """A prompt was asked for (``saves`` is False) or saved, as far as ``groups`` go: ``pages`` whole pages,
    of which the store has the first ``held`` now."""

    groups: bytes  # the keys one after the other: fewer objects, and nothing that somebody else has is held
    pages: int
    held: int
    page_bytes: int
    page_tokens: int
    saves: bool


def joined(groups: Groups) -> bytes:
    """Keys one after the other, each of ``KEY_BYTES``."""
    keys = b"".join(groups)
    if len(keys) != len(groups) * KEY_BYTES:  # somebody makes his own
        keys = b"".join([key[:KEY_BYTES].ljust(KEY_BYTES, b"\0") for key in groups])
    return keys


class Batch:
    """Events as columns of one length: the common stretches and the sampled groups. In each event, what is
    last in the prompt comes first: a page counts as used after those behind it, which leave a tier before it
    does."""

    request: npt.NDArray[np.int64]
    hashes: Hashes
    common: npt.NDArray[np.bool_]
    nbytes: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]
    asks: npt.NDArray[np.bool_]
    brings: npt.NDArray[np.bool_]
    sampled_from: float
    """Tokens that were asked for in whole pages behind the common beginnings: what the sample is one of."""

    def __init__(self, events: Sequence[Event], beginnings: Beginnings, border: int) -> None:
        common = [
            beginnings.common(event.groups) if event.saves else beginnings.asked(event.groups)
            for event in events
        ]
        stretches = np.array([len(each) for each in common])
        request, number, hashes = _sampled(events, border)
        found = [stretch for each in common for stretch in each]
        of_common = np.repeat(np.arange(len(events)), stretches)
        nth = np.arange(len(found)) - np.repeat(np.cumsum(stretches) - stretches, stretches)
        # A group in a common stretch counts for nothing, but is kept up to date: it may not stay one.
        single = group_sizes(number) * (number >= _STRETCH_GROUPS[stretches][request])
        pages = np.concatenate([_STRETCH_PAGES[nth], single])
        held = np.array([group_count(event.held) for event in events])
        last = np.concatenate([_STRETCH_GROUPS[nth + 1] - 1, number])
        request = np.concatenate([of_common, request])
        # All of it backwards, and then by events.
        order = len(request) - 1 - np.argsort(request[::-1], kind="stable")
        self.request = request[order]
        self.common = order < len(found)
        self.hashes = np.concatenate([np.array(found, np.uint64), hashes])[order]
        page_bytes = np.array([event.page_bytes for event in events], float)
        page_tokens = np.array([event.page_tokens for event in events], float)
        saves = np.array([event.saves for event in events])
        self.nbytes = pages[order] * page_bytes[self.request]
        self.tokens = pages[order] * page_tokens[self.request]
        self.asks = ~saves[self.request]
        self.brings = last[order] < held[self.request]
        behind = np.array([event.pages for event in events]) - _STRETCH_ENDS[stretches]
        self.sampled_from = float((np.maximum(behind, 0) * page_tokens * ~saves).sum())

    def __len__(self) -> int:
        return len(self.hashes)

    def uses(self, rate: float) -> Uses:
        """The same for a sample of so many of all pages. A stretch is there for sure, so that it counts for
        less there than a group, which stands for others."""
        return Uses(
            self.hashes, self.request, self.nbytes * np.where(self.common, rate, 1.0), self.asks, self.brings
        )


def _sampled(
    events: Sequence[Event], border: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Hashes]:
    """The sampled groups of all events: which event, the group's number in the prompt, its hash."""
    hashes = np.frombuffer(b"".join([event.groups for event in events]), _HASH)[::2].astype(np.uint64)
    lengths = np.array([len(event.groups) for event in events]) // KEY_BYTES
    ends = np.cumsum(lengths)
    below = np.flatnonzero(hashes < np.uint64(border)) if border < ALL else np.arange(len(hashes))
    request = ends.searchsorted(below, side="right")
    return request, below - (ends - lengths)[request], hashes[below]
