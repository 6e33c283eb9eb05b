"""The health of a tier that can fail: what may be asked of it now, why, and when to try again.

A pure state machine. It is told what happened (a write failed, a read succeeded, a call has been under way
for so long) and answers whether the tier may be read and written. Nothing here does I/O or waits.

Three things can be wrong, and each has its own way back:

* **Writing fails** (full, read-only, I/O errors): *read-only*. What is there is still served.
* **Reading fails** several times in a row, or once in a way that says that the disk has gone: *offline*. What
  is there counts as not there, so that no engine waits for a read that will fail, and nothing is removed.
* **A call does not return**: *offline* for as long as that call is under way. A thread that is stuck in it
  will say so by returning; there is nothing to try.

From the first two the way back is a *probe*: a small page is written, synced and read behind everybody's back
(``DiskTier.probe``). The next batch or the next load would have been a probe too, but pages of users would
have paid for its failure, and a tier that nobody asks would never come back. The time between probes doubles
from one second to a minute. It only starts over when pages have really been written or read again: a disk
that takes a small page and refuses the next batch must not be tried every second for ever.
"""

from __future__ import annotations

import enum
import errno
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tierstore.defaults import STALL_S
from tierstore.tiers.disk import DiskTier

_READ_FAILURES = 3  # in a row, until a tier is not read any more
_FIRST_RETRY_S = 1.0
_MOST_RETRY_S = 60.0
_GONE = frozenset(
    {errno.ENODEV, errno.ENXIO, errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ENOMEDIUM}
)


class Condition(str, enum.Enum):
    """What may be asked of a tier."""

    ONLINE = "online"
    READ_ONLY = "read-only"  # it is read, and not written
    OFFLINE = "offline"  # its pages count as misses


@dataclass(frozen=True, slots=True)
class TierHealth:
    """A snapshot of a tier's health. ``errors`` counts by kind (read, write, probe, stall) since it was last
    in order."""

    condition: Condition
    reason: str  # empty while online
    since_s: float  # for how long it has been so
    retry_s: float | None  # until the next probe; None: nothing is to be tried
    errors: Mapping[str, int]


class _Backoff:
    """Times between attempts: each twice the one before, up to a minute."""

    def __init__(self) -> None:
        self._next_s = _FIRST_RETRY_S

    def take(self) -> float:
        taken, self._next_s = self._next_s, min(2 * self._next_s, _MOST_RETRY_S)
        return taken

    def reset(self) -> None:
        self._next_s = _FIRST_RETRY_S


class Health:
    """The health of one tier. Not thread-safe: the store's lock guards it."""

    def __init__(self, tier: str, clock: Callable[[], float], *, stall_s: float = STALL_S) -> None:
        self._tier = tier
        self._clock = clock
        self.stall_s = stall_s
        self._best = Condition.ONLINE  # what can be had at all in this life …
        self._best_reason = ""
        self._fault = Condition.ONLINE  # what the errors so far call for
        self._reason = ""
        self._retry_at = math.inf
        self._stalled = False
        self.stalls = 0  # how often a call took too long
        self._failures: Counter[str] = Counter()  # of reads, by what was read, in a row
        self._backoffs = {Condition.READ_ONLY: _Backoff(), Condition.OFFLINE: _Backoff()}
        self._shown = Condition.ONLINE
        self._shown_reason = ""
        self._since = clock()
        self._spent = {Condition.READ_ONLY: 0.0, Condition.OFFLINE: 0.0}  # before ``_since``
        self._errors: Counter[str] = Counter()
        self._news: list[str] = []

    # -- what may be asked ---------------------------------------------------------------------------

    @property
    def condition(self) -> Condition:
        return Condition.OFFLINE if self._stalled else self._fault

    @property
    def readable(self) -> bool:
        return self.condition is not Condition.OFFLINE

    @property
    def writable(self) -> bool:
        return self.condition is Condition.ONLINE

    @property
    def stalled(self) -> bool:
        """Whether a call has been under way for too long."""
        return self._stalled

    @property
    def probe_due(self) -> bool:
        """Whether it is time to find out if the tier is in order again."""
        return not self._stalled and self._clock() >= self._retry_at

    @property
    def retry_s(self) -> float | None:
        """Seconds until the next probe; None when none is to come."""
        return None if math.isinf(self._retry_at) else max(self._retry_at - self._clock(), 0.0)

    # -- what happened -------------------------------------------------------------------------------

    def write_failed(self, error: OSError) -> None:
        self._errors["write"] += 1
        self._fail(Condition.OFFLINE if error.errno in _GONE else Condition.READ_ONLY, _message(error))

    def written(self) -> None:
        """Pages became durable."""
        if self._fault is Condition.ONLINE:
            self._backoffs[Condition.READ_ONLY].reset()

    def read_failed(self, error: OSError, what: str = "pages") -> None:
        """Reading ``what`` gave an error. (Pages and records are counted apart: an index that comes out of
        the page cache says nothing of the disk.)"""
        self._errors["read"] += 1
        self._failures[what] += 1
        if error.errno in _GONE or self._failures[what] >= _READ_FAILURES:
            self._fail(Condition.OFFLINE, _message(error))

    def was_read(self, what: str = "pages") -> None:
        """Reading ``what`` succeeded."""
        del self._failures[what]
        if self._fault is not Condition.OFFLINE:
            self._backoffs[Condition.OFFLINE].reset()

    def probe_succeeded(self) -> None:
        self._fault = self._best
        self._reason = self._best_reason
        self._retry_at = math.inf
        self._failures.clear()
        self._show()

    def probe_failed(self, error: OSError) -> None:
        self._errors["probe"] += 1
        worse = Condition.OFFLINE if error.errno in _GONE else self._fault
        self._fault = Condition.ONLINE  # so that this failure counts as a new one
        self._fail(worse, _message(error))
        self._shown_reason = self._why

    def never_write(self, reason: str) -> None:
        """Pages can be read, and not written as long as this process lives."""
        self._best = self._fault = Condition.READ_ONLY
        self._best_reason = self._reason = reason
        self._retry_at = math.inf
        self._show()

    def under_way(self, longest_s: float) -> bool:
        """The oldest call began so long ago. Whether that makes a difference."""
        stalled = longest_s >= self.stall_s
        if stalled == self._stalled:
            return False
        self._stalled = stalled
        self.stalls += stalled
        self._errors["stall"] += stalled
        self._show()
        return True

    def _fail(self, condition: Condition, reason: str) -> None:
        if self._fault is Condition.OFFLINE or self._fault is condition:
            return  # an answer that was on its way when this was known
        self._fault = condition
        self._reason = reason
        self._retry_at = self._clock() + self._backoffs[condition].take()
        self._show()

    def _show(self) -> None:
        condition = self.condition
        if condition is self._shown:
            return
        was = self._words()
        if self._shown is not Condition.ONLINE:
            self._spent[self._shown] += self._clock() - self._since
        self._shown = condition
        self._shown_reason = self._why
        self._since = self._clock()
        if condition is Condition.ONLINE:
            self._news.append(f"{self._tier}: online, was {was}")
            self._errors.clear()
        else:
            self._news.append(self.line)

    # -- seeing --------------------------------------------------------------------------------------

    @property
    def line(self) -> str:
        """The tier's health in one line."""
        if self._shown is Condition.ONLINE:
            return f"{self._tier}: online"
        retry = self.retry_s
        ending = "" if self._stalled or retry is None else f"; retry in {math.ceil(retry)} s"
        return f"{self._tier}: {self._words()}{ending}"

    def _words(self) -> str:
        counts = [(kind, self._errors[kind]) for kind in ("write", "read", "probe")]
        errors = [f"{count} {kind} error{'s' * (count > 1)}" for kind, count in counts if count]
        lasting = self._clock() - self._since
        return ", ".join([f"{self._shown.value} for {lasting:.0f} s ({self._shown_reason})", *errors])

    @property
    def _why(self) -> str:
        if self._stalled:
            return f"a call has not returned for {self.stall_s:.0f} s"
        return "" if self._fault is Condition.ONLINE else self._reason

    def snapshot(self) -> TierHealth:
        lasting = self._clock() - self._since
        return TierHealth(self._shown, self._shown_reason, lasting, self.retry_s, dict(self._errors))

    def spent_s(self, condition: Condition) -> float:
        """Seconds spent in a condition that is not online."""
        now = self._clock() - self._since if self._shown is condition else 0.0
        return self._spent[condition] + now

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def take_news(self) -> list[str]:
        """What a person should be told: one line for each change since this was last asked."""
        news, self._news = self._news, []
        return news


def _message(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


_log = logging.getLogger(__name__)

_NOTHING_UNDER_WAY_S = 1.0  # when to look again if there is nothing to wait for now


class Ends(Protocol):
    """Something that waits for the disk, and can do without."""

    def finish(self) -> None: ...


class StallDetector:
    """Looks at one disk tier (or at none: then there is nothing to see) for one store."""

    def __init__(self, disk: DiskTier | None, health: Health, changed: threading.Condition) -> None:
        self._disk = disk
        self._health = health
        self._changed = changed  # the store's lock, and who waits for changes
        self.waiting: set[Ends] = set()  # under the lock: what is to end when the disk stalls

    def poll(self) -> float:
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
            next_look_s = self.poll()
            with self._changed:
                if condition():
                    return True
                left = next_look_s if give_up is None else give_up - time.monotonic()
                if self._health.stalled or left <= 0:
                    return False
                self._changed.wait(min(left, next_look_s))
