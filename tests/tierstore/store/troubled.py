"""A store on a disk that can be made to fail, with a clock that is moved by hand."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Any

from tests.small_store import load_bytes, pages_of
from tierstore.core.health import Condition
from tierstore.stats import StoreStats
from tierstore.store import Store
from tierstore.testing.clock import ManualClock
from tierstore.testing.faulty_io import Fail, Fault, FaultyIO, Stall

WRITES = ("pwritev", "allocate", "sync")
DURABLE = list(range(16 * 24))  # 24 pages: on disk only
HOT = list(range(10_000, 10_000 + 16 * 8))  # 8 pages: in the host tier, and on disk
WAIT_S = 30.0  # more than anything takes: a test that gets here has failed


class Troubled:
    """A store that holds DURABLE on disk and HOT in host memory."""

    def __init__(self, open_store: Callable[..., Store], **options: Any) -> None:
        self.io = FaultyIO()
        self.clock = ManualClock(1000.0)
        self.stalls: list[Stall] = []
        self._open_store = open_store
        self._options = {"inline_bytes": 0, "lease_s": 1e6, **options}
        self.store = self.open()
        self.save(DURABLE)
        assert self.store.flush(WAIT_S)
        self.store.evict("host")
        self.save(HOT)
        assert self.store.flush(WAIT_S)

    def open(self) -> Store:
        return self._open_store(io=self.io, clock=self.clock, **self._options)

    # -- trouble -------------------------------------------------------------------------------------

    def fail(self, code: int, *kinds: str, times: int | None = None) -> None:
        """These calls (all, if none is named) fail from now on."""
        self.io.set(Fault(lambda call: not kinds or call.kind in kinds, Fail(code), times=times))

    def stall(self, kind: str, *, times: int | None = None) -> Stall:
        """Calls of this kind hang from now on."""
        self.stalls.append(Stall())
        self.io.set(Fault(lambda call: call.kind == kind, self.stalls[-1], times=times))
        return self.stalls[-1]

    def mend(self) -> None:
        """The disk is in order from now on."""
        self.io.clear()
        for stall in self.stalls:
            stall.release()

    # -- use -----------------------------------------------------------------------------------------

    def save(self, tokens: list[int]) -> int:
        return self.store.save(tokens, pages_of(tokens)).wait(WAIT_S)

    def served(self, tokens: list[int]) -> int:
        """How many tokens the engine gets back; not one byte of them is wrong."""
        came, pages = load_bytes(self.store, self.store.lookup(tokens))
        assert pages == pages_of(tokens[:came])
        return came

    def stats(self) -> StoreStats:
        return self.store.stats()

    @property
    def condition(self) -> Condition:
        return self.stats().health["disk"].condition

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that another thread does."""
        give_up = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < give_up, self.stats()
            with self.store.backend.core.state.changed:
                self.store.backend.core.state.changed.wait(0.02)

    def comes_back(self) -> None:
        """Some minutes later the disk is online, without anybody having done anything about it."""
        self.mend()
        self.clock.advance(61)
        self.until(lambda: self.condition is Condition.ONLINE)

    def nothing_is_lost(self) -> None:
        """In this life and the next one, all that was durable is there."""
        self.until(lambda: not self.stats().pending_writes)
        self.store.evict("host")
        assert (self.served(DURABLE), self.served(HOT)) == (len(DURABLE), len(HOT))
        assert self.stats().counters["damaged_pages"] == 0
        assert self.stats().failed_tasks == 0
        self.store.check()
        self.store.close()
        self.store = self.open()
        assert (self.served(DURABLE), self.served(HOT)) == (len(DURABLE), len(HOT))


NAMES = {
    errno.ENOSPC: "disk full",
    errno.EROFS: "read-only",
    errno.EIO: "I/O error",
    errno.ENODEV: "device gone",
    errno.ESTALE: "stale",
}
