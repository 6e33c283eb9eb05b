"""Host memory registered (pinned) with a device's driver, so that the copy engines access it directly.

Registering takes long (0.1 to 0.3 s per GiB in published measurements), so large memory is registered on a
thread of its own. Until then, or if the driver refuses, pages from and to that memory are copied one by one,
which is slower.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from tierstore.tiers.device import Device


class PinnedMemory:
    """``nbytes`` of host memory at ``address``, registered from :meth:`register` to :meth:`unregister`. One
    thread calls :meth:`register` and :meth:`unregister` once each. Any thread may call the other methods."""

    def __init__(self, device: Device, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.over = False  # True after unregister, or if the driver has refused the memory
        self._device = device
        self._there = False  # whether the memory is registered
        self._pid = os.getpid()

    def __repr__(self) -> str:
        where = "over" if self.over else "registered" if self._there else "not registered yet"
        return f"Pinned({self.address:#x}, {self.nbytes} bytes, {where})"

    def register(self) -> None:
        """Register the memory, and block until the driver has done so. Raise
        :class:`~tierstore.tiers.device.DeviceError` if the driver refuses."""
        try:
            self._device.register(self.address, self.nbytes)
            self._there = True
        finally:
            self.over = not self._there

    def unregister(self) -> None:
        """Unregister the memory. No copy from or to the memory may be running."""
        there, self._there, self.over = self._there, False, True
        if there and not self.inherited:
            self._device.unregister(self.address)

    @property
    def inherited(self) -> bool:
        """Whether this object was inherited by a forked child, which cannot use the driver."""
        return os.getpid() != self._pid

    def covers(self, low: int, high: int) -> bool:
        """Return whether the memory is registered and contains the addresses ``low … high``."""
        return self._there and self.address <= low and high < self.address + self.nbytes


Pin: TypeAlias = Callable[[Device], PinnedMemory]
"""A function that registers memory with a device, once for all pools that use the memory. The memory's owner
unregisters it before it is freed."""


class Reach:
    """The host memory that pools have registered with ``device``. The pools of one model share one object.
    Thread-safe; :meth:`covers` acquires no lock."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._pinned: tuple[PinnedMemory, ...] = ()  # replaced as a whole, never changed
        # calls of register by address: the driver accepts each memory only once
        self._asked = Counter[int]()

    def register(self, address: int, nbytes: int) -> None:
        """Register memory. The memory must stay until :meth:`unregister` was called as often as this method.
        Raise :class:`~tierstore.tiers.device.DeviceError` if the driver refuses."""
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
        """Add memory that other pools use too. ``pin`` registers it."""
        self._know(pin(self.device))

    def covers(self, low: int, high: int) -> bool:
        """Return whether the addresses ``low … high`` are all in one range that is registered now."""
        return any(pinned.covers(low, high) for pinned in self._pinned)

    def _know(self, pinned: PinnedMemory) -> None:
        with self._lock:
            self._pinned = (*(each for each in self._pinned if not each.over and each is not pinned), pinned)
