"""The thread that works off what lookups and saves have left for a curve."""

from __future__ import annotations

import threading
import time

from tierstore.curve.curve import ReuseCurve

_SHARE = 1 / 400  # of the time, that it works in the long run …
_SAVED_UP_S = 0.05  # … having saved up so much of its work at most, and at the start …
_AT_ONCE = 1 / 10  # … and that it works as long as there is some of that left


class Worker:
    """Works whenever enough waits, for a small share of the time: a Python thread that works holds up all
    others. What comes faster than that is left out and counted."""

    def __init__(self, curve: ReuseCurve) -> None:
        self.worked_s = 0.0
        """Processor time of all its work so far."""
        self._curve = curve
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tierstore-curve", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """It ends after the batch that it is at. What waits is left to whoever reads the curve."""
        self._stopped.set()
        self._curve.notes.enough.set()
        self._thread.join()

    def _run(self) -> None:
        budget = Budget(time.monotonic())
        stopped = False
        while not stopped:
            self._curve.notes.enough.wait()
            if self._stopped.is_set():
                return
            began = time.thread_time()
            self._curve.work()  # resets ``enough``, also where stop() has set it meanwhile
            took = time.thread_time() - began
            self.worked_s += took
            stopped = self._stopped.wait(budget.rest_s(took, time.monotonic()))


class Budget:
    """How long to rest after work."""

    def __init__(self, now_s: float) -> None:
        self._saved_s = _SAVED_UP_S
        self._now_s = now_s

    def rest_s(self, worked_s: float, now_s: float) -> float:
        """After ``worked_s`` seconds of work, at ``now_s``."""
        earned_s = (now_s - self._now_s) * _SHARE
        self._now_s = now_s
        self._saved_s = min(self._saved_s + earned_s, _SAVED_UP_S) - worked_s
        return worked_s / (_AT_ONCE if self._saved_s > 0 else _SHARE)
