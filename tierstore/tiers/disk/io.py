"""The system calls for the disk tier's files, behind one small class.

All payload I/O uses this class, so that a test can replace it and make any single call fail, transfer fewer
bytes, or return wrong data.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore.memory import address_of

# -- Linux AIO -----------------------------------------------------------------------------------------
#
# Linux AIO does many reads with few system calls. AIO is used for small pages that are not adjacent.
#
# Reading a small page on a thread of a pool costs more time than the read itself: two thread switches, and
# several acquisitions of the GIL. With AIO, one thread passes the kernel a whole batch of reads, and gets the
# results a few at a time. Compared with eight threads, prefetches of such pages were 1.3 times as fast for 64
# KiB pages, 1.4 times for 128 KiB and 1.04 times for 256 KiB, with 0.8 to 0.85 of the processor time. These
# ratios are medians of 12 runs, alternating in one process, on two cores with other work.
#
# AIO consists of four system calls, which Python's libraries do not have. AIO works only with O_DIRECT. On a
# file system without support for AIO, the kernel does the reads one after the other, so calibration.py
# measures whether AIO is faster. io_uring would also work, but most containers forbid it.


_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}  # setup, destroy, getevents, submit
_READ = 0
_AT_LEAST = 4  # results to wait for in one system call
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
    """A request to fill ``view`` from byte ``offset`` of a file that is open with O_DIRECT. The address and
    length of ``view``, and ``offset``, are multiples of 4096."""

    fd: int
    view: memoryview
    offset: int


Landed = Callable[[int, int], None]
"""A function that is called with the number of a read and its outcome: the number of bytes that were read, or
a negative error number."""


class ReadQueue:
    """A queue of the kernel for up to ``depth`` reads in flight. One thread at a time may use the queue."""

    def __init__(self, depth: int) -> None:
        """Create the queue. Raise :class:`OSError` if the kernel does not provide one."""
        self._depth = depth
        self._context = ctypes.c_ulong(0)
        self._events = np.zeros(depth, _EVENT)
        if platform.machine() not in _CALLS:
            raise OSError(errno.ENOSYS, f"the system calls of {platform.machine()} are not known")
        setup, destroy, self._getevents, self._submit = _CALLS[platform.machine()]
        _call(setup, ctypes.c_long(depth), ctypes.byref(self._context))
        # The queue is not destroyed by __del__, which may run at interpreter exit without this module's
        # globals. The queue is not destroyed at exit either, because that could wait for a disk that has
        # stopped responding. The kernel frees the queues of a process at its end.
        self._finalizer = weakref.finalize(self, _call, destroy, ctypes.c_ulong(self._context.value))
        self._finalizer.atexit = False

    def read(self, reads: Sequence[QueuedRead], landed: Landed) -> None:
        """Do all of ``reads``, and call ``landed`` for each. No read is in flight when this returns or
        raises. Raise :class:`OSError` if the kernel accepts no more reads; reads without a call of ``landed``
        were not done."""
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
            while arrived < submitted:  # wait for reads in flight, because they write to the caller's memory
                arrived += len(self._take(1))

    def close(self) -> None:
        """Free the queue. The queue is also freed when the last reference to this object is gone. Repeated
        calls do nothing."""
        self._finalizer()

    def _hand_in(self, addresses: npt.NDArray[np.uint64]) -> int:
        count = ctypes.c_long(len(addresses))
        return _call(self._submit, self._context, count, ctypes.c_void_p(addresses.ctypes.data))

    def _take(self, least: int) -> list[tuple[int, int]]:
        """Return (number, outcome) of the reads that have ended."""
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
    """Do a system call, and repeat it if a signal interrupts it. Raise :class:`OSError` if it fails."""
    while True:
        result: int = _libc.syscall(ctypes.c_long(number), *arguments)
        if result >= 0:
            return result
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


_QUEUE_DEPTH = 128
_FALLOCATE = {"x86_64": 285, "aarch64": 47}
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class FileIO:
    """The file functions of the operating system. Every method may raise :class:`OSError`. Thread-safe."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file, closed on exec, and return its descriptor. New files have mode 0600."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Return the number of bytes read, which is smaller than requested at the end of the file."""
        return os.preadv(fd, buffers, offset)

    def read_many(self, reads: Sequence[QueuedRead], landed: Landed) -> None:
        """Do reads that may all be in flight at once, and call ``landed`` with each outcome, in any order.
        Raise :class:`OSError` if the kernel cannot queue reads; reads without a call of ``landed`` were not
        done. The implementation in this class does one read after the other; :class:`QueuedIO` queues
        reads."""
        for number, read in enumerate(reads):
            try:
                result = self.preadv(read.fd, [read.view], read.offset)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            landed(number, result)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Return the number of bytes written, which is smaller than requested if the disk becomes full."""
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Allocate blocks on disk for the range. A shorter file grows."""
        os.posix_fallocate(fd, offset, nbytes)

    def free(self, fd: int, offset: int, nbytes: int) -> None:
        """Free the blocks of the range. The file keeps its length and reads as zeros there."""
        if platform.machine() not in _FALLOCATE:
            raise OSError(errno.ENOSYS, f"the system calls of {platform.machine()} are not known")
        number = _FALLOCATE[platform.machine()]
        _call(number, *map(ctypes.c_long, (fd, _PUNCH_HOLE, offset, nbytes)))

    def sync(self, fd: int) -> None:
        """Make the file's contents and size survive a power loss."""
        os.fdatasync(fd)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def available(self, fd: int) -> int:
        """Return the bytes that the file system of ``fd`` has left for this user."""
        volume = os.fstatvfs(fd)
        return volume.f_bavail * volume.f_frsize

    def forget(self, fd: int, offset: int, nbytes: int) -> None:
        """Drop a range from the page cache."""
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rename(self, path: Path, to: Path) -> None:
        """Rename a file, replacing any file of that name."""
        os.replace(path, to)

    def sync_directory(self, path: Path) -> None:
        """Make the creation and removal of files in ``path`` durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class QueuedIO(FileIO):
    """The file functions of the operating system, with read queues in the kernel."""

    def __init__(self) -> None:
        self._idle: queue.SimpleQueue[ReadQueue] = queue.SimpleQueue()  # queues that no thread uses now

    def read_many(self, reads: Sequence[QueuedRead], landed: Landed) -> None:
        try:
            own = self._idle.get_nowait()
        except queue.Empty:
            own = ReadQueue(_QUEUE_DEPTH)
        try:
            own.read(reads, landed)
        finally:
            self._idle.put(own)


# -- calls that have not returned ----------------------------------------------------------------------
#
# To detect a disk that has stopped responding, each running call is recorded with its start, and callers
# look at the age of the oldest call. A thread in a system call cannot be interrupted.


class InFlightCalls:
    """The I/O calls that are running now. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._begun: dict[_Call, float] = {}  # in the order of their start

    def call(self) -> _Call:
        """Return a context manager around one call, or around a few short calls that count as one."""
        return _Call(self)

    def longest_s(self) -> float:
        """Return how long the oldest call has been running; 0 if none is."""
        with self._lock:
            begun = next(iter(self._begun.values()), None)
        return 0.0 if begun is None else self._clock() - begun

    def begin(self, call: _Call) -> None:
        with self._lock:
            self._begun[call] = self._clock()

    def end(self, call: _Call) -> None:
        with self._lock:
            del self._begun[call]


class _Call:
    """One running call, as a context manager. A generator-based context manager takes four times as long."""

    __slots__ = ("_calls",)

    def __init__(self, calls: InFlightCalls) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._calls.begin(self)

    def __exit__(self, *_: object) -> None:
        self._calls.end(self)


P = ParamSpec("P")
R = TypeVar("R")


def _tracked(method: Callable[Concatenate[FileIO, P], R]) -> Callable[Concatenate[TrackedIO, P], R]:
    """Return a method that calls the method of this name of the inner object, and records the call."""
    name = method.__name__

    def call(self: TrackedIO, /, *arguments: P.args, **named: P.kwargs) -> R:
        with self._calls.call():
            result: R = getattr(self._inner, name)(*arguments, **named)
            return result

    return call


class TrackedIO(FileIO):
    """Calls the methods of another :class:`FileIO`, and records each call while it runs."""

    def __init__(self, inner: FileIO, calls: InFlightCalls) -> None:
        self._inner = inner
        self._calls = calls

    open = _tracked(FileIO.open)
    close = _tracked(FileIO.close)
    preadv = _tracked(FileIO.preadv)
    read_many = _tracked(FileIO.read_many)
    pwritev = _tracked(FileIO.pwritev)
    allocate = _tracked(FileIO.allocate)
    free = _tracked(FileIO.free)
    sync = _tracked(FileIO.sync)
    truncate = _tracked(FileIO.truncate)
    size = _tracked(FileIO.size)
    available = _tracked(FileIO.available)
    forget = _tracked(FileIO.forget)
    unlink = _tracked(FileIO.unlink)
    rename = _tracked(FileIO.rename)
    sync_directory = _tracked(FileIO.sync_directory)
