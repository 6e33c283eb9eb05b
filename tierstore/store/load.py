"""Starts loads: each kind of destination, at the priority of whoever asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tierstore.mover import Mover, Priority
from tierstore.store.destinations import BufferLoad, HbmLoad, HostLoad, Loaded
from tierstore.store.endpoints import Buffers
from tierstore.store.hit import EmbeddedHit
from tierstore.store.load_job import LoadJob
from tierstore.store.state import StoreState
from tierstore.transfer import Transfer

__all__ = ["Loaded", "Loader"]

R = TypeVar("R")


class Loader:
    """Starts loads."""

    def __init__(self, state: StoreState, mover: Mover) -> None:
        self._state = state
        self._mover = mover

    def prefetch(self, hit: EmbeddedHit, *, deadline_s: float | None) -> Transfer[int]:
        return self._start(Priority.PREFETCH, lambda: HostLoad(self._state, hit, deadline_s))

    def to_host(self, hit: EmbeddedHit, *, deadline_s: float | None, priority: Priority) -> Transfer[int]:
        """A prefetch that somebody may wait for already."""
        return self._start(priority, lambda: HostLoad(self._state, hit, deadline_s))

    def to_hbm(self, hit: EmbeddedHit, *, deadline_s: float | None) -> Transfer[Loaded]:
        return self._start(Priority.LOAD, lambda: HbmLoad(self._state, hit, deadline_s))

    def to_buffers(self, hit: EmbeddedHit, buffers: Buffers, *, deadline_s: float | None) -> Transfer[Loaded]:
        return self._start(Priority.LOAD, lambda: BufferLoad(self._state, hit, deadline_s, buffers))

    def _start(self, priority: Priority, make: Callable[[], LoadJob[R]]) -> Transfer[R]:
        return make().start(self._mover, priority)
