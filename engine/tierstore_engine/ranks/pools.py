"""The page pools of a rank, opened by a process that has not made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tierstore.spec import KVSpec
from tierstore.tiers.cuda import CudaDevice
from tierstore.tiers.divided_pool import DeviceShare, DividedRegion, ShareLayout
from tierstore.tiers.group_pools import attach_group_pools
from tierstore.tiers.hbm import HostRegion, PagePool


@dataclass(frozen=True, slots=True)
class HostPools:
    """The pools of one part, in memory that its ranks map. ``groups`` are the layouts of the layer groups'
    pages. ``fd`` is the inherited descriptor of all parts' memory, and ``first`` the part's first large
    page."""

    groups: tuple[str, ...]
    fd: int
    large_bytes: int
    count: int
    first: int

    def open(self) -> list[PagePool]:
        """Return the pools. Call it once. Raises :class:`~tierstore.errors.UsageError`."""
        specs = [KVSpec.parse(group) for group in self.groups]
        return attach_group_pools(specs, self.fd, self.large_bytes, self.count, first=self.first)


@dataclass(frozen=True, slots=True)
class DevicePools:
    """The pools of one share of a part's heads, in memory of the GPU number ``index``, with its ``handle``.
    ``groups`` are the layouts of the layer groups' pages there; see
    :class:`~tierstore.tiers.divided_pool.ShareLayout`."""

    groups: tuple[str, ...]
    index: int
    handle: bytes
    per_large: tuple[int, ...]
    large_bytes: int
    count: int

    def open(self) -> list[PagePool]:
        """Return the pools. Call it once. Raises :class:`~tierstore.tiers.device.DeviceError`."""
        specs = tuple(KVSpec.parse(group) for group in self.groups)
        layout = ShareLayout(specs, self.per_large, self.large_bytes, self.count)
        return DeviceShare.attach(CudaDevice(self.index), self.handle, layout).pools()


RankPools: TypeAlias = HostPools | DevicePools


def pools_of(pools: Sequence[PagePool], heads: int, part: int) -> RankPools:
    """Return what a rank, with share number ``heads`` of the heads, needs to open its part of rank 0's
    ``pools``."""
    region = pools[0].region
    if isinstance(region, DividedRegion):
        share = region.share(part, heads)
        layout = share.layout
        groups = tuple(spec.describe() for spec in layout.specs)
        index = int(share.device.partition(":")[2])
        return DevicePools(groups, index, share.handle(), layout.per_large, layout.large_bytes, layout.count)
    assert isinstance(region, HostRegion)
    assert region.memory.fd is not None, "the pools are not shared"
    size, groups = region.large_pages.part_size, tuple(pool.spec.describe() for pool in pools)
    return HostPools(groups, region.memory.fd, region.large_pages.large_bytes, size, part * size)


def own_pools(pools: Sequence[PagePool]) -> Sequence[PagePool]:
    """Return the pools that rank 0 itself computes with."""
    region = pools[0].region
    return region.shares[0].pools() if isinstance(region, DividedRegion) else pools
