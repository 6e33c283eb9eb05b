"""Copies out of the daemon's arena that go on after their load has ended, beside what computes.

The engine has the pages by then, and its work is ordered behind the copies, so nobody could take back what
was read too late. The lease therefore lasts until they have ended: it is renewed when half of what is left of
it has passed. It can only end before them if the device stands still and the daemon does not answer, both for
seconds; then the pool is not to be trusted any more, and says so to whoever goes on computing.
"""

from __future__ import annotations

import threading

from tierstore.daemon.connected_hit import ConnectedHit
from tierstore.memory import Memory
from tierstore.tiers.hbm import Filling

LEAST_S = 5.0
"""What must be left of a lease for that. Copies of what fits a device take a few seconds at most."""


class Copying:
    """One of them, from pages of ``hit`` in ``mapped``, under a :meth:`ConnectedHit.hold`."""

    def __init__(self, hit: ConnectedHit, filling: Filling, mapped: Memory | None) -> None:
        self._hit = hit
        self._filling = filling
        self._mapped = mapped  # keeps it
        self._lock = threading.Lock()
        self._ended = False
        self._timer: threading.Timer | None = None
        self._renew_later()

    def wait(self) -> bool:
        """Block until the copies have ended. False when the lease had ended before."""
        self._filling.wait()
        with self._lock:
            self._ended = True
            self._mapped = None  # now, and not when Python finds the circle of this and its timer
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        return self._hit.let_go()

    def _renew_later(self) -> None:
        left_s = self._hit.lease_left_s
        with self._lock:
            if self._ended or left_s <= 0:
                return
            self._timer = threading.Timer(left_s / 2, self._hit.renew, [self._renew_later])
            self._timer.daemon = True
            self._timer.start()
