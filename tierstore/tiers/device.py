"""What the hbm tier needs of a device with memory of its own: streams, events, asynchronous copies.

Work that is put on one *stream* happens in order; between streams only *events* order it. Nothing here waits
for the device but :meth:`Device.synchronize`, and nothing but that says that bytes have arrived. All methods
may be called from any thread, release the GIL where they may wait, and raise :class:`DeviceError` when the
driver refuses.

The one implementation is :class:`tierstore.tiers.cuda.CudaDevice`. Streams and addresses are plain ints, so
that whoever computes (torch, CuPy) can share them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NewType, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.errors import TierStoreError

Stream = NewType("Stream", int)
"""The driver's handle of a stream."""

Addresses = npt.NDArray[np.uint64]


class DeviceError(TierStoreError):
    """The device's driver refused a call, or is not there."""


class DeviceMemoryError(DeviceError):
    """The device has not that much memory left."""


class SourceOrder(enum.IntEnum):
    """When a copy may read its source. The numbers are CUDA's."""

    STREAM = 1  # in the stream's order: whatever wrote it before on the device is waited for
    ANY = 3  # from the call on: for host memory that nothing on the device writes


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device's memory."""

    free: int
    total: int


class Event:
    """A point in a stream. The driver's event is given back with the object."""

    __slots__ = ("_destroy", "handle")

    def __init__(self, handle: int, destroy: Callable[[int], None]) -> None:
        self.handle = handle
        self._destroy = destroy

    def __del__(self) -> None:
        self._destroy(self.handle)


class Device(Protocol):
    """One device. ``name`` is what torch calls it, such as ``cuda:0``."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """The devices whose driver is the same: what one of them has registered, all of them reach."""

    @property
    def host_pointers(self) -> bool:
        """Whether kernels may use the addresses of registered host memory as they are."""

    def memory(self) -> DeviceMemory:
        """What is free now, and all."""

    def allocate(self, nbytes: int) -> int:
        """The address of new memory that other processes may be let into. Raises
        :class:`DeviceMemoryError`."""

    def free(self, address: int) -> None:
        """Give memory of :meth:`allocate` back. Waits for the device."""

    @property
    def granule_bytes(self) -> int:
        """In pieces of which size memory can be mapped to reserved addresses; 0 where it cannot."""

    def reserve(self, nbytes: int) -> int:
        """The first of so many addresses without memory: whole granules."""

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give addresses of :meth:`reserve` back, none of which has memory any more."""

    def map(self, address: int, nbytes: int) -> None:
        """Put new memory behind reserved addresses: whole granules. Raises :class:`DeviceMemoryError`."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Give the memory back that :meth:`map` was called for with the same arguments. Does not wait: all
        that was put to work on it must have happened."""

    def view(self, address: int, shape: tuple[int, ...], *, stride: int | None = None) -> Any:
        """Memory of this device as an array of uint8 that the libraries that compute on it take. ``stride``:
        it has rows, so many bytes apart."""

    def share(self, address: int) -> bytes:
        """The handle by which another process opens memory of :meth:`allocate`."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory, populated or not, so that copies from and to it need no detour. Takes a while
        for many GiB, and is refused for what is registered already."""

    def unregister(self, address: int) -> None:
        """Unpin what begins at ``address``."""

    def stream(self) -> Stream:
        """A new stream, which never waits for the default one."""

    def release(self, stream: Stream) -> None:
        """Give a stream of :meth:`stream` back. What is on it still happens, and its events stay; nothing may
        be put on it any more."""

    def record(self, stream: Stream) -> Event:
        """The point after all that has been put on ``stream`` so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What is put on ``stream`` from now on happens after ``event``."""

    def reached(self, event: Event) -> bool:
        """Whether all before ``event`` has happened."""

    def synchronize(self, event: Event) -> None:
        """Block until ``event`` is reached."""

    def copy(self, stream: Stream, to: int, source: int, nbytes: int) -> None:
        """Copy between any two memories, as the next thing on ``stream``."""

    def copy_many(
        self, stream: Stream, to: Addresses, sources: Addresses, sizes: Addresses, order: SourceOrder
    ) -> None:
        """Many copies in one call, as the next thing on ``stream`` and in no order among themselves. Host
        memory must be registered."""

    def copy_each(self, stream: Stream, to: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """Many copies one by one, between any two memories."""
