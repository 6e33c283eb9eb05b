"""How much a client's saves may hold in reservations at once, and whose turn it is."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from tierstore.daemon.greeting import Session


@dataclass(slots=True, eq=False)
class Window:
    """Pages ``first … first + count`` of a save. ``positions`` (within it) are to be written; ``done`` are
    the checksums of those that have been."""

    first: int
    count: int
    nbytes: int
    session: Session | None
    reservation: int = 0
    stored_tokens: int = 0
    positions: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    done: dict[int, int] = field(default_factory=dict)
    groups: deque[tuple[int, int]] = field(default_factory=deque)  # (first, stop) of positions to write
    tasks: int = 0


class Reserving(Protocol):
    """A save that goes on by windows."""

    def next_window(self) -> Window:
        """What it would reserve next."""

    def reserve(self, window: Window) -> None:
        """Reserve it; ``window_ended`` is called when it is over."""


class Budget:
    """Keeps all saves of a store within what a client may hold in reservations."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Reserving] = deque()
        self._reserved_bytes = 0
        self._pumping = False

    def request(self, job: Reserving) -> None:
        """Let ``job`` reserve its next window, as soon as there is room for one."""
        with self._lock:
            self._waiting.append(job)
        self._pump()

    def window_ended(self, window: Window) -> None:
        with self._lock:
            self._reserved_bytes -= window.nbytes
        self._pump()

    def _pump(self) -> None:
        with self._lock:
            if self._pumping:
                return  # whoever is at it will see what has changed
            self._pumping = True
        while (turn := self._next_turn()) is not None:
            job, window = turn
            job.reserve(window)

    def _next_turn(self) -> tuple[Reserving, Window] | None:
        with self._lock:
            if self._waiting:
                job = self._waiting[0]
                window = job.next_window()
                room = window.session.reserve_bytes if window.session is not None else 0
                if not self._reserved_bytes or self._reserved_bytes + window.nbytes <= room:
                    self._waiting.popleft()
                    self._reserved_bytes += window.nbytes
                    return job, window
            self._pumping = False
            return None
