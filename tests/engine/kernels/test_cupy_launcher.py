"""What CuPy and torch are asked for when a kernel is launched on a GPU, written down by stand-ins of both.

The stand-in takes exactly the calls that ``cupy/_core/raw.pyx`` and ``cupy/cuda/function.pyx`` have in CuPy
13 and 14; that a GPU then does what it should is for a GPU to show.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tierstore_engine.errors import KernelError
from tierstore_engine.kernels.catalog import Instance
from tierstore_engine.kernels.cubins import CubinCache
from tierstore_engine.kernels.cupy_launcher import CupyLauncher, _LauncherStream, architecture
from tierstore_engine.kernels.toolkit import find_toolkit

HANDLE = 0x5150


class Function:
    """As a ``RawKernel``: keywords go on to ``Function.__call__``, which looks at ``stream.ptr``."""

    def __init__(self, image: bytes, name: str, devices: list[int]) -> None:
        self.image, self.name = image, name
        self.max_dynamic_shared_size_bytes = 0
        self.launches: list[tuple[Any, ...]] = []
        self._devices = devices

    def __call__(self, grid: tuple, block: tuple, args: Any, *, shared_mem: int = 0, stream: Any) -> None:  # type: ignore[type-arg]
        assert isinstance(grid, tuple)
        assert isinstance(block, tuple)
        self.launches.append((self._devices[-1], grid, block, args, shared_mem, stream.ptr))


class Cupy:
    """As much of the module as the launcher may use. No ``ExternalStream``: it warns from CuPy 14 on."""

    def __init__(self) -> None:
        self.functions: list[Function] = []
        self.devices: list[int] = []
        runtime = SimpleNamespace(driverGetVersion=lambda: 13000)
        self.cuda = SimpleNamespace(runtime=runtime, Device=self._device)

    def RawModule(self, *, path: str) -> SimpleNamespace:
        def get_function(name: str) -> Function:
            self.functions.append(Function(Path(path).read_bytes(), name, self.devices))
            return self.functions[-1]

        return SimpleNamespace(get_function=get_function)

    @contextmanager
    def _device(self, index: int) -> Iterator[None]:
        self.devices.append(index)
        yield
        self.devices.pop()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Cupy:
    try:
        find_toolkit()
    except KernelError as error:
        pytest.skip(f"kernels cannot be compiled: {error}")
    stand_in = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=HANDLE + index)
    )
    return stand_in


def test_a_launch_is_what_cupy_takes(cupy: Cupy, tmp_path: Path) -> None:
    cubins = CubinCache(tmp_path)
    launcher = CupyLauncher("cuda:1", cubins)
    kernel = launcher.load(Instance("page_copy.cu", "page_copy", 512, 1024))
    [function] = cupy.functions
    assert (function.image, function.name) == (
        cubins.get(Instance("page_copy.cu", "page_copy", 512), "sm_90").image,
        "_Z9page_copyPKyS0_ii",
    )
    addresses = torch.zeros(2, dtype=torch.int64)
    kernel([16], (addresses, None, np.int32(2), np.int32(16)))
    [(device, grid, block, values, shared, stream)] = function.launches
    assert (device, grid, block, shared, stream) == (1, (16,), (512,), 1024, HANDLE + 1)
    # CuPy passes each in the size of its type: an address is 8 bytes, null too.
    assert [value.nbytes for value in values] == [8, 8, 4, 4]
    assert [int(value) for value in values] == [addresses.data_ptr(), 0, 2, 16]
    assert cupy.devices == []


@pytest.mark.parametrize(("shared_bytes", "asked"), [(48 << 10, 0), ((48 << 10) + 16, (48 << 10) + 16)])
def test_more_shared_memory_than_a_block_has_by_itself(
    cupy: Cupy, tmp_path: Path, shared_bytes: int, asked: int
) -> None:
    CupyLauncher("cuda", CubinCache(tmp_path)).load(Instance("page_copy.cu", "page_copy", 512, shared_bytes))
    assert cupy.functions[0].max_dynamic_shared_size_bytes == asked


def test_a_launcher_leaves_nothing_to_clean_up(cupy: Cupy, tmp_path: Path) -> None:
    """A folder that the collector removes is a ResourceWarning, which ends a test run."""
    CupyLauncher("cuda", CubinCache(tmp_path)).load(Instance("page_copy.cu", "page_copy", 512))
    gc.collect()


def test_devices_that_the_kernels_are_for() -> None:
    assert [architecture(8, 0), architecture(8, 9), architecture(9, 0)] == ["sm_80", "sm_89", "sm_90"]
    with pytest.raises(
        KernelError, match=r"need compute capability 8\.0 .*this device has 7\.5: use --device cpu"
    ):
        architecture(7, 5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the kernels' own tests show it")
def test_the_installed_cupy_takes_these_calls(tmp_path: Path) -> None:
    """Each goes as far as the driver that is not there: a call of another form would be a TypeError."""
    cupy = pytest.importorskip("cupy")
    image = tmp_path / "some.cubin"
    image.write_bytes(b"")
    no_driver = cupy.cuda.runtime.CUDARuntimeError
    assert cupy.cuda.runtime.driverGetVersion() == 0
    with pytest.raises(no_driver):
        cupy.RawModule(path=str(image)).get_function("symbol")
    kernel = cupy.RawKernel("", "symbol")
    with pytest.raises(no_driver):
        kernel((1,), (32,), (np.uintp(0), np.int32(1)), shared_mem=0, stream=_LauncherStream(HANDLE))
    with pytest.raises(no_driver):
        kernel.max_dynamic_shared_size_bytes = 64 << 10
    with pytest.raises(no_driver), cupy.cuda.Device(0):
        pass
    with pytest.raises(TypeError):
        cupy.RawModule(image=str(image))
