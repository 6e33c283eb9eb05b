"""The mapping of a daemon's arena: one in a process, for all of its connections.

An engine has several (the scheduler's half of a connector and the worker's, one for each model), and every
mapping has page tables of its own: 2 MiB of them for each GiB of the arena, and 0.2 s to fill them.

A device's driver is told of it likewise: once, whatever pools there are, as soon as the first one asks. That
takes as long again, so a thread does it, after the page tables are full: the driver holds locks meanwhile
that whoever computes may need, and so holds them for less. Nobody waits for it. A load in the first seconds
goes up by plain copies, which are slower; waiting could take longer than computing anew.

The driver may only know of memory that is there. So it is told of the mapping's end by what unmaps it: when
the last reference to the ``Memory`` has gone (every copy under way has one), a thread makes the driver forget
it, and then lets go of the pages themselves.
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
    """``memory`` is the arena. Got by :func:`map_arena`; every holder lets go of it once."""

    def __init__(self, memory: Memory, file: _File) -> None:
        self.memory = memory
        self.file = file
        self.holders = 1  # guarded by _lock, as is the next
        self._pins: dict[str, tuple[PinnedMemory, threading.Thread]] = {}  # by kind of device
        self._populating = threading.Thread(target=self._populate, name="tierstore-attach", daemon=True)
        self._populating.start()

    def wait_populated(self) -> None:
        """Block until copies are as fast as they get."""
        self._populating.join()
        with _lock:
            pinning = [thread for _, thread in self._pins.values()]
        for thread in pinning:
            thread.join()

    def pin(self, device: Device, refused: Callable[[], None]) -> PinnedMemory:
        """The mapping as the driver of ``device`` knows it, or will soon: whoever is the first to ask begins
        that. ``refused`` is called then, on another thread, if the driver does not take it."""
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
        """The last holder's ends the mapping, once no copy that is under way uses it any more (a dead
        daemon's arena takes up memory until then)."""
        with _lock:
            self.holders -= 1
            if self.holders:
                return
            del _mappings[self.file]
        self.memory.close()

    def _populate(self) -> None:
        # Fill this process's page tables: the first touch of each shared 4 KiB page costs 0.25 µs and more
        # in the middle of a copy.
        self.memory.populate(lambda: self.holders > 0)

    def _pin(self, pinned: PinnedMemory, refused: Callable[[], None]) -> None:
        self._populating.join()
        if not self.holders:
            return
        try:
            pinned.register()
        except DeviceError as error:
            size = format_size(pinned.nbytes)
            _log.warning("the daemon's arena (%s) cannot be pinned, loads go up slowly: %s", size, error)
            refused()
            return
        pages = self.memory.pages
        weakref.finalize(self.memory, _unpin_later, pinned, pages).atexit = False  # the driver may be gone


def _unpin_later(pinned: PinnedMemory, pages: mmap.mmap) -> None:
    """On a thread: whoever was the last to let go has better things to do (a connection looks for the next
    daemon)."""
    if not pinned.inherited:
        threading.Thread(target=_unpin, args=(pinned, pages), name="tierstore-unpin", daemon=True).start()


def _unpin(pinned: PinnedMemory, pages: mmap.mmap) -> None:
    try:
        pinned.unregister()
    except DeviceError as error:  # the device is in trouble, which those who compute will hear of
        _log.warning("the arena of a daemon that has gone stays pinned: %s", error)


_lock = threading.Lock()
_mappings: dict[_File, Mapping] = {}


def map_arena(fd: int, nbytes: int) -> Mapping:
    """The mapping of a shared-memory file's first ``nbytes``, made if there is none. Owns ``fd`` from now on.
    Raises :class:`~tierstore.errors.UsageError` when it cannot be mapped, and leaves ``fd`` open then."""
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
    """A forked child has the mappings, but neither the threads nor, perhaps, the lock."""
    global _lock
    _lock = threading.Lock()
    for mapping in _mappings.values():
        mapping.memory.close()
    _mappings.clear()


os.register_at_fork(after_in_child=_forget_in_child)
