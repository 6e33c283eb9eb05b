"""What lookups and saves note down for the curve, to be worked off later."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, TypeAlias

from tierstore.curve.groups import Groups

Note: TypeAlias = tuple[Groups, int, int, int, int, bool]
"""A prompt was asked for or saved: the keys of its groups, tokens that were asked for or saved, how many of
these the store has now, tokens and bytes of a page, and whether it was a save. Not a named tuple: making one
takes longer than all else that a lookup does here."""

MOST: Final = 128  # notes; each keeps up to 12 KiB of keys from being freed
_ENOUGH = MOST // 2  # for it to be worth to work some of it off


class Notes:
    """A queue with an end: what does not fit any more is left out and counted. Thread-safe.

    A lookup of a short prompt takes 40 µs, of which this may take a hundredth. So it takes no lock, copies
    nothing that is short, and wakes nobody for a single note.
    """

    def __init__(self) -> None:
        self.enough = threading.Event()
        """Set while it is worth to work some of it off."""
        self._notes: deque[Note] = deque()
        self.left_out = 0  # nearly: of threads that count at the same moment one may do so in vain

    def looked_up(
        self, groups: Groups, tokens: int, held_tokens: int, page_tokens: int, page_bytes: int
    ) -> None:
        """``tokens`` tokens of a prompt were asked for, of which the first ``held_tokens`` were found. Of its
        groups there may be more than belong to whole pages of these tokens. They must not change, but others
        may follow them."""
        if len(self._notes) < _ENOUGH or self._has_room():
            self._notes.append((groups, tokens, held_tokens, page_tokens, page_bytes, False))

    def saved(self, groups: Groups, tokens: int, page_tokens: int, page_bytes: int) -> None:
        """The first ``tokens`` tokens of a prompt are being saved, or are there already."""
        if len(self._notes) < _ENOUGH or self._has_room():
            self._notes.append((groups, tokens, tokens, page_tokens, page_bytes, True))

    def _has_room(self) -> bool:
        if len(self._notes) >= MOST:  # by as many more as there are threads that ask at the same time
            self.left_out += 1
            return False
        if not self.enough.is_set():
            self.enough.set()
        return True

    def take(self, groups: float) -> list[Note]:
        """Remove the oldest notes: one, or as many as have about this many groups together. One thread at a
        time."""
        self.enough.clear()
        taken: list[Note] = []
        try:
            while groups > 0:
                note = self._notes.popleft()
                groups -= len(note[0])
                taken.append(note)
        except IndexError:
            return taken  # that was the last one
        if len(self._notes) >= _ENOUGH:
            self.enough.set()
        return taken
