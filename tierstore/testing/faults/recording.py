"""A script that was played and recorded: its events, and what a crash at any moment of it must leave.

A crash in the middle of a step must leave what was acknowledged before the step and is still there after it:
the rest has been evicted, by a decision that was counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tierstore.testing.faults.index_recorder import recorded_index
from tierstore.testing.faults.journal import Event, Journal, RecordingIO
from tierstore.testing.faults.player import WAIT_S, Player
from tierstore.testing.faults.prompts import Life
from tierstore.testing.faults.script import Evict, Held, Reopen, Step, book_of
from tierstore.tiers.disk import FileIO


@dataclass(frozen=True, slots=True)
class Mark:
    """``held`` is on disk after the first ``position`` events."""

    position: int
    held: Held


@dataclass(frozen=True, slots=True)
class Opening:
    """From event ``position`` on the store is open, or being opened, as ``lives[life]``."""

    position: int
    life: int


@dataclass(slots=True)
class Recording:
    """What a script did. ``prompts`` are the longest that were saved: (book, prompt) → tokens."""

    lives: Sequence[Life]
    events: list[Event]
    taken: list[int]  # bytes on disk after each event
    openings: list[Opening] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    prompts: Held = field(default_factory=dict)
    evicted_pages: int = 0
    wrong_pages: int = 0  # served by the script's own loads
    problems: list[str] = field(default_factory=list)

    def must_have(self, position: int) -> Held:
        """What a crash after ``position`` events must leave."""
        before = [mark for mark in self.marks if mark.position <= position]
        if not before:
            return {}
        after = self.marks[min(len(before), len(self.marks) - 1)].held
        both = {
            name: self._common(name[0], before[-1].held[name], after.get(name, 0)) for name in before[-1].held
        }
        return {name: tokens for name, tokens in both.items() if tokens}

    def _common(self, book: int, before: int, after: int) -> int:
        """The leading tokens that are in the same pages before and after a step. A partial page that a longer
        one has replaced may have left before that one came."""
        chunk = self.lives[book].spec.chunk_tokens
        return before if before == after else min(before, after) // chunk * chunk

    def lives_at(self, position: int) -> Sequence[Life]:
        """How a user would open each book's pages after ``position`` events: as it was opened last."""
        lives = list(self.lives)
        for opening in self.openings:
            if opening.position <= position:
                lives[book_of(self.lives, opening.life)] = self.lives[opening.life]
        return lives

    def capacity_at(self, position: int) -> int:
        """What the directory may take after ``position`` events. While a store is being opened with a smaller
        cap than before, the old one counts."""
        capacity = 0
        for opening in self.openings:
            if opening.position <= position:
                ready = any(opening.position < mark.position <= position for mark in self.marks)
                now = self.lives[opening.life].disk_bytes
                capacity = now if ready else max(capacity, now)
        return capacity

    def over_capacity(self) -> int:
        """After how many events the directory took more than it may."""
        return sum(nbytes > self.capacity_at(at) for at, nbytes in enumerate(self.taken))


def record(
    directory: Path,
    lives: Sequence[Life],
    steps: Iterable[Step],
    *,
    over: Callable[[FileIO], FileIO] = lambda io: io,
) -> Recording:
    """Run ``steps`` on a store in ``directory``, which begins as ``lives[0]``, and close it.

    ``over`` may put something between the store and the recording: the calls that it swallows are not
    recorded, which is how the campaign itself is tested.
    """
    journal = Journal(directory)
    recording = Recording(lives, journal.events, journal.taken, [Opening(0, 0)])
    with recorded_index(journal):
        player = Player(directory, lives, over(RecordingIO(journal)), checks=True)
        for step in steps:
            if isinstance(step, Reopen):
                player.store.close()
                recording.openings.append(Opening(len(journal), step.life))
            position = len(journal)
            evicted = player.evicted_pages
            player.play(step)
            writable = player.store.stats().disk_writable
            if isinstance(step, Evict) and player.evicted_pages > evicted and writable:
                journal.wait_for_commit(position, WAIT_S)  # nobody else waits for it
            recording.marks.append(Mark(len(journal), dict(player.held)))
        player.store.close()
        recording.marks.append(Mark(len(journal), dict(player.held)))
    recording.prompts = dict(player.prompts)
    recording.evicted_pages = player.evicted_pages
    recording.wrong_pages = player.wrong_pages
    recording.problems = player.problems
    return recording
