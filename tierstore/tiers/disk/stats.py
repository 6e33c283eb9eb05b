"""What can be seen of a disk tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskStats:
    """A snapshot. Counters count from open."""

    capacity_bytes: int  # the cap on everything under the directory
    used_bytes: int  # slots and index pages in use or promised
    file_bytes: int  # what extent files take on disk, used or not
    index_used_bytes: int
    index_bytes: int  # the index's share of the cap
    extent_used_bytes: int
    extent_bytes: int  # the extents' share of the cap
    pages: int  # durable
    direct_io: bool  # False: this file system has no O_DIRECT, and pages go through the page cache
    read_direct: bool  # how pages are read, and with how many requests at a time
    read_streams: int
    written_pages: int
    written_bytes: int
    read_pages: int
    read_bytes: int
    bad_pages: int  # reads that did not come back as they were saved
    failed_pages: int  # reads that the disk answered with an error
    commits: int
