"""Memory for KV pages, aligned to the system's pages.

The memory is mapped, has huge pages if the kernel offers them, and is *populated* ahead of use. Otherwise,
the first access would cost as much as the copy itself (measured: 8 GB/s into untouched memory, 14 GB/s into
populated memory).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from tierstore.errors import UsageError
from tierstore.units import format_size, round_up

ALIGNMENT = 4096
_HUGE_PAGE = 2 << 20
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels return EINVAL, and populate at the first access
_POPULATE_STEP = 32 << 20
# Truncating a shared-memory file would kill processes that map it with SIGBUS. Seals prevent that.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Memory:
    """``nbytes`` of page-aligned memory at ``address``. ``fd`` is the descriptor of shared memory, else None.

    Views from :meth:`view` keep the memory mapped after ``close()``.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        shared: bool,
        reserve: bool = False,
        huge_pages: bool = True,
        name: str = "tierstore-arena",
    ) -> None:
        """With ``reserve``, the mapping may be larger than the system's memory. Without ``huge_pages``, only
        accessed system pages take memory. ``/proc/PID/maps`` shows the ``name`` of ``shared`` memory."""
        nbytes = round_up(nbytes, ALIGNMENT)
        fd = None
        try:
            if shared:
                # Not a file in /dev/shm: it would remain after kill -9, and many containers limit /dev/shm
                # to 64 MB.
                fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.fchmod(fd, 0o600)
                os.ftruncate(fd, nbytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
                mapped = mmap.mmap(fd, nbytes)
            else:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                mapped = mmap.mmap(-1, nbytes, flags=flags | (_MAP_NORESERVE if reserve else 0))
        except (OSError, ValueError, OverflowError) as error:
            raise UsageError(f"cannot map {format_size(nbytes)} of memory: {error}") from error
        self._take(mapped, nbytes, fd, huge_pages=huge_pages)

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, offset: int = 0) -> Memory:
        """Map ``nbytes`` of another process's shared-memory file, from ``offset`` on (a multiple of
        ``ALIGNMENT``), and take over ``fd``. If that is impossible, raise :class:`UsageError`; the caller
        then still owns ``fd``."""
        try:
            # An access to memory behind the file's end would kill this process with SIGBUS.
            if nbytes <= 0 or offset < 0 or offset + nbytes > os.fstat(fd).st_size:
                raise ValueError(f"the file has {os.fstat(fd).st_size} bytes")
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError("the file is not sealed, so its owner could truncate it")
            mapped = mmap.mmap(fd, nbytes, offset=offset)
        except (OSError, ValueError, OverflowError) as error:
            raise UsageError(f"cannot map {format_size(nbytes)} of shared memory: {error}") from error
        memory = cls.__new__(cls)
        memory._take(mapped, nbytes, fd)
        return memory

    def _take(self, mapped: mmap.mmap, nbytes: int, fd: int | None, *, huge_pages: bool = True) -> None:
        self.nbytes = nbytes
        self.fd = fd
        self._map = mapped
        self._view = memoryview(mapped)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        _libc.madvise(self.address, nbytes, mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)

    @property
    def pages(self) -> mmap.mmap:
        """The mapping itself. The memory stays mapped while there are references to it."""
        return self._map

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes ``offset … offset + nbytes``, writable, without a copy."""
        return self._view[offset : offset + nbytes]

    def populate(
        self, wanted: Callable[[], bool] = lambda: True, *, first: int = 0, nbytes: int | None = None
    ) -> None:
        """Populate all memory, or ``nbytes`` from ``first`` on, without the GIL. Ends early when ``wanted``
        returns False."""
        begin = first // ALIGNMENT * ALIGNMENT
        stop = self.nbytes if nbytes is None else round_up(first + nbytes, ALIGNMENT)
        for start in range(begin, stop, _POPULATE_STEP):
            if not wanted():
                return
            length = min(_POPULATE_STEP, stop - start)
            _libc.madvise(self.address + start, length, _MADV_POPULATE_WRITE)

    def populate_range(self, start: int, stop: int) -> bool:
        """Populate the bytes ``start … stop``, in whole system pages. Return False if the system has no
        memory left."""
        stop = min(stop, self.nbytes)
        failed = _libc.madvise(self.address + start, stop - start, _MADV_POPULATE_WRITE)
        return not failed or ctypes.get_errno() != errno.ENOMEM

    def allow_huge_pages(self, unit: int) -> None:
        """Let the kernel use huge pages if ``unit`` bytes are a whole number of them. Each unit can then be
        populated and discarded without its neighbours."""
        if unit % _HUGE_PAGE == 0 and self.address % _HUGE_PAGE == 0:
            _libc.madvise(self.address, self.nbytes, mmap.MADV_HUGEPAGE)

    def discard(self, start: int, stop: int) -> None:
        """Return the memory of the bytes ``start … stop`` to the system, in whole system pages; shared memory
        is discarded for all processes. The next access finds zeros. Raise :class:`OSError` if that fails."""
        stop = min(stop, self.nbytes)
        advice = mmap.MADV_DONTNEED if self.fd is None else mmap.MADV_REMOVE
        if _libc.madvise(self.address + start, stop - start, advice):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def shared_huge_pages() -> bool:
    """Return whether the kernel gives huge pages to shared memory that requests them (``shmem_enabled`` is
    ``advise`` or more)."""
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return False
    return not any(off in setting for off in ("[never]", "[deny]"))


def address_of(buffer: memoryview, *, writable: bool) -> int:
    """Return the address of a contiguous buffer's first byte. Raise :class:`UsageError` for a buffer that is
    not contiguous, or read-only with ``writable``."""
    if not buffer.contiguous or (writable and buffer.readonly):
        raise UsageError("page buffers must be contiguous, and writable if bytes are loaded into them")
    if buffer.readonly:
        import numpy as np

        return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
