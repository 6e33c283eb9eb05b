"""The lookout: sees that the disk has stopped answering, or answers again, and does what follows.

No thread stands watch. Whoever comes by looks: lookups, loads, whoever waits for a load, a flush or the end
of the store. That is everybody whom a stalled disk could hurt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from tierstore.core.health import Health
from tierstore.tiers.disk import DiskTier

_log = logging.getLogger(__name__)

_NOTHING_UNDER_WAY_S = 1.0  # when to look again if there is nothing to wait for now


class Ends(Protocol):
    """Something that waits for the disk, and can do without."""

    def finish(self) -> None: ...


class Lookout:
    """Looks at one disk tier (or at none: then there is nothing to see) for one store."""

    def __init__(self, disk: DiskTier | None, health: Health, changed: threading.Condition) -> None:
        self._disk = disk
        self._health = health
        self._changed = changed  # the store's lock, and who waits for changes
        self.waiting: set[Ends] = set()  # under the lock: what is to end when the disk stalls

    def look(self) -> float:
        """Take note of how long the oldest call has been under way, end what waits for a disk that does not
        answer, and tell. Returns in how many seconds there may be something new. Without the lock."""
        if self._disk is None:
            return _NOTHING_UNDER_WAY_S
        health = self._health
        longest = self._disk.in_flight.longest_s()
        if (longest >= health.stall_s) != health.stalled or health.has_news or health.probe_due:
            self._act(longest)
        left = health.stall_s - longest
        return left if 0 < left < health.stall_s else _NOTHING_UNDER_WAY_S

    def _act(self, longest_s: float) -> None:
        health = self._health
        with self._changed:
            health.under_way(longest_s)
            ending = list(self.waiting) if health.stalled else []
            news = health.take_news()
            self._changed.notify_all()  # among them the writer, who probes
        for each in ending:
            each.finish()
        for line in news:
            _log.warning("%s", line)

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``condition`` holds (it is asked under the lock). False when ``timeout`` seconds pass
        first, or when the disk does not answer. Without the lock."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while True:
            next_look_s = self.look()
            with self._changed:
                if condition():
                    return True
                left = next_look_s if give_up is None else give_up - time.monotonic()
                if self._health.stalled or left <= 0:
                    return False
                self._changed.wait(min(left, next_look_s))
