from __future__ import annotations

import os

import pytest

from tierstore.memory import Memory
from tierstore.tiers.disk.extents import ExtentFiles
from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.payloads import Payloads
from tierstore.tiers.disk.records import PageRecord
from tierstore.units import KIB, MIB

FILE = 1 * MIB


@pytest.fixture
def open_extents(tmp_path):
    opened = []

    def open_extents(capacity_bytes=3 * MIB + 64 * KIB, io=None):
        opened.append(
            ExtentFiles(tmp_path, capacity_bytes=capacity_bytes, file_bytes=FILE, io=io or FileIO())
        )
        return opened[-1]

    yield open_extents
    for extents in opened:
        extents.close()


def sizes(path):
    return {name: (path / name).stat().st_size for name in sorted(os.listdir(path))}


def test_files_are_made_as_they_are_needed_and_never_past_the_capacity(open_extents, tmp_path):
    extents = open_extents()
    assert sizes(tmp_path) == {}
    extents.grow(10)
    assert sizes(tmp_path) == {"000000": FILE}
    extents.grow(3 * MIB + 64 * KIB)
    assert sizes(tmp_path) == {"000000": FILE, "000001": FILE, "000002": FILE, "000003": 64 * KIB}
    assert extents.allocated_bytes == 3 * MIB + 64 * KIB


def test_what_lies_beyond_a_smaller_capacity_is_cut_off(open_extents, tmp_path):
    open_extents().grow(3 * MIB)
    extents = open_extents(capacity_bytes=1 * MIB + 8 * KIB)
    assert extents.allocated_bytes == 3 * MIB  # what lies there can be read, and moved
    extents.cut()
    assert sizes(tmp_path) == {"000000": FILE, "000001": 8 * KIB}
    assert extents.allocated_bytes == 1 * MIB + 8 * KIB


def test_a_page_may_lie_across_files(open_extents):
    extents = open_extents()
    payloads = Payloads(extents, io_threads=3)
    nbytes = 2 * MIB + 100 * KIB + 17
    memory = Memory(2 * nbytes, shared=False)
    view = memory.view(0, nbytes)
    view[:] = os.urandom(nbytes)
    record = PageRecord(1, 0, bytes(16), bytes(32), b"", nbytes, place=512 * KIB)
    payloads.write([(record, view)])
    back = Memory(nbytes, shared=False).view(0, nbytes)
    assert payloads.read([(record, back)]).all_good
    assert back == view
    payloads.close()


def test_reading_where_there_is_no_file_is_an_error_and_beyond_its_end_is_nothing(open_extents):
    extents = open_extents()
    view = Memory(4096, shared=False).view(0, 4096)
    for direct in (True, False):
        with pytest.raises(FileNotFoundError, match="no extent file"):
            extents.read(2 * MIB, [view], direct=direct)
    extents.grow(4096)
    os.truncate(extents._path(0), 4096)
    assert extents.read(4096, [view], direct=False) == 0


class WithoutDirect(FileIO):
    """A file system that refuses O_DIRECT at open, as older ones in memory do."""

    def open(self, path, flags):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return super().open(path, flags)


class RefusingDirect(FileIO):
    """A file system that opens files with O_DIRECT, and then refuses to transfer anything."""

    def __init__(self):
        self.direct = set()

    def open(self, path, flags):
        fd = super().open(path, flags)
        self.direct.discard(fd)
        if flags & os.O_DIRECT:
            self.direct.add(fd)
        return fd

    def pwritev(self, fd, buffers, offset):
        if fd in self.direct:
            raise OSError(22, "Invalid argument")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd, buffers, offset):
        if fd in self.direct:
            raise OSError(22, "Invalid argument")
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize("io", [WithoutDirect(), RefusingDirect()])
def test_a_file_system_without_direct_io_is_used_through_the_page_cache(open_shelf, io):
    shelf = open_shelf(io=io)
    shelf.save([64 * KIB, 300_000, 5 * MIB])
    shelf.verify()
    assert shelf.tier.stats().direct_io is isinstance(io, RefusingDirect)
