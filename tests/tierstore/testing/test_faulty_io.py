"""The I/O layer that fails: each effect does what it says, and only to the calls it is meant for."""

from __future__ import annotations

import errno
import mmap
import os
import threading

import pytest

from tierstore.testing.faulty_io import Fail, Fault, FaultyIO, FlipBit, Lose, Misdirect, Short, Stall

BLOCK = 4096


def buffer(byte, blocks=2):
    view = memoryview(mmap.mmap(-1, blocks * BLOCK))
    view[:] = byte * len(view)
    return view


@pytest.fixture
def io():
    return FaultyIO()


@pytest.fixture
def file(io, tmp_path):
    path = tmp_path / "file"
    fd = io.open(path, os.O_RDWR | os.O_CREAT)
    io.pwritev(fd, [buffer(b"o", 4)], 0)
    yield fd
    io.clear()
    io.close(fd)


def on(kind, effect, times=None):
    return Fault(lambda call: call.kind == kind, effect, times)


def content(io, fd):
    return os.pread(fd, 1 << 20, 0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ENODEV])
def test_a_failing_call_raises_its_error_and_does_nothing(io, file, code):
    before = content(io, file)
    io.set(on("pwritev", Fail(code)))
    with pytest.raises(OSError, match="injected") as raised:
        io.pwritev(file, [buffer(b"n")], 0)
    assert raised.value.errno == code
    assert content(io, file) == before
    io.sync(file)  # other calls are in order


def test_a_fault_strikes_as_often_as_it_says(io, file):
    fault = on("sync", Fail(errno.EIO), times=1)
    io.set(fault)
    with pytest.raises(OSError, match="injected"):
        io.sync(file)
    io.sync(file)
    assert fault.hits == 1


def test_short_transfers_move_whole_blocks_from_the_beginning(io, file):
    io.set(on("pwritev", Short()))
    assert io.pwritev(file, [buffer(b"n"), buffer(b"m")], 0) == 2 * BLOCK
    assert content(io, file) == b"n" * 2 * BLOCK + b"o" * 2 * BLOCK
    io.set(on("preadv", Short()))
    into = [buffer(b"?"), buffer(b"?")]
    assert io.preadv(file, into, 0) == 2 * BLOCK
    assert bytes(into[1]) == b"?" * 2 * BLOCK


def test_a_flipped_bit_is_one_bit_on_the_way_there_or_back(io, file):
    io.set(on("pwritev", FlipBit(8 * 5 + 1), times=1))
    mine = buffer(b"\0")
    io.pwritev(file, [mine], 0)
    assert content(io, file)[:8] == b"\0\0\0\0\0\2\0\0"
    assert bytes(mine) == b"\0" * 2 * BLOCK, "the caller's memory is not to be touched"
    io.clear()
    io.pwritev(file, [mine], 0)
    io.set(on("preadv", FlipBit(8 * (BLOCK + 3))))
    into = [buffer(b"?", 1), buffer(b"?", 1)]
    io.preadv(file, into, 0)
    assert bytes(into[0]) == b"\0" * BLOCK
    assert bytes(into[1][:5]) == b"\0\0\0\1\0"


def test_a_misdirected_write_lands_beside(io, file):
    io.set(on("pwritev", Misdirect(BLOCK)))
    io.pwritev(file, [buffer(b"n", 1)], BLOCK)
    assert content(io, file) == b"o" * 2 * BLOCK + b"n" * BLOCK + b"o" * BLOCK


def test_a_lost_write_says_it_was_done(io, file):
    before = content(io, file)
    io.set(on("pwritev", Lose()))
    assert io.pwritev(file, [buffer(b"n")], 0) == 2 * BLOCK
    assert content(io, file) == before


def test_a_stalled_call_waits_to_be_released_and_is_then_done(io, file):
    stall = Stall()
    io.set(on("pwritev", stall))
    writer = threading.Thread(target=io.pwritev, args=(file, [buffer(b"n")], 0))
    writer.start()
    assert stall.entered.wait(30)
    assert content(io, file)[:1] == b"o"
    stall.release()
    writer.join(30)
    assert content(io, file)[:1] == b"n"


def test_every_call_is_logged_in_order(io, file, tmp_path):
    io.sync(file)
    io.allocate(file, 0, 8 * BLOCK)
    assert io.size(file) == 8 * BLOCK
    io.truncate(file, BLOCK)
    io.sync_directory(tmp_path)
    assert [call.kind for call in io.calls] == [
        "open",
        "pwritev",
        "sync",
        "allocate",
        "size",
        "truncate",
        "sync_directory",
    ]
    assert [call.number for call in io.calls] == list(range(7))
    assert io.calls[3].nbytes == 8 * BLOCK
    assert io.path_of(file) == tmp_path / "file"
