"""The interface of a device with its own memory: streams, events, asynchronous copies.

Work on one *stream* runs in order. Work on different streams is ordered only by *events*. Only
:meth:`Device.synchronize` waits for the device, and only its return says that bytes have arrived. All methods
are thread-safe, release the GIL if they may wait, and raise :class:`DeviceError` if the driver refuses.

The one implementation is :class:`tierstore.tiers.cuda.CudaDevice`. Streams and addresses are plain ints, so
that torch and CuPy can share them.
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
    """The device's driver refused a call, or is missing."""


class DeviceMemoryError(DeviceError):
    """The device has not enough free memory."""


class SourceOrder(enum.IntEnum):
    """When a copy may read its source. The numbers are CUDA's."""

    STREAM = 1  # in stream order, after earlier writes to it on the device
    ANY = 3  # any time after the call: for host memory that nothing on the device writes


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device's memory."""

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
    """One device. ``name`` is torch's name for it, such as ``cuda:0``."""

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
        """Return the free and the total bytes of memory."""

    def allocate(self, nbytes: int) -> int:
        """Allocate memory that can be shared with other processes, and return its address. Raise
        :class:`DeviceMemoryError` if there is not enough."""

    def free(self, address: int) -> None:
        """Free memory of :meth:`allocate`. Waits for the device."""

    @property
    def granule_bytes(self) -> int:
        """The size of the pieces in which memory can be mapped to reserved addresses; 0 if that is not
        possible."""

    def reserve(self, nbytes: int) -> int:
        """Reserve ``nbytes`` of addresses without memory, in whole granules. Return the first address."""

    def unreserve(self, address: int, nbytes: int) -> None:
        """Release addresses of :meth:`reserve`. No memory may be mapped to them."""

    def map(self, address: int, nbytes: int) -> None:
        """Map new memory to reserved addresses, in whole granules. Raise :class:`DeviceMemoryError` if there
        is not enough."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap the memory of an earlier :meth:`map` with the same arguments. Does not wait: all work on it
        must be done."""

    def view(self, address: int, shape: tuple[int, ...], *, stride: int | None = None) -> Any:
        """Return memory of this device as an array of uint8 that the device's compute libraries accept.
        ``stride`` is the distance of its rows in bytes (None: contiguous)."""

    def share(self, address: int) -> bytes:
        """Return the handle with which another process opens memory of :meth:`allocate`."""

    def open(self, handle: bytes) -> int:
        """Return the address of memory that another process shares by this handle. It stays open until this
        process ends."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory, populated or not, so that copies access it directly. Takes long for many GiB.
        Refused for memory that is already registered."""

    def unregister(self, address: int) -> None:
        """Unpin the memory that begins at ``address``."""

    def stream(self) -> Stream:
        """Return a new stream, which never waits for the default stream."""

    def release(self, stream: Stream) -> None:
        """Release a stream of :meth:`stream`. Work on it still runs, and its events stay valid. No new work
        may be put on it."""

    def record(self, stream: Stream) -> Event:
        """Return an event after all work on ``stream`` so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Order later work on ``stream`` after ``event``."""

    def reached(self, event: Event) -> bool:
        """Return whether all work before ``event`` is done."""

    def synchronize(self, event: Event) -> None:
        """Block until ``event`` is reached."""

    def copy(self, stream: Stream, to: int, source: int, nbytes: int) -> None:
        """Queue a copy between any two memories on ``stream``."""

    def copy_many(
        self, stream: Stream, to: Addresses, sources: Addresses, sizes: Addresses, order: SourceOrder
    ) -> None:
        """Queue many copies on ``stream`` with one call. They are not ordered among themselves. Host memory
        must be registered."""

    def copy_each(self, stream: Stream, to: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """Queue many copies one by one, between any two memories."""
