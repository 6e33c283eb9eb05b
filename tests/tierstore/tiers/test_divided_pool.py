"""Pages on several devices: every share has its heads' bytes of its part, and a page comes back whole."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from tests.engine.device import SCHEDULES, FakeDevice, missing
from tests.portions import diagonal
from tierstore.errors import UsageError
from tierstore.memory import Memory
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.tiers.device import Device
from tierstore.tiers.divided_pool import DividedPool, DividedRegion, open_divided_pools

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no device to test with: {missing()}")

FULL = LayerGroup(LayerKind.FULL_ATTENTION, (0, 2), 4, 32)
WINDOW = LayerGroup(LayerKind.SLIDING_WINDOW, (1,), 4, 32, window=64)
LATENT = LayerGroup(LayerKind.MLA_LATENT, (0, 1), 1, 48)
SPECS = {
    "floats": KVSpec((FULL,), "float16", 16),
    "scales": KVSpec((FULL, WINDOW), "int8", 16, value_dtype="int4", scaled=True),
    "latents": KVSpec((LATENT,), "float16", 16),
}
HEADS = {"even": (range(2), range(2, 4)), "uneven": (range(3), range(3, 4)), "the same": (range(4), range(4))}


def opened(spec: KVSpec, heads: tuple[range, ...], seed: int, parts: int = 1) -> tuple[DividedPool, ...]:
    shares: dict[Device, range] = {FakeDevice(seed, beside=at): own for at, own in enumerate(heads * parts)}
    return open_divided_pools(spec.split(), 1 << 18, shares, parts=parts)


def tiles(page: npt.NDArray[np.uint8], spec: KVSpec, heads: range) -> list[bytes]:
    """Return what a page of these heads has, tile by tile."""
    [group] = spec.groups
    found = []
    for layer in group.layers:
        for find in (spec.tile, spec.scales) if spec.scaled else (spec.tile,):
            for plane in range(group.planes):
                for head in heads:
                    part = find(layer, plane, head)
                    found.append(page[part.start : part.stop].tobytes())
    return found


@pytest.mark.parametrize(*diagonal(name=[*SPECS], heads=[*HEADS], seed=SCHEDULES[:4], parts=[1, 2, 3]))
def test_shares_have_their_heads_and_pages_come_back_whole(
    name: str, heads: str, seed: int, parts: int
) -> None:
    """Pages are copied within parts and between them."""
    pools = opened(SPECS[name], HEADS[heads], seed, parts)
    region = pools[0].region
    assert isinstance(region, DividedRegion)
    device = region.shares[0].runtime
    assert isinstance(device, FakeDevice)
    random = np.random.default_rng(seed)
    for group, pool in enumerate(pools):
        size = pool.spec.page_bytes
        pages = pool.allocate(6)
        assert pages is not None
        random.shuffle(pages)
        memory = Memory(6 * size, shared=False)  # the driver registers whole system pages
        array = np.frombuffer(memory.view(0, 6 * size), np.uint8).reshape(6, size)
        host, back = array[:3], array[3:]
        host[:] = random.integers(0, 256, host.shape, np.uint8)
        if seed % 2:
            pool.register(memory.address, memory.nbytes)
        pool.start_writing(list(zip(pages, (row.ctypes.data for row in host), strict=False))).wait()
        part_pages = pool.large_pages.part_size * pool.books.per_large
        for number, own in product(range(parts), range(2)):
            there = region.share(number, own).pools()[group]
            heads_of = HEADS[heads][own]
            in_group = heads_of if LayerKind.MLA_LATENT is not pool.spec.groups[0].kind else range(1)
            for page, row in zip(pages, host, strict=False):
                if page // part_pages == number:
                    found = bytes(there.array[page % part_pages])
                    assert b"".join(tiles(row, pool.spec, in_group)) == found
        pool.copy_pages(list(zip(pages[3:], pages, strict=False)))
        pool.write_pages([(page, back.ctypes.data) for page in pages[:3]])  # their bytes go
        pool.read_pages(list(zip(pages[3:], (row.ctypes.data for row in back), strict=True)))
        assert np.array_equal(back, host)
        if parts == 1:  # copies between devices are never in batches
            assert (device.copies == 0) == bool(seed % 2)
        if seed % 2:
            pool.unregister(memory.address)
        pool.free(pages)
    assert device.strays == 0


def test_a_page_takes_each_device_its_share() -> None:
    spec, heads = SPECS["floats"], HEADS["uneven"]
    [pool] = opened(spec, heads, 0)
    assert pool.num_pages == (1 << 18) // spec.page_bytes
    region = pool.region
    assert isinstance(region, DividedRegion)
    whole = pool.num_pages * spec.page_bytes
    assert [share.layout.nbytes for share in region.shares] == [whole * 3 // 4, whole // 4]
    with pytest.raises(UsageError, match=r"^a page pool on several devices cannot be resized$"):
        pool.resize(spec.page_bytes * 2)


def test_a_device_without_room_is_named() -> None:
    shares: dict[Device, range] = {
        FakeDevice(total_bytes=200 << 10): range(2),
        FakeDevice(beside=1): range(2, 4),
    }
    sentence = "^cuda:1 has no room for its share of the pages, 128 KiB: 72 KiB are free$"
    with pytest.raises(UsageError, match=sentence):
        open_divided_pools([SPECS["floats"]], 1 << 18, shares)
