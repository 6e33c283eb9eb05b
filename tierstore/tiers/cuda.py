"""A CUDA device, used through the driver interface (``libcuda.so.1``) and ctypes.

CuPy and torch are not used, so that the store can be installed and imported without them. Every call that may
take long, or may wait for a lock of the driver, releases the GIL. (Pinning memory holds locks of the driver
for seconds.) All calls use the device's *primary* context, in which torch and CuPy also compute, so addresses
and streams can be shared with them. The context is made current for each single call, because the calling
thread may compute on another device. Signatures are those of ``cuda.h``. Names end in ``_v2`` where the
header replaces the plain name by it.

Memory is allocated by ``cuMemAlloc``, because ``cuIpcGetMemHandle`` exports no other memory. Streams do not
wait for the legacy default stream. Events let a waiting thread sleep, and record no time.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_ushort,
    c_void_p,
)
from typing import Any

import numpy as np

from tierstore.tiers.device import (
    Addresses,
    DeviceError,
    DeviceMemory,
    DeviceMemoryError,
    Event,
    SourceOrder,
    Stream,
)

_OUT_OF_MEMORY = 2
_NOT_READY = 600
_STREAM_NON_BLOCKING = 1
_EVENT_SLEEPS_WITHOUT_TIME = 1 | 2  # CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING
_REGISTER_PORTABLE_MAPPED = 1 | 2
_IPC_HANDLE_BYTES = 64
_IPC_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, which cuIpcOpenMemHandle requires
_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91
_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
_ALLOCATION_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_LOCATION_DEVICE = 1
_ACCESS_READ_WRITE = 3
_OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``, which is passed by value."""

    _fields_ = (("reserved", c_ubyte * _IPC_HANDLE_BYTES),)


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, c_void_p, c_uint64),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemRelease": (c_uint64,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuIpcGetMemHandle": (c_void_p, c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _IpcHandle, c_uint),
    "cuStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
}
# Functions for many copies in one call. The function of CUDA 13 has eight arguments. The function of CUDA
# 12.8 has a ninth argument for the index of a failed copy. Drivers with the newer function also have the
# older one.
_BATCH = (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t)
_BATCHES = {"cuMemcpyBatchAsync_v2": (*_BATCH, c_void_p), "cuMemcpyBatchAsync": (*_BATCH, c_void_p, c_void_p)}
_MOST_COPIES = 4096
"""Most copies in one call. Drivers have crashed with 50,000 (vllm-project/vllm issue 49276)."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _CopyAttributes(ctypes.Structure):
    """``CUmemcpyAttributes``. ``source`` and ``to`` are hints for managed memory only."""

    _fields_ = (("order", c_int), ("source", _Location), ("to", _Location), ("flags", c_uint))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class _Allocation(ctypes.Structure):
    """``CUmemAllocationProp``"""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows", c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``"""

    _fields_ = (("location", _Location), ("flags", c_int))


_THREADS_OWN = ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuGetErrorName")
"""Functions that never wait, because they only use constants or the calling thread's state. Calls of these
functions keep the GIL, because two of the functions surround each other call of the driver, and releasing the
GIL would let other threads run in between."""


def open_driver(name: str = "libcuda.so.1") -> ctypes.CDLL:
    """Load NVIDIA's driver. Raise :class:`DeviceError` if it is missing."""
    try:
        driver = ctypes.CDLL(name)
        for function, signature in _SIGNATURES.items():
            # getattr caches the function object; driver[function] would return a new one each time.
            getattr(driver, function).argtypes = signature
    except (OSError, AttributeError) as error:
        raise DeviceError(f"no CUDA device: NVIDIA's driver cannot be used ({error})") from error
    return driver


def _with_gil(driver: ctypes.CDLL) -> ctypes.PyDLL:
    """Return the driver's library for calls that keep the GIL."""
    quick = ctypes.PyDLL(driver._name, handle=driver._handle)
    for function in _THREADS_OWN:
        getattr(quick, function).argtypes = _SIGNATURES[function]
    return quick


def _batch_function(driver: ctypes.CDLL) -> str | None:
    """Set the signature of the driver's newest function for many copies, and return its name; None if the
    driver has no such function."""
    for name, signature in _BATCHES.items():
        try:
            getattr(driver, name).argtypes = signature
        except AttributeError:
            continue
        return name
    return None


class CudaDevice:
    """The CUDA device number ``index``. Implements :class:`tierstore.tiers.device.Device`.

    ``refused_batches`` is the number of calls with many copies that the driver refused. The copies of a
    refused call were made one by one."""

    def __init__(self, index: int = 0, *, driver: ctypes.CDLL | None = None) -> None:
        self.name = f"cuda:{index}"
        self.kind = "cuda"
        self.refused_batches = 0
        self._driver = driver if driver is not None else open_driver()
        self._quick = _with_gil(self._driver)
        self._context = c_void_p()
        self._popped = byref(
            c_void_p()
        )  # for _destroy_event, which may run after this module's globals are gone
        device = c_int()
        self._call_bare("cuInit", 0)
        self._call_bare("cuDeviceGet", byref(device), index)
        self._call_bare("cuDevicePrimaryCtxRetain", byref(self._context), device)
        same = c_int()
        self._call_bare(
            *("cuDeviceGetAttribute", byref(same), _CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, device)
        )
        self.host_pointers = bool(same.value)
        self._batch = _batch_function(self._driver)
        maps = c_int()
        self._call_bare("cuDeviceGetAttribute", byref(maps), _VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device)
        here = _Location(_LOCATION_DEVICE, index)
        self._allocation = _Allocation(_ALLOCATION_PINNED, 0, here, None, _AllocationFlags())
        self._access = _Access(here, _ACCESS_READ_WRITE)
        self.granule_bytes = self._granularity() if maps.value else 0

    def __repr__(self) -> str:
        return f"CudaDevice({self.name})"

    # -- memory --------------------------------------------------------------------------------------

    def memory(self) -> DeviceMemory:
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return DeviceMemory(free.value, total.value)

    def allocate(self, nbytes: int) -> int:
        address = c_uint64()
        error = self._try("cuMemAlloc_v2", byref(address), nbytes)
        if error == _OUT_OF_MEMORY:
            raise DeviceMemoryError(f"{self.name} has less than {nbytes} bytes free")
        self._require("cuMemAlloc_v2", error)
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def _granularity(self) -> int:
        granule = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(granule), byref(self._allocation), 0)
        return granule.value

    def reserve(self, nbytes: int) -> int:
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
        return address.value

    def unreserve(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int) -> None:
        handle = c_uint64()
        error = self._try("cuMemCreate", byref(handle), nbytes, byref(self._allocation), 0)
        if error == _OUT_OF_MEMORY:
            raise DeviceMemoryError(f"{self.name} has less than {nbytes} bytes free")
        self._require("cuMemCreate", error)
        try:
            self._call("cuMemMap", address, nbytes, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)  # the mapping, if there is one, keeps the memory
        try:
            self._call("cuMemSetAccess", address, nbytes, byref(self._access), 1)
        except DeviceError:
            self.unmap(address, nbytes)
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def view(self, address: int, shape: tuple[int, ...], *, stride: int | None = None) -> Any:
        return DeviceArray(address, shape, stride=stride)

    def share(self, address: int) -> bytes:
        handle = ctypes.create_string_buffer(_IPC_HANDLE_BYTES)
        self._call("cuIpcGetMemHandle", handle, address)
        return handle.raw

    def open(self, handle: bytes) -> int:
        address = c_uint64()
        given = _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(address), given, _IPC_LAZY_PEER_ACCESS)
        return address.value

    def register(self, address: int, nbytes: int) -> None:
        self._call("cuMemHostRegister_v2", address, nbytes, _REGISTER_PORTABLE_MAPPED)

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    # -- order ---------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        stream = c_void_p()
        self._call("cuStreamCreateWithPriority", byref(stream), _STREAM_NON_BLOCKING, 0)
        return Stream(_handle(stream))

    def release(self, stream: Stream) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def record(self, stream: Stream) -> Event:
        created = c_void_p()
        self._call("cuEventCreate", byref(created), _EVENT_SLEEPS_WITHOUT_TIME)
        event = Event(_handle(created), self._destroy_event)
        self._call("cuEventRecord", event.handle, stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._call("cuStreamWaitEvent", stream, event.handle, 0)

    def reached(self, event: Event) -> bool:
        error = self._try("cuEventQuery", event.handle)
        if error != _NOT_READY:
            self._require("cuEventQuery", error)
        return error != _NOT_READY

    def synchronize(self, event: Event) -> None:
        self._call("cuEventSynchronize", event.handle)

    def _destroy_event(self, handle: int) -> None:
        """Destroy an event. Errors are ignored, because at interpreter exit the driver may be unloaded
        already."""
        if self._quick.cuCtxPushCurrent_v2(self._context) == 0:
            self._driver.cuEventDestroy_v2(handle)
            self._quick.cuCtxPopCurrent_v2(self._popped)

    # -- copies --------------------------------------------------------------------------------------

    def copy(self, stream: Stream, to: int, source: int, nbytes: int) -> None:
        self._call("cuMemcpyAsync", to, source, nbytes, stream)

    def copy_many(
        self, stream: Stream, to: Addresses, sources: Addresses, sizes: Addresses, order: SourceOrder
    ) -> None:
        for start in range(0, len(to), _MOST_COPIES):
            part = slice(start, start + _MOST_COPIES)
            if not self._copy_batch(stream, to[part], sources[part], sizes[part], order):
                self.copy_each(stream, to[part], sources[part], sizes[part])

    def copy_each(self, stream: Stream, to: Addresses, sources: Addresses, sizes: Addresses) -> None:
        for copy in zip(to.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self.copy(stream, *copy)

    def _copy_batch(
        self, stream: Stream, to: Addresses, sources: Addresses, sizes: Addresses, order: SourceOrder
    ) -> bool:
        """Put the copies on the stream with one call. Return False, with no copy made, if the driver has no
        function for this or refuses."""
        if self._batch is None:
            return False
        arrays = [np.ascontiguousarray(array, np.uint64) for array in (to, sources, sizes)]
        attributes = _CopyAttributes(order, _Location(), _Location(), _OVERLAP_WITH_COMPUTE)
        first, failed = c_size_t(0), c_size_t()
        arguments: list[Any] = [array.ctypes.data for array in arrays]
        arguments += [len(to), byref(attributes), byref(first), 1]
        if len(_BATCHES[self._batch]) > len(_BATCH) + 1:
            arguments.append(byref(failed))
        refused = self._try(self._batch, *arguments, stream) != 0
        self.refused_batches += refused
        return not refused

    # -- the driver ----------------------------------------------------------------------------------

    def _call(self, function: str, *arguments: Any) -> None:
        self._require(function, self._try(function, *arguments))

    def _try(self, function: str, *arguments: Any) -> int:
        self._require("cuCtxPushCurrent_v2", int(self._quick.cuCtxPushCurrent_v2(self._context)))
        try:
            return int(getattr(self._driver, function)(*arguments))
        finally:
            self._require("cuCtxPopCurrent_v2", int(self._quick.cuCtxPopCurrent_v2(byref(c_void_p()))))

    def _call_bare(self, function: str, *arguments: Any) -> None:
        self._require(function, int(getattr(self._driver, function)(*arguments)))

    def _require(self, function: str, error: int) -> None:
        if error:
            name = c_char_p()
            self._quick.cuGetErrorName(error, byref(name))
            told = name.value.decode() if name.value else str(error)
            raise DeviceError(f"{self.name}: {function} failed with {told}")


class DeviceArray:
    """Device memory in the form that CuPy, torch and numba accept without a copy, for example in
    ``torch.as_tensor(array, device=…)``. ``stride`` is the distance of its rows in bytes (None:
    contiguous)."""

    def __init__(self, address: int, shape: tuple[int, ...], *, stride: int | None = None) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "strides": None if stride is None else (stride, 1),
            "version": 3,
        }


def _handle(pointer: c_void_p) -> int:
    assert pointer.value is not None, "the driver returned no handle"
    return pointer.value
