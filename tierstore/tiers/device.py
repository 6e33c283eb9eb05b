"""The interface of a device with its own memory: streams, events, asynchronous copies.

Work on one *stream* runs in order. Work on different streams is ordered only by *events*. A copy has ended
for certain only after :meth:`Device.synchronize` with a later event has returned. All methods are
thread-safe, release the GIL if they may wait, and raise :class:`DeviceError` if the driver refuses.

:class:`tierstore.tiers.cuda.CudaDevice` implements the interface. Streams and addresses are ints, so that
torch and CuPy can use them too."""

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
    """The device's driver refused a call, or is missing."""


class DeviceMemoryError(DeviceError):
    """The device does not have enough free memory."""


class SourceOrder(enum.IntEnum):
    """When a copy may read its source. The numbers are CUDA's."""

    STREAM = 1  # in stream order: after earlier writes to the source on the device
    ANY = 3  # at any time after the call: for host memory to which the device does not write


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The free and the total bytes of a device's memory."""

    free: int
    total: int


class Event:
    """A point in a stream. The driver's event is destroyed with the object."""

    __slots__ = ("_destroy", "handle")

    def __init__(self, handle: int, destroy: Callable[[int], None]) -> None:
        self.handle = handle
        self._destroy = destroy

    def __del__(self) -> None:
        self._destroy(self.handle)


class Device(Protocol):
    """One device. ``name`` is torch's name for the device, such as ``cuda:0``."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """The driver of the device. Memory registered with one device is accessible to all devices of the
        same kind."""

    @property
    def host_pointers(self) -> bool:
        """Whether kernels can use the addresses of registered host memory unchanged."""

    def memory(self) -> DeviceMemory:
        """Return the size of the device's memory."""

    def allocate(self, nbytes: int) -> int:
        """Allocate memory that can be shared with other processes, and return its address. Raise
        :class:`DeviceMemoryError` if there is too little free memory."""

    def free(self, address: int) -> None:
        """Free memory of :meth:`allocate`, after all work on the device."""

    @property
    def granule_bytes(self) -> int:
        """The size of a *granule*, the unit in which memory can be mapped to reserved addresses; 0 if the
        device cannot map memory."""

    def reserve(self, nbytes: int) -> int:
        """Reserve ``nbytes`` of addresses without memory, in whole granules. Return the first address."""

    def unreserve(self, address: int, nbytes: int) -> None:
        """Release addresses of :meth:`reserve`. No memory may be mapped to them."""

    def map(self, address: int, nbytes: int) -> None:
        """Map new memory to reserved addresses, in whole granules. Raise :class:`DeviceMemoryError` if there
        is too little free memory."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap the memory of an earlier :meth:`map` with the same arguments. All work on the memory must
        have ended, because this method does not wait."""

    def view(self, address: int, shape: tuple[int, ...], *, stride: int | None = None) -> Any:
        """Return memory of this device as an array of uint8 that the device's compute libraries accept.
        ``stride`` is the distance of the array's rows in bytes (None: contiguous)."""

    def share(self, address: int) -> bytes:
        """Return the handle with which another process opens memory of :meth:`allocate`."""

    def open(self, handle: bytes) -> int:
        """Return the address of memory that another process shares by this handle. The memory stays open
        until this process ends."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory, so that copies access it directly. Takes long for many GiB. Raise
        :class:`DeviceError` for memory that is already registered."""

    def unregister(self, address: int) -> None:
        """Unpin the memory that begins at ``address``."""

    def stream(self) -> Stream:
        """Return a new stream, whose work does not wait for the default stream."""

    def release(self, stream: Stream) -> None:
        """Release a stream of :meth:`stream`. Work already on the stream still runs, and its events stay
        valid. No new work may be put on the stream."""

    def record(self, stream: Stream) -> Event:
        """Return an event that is reached when all work so far on ``stream`` has ended."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Order later work on ``stream`` after ``event``."""

    def reached(self, event: Event) -> bool:
        """Return whether all work before ``event`` has ended."""

    def synchronize(self, event: Event) -> None:
        """Block until ``event`` is reached."""

    def copy(self, stream: Stream, to: int, source: int, nbytes: int) -> None:
        """Put a copy on ``stream``. Source and destination may be any memory of host or device."""

    def copy_many(
        self, stream: Stream, to: Addresses, sources: Addresses, sizes: Addresses, order: SourceOrder
    ) -> None:
        """Put many copies on ``stream`` with one call. The copies may run in any order. Host memory must be
        registered."""

    def copy_each(self, stream: Stream, to: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """Put many copies on ``stream``, with one call of :meth:`copy` each."""
