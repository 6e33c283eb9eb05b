"""Many reads with a handful of system calls: Linux AIO, for pages that are small and lie apart.

A thread for each request in flight costs more than the request when that is small: two switches, and the
interpreter's lock several times. Here one thread hands the kernel a whole batch, and takes what has arrived a
few at a time. Prefetches of pages that lie apart were 1.3 times as fast so as with eight threads for 64 KiB
pages, 1.4 times for 128 KiB and 1.04 times for 256 KiB, with 0.8 to 0.85 of the core-seconds (medians of 12,
by turns in one process, two cores with other work).

The kernel's interface is four system calls, which no library that comes with Python has. It only works with
O_DIRECT, and where a file system does not support it the reads happen one after the other, which is why a
directory finds out first whether it is any faster (calibration.py). io_uring would do as well, and is
forbidden in most containers.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.memory import address_of

_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}  # setup, destroy, getevents, submit
_READ = 0
_AT_LEAST = 4  # arrivals are waited for at once
_REQUEST = np.dtype(
    [
        ("number", "<u8"),
        ("key", "<u4"),
        ("flags", "<u4"),
        ("operation", "<u2"),
        ("priority", "<i2"),
        ("fd", "<u4"),
        ("address", "<u8"),
        ("nbytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("more_flags", "<u4"),
        ("event_fd", "<u4"),
    ]
)
_EVENT = np.dtype([("number", "<u8"), ("request", "<u8"), ("result", "<i8"), ("more", "<i8")])

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class QueuedRead(NamedTuple):
    """Fill ``view`` from byte ``offset`` of a file that is open with O_DIRECT; all three are aligned."""

    fd: int
    view: memoryview
    offset: int


Landed = Callable[[int, int], None]
"""Is told the number of a read and its outcome: bytes, or the error number below 0."""


class ReadQueue:
    """Up to ``depth`` reads in flight, for one thread at a time."""

    def __init__(self, depth: int) -> None:
        """Raises :class:`OSError` where the kernel has no such queue to give."""
        self._depth = depth
        self._context = ctypes.c_ulong(0)
        self._events = np.zeros(depth, _EVENT)
        if platform.machine() not in _CALLS:
            raise OSError(errno.ENOSYS, f"the system calls of {platform.machine()} are not known")
        setup, destroy, self._getevents, self._submit = _CALLS[platform.machine()]
        _call(setup, ctypes.c_long(depth), ctypes.byref(self._context))
        # Not __del__, which at the interpreter's end may find half of this module gone; and not at exit, when
        # a disk that has stopped answering would be waited for. A process that ends has no queues any more.
        self._finalizer = weakref.finalize(self, _call, destroy, ctypes.c_ulong(self._context.value))
        self._finalizer.atexit = False

    def read(self, reads: Sequence[QueuedRead], landed: Landed) -> None:
        """Do all of ``reads``. On return, also by an exception, none is in flight any more. Raises
        :class:`OSError` when the kernel takes no more of them: what has not ``landed`` was not done."""
        requests = _requests(reads)
        addresses = requests.ctypes.data + _REQUEST.itemsize * np.arange(len(reads), dtype=np.uint64)
        submitted = arrived = 0
        try:
            while arrived < len(reads):
                room = min(len(reads) - submitted, self._depth - (submitted - arrived))
                if room:
                    submitted += self._hand_in(addresses[submitted : submitted + room])
                found = self._take(min(_AT_LEAST, submitted - arrived))
                arrived += len(found)
                for number, result in found:
                    landed(number, result)
        finally:
            while arrived < submitted:  # they write to the caller's memory
                arrived += len(self._take(1))

    def close(self) -> None:
        """Also done when nobody has it any more. Idempotent."""
        self._finalizer()

    def _hand_in(self, addresses: npt.NDArray[np.uint64]) -> int:
        count = ctypes.c_long(len(addresses))
        return _call(self._submit, self._context, count, ctypes.c_void_p(addresses.ctypes.data))

    def _take(self, least: int) -> list[tuple[int, int]]:
        """(number, outcome) of what has arrived."""
        events = ctypes.c_void_p(self._events.ctypes.data)
        sizes = ctypes.c_long(least), ctypes.c_long(self._depth)
        count = _call(self._getevents, self._context, *sizes, events, None)
        found = self._events[:count]
        return list(zip(found["number"].tolist(), found["result"].tolist(), strict=True))


def _requests(reads: Sequence[QueuedRead]) -> npt.NDArray[np.void]:
    requests = np.zeros(len(reads), _REQUEST)
    requests["number"] = np.arange(len(reads))
    requests["operation"] = _READ
    requests["fd"] = [read.fd for read in reads]
    requests["address"] = [address_of(read.view, writable=True) for read in reads]
    requests["nbytes"] = [read.view.nbytes for read in reads]
    requests["offset"] = [read.offset for read in reads]
    return requests


def _call(number: int, *arguments: object) -> int:
    """A system call, again when a signal has cut it short. Raises :class:`OSError`."""
    while True:
        result: int = _libc.syscall(ctypes.c_long(number), *arguments)
        if result >= 0:
            return result
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
