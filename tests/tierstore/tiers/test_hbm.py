"""Page pools: the one in ordinary memory, and which one a device gets."""

from __future__ import annotations

import ctypes

import pytest

from tierstore import open_pool
from tierstore.errors import UsageError
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.tiers import cuda
from tierstore.tiers.device import DeviceError
from tierstore.tiers.hbm import COMPLETED, PagePool

SPEC = KVSpec((LayerGroup(LayerKind.FULL_ATTENTION, (0, 1, 2), 2, 16),), "float16", 16)


def test_pages_are_given_out_once_and_come_back() -> None:
    pool = PagePool(SPEC, 4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    pool.free([1, 2])
    assert pool.free_pages == 3
    assert sorted(pool.allocate(3) or ()) == [1, 2, 3]
    assert "0/4 pages free" in repr(pool)


def test_copies_are_done_when_the_call_returns() -> None:
    pool = PagePool(SPEC, 3)
    host = (ctypes.c_ubyte * (2 * SPEC.page_bytes))(*([1, 2, 3, 4] * (SPEC.page_bytes // 2)))
    address = ctypes.addressof(host)
    assert pool.start_writing([(2, address)]) is COMPLETED
    assert pool.start_copying([(0, 2)]).done
    assert pool.array[0].tobytes() == bytes(host)[: SPEC.page_bytes]
    pool.array[0] = 9
    pool.read_pages([(0, address + SPEC.page_bytes)], after=pool.computed())
    assert bytes(host)[SPEC.page_bytes :] == bytes([9]) * SPEC.page_bytes
    assert not pool.arrivals([0, 1, 2]).pending


def test_a_pool_needs_a_page() -> None:
    with pytest.raises(UsageError, match="at least 1 page"):
        open_pool(SPEC, 0)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda0"])
def test_devices_that_there_are_not(device: str) -> None:
    with pytest.raises(UsageError, match=f"no page pool for device '{device}': use cpu or cuda"):
        open_pool(SPEC, 1, device=device)


def test_without_a_driver_it_is_said_so() -> None:
    with pytest.raises(DeviceError, match="no CUDA device: NVIDIA's driver cannot be used"):
        cuda.open_driver("libcuda-that-is-not-there.so.1")
