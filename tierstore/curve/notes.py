"""What lookups and saves note down for the curve, to be worked off later."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from tierstore.curve.groups import ALL, CELL_GROUPS, Groups, group_counts, groups, some_cell_below
from tierstore.keys import PageKey

Note: TypeAlias = tuple[Sequence[PageKey], bool, int, int, int, int, bool, int]
"""A prompt was asked for or saved: keys, whether these are those of all its pages (else: of its groups),
tokens that were asked for or saved, how many of these the store has now, tokens and bytes of a page, whether
it was a save, and for how many notes it stands (0: it was only kept for its sampled groups). Not a named
tuple: making one takes longer than all else that a lookup does here."""

MOST: Final = 128  # notes; each keeps up to 12 KiB of keys from being freed …
MOST_WHOLE: Final = 256  # … which those of all pages of a prompt are, if it has no more
_ENOUGH = MOST // 2  # for it to be worth to work some of it off
_LOOK_EVERY = MOST // 4  # notes, at the queue, while it is not long
_AT_ONCE = _ENOUGH + _ENOUGH // 8  # wait at most, where whoever works them off comes as soon as he is called
_FEWER = 4  # times as few spot checks, at most, the next time: a burst may be over soon
_SPOT_CHECKS = MOST // 4  # under load, about so many of the notes in a queue


_GROUPS_IN: Final = group_counts(np.arange(MOST_WHOLE + 1)).tolist()


def groups_in(note: Note) -> int:
    """How many groups the prompt of a note has."""
    keys, whole, tokens, _, page_tokens, *_ = note
    return _GROUPS_IN[tokens // page_tokens] if whole else len(keys)  # others may have followed its keys


@dataclass(frozen=True, slots=True)
class Taken:
    """Some notes, oldest first, and how they came: ``came`` is how many there were to make since the last
    time, also those that were not worth it, of which ``left_out`` found no room."""

    notes: list[Note]
    came: int
    left_out: int


class Notes:
    """A queue with an end: what does not fit any more is left out and counted. Thread-safe.

    A lookup of a short prompt takes 30 µs, of which this may take a hundredth, about as long as it takes to
    call a function. So the embedded store does itself what is to be done with nearly all lookups: it adds a
    note where nobody has to look at the queue (:attr:`unseen`), and passes over those that nothing would be
    done with (:attr:`passes`). No lock is taken, nothing is copied, and nobody is woken for a single note.

    **Under load**, when more comes than is worked off, only those prompts are noted that have a cell in the
    sample (``groups.py``): nothing else would be done with the others. Whether what the store has of a prompt
    has one takes a look at its last page, which knows the smallest key of all cells up to it. Of the rest all
    cells' keys are looked at, three of a prompt of 15 pages and 17 of one of 1,500. It is done at once, not
    for many prompts together: a moment later their keys are no longer in the processor's cache, which takes
    longer than all the rest.

    What has to be known of all prompts together (which beginnings are common, how many tokens are asked for)
    is estimated from **spot checks**: every n-th note or so, at random, is kept whatever is in it. As soon as
    there is time for more, n falls.
    """

    __slots__ = (
        "_counted",
        "_drawn",
        "_left_out_before",
        "_notes",
        "_picked",
        "_random",
        "_spot_checks",
        "add",
        "border",
        "enough",
        "left_out",
        "passes",
        "unseen",
    )

    def __init__(self) -> None:
        self.enough = threading.Event()
        """Set while it is worth to work some of it off."""
        self._notes: deque[Note] = deque()
        self.add = self._notes.append
        """A note that stands for itself, where there may be :attr:`unseen` ones."""
        # These numbers are nearly right: of threads that count at the same moment one may do so in vain.
        self.left_out = 0
        self.unseen = 0
        """Notes that may be added before somebody looks at the queue; 0 under load."""
        self._spot_checks = 1  # one note in so many
        self.passes = 0
        """Under load: notes from here to the next spot check …"""
        self._drawn = 0  # … and so many between all of them so far …
        self._picked = 0  # … of which so many were worth a note
        self._counted = 0  # of those that were not, and of those left out, the last time some were taken
        self._left_out_before = 0
        self.border = b""
        """Keys below it are in the sample."""
        self._random = random.Random(0)

    def prompt_looked_up(
        self,
        keys: Sequence[PageKey],
        tokens: int,
        held_tokens: int,
        page_tokens: int,
        page_bytes: int,
        least: bytes,
    ) -> None:
        """``tokens`` tokens of a prompt with these ``keys``, of all its pages, were asked for, of which the
        first ``held_tokens`` were found; ``least`` is the smallest of the keys that stand for cells of these
        (:func:`least_key`). The keys must not change, but others may follow them."""
        if self.passes > 0:
            self.passes -= 1
            border = self.border
            if least >= border and not some_cell_below(
                border, keys, held_tokens // page_tokens, tokens // page_tokens
            ):
                return
            self._picked += 1
            stands_for = 0
        else:
            stands_for = self._spot_checks
            if stands_for > 1:
                self._draw()
        whole = len(keys) <= MOST_WHOLE
        asked = keys if whole else groups(keys)
        self._add((asked, whole, tokens, held_tokens, page_tokens, page_bytes, False, stands_for))

    def looked_up(
        self,
        groups: Groups,
        tokens: int,
        held_tokens: int,
        page_tokens: int,
        page_bytes: int,
        save: bool = False,
    ) -> None:
        """The same where only the keys of the prompt's groups are at hand. There may be more than belong to
        whole pages of these tokens. ``save``: see :meth:`saved`."""
        if self.passes > 0:
            self.passes -= 1
            if self._is_sampled(groups):
                self._picked += 1
                self._add((groups, False, tokens, held_tokens, page_tokens, page_bytes, save, 0))
        else:
            stands_for = self._spot_checks
            self._add((groups, False, tokens, held_tokens, page_tokens, page_bytes, save, stands_for))
            if self._spot_checks > 1:
                self._draw()

    def saved(self, groups: Groups, tokens: int, page_tokens: int, page_bytes: int) -> None:
        """The first ``tokens`` tokens of a prompt are being saved, or are there already."""
        self.looked_up(groups, tokens, tokens, page_tokens, page_bytes, True)

    def _is_sampled(self, groups: Groups) -> bool:
        count = len(groups)
        for group in CELL_GROUPS:
            if group >= count:
                return False
            if groups[group] < self.border:
                return True
        return False

    def _add(self, note: Note) -> None:
        waiting = len(self._notes)
        if waiting >= MOST:  # by as many more as there are threads that ask at the same time
            self.left_out += 1
            return
        self._notes.append(note)
        if waiting < _ENOUGH:
            self.unseen = min(_LOOK_EVERY, _ENOUGH - waiting) if self._spot_checks == 1 else 0
        elif not self.enough.is_set():
            self.enough.set()

    def take(self, groups: float) -> Taken:
        """Remove the oldest notes: one, or as many as have about this many groups together. One thread at a
        time."""
        self.enough.clear()
        waited = len(self._notes)
        left_out_so_far = self.left_out
        counted = self._drawn - self.passes - self._picked + left_out_so_far
        left_out = left_out_so_far - self._left_out_before
        taken: list[Note] = []
        while groups > 0 and self._notes:
            note = self._notes.popleft()
            groups -= groups_in(note)
            taken.append(note)
        came = len(taken) + counted - self._counted
        self._counted = counted
        self._left_out_before = left_out_so_far
        if left_out and not self._notes:  # else it is not their number that takes long
            self._check(min(_FEWER * self._spot_checks, -(-came // _SPOT_CHECKS)))
        elif _ENOUGH <= waited <= _AT_ONCE and self._spot_checks > 1:
            self._check(self._spot_checks // 2)
        if len(self._notes) >= _ENOUGH:
            self.enough.set()
        return Taken(taken, came, left_out)

    def _check(self, one_in: int) -> None:
        self._spot_checks = one_in
        self.unseen = 0
        self._drawn -= self.passes
        self.passes = 0
        if one_in > 1:
            self._draw()

    def _draw(self) -> None:
        self.passes = self._random.randrange(2 * self._spot_checks - 1)
        self._drawn += self.passes

    def sample_below(self, border: int) -> None:
        """Groups whose keys begin with a smaller number of 8 bytes than ``border`` are in the sample."""
        self.border = min(border, ALL - 1).to_bytes(8, "big")
