"""Host memory that a device's driver knows of, so that its copy engines reach it without a detour.

Registering takes its time (0.1 to 0.3 s for each GiB is what others report; it has not been measured here),
and whoever maps much memory does it on a thread of its own. Until it has happened, and where the driver
refuses, copies from and to that memory are plain ones: slower, one by one, and the same bytes.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from tierstore.tiers.device import Device


class PinnedMemory:
    """``nbytes`` of host memory at ``address``. Known to the driver between :meth:`register` and
    :meth:`unregister`, each of which is called once, by one thread; any thread may ask."""

    def __init__(self, device: Device, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.over = False  # it was unregistered, or never will be registered
        self._device = device
        self._there = False
        self._pid = os.getpid()

    def __repr__(self) -> str:
        where = "over" if self.over else "registered" if self._there else "not registered yet"
        return f"Pinned({self.address:#x}, {self.nbytes} bytes, {where})"

    def register(self) -> None:
        """Blocks until the driver has it. Raises :class:`~tierstore.tiers.device.DeviceError` when it
        refuses."""
        try:
            self._device.register(self.address, self.nbytes)
            self._there = True
        finally:
            self.over = not self._there

    def unregister(self) -> None:
        """Nothing is copied from or to it any more."""
        there, self._there, self.over = self._there, False, True
        if there and not self.inherited:
            self._device.unregister(self.address)

    @property
    def inherited(self) -> bool:
        """Whether this is the copy in a forked child, which has the memory but not the driver."""
        return os.getpid() != self._pid

    def covers(self, low: int, high: int) -> bool:
        """Whether the copy engines reach the addresses ``low … high`` here."""
        return self._there and self.address <= low and high < self.address + self.nbytes


Pin: TypeAlias = Callable[[Device], PinnedMemory]
"""Prepares memory that others use too for a device, once for all of them, and takes care of its end."""


class Reach:
    """The host memory that the copy engines of ``device`` reach, as far as it goes through here: pools that
    have one model's pages have one of these. Thread-safe; :meth:`covers` takes no lock."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._pinned: tuple[PinnedMemory, ...] = ()  # replaced, never changed
        self._asked = Counter[int]()  # by address: the driver takes memory once

    def register(self, address: int, nbytes: int) -> None:
        """Pin memory that must stay until it is unregistered, as often as it was registered. Raises
        :class:`~tierstore.tiers.device.DeviceError` when the driver refuses."""
        with self._lock:
            known = self._asked[address] > 0
            self._asked[address] += known
        if known:
            return
        pinned = PinnedMemory(self.device, address, nbytes)
        pinned.register()
        self._know(pinned)
        with self._lock:
            self._asked[address] += 1

    def unregister(self, address: int) -> None:
        """The memory that begins at ``address`` is about to go."""
        with self._lock:
            self._asked[address] -= 1
            if self._asked[address] > 0:
                return
            del self._asked[address]
        for pinned in self._pinned:
            if pinned.address == address and not pinned.over:
                pinned.unregister()

    def share(self, pin: Pin) -> None:
        """Take in memory that others use too."""
        self._know(pin(self.device))

    def covers(self, low: int, high: int) -> bool:
        """Whether the addresses ``low … high`` are all in one range that is pinned by now."""
        return any(pinned.covers(low, high) for pinned in self._pinned)

    def _know(self, pinned: PinnedMemory) -> None:
        with self._lock:
            self._pinned = (*(each for each in self._pinned if not each.over and each is not pinned), pinned)
