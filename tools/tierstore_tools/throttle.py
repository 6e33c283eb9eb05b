"""Slow down the tiers of a store, to simulate a slower machine."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping

from tierstore.backend import Backend, Lease, Located
from tierstore.errors import UsageError
from tierstore.transfer import Transfer, TransferState

_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "KI": 2.0**10, "MI": 2.0**20, "GI": 2.0**30, "": 1.0}
_RATE = re.compile(r"(host|disk)=([0-9.]+)([KMG]?i?)B/s", re.IGNORECASE | re.ASCII)


def parse_throttle(text: str) -> dict[str, float]:
    """Return bytes per second by tier, from ``disk=200MB/s,host=2GB/s``. Raises :class:`UsageError`."""
    rates = {}
    for each in text.split(","):
        match = _RATE.fullmatch(each.strip())
        try:
            tier, number, unit = match.groups() if match is not None else ("", "0", "")
            rate = float(number) * _UNITS[unit.upper()]
        except (KeyError, ValueError):
            rate = 0.0
        if rate <= 0:
            raise UsageError(f"--throttle takes tiers and rates (disk=200MB/s,host=2GB/s), got {text!r}")
        rates[tier.lower()] = rate
    return rates


class Throttle:
    """Slows down ``backend``: pages of a tier arrive at most at its rate in ``rates``, in bytes per second,
    one after the other as from one device. ``rates`` may be changed at any time."""

    def __init__(self, backend: Backend, rates: Mapping[str, float]) -> None:
        self.rates = dict(rates)
        self._locate = backend.locate
        self._lock = threading.Lock()
        self._free_at: dict[str, float] = {}  # by tier: the time at which its device is idle
        # every part of the store that uses this backend shares these devices
        vars(backend)["locate"] = self.locate

    def locate(
        self, lease: Lease, first: int, count: int, *, wait_s: float | None
    ) -> Transfer[Located | None]:
        """Locate pages like :meth:`~tierstore.backend.Backend.locate`, but answer later. A call that is
        cancelled takes no time of the device."""
        tier = lease.run_at(first)[0]
        rate = self.rates.get(tier)
        found = self._locate(lease, first, count, wait_s=wait_s)
        if rate is None:
            return found
        takes_s = count * lease.page_bytes / rate
        with self._lock:
            at = max(self._free_at.get(tier, 0.0), time.monotonic()) + takes_s
            self._free_at[tier] = at

        def settle(state: TransferState) -> Located | None:
            timer.cancel()
            if state is not TransferState.DONE:
                with self._lock:
                    self._free_at[tier] -= max(min(takes_s, at - time.monotonic()), 0.0)
                if not found.cancel():
                    located = found.wait()
                    if located is not None:
                        located.release()
                return None
            return found.wait()

        slow: Transfer[Located | None] = Transfer(settle, pages=count, nbytes=0, deadline_s=wait_s)
        timer = threading.Timer(max(at - time.monotonic(), 0.0), lambda: found.on_end(slow.finish))
        timer.daemon = True
        timer.start()
        return slow
