"""The mapping of a daemon's arena. A process has one for all of its connections.

An engine has several connections (the scheduler's part of a connector and the worker's, one for each model).
Each mapping would have its own page tables: 2 MiB for each GiB of the arena, which take 0.2 s to fill.

The mapping is also registered with a device's driver, once for all pools, at the request of the first pool.
This takes as long again, so a thread does it after the page tables are full: then the driver holds its locks,
which computing threads may need, for a shorter time. Nothing waits for the registration. A load in the first
seconds uses plain copies, which are slower, because waiting could take longer than computing the pages.

The driver must not know memory that no longer exists. When the last reference to the ``Memory`` has gone
(every running copy has one), a thread unregisters the mapping from the driver and then unmaps the pages.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable

from tierstore.memory import Memory
from tierstore.tiers.device import Device, DeviceError
from tierstore.tiers.pinned import PinnedMemory
from tierstore.units import format_size

_log = logging.getLogger(__name__)

_File = tuple[int, int, int]  # device, inode, bytes


class Mapping:
    """An arena mapped as ``memory``. Returned by :func:`map_arena`. Each holder releases it once."""

    def __init__(self, memory: Memory, file: _File) -> None:
        self.memory = memory
        self.file = file
        self.holders = 1  # guarded by _lock, as the next attribute
        self._pins: dict[str, tuple[PinnedMemory, threading.Thread]] = {}  # by kind of device
        self._populating = threading.Thread(target=self._populate, name="tierstore-attach", daemon=True)
        self._populating.start()

    def wait_populated(self) -> None:
        """Block until copies have reached their full speed."""
        self._populating.join()
        with _lock:
            pinning = [thread for _, thread in self._pins.values()]
        for thread in pinning:
            thread.join()

    def pin(self, device: Device, refused: Callable[[], None]) -> PinnedMemory:
        """Return the mapping as the driver of ``device`` knows it, or will know it soon: the first call
        starts the registration. If the driver refuses the mapping, ``refused`` is called on another thread.
        """
        with _lock:
            if device.kind not in self._pins:
                pinned = PinnedMemory(device, self.memory.address, self.memory.nbytes)
                thread = threading.Thread(
                    target=self._pin, args=(pinned, refused), name="tierstore-pin", daemon=True
                )
                self._pins[device.kind] = pinned, thread
                thread.start()
            return self._pins[device.kind][0]

    def release(self) -> None:
        """Release one holder. The last one ends the mapping when no running copy uses it any more. (Until
        then, a dead daemon's arena takes memory.)"""
        with _lock:
            self.holders -= 1
            if self.holders:
                return
            del _mappings[self.file]
        self.memory.close()

    def _populate(self) -> None:
        # Fill this process's page tables. Otherwise the first access to each shared 4 KiB page costs 0.25 µs,
        # and more during a copy.
        self.memory.populate(lambda: self.holders > 0)

    def _pin(self, pinned: PinnedMemory, refused: Callable[[], None]) -> None:
        self._populating.join()
        if not self.holders:
            return
        try:
            pinned.register()
        except DeviceError as error:
            size = format_size(pinned.nbytes)
            _log.warning(
                "cannot pin the daemon's arena (%s), loads to the device are slower: %s", size, error
            )
            refused()
            return
        pages = self.memory.pages
        weakref.finalize(self.memory, _unpin_later, pinned, pages).atexit = False  # the driver may be gone


def _unpin_later(pinned: PinnedMemory, pages: mmap.mmap) -> None:
    """Unpin on another thread, so that the thread that drops the last reference does not wait (for example, a
    connection that looks for the next daemon)."""
    if not pinned.inherited:
        threading.Thread(target=_unpin, args=(pinned, pages), name="tierstore-unpin", daemon=True).start()


def _unpin(pinned: PinnedMemory, pages: mmap.mmap) -> None:
    try:
        pinned.unregister()
    except DeviceError as error:  # an error of the device, which its users will see too
        _log.warning("cannot unpin the arena of a daemon that is gone: %s", error)


_lock = threading.Lock()
_mappings: dict[_File, Mapping] = {}


def map_arena(fd: int, nbytes: int) -> Mapping:
    """Return the mapping of a shared-memory file's first ``nbytes``, and make it if there is none. Takes
    ownership of ``fd``. If it cannot be mapped, raise :class:`~tierstore.errors.UsageError` and leave ``fd``
    open."""
    status = os.fstat(fd)
    file = status.st_dev, status.st_ino, nbytes
    with _lock:
        mapping = _mappings.get(file)
        if mapping is None:
            mapping = _mappings[file] = Mapping(Memory.attach(fd, nbytes), file)
        else:
            mapping.holders += 1
            os.close(fd)
    return mapping


def _forget_in_child() -> None:
    """Reset the lock: a forked child has the mappings but not the threads, and the lock may be held."""
    global _lock
    _lock = threading.Lock()
    for mapping in _mappings.values():
        mapping.memory.close()
    _mappings.clear()


os.register_at_fork(after_in_child=_forget_in_child)
