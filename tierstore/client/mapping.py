"""The memory mapping of a daemon's arena. All connections of a process share one mapping.

An engine has several connections (of the scheduler, of the workers, one for each model). With a mapping for
each connection, each would need its own page tables: 2 MiB per GiB of the arena, which take 0.2 s to fill.

The first HBM pool of a device registers the mapping with the device's driver, for all pools. The registration
takes about as long as filling the page tables. A thread registers after the page tables are filled, because
the driver then holds its locks, which computing threads may need, for a shorter time. No load waits for the
registration, because recomputing pages could be faster than waiting. Before the registration has ended, loads
use plain copies, which are slower.

Memory must be unregistered from the driver before it is unmapped. When the last reference to the ``Memory``
is dropped (every running copy has one), a thread unregisters the mapping and then unmaps it.
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
    """An arena, mapped as ``memory``. Each caller of :func:`map_arena` must call :meth:`release` once."""

    def __init__(self, memory: Memory, file: _File) -> None:
        self.memory = memory
        self.file = file
        self.holders = 1  # guarded by _lock, as the next attribute
        self._pins: dict[str, tuple[PinnedMemory, threading.Thread]] = {}  # by kind of device
        self._populating = threading.Thread(target=self._populate, name="tierstore-attach", daemon=True)
        self._populating.start()

    def wait_populated(self) -> None:
        """Block until the page tables are filled and running registrations with drivers have ended, so that
        copies run at full speed."""
        self._populating.join()
        with _lock:
            pinning = [thread for _, thread in self._pins.values()]
        for thread in pinning:
            thread.join()

    def pin(self, device: Device, refused: Callable[[], None]) -> PinnedMemory:
        """Return the mapping as pinned memory of ``device``. The first call starts the registration with the
        device's driver on another thread, which calls ``refused`` if the driver refuses."""
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
        """Release the mapping. After the last release and the last running copy, the memory is unmapped.
        Until then, the arena occupies memory even if its daemon is dead."""
        with _lock:
            self.holders -= 1
            if self.holders:
                return
            del _mappings[self.file]
        self.memory.close()

    def _populate(self) -> None:
        # Without this, the first access to each 4 KiB of the arena takes 0.25 µs, and more during a copy.
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
    """Unpin on another thread. The thread that drops the last reference must not wait: it may be a
    connection's thread that has to reconnect."""
    if not pinned.inherited:
        threading.Thread(target=_unpin, args=(pinned, pages), name="tierstore-unpin", daemon=True).start()


def _unpin(pinned: PinnedMemory, pages: mmap.mmap) -> None:
    try:
        pinned.unregister()
    except DeviceError as error:
        _log.warning("cannot unpin the arena of a daemon that is gone: %s", error)


_lock = threading.Lock()
_mappings: dict[_File, Mapping] = {}


def map_arena(fd: int, nbytes: int) -> Mapping:
    """Return this process's mapping of the first ``nbytes`` of a shared-memory file; map the file if
    necessary. Takes ownership of ``fd``. If the file cannot be mapped, raise
    :class:`~tierstore.errors.UsageError` and leave ``fd`` open."""
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
    """Close the mappings in a forked child. The lock is replaced, because a thread that exists only in the
    parent may have held it."""
    global _lock
    _lock = threading.Lock()
    for mapping in _mappings.values():
        mapping.memory.close()
    _mappings.clear()


os.register_at_fork(after_in_child=_forget_in_child)
