"""The disk tier."""

from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.records import INLINE, PageRecord
from tierstore.tiers.disk.stats import DiskStats
from tierstore.tiers.disk.tier import DiskTier

__all__ = ["INLINE", "DiskStats", "DiskTier", "FileIO", "PageRecord"]
