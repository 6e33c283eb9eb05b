"""Host memory registered with a device's driver, so that the copy engines access it directly.

Registering is slow (others report 0.1 to 0.3 s per GiB; it was not measured here), so large memory is
registered on a thread of its own. Before that, or if the driver refuses, copies from and to that memory are
plain copies: slower and one by one, but with the same bytes.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from tierstore.tiers.device import Device


class PinnedMemory:
    """``nbytes`` of host memory at ``address``. The driver knows it between :meth:`register` and
    :meth:`unregister`. One thread calls each of them once; any thread may query."""

    def __init__(self, device: Device, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.over = False  # unregistered, or never to be registered
        self._device = device
        self._there = False
        self._pid = os.getpid()

    def __repr__(self) -> str:
        where = "over" if self.over else "registered" if self._there else "not registered yet"
        return f"Pinned({self.address:#x}, {self.nbytes} bytes, {where})"

    def register(self) -> None:
        """Register the memory; blocks until the driver has done so. Raise
        :class:`~tierstore.tiers.device.DeviceError` if it refuses."""
        try:
            self._device.register(self.address, self.nbytes)
            self._there = True
        finally:
            self.over = not self._there

    def unregister(self) -> None:
        """Unregister the memory. No copy from or to it may run any more."""
        there, self._there, self.over = self._there, False, True
        if there and not self.inherited:
            self._device.unregister(self.address)

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child's copy. The child has the memory but not the driver."""
        return os.getpid() != self._pid

    def covers(self, low: int, high: int) -> bool:
        """Return whether the copy engines can access the addresses ``low … high`` in this memory."""
        return self._there and self.address <= low and high < self.address + self.nbytes


Pin: TypeAlias = Callable[[Device], PinnedMemory]
"""Registers memory that other pools use too with a device, once for all pools, and unregisters it at its
end."""


class Reach:
    """The host memory that is registered with ``device`` through this object. The pools of one model share
    one. Thread-safe; :meth:`covers` takes no lock."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._pinned: tuple[PinnedMemory, ...] = ()  # replaced as a whole, never changed
        # further registrations by address: the driver registers memory only once
        self._asked = Counter[int]()

    def register(self, address: int, nbytes: int) -> None:
        """Pin memory. It must stay until it has been unregistered as often as it was registered. Raise
        :class:`~tierstore.tiers.device.DeviceError` if the driver refuses."""
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
        """Undo :meth:`register` for memory at ``address``, before the memory is freed."""
        with self._lock:
            self._asked[address] -= 1
            if self._asked[address] > 0:
                return
            del self._asked[address]
        for pinned in self._pinned:
            if pinned.address == address and not pinned.over:
                pinned.unregister()

    def share(self, pin: Pin) -> None:
        """Add memory that other pools use too."""
        self._know(pin(self.device))

    def covers(self, low: int, high: int) -> bool:
        """Return whether the addresses ``low … high`` are all in one range that is pinned by now."""
        return any(pinned.covers(low, high) for pinned in self._pinned)

    def _know(self, pinned: PinnedMemory) -> None:
        with self._lock:
            self._pinned = (*(each for each in self._pinned if not each.over and each is not pinned), pinned)
