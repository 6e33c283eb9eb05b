"""The mapping of the arena, which the connections of a process share."""

from __future__ import annotations

import fcntl
import gc
import os

import pytest

from tests.daemons import TOKENS, load_bytes, pages_of
from tests.tierstore.daemon.client.test_processes import fork
from tierstore.client.mapping import map_arena
from tierstore.errors import UsageError
from tierstore.testing.clock import wait_until


def arenas_mapped() -> int:
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("memfd:tierstore-arena" in line for line in maps)


@pytest.fixture
def shared_file():
    """Makes files in shared memory of one MiB."""
    made = []

    def make():
        fd = os.memfd_create("tierstore-arena", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 1 << 20)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        made.append(fd)
        return fd

    yield make
    for fd in made:
        os.close(fd)


def test_connections_of_a_process_share_one_mapping(make_daemon, connect):
    before = arenas_mapped()
    daemon = make_daemon()
    first = connect(daemon.url)
    second = connect(daemon.url, identity=first.identity)
    assert arenas_mapped() == before + 1
    first.save(TOKENS, pages_of(TOKENS)).wait(10)
    first.close()
    second.wait_ready()
    assert load_bytes(second, second.lookup(TOKENS)) == (70, pages_of(TOKENS))
    assert arenas_mapped() == before + 1
    second.close()
    assert arenas_mapped() == before


def test_a_restarted_daemons_arena_is_another_one(make_daemon, connect):
    before = arenas_mapped()
    daemon = make_daemon()
    stores = [connect(daemon.url) for _ in range(2)]
    daemon.kill()
    wait_until(lambda: all(store.backend.connection.link is None for store in stores))
    daemon.start()
    for store in stores:
        assert store.wait_connected(30)
        store.save(TOKENS, pages_of(TOKENS)).wait(10)
        assert load_bytes(store, store.lookup(TOKENS)) == (70, pages_of(TOKENS))
    assert arenas_mapped() == before + 1


def test_one_file_is_mapped_once_until_its_last_holder_lets_go(shared_file):
    before = arenas_mapped()
    fd, other = shared_file(), shared_file()
    holders = [map_arena(os.dup(fd), 1 << 20) for _ in range(3)]
    assert holders[0] is holders[1] is holders[2]
    assert map_arena(os.dup(other), 1 << 20) is not holders[0]
    assert arenas_mapped() == before + 2
    holders.pop().release()
    holders.pop().release()
    assert map_arena(os.dup(fd), 1 << 20) is holders[0]
    holders[0].release()
    holders.pop().release()
    assert arenas_mapped() == before + 1
    again = map_arena(os.dup(fd), 1 << 20)
    again.wait_populated()
    assert again.memory.view(0, 8) == bytes(8)
    again.release()
    map_arena(os.dup(other), 1 << 20).release()


def test_a_file_that_is_too_short_is_refused_and_stays_open(shared_file):
    fd = shared_file()
    with pytest.raises(UsageError, match="cannot map"):
        map_arena(fd, 2 << 20)
    os.fstat(fd)


def test_a_forked_child_begins_anew(shared_file):
    fd = shared_file()
    ours = map_arena(os.dup(fd), 1 << 20)

    def child():
        theirs = map_arena(os.dup(fd), 1 << 20)
        assert theirs is not ours
        theirs.wait_populated()
        theirs.memory.view(0, 5)[:] = b"child"
        theirs.release()

    assert fork(child) == 0
    assert ours.memory.view(0, 5) == b"child"
    ours.release()
