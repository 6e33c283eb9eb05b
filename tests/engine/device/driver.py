"""The device of the tests: :class:`CudaDevice` over the driver in ``driver.cc``, whose memory is the
host's."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.engine.kernels.executor.build import build_plain
from tests.engine.kernels.executor.toolchain import missing_tools
from tests.portions import chosen
from tierstore.tiers.cuda import CudaDevice, open_driver
from tierstore.tiers.device import Stream

COMPLETED = Path(__file__).parent
SCHEDULES = tuple(range(int(os.environ.get("TIERSTORE_DEVICE_SCHEDULES", "14"))))
"""Seeds: lazy, eager, and six each of random and mixed (see ``driver.cc``)."""
ONE_OF_EACH = chosen(SCHEDULES, *SCHEDULES[:3], *SCHEDULES[8:9])
"""The seeds as parameters: one of each kind, and the others for the soak."""

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_longlong)


class FakeDevice(CudaDevice):
    """A device whose asynchronous work happens when the schedule ``seed`` says so. One at a time."""

    def __init__(
        self,
        seed: int = 0,
        *,
        total_bytes: int = 1 << 30,
        batches: bool = True,
        maps: bool = True,
        beside: int = 0,
    ) -> None:
        """``beside``: another device, after so many that were made for one test. They have one schedule and
        one memory."""
        library = _library()
        if not beside:
            library.fake_reset(ctypes.c_ulonglong(seed), ctypes.c_size_t(total_bytes), int(batches))
        library.fake_devices(beside + 1)
        if not maps:
            library.fake_cannot_map()
        self.failure: BaseException | None = None
        self._numbers = itertools.count()
        self._calls: dict[int, Callable[[], None]] = {}
        self._entry = _Callback(self._run)
        super().__init__(beside, driver=library)

    def view(
        self, address: int, shape: tuple[int, ...], *, stride: int | None = None
    ) -> npt.NDArray[np.uint8]:
        if stride is None:
            memory = (ctypes.c_ubyte * int(np.prod(shape))).from_address(address)
            return np.frombuffer(memory, np.uint8).reshape(shape)
        memory = (ctypes.c_ubyte * (shape[0] * stride)).from_address(address)
        return np.frombuffer(memory, np.uint8).reshape(shape[0], stride)[:, : shape[1]]

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        """Compute ``work`` as the next thing on ``stream``. What it raises comes out of :meth:`finish`."""
        number = next(self._numbers)
        self._calls[number] = work
        self._call("fake_launch", ctypes.c_void_p(stream), self._entry, ctypes.c_longlong(number))

    def finish(self, stream: Stream) -> None:
        """Block until all that is on ``stream`` has happened."""
        self.synchronize(self.record(stream))
        if self.failure is not None:
            raise self.failure

    @property
    def batches(self) -> int:
        """Calls that made many copies."""
        return int(_library().fake_batches())

    @property
    def copies(self) -> int:
        """Calls that made one."""
        return int(_library().fake_copies())

    @property
    def streams(self) -> int:
        """Those that were made, by whatever device, and have not been given back."""
        return int(_library().fake_streams())

    @property
    def registered(self) -> int:
        """Ranges of host memory that are pinned."""
        return int(_library().fake_registered())

    @property
    def registrations(self) -> int:
        """How often that was done."""
        return int(_library().fake_registrations())

    @property
    def strays(self) -> int:
        """Registered memory that was not mapped, and copies that found theirs not registered."""
        return int(_library().fake_strays())

    @property
    def mapped(self) -> int:
        """Bytes of memory behind reserved addresses."""
        return int(_library().fake_mapped())

    @property
    def handles(self) -> int:
        """Of memory, that have not been given back."""
        return int(_library().fake_handles())

    @property
    def reserved(self) -> int:
        """Ranges of addresses."""
        return int(_library().fake_reserved())

    def refuse_registrations(self) -> None:
        """From now on."""
        _library().fake_refuse_registrations()

    def _run(self, number: int) -> None:
        try:
            self._calls.pop(number)()
        except BaseException as error:  # noqa: BLE001  # nothing may pass through the driver
            self.failure = error


def missing() -> str | None:
    """Why there is no driver to be had here, or None."""
    return missing_tools()


@cache
def _library() -> ctypes.CDLL:
    library = open_driver(str(build_plain(COMPLETED / "driver.cc")))
    library.fake_batches.restype = library.fake_copies.restype = ctypes.c_longlong
    library.fake_registrations.restype = library.fake_strays.restype = ctypes.c_longlong
    for sizes in (library.fake_mapped, library.fake_handles, library.fake_reserved):
        sizes.restype = ctypes.c_size_t
    library.fake_registered.restype = library.fake_streams.restype = ctypes.c_size_t
    return library
