"""Real file systems in real trouble. They have to be mounted, which takes root."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.small_store import SPEC, load_bytes, pages_of
from tests.tierstore.store.troubled import DURABLE, HOT, WAIT_S, Troubled
from tierstore.core.health import Condition
from tierstore.units import KIB, MIB

NEW = list(range(50_000, 50_000 + 16 * 8))


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def mount(tmp_path):
    """Mounts at ``tmp_path/name``, and unmounts in the end; skips where that is not allowed."""
    mounted = []

    def mount(name, *command):
        point = tmp_path / name
        point.mkdir(exist_ok=True)
        done = run("mount", *command, str(point))
        if done.returncode:
            pytest.skip(f"nothing can be mounted here (that takes root): {done.stderr.strip()}")
        mounted.append(point)
        return point

    yield mount
    for point in reversed(mounted):
        run("umount", "-l", str(point))


@pytest.fixture
def troubled_in(open_store):
    """A troubled store in a directory of a mount, which is closed before that is unmounted."""
    made = []

    def troubled_in(path, **options):
        made.append(Troubled(open_store, path=path, **options))
        return made[-1]

    yield troubled_in
    for each in made:
        each.mend()
        each.store.close()


def test_a_file_system_that_somebody_else_filled(mount, troubled_in):
    point = mount("small", "-t", "tmpfs", "-o", "size=3m", "tierstore-test")
    troubled = troubled_in("small/disk", disk_bytes=2 * MIB, pages=96)
    ballast = point / "ballast"
    free = os.statvfs(point)
    ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - 64 * KIB))
    # Another store's worth of pages: the files have to grow for them, or the index has.
    for n in range(8):
        troubled.save(list(range(100_000 * (n + 1), 100_000 * (n + 1) + 16 * 24)))
        assert troubled.store.flush(WAIT_S)
    if troubled.condition is Condition.ONLINE:
        pytest.skip("this file system had given the store all of its blocks before")
    assert troubled.condition is Condition.READ_ONLY
    assert "read-only for 0 s" in troubled.stats().health_line  # LMDB says EIO of a write that was cut short
    assert troubled.served(DURABLE) == len(DURABLE)
    ballast.unlink()
    troubled.comes_back()
    assert troubled.stats().disk_writable
    troubled.until(lambda: not troubled.stats().pending_writes)
    troubled.store.check()


def test_a_file_system_that_turns_read_only(mount, troubled_in, tmp_path):
    """As ext4 does after an error. It takes a repair and a restart to write again; reading goes on."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 * MIB)
    made = run("mkfs.ext4", "-q", str(image))
    if made.returncode:
        pytest.skip(f"an ext4 cannot be made here: {made.stderr.strip()}")
    point = mount("ext4", "-o", "loop", str(image))
    troubled = troubled_in("ext4/disk", disk_bytes=8 * MIB, pages=96)
    if run("mount", "-o", "remount,abort", str(point)).returncode:
        pytest.skip("this kernel cannot make an ext4 fail")
    troubled.save(NEW)
    assert troubled.store.flush(WAIT_S)
    assert troubled.condition is Condition.READ_ONLY
    assert "Read-only file system" in troubled.stats().health_line
    troubled.store.evict("host")
    assert (troubled.served(DURABLE), troubled.served(HOT)) == (len(DURABLE), len(HOT))
    troubled.clock.advance(1)
    troubled.until(lambda: troubled.stats().health["disk"].errors.get("probe") == 1)
    assert troubled.condition is Condition.READ_ONLY
    troubled.store.close()
    run("umount", str(point))
    mount("ext4", "-o", "loop", str(image))  # which replays the journal
    troubled.store = troubled.open()
    assert (troubled.served(DURABLE), troubled.served(HOT)) == (len(DURABLE), len(HOT))
    troubled.save(NEW)
    assert troubled.store.flush(WAIT_S)
    assert troubled.stats().disk_writable


def test_a_file_system_that_is_unmounted_and_comes_back(mount, troubled_in, tmp_path):
    origin = mount("origin", "-t", "tmpfs", "-o", "size=32m", "tierstore-test")
    point = mount("point", "--bind", str(origin))
    troubled = troubled_in("point/disk", disk_bytes=8 * MIB)
    assert run("umount", "-l", str(point)).returncode == 0
    troubled.save(NEW)
    assert troubled.store.flush(WAIT_S)
    assert troubled.condition is Condition.OFFLINE
    assert "No such file or directory" in troubled.stats().health_line
    assert troubled.store.lookup(DURABLE).tokens == 0
    assert troubled.served(HOT) == len(HOT)
    assert list(point.iterdir()) == []  # nothing was made in what is under the mount
    mount("point", "--bind", str(origin))
    troubled.comes_back()
    troubled.until(lambda: troubled.stats().counters["disk_written_pages"] > 32)
    troubled.nothing_is_lost()


STUCK = """
import sys, threading
sys.path[:0] = sys.argv[2:]
from tests.small_store import SPEC, pages_of
from tierstore.store import Store
from tierstore.tiers.disk import FileIO

class Stuck(FileIO):
    stuck = False
    def pwritev(self, fd, buffers, offset):
        if self.stuck:
            threading.Event().wait()
        return super().pwritev(fd, buffers, offset)

io = Stuck()
from tierstore.testing.opening import open_store
store = open_store(
    sys.argv[1], SPEC, host_bytes=1 << 20, disk_bytes=16 << 20, inline_bytes=0, io=io, stall_s=0.2
)
store.save(list(range(64)), pages_of(list(range(64)))).wait()
assert store.flush()
io.stuck = True
store.save(list(range(100, 164)), pages_of(list(range(100, 164)))).wait()
assert not store.flush()
print(store.stats().health_line, flush=True)
store.close()
"""


def test_a_process_ends_though_its_disk_does_not_answer(open_store, tmp_path):
    command = [sys.executable, "-c", STUCK, str(tmp_path / "disk"), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "a call has not returned" in done.stdout
    store = open_store(identity=None, inline_bytes=0)
    tokens = list(range(64))
    assert load_bytes(store, store.lookup(tokens)) == (64, pages_of(tokens))
    assert store.spec == SPEC
