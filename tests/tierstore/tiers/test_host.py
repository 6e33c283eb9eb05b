from __future__ import annotations

import os
import stat

import pytest

from tierstore.tiers.host import HostTier


@pytest.mark.parametrize("shared", [True, False, None])
def test_slots_are_what_was_written_into_them(shared):
    host = HostTier(1 << 20, shared=shared)
    host.wait_populated()
    places = host.allocate_many(100_000, 1 << 20)
    assert len(places) == len(set(places)) == host.pages_for(100_000)
    assert host.allocate_many(100_000, 1) == []
    assert host.used_bytes <= host.capacity_bytes
    for n, place in enumerate(places):
        host.view(place, 100_000)[:] = bytes([n]) * 100_000
    for n, place in enumerate(places):
        assert bytes(host.view(place, 100_000)) == bytes([n]) * 100_000
        host.free(place, 100_000)
    host.check()
    host.close()


def test_a_shared_arena_is_a_file_only_its_owner_can_open():
    host = HostTier(1 << 20, shared=True)
    assert host.shared_fd is not None
    assert stat.S_IMODE(os.fstat(host.shared_fd).st_mode) == 0o600
    (place,) = host.allocate_many(4096, 1)
    host.view(place, 5)[:] = b"bytes"
    assert os.pread(host.shared_fd, 5, place) == b"bytes"
    host.close()
