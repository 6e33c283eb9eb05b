"""The health of a tier that can fail: whether it may be read and written, why not, and when to try again.

:class:`Health` is a pure state machine. A ``Health`` receives events (a write failed, a read succeeded, a
call has run for some time) and says whether the tier may be read and written. It does no I/O and never waits.

A tier can fail in three ways:

* **Writes fail** (full, read-only, I/O errors): the tier is *read-only*. The tier's pages are still served.
* **Reads fail** several times in a row, or once with an error that says that the disk is gone: the tier is
  *offline*. The tier's pages count as misses, so that no engine waits for a read that will fail. No page is
  removed.
* **A call does not return**: the tier is *offline* until the call returns. Nothing is tried meanwhile.

A successful *probe* (``DiskTier.probe``) ends a state that failed writes or reads have caused: a small page
is written, synced and read in the background. Users' pages are not used as probes, because they would suffer
from a failed probe, and a tier without requests would never recover. The time between probes doubles from one
second to a minute. The doubling starts over only when pages were written or read again, because a disk that
takes a small page but refuses the next batch must not be probed every second forever.
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
from typing import Any

from tierstore.defaults import STALL_S
from tierstore.tiers.disk import DiskTier
from tierstore.transfer import Transfer

_READ_FAILURES = 3  # failed reads in a row before a tier is offline
_FIRST_RETRY_S = 1.0
_MOST_RETRY_S = 60.0
_GONE = frozenset(
    {errno.ENODEV, errno.ENXIO, errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ENOMEDIUM}
)


class Condition(str, enum.Enum):
    """How a tier may be used."""

    ONLINE = "online"
    READ_ONLY = "read-only"  # may be read but not written
    OFFLINE = "offline"  # the tier's pages count as misses


@dataclass(frozen=True, slots=True)
class TierHealth:
    """A snapshot of a tier's health. ``errors`` counts errors by kind (read, write, probe, stall) since the
    tier was last online."""

    condition: Condition
    reason: str  # empty while online
    since_s: float  # seconds in this condition
    retry_s: float | None  # seconds until the next probe; None if no probe is planned
    errors: Mapping[str, int]


class Health:
    """The health of one tier. Not thread-safe: the store's lock guards it."""

    def __init__(self, tier: str, clock: Callable[[], float], *, stall_s: float = STALL_S) -> None:
        self._tier = tier
        self._clock = clock
        self.stall_s = stall_s
        self._best = Condition.ONLINE  # the condition after a successful probe
        self._best_reason = ""
        self._fault = Condition.ONLINE  # the condition that follows from the errors so far
        self._reason = ""
        self._retry_at = math.inf
        self._stalled = False
        self.stalls = 0  # number of calls that have run for too long
        self._failures: Counter[str] = Counter()  # consecutive failed reads, by what was read
        # seconds until the next probe; doubled after each failed probe
        self._next_retry_s = {Condition.READ_ONLY: _FIRST_RETRY_S, Condition.OFFLINE: _FIRST_RETRY_S}
        self._shown = Condition.ONLINE
        self._shown_reason = ""
        self._since = clock()
        self._spent = {Condition.READ_ONLY: 0.0, Condition.OFFLINE: 0.0}  # seconds until ``_since``
        self._errors: Counter[str] = Counter()
        self._news: list[str] = []

    # -- permitted use -------------------------------------------------------------------------------

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
        """Whether a call has been running for at least ``stall_s``."""
        return self._stalled

    @property
    def probe_due(self) -> bool:
        return not self._stalled and self._clock() >= self._retry_at

    @property
    def retry_s(self) -> float | None:
        """Seconds until the next probe; None if no probe is planned."""
        return None if math.isinf(self._retry_at) else max(self._retry_at - self._clock(), 0.0)

    # -- events --------------------------------------------------------------------------------------

    def write_failed(self, error: OSError) -> None:
        self._errors["write"] += 1
        self._fail(Condition.OFFLINE if error.errno in _GONE else Condition.READ_ONLY, _message(error))

    def written(self) -> None:
        """Record that pages became durable."""
        if self._fault is Condition.ONLINE:
            self._next_retry_s[Condition.READ_ONLY] = _FIRST_RETRY_S

    def read_failed(self, error: OSError, what: str = "pages") -> None:
        """Record that reading ``what`` failed. Failures are counted separately for pages and records, because
        records may be read from the page cache, which says nothing about the disk."""
        self._errors["read"] += 1
        self._failures[what] += 1
        if error.errno in _GONE or self._failures[what] >= _READ_FAILURES:
            self._fail(Condition.OFFLINE, _message(error))

    def was_read(self, what: str = "pages") -> None:
        """Record that reading ``what`` succeeded."""
        del self._failures[what]
        if self._fault is not Condition.OFFLINE:
            self._next_retry_s[Condition.OFFLINE] = _FIRST_RETRY_S

    def probe_succeeded(self) -> None:
        self._fault = self._best
        self._reason = self._best_reason
        self._retry_at = math.inf
        self._failures.clear()
        self._show()

    def probe_failed(self, error: OSError) -> None:
        self._errors["probe"] += 1
        worse = Condition.OFFLINE if error.errno in _GONE else self._fault
        self._fault = Condition.ONLINE  # otherwise _fail() would ignore this failure
        self._fail(worse, _message(error))
        self._shown_reason = self._why

    def never_write(self, reason: str) -> None:
        """Set the tier to read-only for as long as this process runs."""
        self._best = self._fault = Condition.READ_ONLY
        self._best_reason = self._reason = reason
        self._retry_at = math.inf
        self._show()

    def under_way(self, longest_s: float) -> bool:
        """Record how long the oldest running call has run. Return whether this changes the condition."""
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
            return  # another error of a known fault
        self._fault = condition
        self._reason = reason
        retry_s = self._next_retry_s[condition]
        self._retry_at = self._clock() + retry_s
        self._next_retry_s[condition] = min(2 * retry_s, _MOST_RETRY_S)
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

    # -- reports -------------------------------------------------------------------------------------

    @property
    def line(self) -> str:
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
        """Return the seconds spent in a condition other than online."""
        now = self._clock() - self._since if self._shown is condition else 0.0
        return self._spent[condition] + now

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def take_news(self) -> list[str]:
        """Return the log lines about changes since the last call, one for each change."""
        news, self._news = self._news, []
        return news


def _message(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


_log = logging.getLogger(__name__)

_NOTHING_UNDER_WAY_S = 1.0  # time between checks while no call is running


class StallDetector:
    """Watches one disk tier for calls that do not return. Without a disk, it reports no stalls."""

    def __init__(self, disk: DiskTier | None, health: Health, changed: threading.Condition) -> None:
        self._disk = disk
        self._health = health
        self._changed = changed  # a condition variable of the store's lock
        self.waiting: set[Transfer[Any]] = set()  # transfers to finish when the disk stalls (needs the lock)

    def poll(self) -> float:
        """Check how long the oldest call has run. If the disk has stalled, finish the waiting transfers. Log
        changes. Return the seconds until the next check is useful. Call it without the lock."""
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
            self._changed.notify_all()  # also wakes the writer, which probes
        for each in ending:
            each.finish()
        for line in news:
            _log.warning("%s", line)

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``condition``, which is called under the lock, returns True. Return False if ``timeout``
        seconds pass first, or if the disk does not answer. Call it without the lock."""
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
