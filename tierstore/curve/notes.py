"""What lookups and saves note down for the curve, to be worked off later."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from tierstore.curve.groups import ALL, CELL_GROUPS, CELL_PAGES, Groups, groups
from tierstore.keys import PageKey

Note: TypeAlias = tuple[Groups, int, int, int, int, bool, int]
"""A prompt was asked for or saved: the keys of its groups, tokens that were asked for or saved, how many of
these the store has now, tokens and bytes of a page, whether it was a save, and for how many notes it stands
(0: it was only kept for its sampled groups). Not a named tuple: making one takes longer than all else that a
lookup does here."""

MOST: Final = 128  # notes; each keeps up to 12 KiB of keys from being freed
_ENOUGH = MOST // 2  # for it to be worth to work some of it off
_AT_ONCE = _ENOUGH + _ENOUGH // 8  # wait at most, where whoever works them off comes as soon as he is called
_FEWER = 4  # times as few spot checks, at most, the next time: a burst may be over soon
_SPOT_CHECKS = MOST // 4  # under load, about so many of the notes in a queue


@dataclass(frozen=True, slots=True)
class Taken:
    """Some notes, oldest first, and how they came: ``came`` is how many there were to make since the last
    time, also those that were not worth it, of which ``left_out`` found no room."""

    notes: list[Note]
    came: int
    left_out: int


class Notes:
    """A queue with an end: what does not fit any more is left out and counted. Thread-safe.

    A lookup of a short prompt takes 40 µs, of which this may take a hundredth. So it takes no lock, copies
    nothing that is short, and wakes nobody for a single note.

    **Under load**, when more comes than is worked off, only those prompts are noted that have a cell in the
    sample (``groups.py``): nothing else would be done with the others. To find out takes a look at three keys
    of a prompt of 15 pages and at 17 of one of 1,500. It is done at once, not for many prompts together: a
    moment later their keys are no longer in the processor's cache, which takes longer than all the rest.

    What has to be known of all prompts together (which beginnings are common, how many tokens are asked for)
    is estimated from **spot checks**: every n-th note or so, at random, is kept whatever is in it. As soon as
    there is time for more, n falls.
    """

    __slots__ = (
        "_border",
        "_counted",
        "_drawn",
        "_left_out_before",
        "_notes",
        "_picked",
        "_random",
        "_spot_checks",
        "_unchecked",
        "enough",
        "left_out",
    )

    def __init__(self) -> None:
        self.enough = threading.Event()
        """Set while it is worth to work some of it off."""
        self._notes: deque[Note] = deque()
        # Nearly: of threads that count at the same moment one may do so in vain.
        self.left_out = 0
        self._spot_checks = 1  # one note in so many
        self._unchecked = 0  # notes from here to the next spot check …
        self._drawn = 0  # … and so many between all of them so far …
        self._picked = 0  # … of which so many were worth a note
        self._counted = 0  # of those that were not, and of those left out, the last time some were taken
        self._left_out_before = 0
        self._border = b""  # keys below it are in the sample
        self._random = random.Random(0)

    def prompt_looked_up(
        self, keys: Sequence[PageKey], tokens: int, held_tokens: int, page_tokens: int, page_bytes: int
    ) -> None:
        """``tokens`` tokens of a prompt with these ``keys``, of all its pages, were asked for, of which the
        first ``held_tokens`` were found. The keys must not change, but others may follow them."""
        if self._unchecked > 0:
            self._unchecked -= 1
            border = self._border
            count = len(keys)
            for page in CELL_PAGES:
                if page >= count:
                    return
                if keys[page] < border:
                    break
            else:
                return
            self._picked += 1
            self._add((groups(keys), tokens, held_tokens, page_tokens, page_bytes, False, 0))
        else:
            stands_for = self._spot_checks
            self._add((groups(keys), tokens, held_tokens, page_tokens, page_bytes, False, stands_for))
            if self._spot_checks > 1:
                self._draw()

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
        if self._unchecked > 0:
            self._unchecked -= 1
            if self._is_sampled(groups):
                self._picked += 1
                self._add((groups, tokens, held_tokens, page_tokens, page_bytes, save, 0))
        else:
            self._add((groups, tokens, held_tokens, page_tokens, page_bytes, save, self._spot_checks))
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
            if groups[group] < self._border:
                return True
        return False

    def _add(self, note: Note) -> None:
        if len(self._notes) < _ENOUGH or self._has_room():
            self._notes.append(note)

    def _has_room(self) -> bool:
        if len(self._notes) >= MOST:  # by as many more as there are threads that ask at the same time
            self.left_out += 1
            return False
        if not self.enough.is_set():
            self.enough.set()
        return True

    def take(self, groups: float) -> Taken:
        """Remove the oldest notes: one, or as many as have about this many groups together. One thread at a
        time."""
        self.enough.clear()
        waited = len(self._notes)
        left_out_so_far = self.left_out
        counted = self._drawn - self._unchecked - self._picked + left_out_so_far
        left_out = left_out_so_far - self._left_out_before
        taken: list[Note] = []
        while groups > 0 and self._notes:
            note = self._notes.popleft()
            groups -= len(note[0])
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
        self._drawn -= self._unchecked
        self._unchecked = 0
        if one_in > 1:
            self._draw()

    def _draw(self) -> None:
        self._unchecked = self._random.randrange(2 * self._spot_checks - 1)
        self._drawn += self._unchecked

    def sample_below(self, border: int) -> None:
        """Groups whose keys begin with a smaller number of 8 bytes than ``border`` are in the sample."""
        self._border = min(border, ALL - 1).to_bytes(8, "big")
