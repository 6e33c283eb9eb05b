"""A page that is read in pieces by several threads."""

from __future__ import annotations

import xxhash

from tierstore.memory import ALIGNMENT, Memory
from tierstore.tiers.disk.payloads import PageBuffer

NBYTES = 2 * ALIGNMENT


class Interrupted:
    """The hash of a page's pieces. Right after its first piece, another thread hashes the second one."""

    def __init__(self, pieces, other_thread):
        self._pieces, self._other_thread = pieces, other_thread

    def add(self, start, stop):
        whole = self._pieces.add(start, stop)
        if start == 0:
            self._other_thread()
        return whole


def test_the_thread_that_ends_a_page_is_not_overwritten_by_an_earlier_one():
    memory = Memory(NBYTES, shared=False)
    view = memory.view(0, NBYTES)
    view[:] = bytes(range(256)) * (NBYTES // 256)
    buffer = PageBuffer(view)
    buffer.expect_pieces()
    buffer._pieces = Interrupted(buffer._pieces, lambda: buffer.hash(ALIGNMENT, NBYTES))
    buffer.hash(0, ALIGNMENT)
    assert buffer.checksum == xxhash.xxh3_64_intdigest(view)
