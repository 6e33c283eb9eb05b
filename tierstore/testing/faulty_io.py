"""File operations of the disk tier with injected faults: errors, short transfers, wrong data and hangs.

A :class:`FaultyIO` replaces :class:`~tierstore.tiers.disk.FileIO`. A FaultyIO logs every call and forwards
it. A :class:`Fault` selects calls and changes what they do. If several faults match a call, the first one
applies::

    io = FaultyIO()
    io.set(Fault(lambda call: call.kind == "pwritev", Fail(errno.ENOSPC), times=1))
    store = open_store(path, spec, io=io)  # from tierstore.testing.opening
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.tiers.disk import FileIO

_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class IoCall:
    """A logged call. ``offset`` and ``nbytes`` are 0 if the call has no such arguments."""

    number: int  # counted from 0, in the order in which the calls began
    kind: str  # name of the FileIO method
    path: Path
    offset: int = 0
    nbytes: int = 0


class Effect:
    """The effect of a fault on a call. The base class has no effect."""

    skips = False  # whether the call reports success but does nothing

    def begin(self) -> None:
        """Run before the call. May wait, or raise :class:`OSError` to make the call fail."""

    def aim(self, offset: int) -> int:
        """Return the offset at which a transfer for ``offset`` happens."""
        return offset

    def cut(self, nbytes: int) -> int:
        """Return how many bytes of a transfer of ``nbytes`` happen."""
        return nbytes

    def change(self, data: memoryview) -> None:
        """Change, in place, the data that was read or a copy of the data to write."""


@dataclass(frozen=True, slots=True)
class Fail(Effect):
    """The call fails with the error number ``code``."""

    code: int

    def begin(self) -> None:
        raise OSError(self.code, f"injected {errno.errorcode[self.code]}")


class Short(Effect):
    """A transfer ends after half of its bytes, rounded to whole blocks, as O_DIRECT requires."""

    def cut(self, nbytes: int) -> int:
        return min(max(nbytes // 2 // _BLOCK * _BLOCK, _BLOCK), nbytes)


@dataclass(frozen=True, slots=True)
class FlipBit(Effect):
    """One bit of the transferred data is wrong: bit ``bit`` modulo the size of the transfer."""

    bit: int

    def change(self, data: memoryview) -> None:
        if data.nbytes:
            at = self.bit // 8 % data.nbytes
            data[at] ^= 1 << self.bit % 8


@dataclass(frozen=True, slots=True)
class Misdirect(Effect):
    """A transfer happens at an offset that is wrong by ``shift`` bytes, but never before the file's start."""

    shift: int

    def aim(self, offset: int) -> int:
        return max(offset + self.shift, 0)


class Lose(Effect):
    """The call does nothing and reports success."""

    skips = True


class Stall(Effect):
    """The call hangs until :meth:`release`, as if the disk did not answer."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._released = threading.Event()

    def begin(self) -> None:
        self.entered.set()
        self._released.wait()

    def release(self) -> None:
        self._released.set()


@dataclass(slots=True)
class Fault:
    """Applies ``effect`` to calls for which ``when`` is true, at most ``times`` times (None: always)."""

    when: Callable[[IoCall], bool]
    effect: Effect
    times: int | None = None
    hits: int = 0  # how often the fault was applied


class FaultyIO(FileIO):
    """Forwards calls to ``inner``, with the effects of the faults. Thread-safe."""

    def __init__(self, inner: FileIO | None = None) -> None:
        self._inner = inner or FileIO()
        self._lock = threading.Lock()
        self._paths: dict[int, Path] = {}
        self._faults: list[Fault] = []
        self.calls: list[IoCall] = []

    def set(self, *faults: Fault) -> None:
        """Replace all faults by these."""
        with self._lock:
            self._faults = list(faults)

    def clear(self) -> None:
        """Remove all faults."""
        self.set()

    def path_of(self, fd: int) -> Path:
        """Return the path with which ``fd`` was opened."""
        return self._paths[fd]

    # -- FileIO --------------------------------------------------------------------------------------

    def open(self, path: Path, flags: int) -> int:
        self._begin("open", path)
        fd = self._inner.open(path, flags)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        self._begin("close", self._paths[fd])
        self._inner.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        effect = self._begin("preadv", self._paths[fd], offset, _size(buffers))
        views = _head(buffers, effect.cut(_size(buffers)))
        got = self._inner.preadv(fd, views, effect.aim(offset))
        if got and type(effect).change is not Effect.change:
            data = bytearray(b"".join(views)[:got])
            effect.change(memoryview(data))
            _scatter(data, views)
        return got

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        effect = self._begin("pwritev", self._paths[fd], offset, _size(buffers))
        if effect.skips:
            return _size(buffers)
        views = _head(buffers, effect.cut(_size(buffers)))
        if type(effect).change is not Effect.change:
            copy = memoryview(mmap.mmap(-1, _size(views)))  # page-aligned memory, as O_DIRECT requires
            copy[:] = b"".join(views)
            effect.change(copy)
            views = [copy]
        return self._inner.pwritev(fd, views, effect.aim(offset))

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        if not self._begin("allocate", self._paths[fd], offset, nbytes).skips:
            self._inner.allocate(fd, offset, nbytes)

    def free(self, fd: int, offset: int, nbytes: int) -> None:
        if not self._begin("free", self._paths[fd], offset, nbytes).skips:
            self._inner.free(fd, offset, nbytes)

    def sync(self, fd: int) -> None:
        if not self._begin("sync", self._paths[fd]).skips:
            self._inner.sync(fd)

    def truncate(self, fd: int, nbytes: int) -> None:
        if not self._begin("truncate", self._paths[fd], 0, nbytes).skips:
            self._inner.truncate(fd, nbytes)

    def size(self, fd: int) -> int:
        self._begin("size", self._paths[fd])
        return self._inner.size(fd)

    def available(self, fd: int) -> int:
        self._begin("available", self._paths[fd])
        return self._inner.available(fd)

    def forget(self, fd: int, offset: int, nbytes: int) -> None:
        self._begin("forget", self._paths[fd], offset, nbytes)
        self._inner.forget(fd, offset, nbytes)

    def unlink(self, path: Path) -> None:
        if not self._begin("unlink", path).skips:
            self._inner.unlink(path)

    def rename(self, path: Path, to: Path) -> None:
        if not self._begin("rename", path).skips:
            self._inner.rename(path, to)

    def sync_directory(self, path: Path) -> None:
        if not self._begin("sync_directory", path).skips:
            self._inner.sync_directory(path)

    def _begin(self, kind: str, path: Path, offset: int = 0, nbytes: int = 0) -> Effect:
        """Log a call, begin the effect of a matching fault, and return the effect."""
        with self._lock:
            call = IoCall(len(self.calls), kind, path, offset, nbytes)
            self.calls.append(call)
            effect = self._effect(call)
        effect.begin()
        return effect

    def _effect(self, call: IoCall) -> Effect:
        for fault in self._faults:
            if (fault.times is None or fault.hits < fault.times) and fault.when(call):
                fault.hits += 1
                return fault.effect
        return _NONE


_NONE = Effect()


def _size(buffers: Sequence[memoryview]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def _head(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return the first ``nbytes`` bytes of ``buffers``."""
    views = []
    for buffer in buffers:
        if nbytes <= 0:
            break
        views.append(buffer[:nbytes])
        nbytes -= buffer.nbytes
    return views


def _scatter(data: bytearray, views: Sequence[memoryview]) -> None:
    """Copy ``data`` to the memory of ``views``, one after the other."""
    at = 0
    for view in views:
        part = data[at : at + view.nbytes]
        view[: len(part)] = part
        at += len(part)
