"""Real file systems that are full, read-only, or gone. They need to be mounted, which takes root."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess

import pytest

from tests.campaigns.prompts import Life, inline_life, load, save, small_pages
from tests.campaigns.verdict import judge
from tierstore.errors import StoreUnavailableError
from tierstore.testing.faulty_io import Fail, Fault, FaultyIO
from tierstore.units import KIB, MIB

EXTENTS = Life(small_pages(), disk_bytes=1 * MIB)
PROMPTS = range(0, 32, 2)  # 64 pages: they fit under the cap
TOKENS = 64


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def tmpfs(tmp_path):
    """Mounts a tmpfs of a given size; skips where that is not allowed."""
    mounted = []

    def mount(size):
        point = tmp_path / f"mount-{len(mounted)}"
        point.mkdir()
        done = run("mount", "-t", "tmpfs", "-o", f"size={size}", "tierstore-test", str(point))
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounted.append(point)
        return point

    yield mount
    for point in mounted:
        run("umount", "-l", str(point))


class Ext4:
    """An ext4 in a file, mounted."""

    def __init__(self, image, point):
        self.image = image
        self.point = point

    def mount(self):
        return run("mount", "-o", "loop", str(self.image), str(self.point))

    def unmount(self):
        return run("umount", str(self.point))

    def abort(self):
        """As after an error in its journal: nothing can be written from now on."""
        done = run("mount", "-o", "remount,abort", str(self.point))
        assert done.returncode == 0, done.stderr

    def remount(self):
        assert self.unmount().returncode == 0, "the store has left files open"
        assert self.mount().returncode == 0


@pytest.fixture
def ext4(tmp_path):
    """A small ext4 of its own; skips where that is not allowed."""
    image = tmp_path / "ext4"
    (tmp_path / "mount").mkdir()
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    fs = Ext4(image, tmp_path / "mount")
    if not shutil.which("mkfs.ext4"):
        pytest.skip("there is no mkfs.ext4 here")
    done = run("mkfs.ext4", "-q", "-F", str(image))
    if not done.returncode:
        done = fs.mount()
    if done.returncode:
        pytest.skip(f"an ext4 cannot be mounted here: {done.stderr.strip()}")
    yield fs
    run("umount", "-l", str(fs.point))


def fill(store):
    """Save until nothing more becomes durable. Returns what is on disk: prompt → tokens."""
    for number in PROMPTS:
        save(store, number, TOKENS)
        assert store.flush(30)
    return on_disk(store)


def on_disk(store):
    store.evict("host")
    return {(0, number): found for number in PROMPTS if (found := load(store, number, TOKENS).served_tokens)}


def prompts():
    return {(0, number): TOKENS for number in PROMPTS}


def require_sound(path, life, must, **options):
    verdict = judge(path, [life], prompts(), must, **options)
    assert verdict.good, f"{verdict}"


@pytest.mark.parametrize("life", [EXTENTS, inline_life()], ids=["extents", "inline"])
@pytest.mark.parametrize("size", [96 * KIB, 160 * KIB, 320 * KIB, 512 * KIB])
def test_a_file_system_smaller_than_the_cap_is_only_a_smaller_cache(tmpfs, tmp_path, life, size):
    point = tmpfs(size)
    try:
        store = life.open(point / "store")
    except StoreUnavailableError as refused:
        said = str(refused)
        assert "No space left" in said  # whether it opens at all depends on the size
        return
    held = fill(store)
    for number in PROMPTS:  # what did not get to disk may still be in the host tier: it must be right
        assert load(store, number, TOKENS).wrong_pages == 0
    stats = store.stats()
    assert stats.tiers["host"].leased_pages == 0, "ENOSPC must not leak staging memory"
    assert stats.counters["disk_write_errors"] > 0
    assert not stats.disk_writable
    store.check()
    store.close()
    # What is there comes back where there is room again.
    shutil.copytree(point / "store", tmp_path / "copy")
    require_sound(tmp_path / "copy", life, held)


def test_enospc_by_quota_leaks_nothing_in_the_host_tier_and_ends_by_itself(tmp_path):
    """The same where nothing may be mounted: a quota inside the I/O layer."""
    io = FaultyIO()
    store = EXTENTS.open(tmp_path / "store", io)
    save(store, 0, TOKENS)
    assert store.flush(30)
    io.set(Fault(lambda call: call.kind in ("pwritev", "allocate"), Fail(errno.ENOSPC)))
    for number in PROMPTS[1:]:
        save(store, number, TOKENS)
        assert store.flush(30)
    stats = store.stats()
    assert stats.tiers["host"].leased_pages == 0
    assert stats.counters["disk_write_errors"] > 0
    assert not stats.disk_writable
    store.evict("host")
    assert store.stats().tiers["host"].used_bytes == 0
    assert load(store, 0, TOKENS).served_tokens == TOKENS
    io.clear()
    store.check()
    store.close()
    store = EXTENTS.open(tmp_path / "store", io)
    assert len(fill(store)) == len(PROMPTS)
    store.close()


def test_a_file_system_that_becomes_read_only_keeps_serving(ext4):
    """What the kernel does to a file system with errors: every write fails from one moment to the next."""
    store = EXTENTS.open(ext4.point / "store")
    save(store, 0, TOKENS)
    assert store.flush(30)
    ext4.abort()
    for number in (2, 4):
        save(store, number, TOKENS)
        assert store.flush(30)
    assert store.stats().counters["disk_write_errors"] > 0
    assert not store.stats().disk_writable
    for number in (2, 4):
        assert load(store, number, TOKENS).served_tokens == TOKENS  # from the host tier
    store.evict("host")
    assert load(store, 0, TOKENS).served_tokens == TOKENS  # from the disk
    store.close()
    ext4.remount()
    require_sound(ext4.point / "store", EXTENTS, {(0, 0): TOKENS})


def test_a_read_only_directory_is_refused_with_one_clear_error(tmpfs):
    point = tmpfs("4m")
    store = EXTENTS.open(point / "store")
    save(store, 0, TOKENS)
    store.close()
    assert run("mount", "-o", "remount,ro", str(point)).returncode == 0
    with pytest.raises(StoreUnavailableError, match="Read-only file system"):
        EXTENTS.open(point / "store")
    assert run("mount", "-o", "remount,rw", str(point)).returncode == 0
    require_sound(point / "store", EXTENTS, {(0, 0): TOKENS})


def test_a_mount_that_vanishes_under_a_store_raises_nowhere(tmpfs):
    """A lazy unmount: open files live on, names are gone."""
    point = tmpfs("4m")
    store = EXTENTS.open(point / "store")
    save(store, 0, TOKENS)
    assert store.flush(30)
    held = os.open(point / "store", os.O_RDONLY)  # to find the store again
    assert run("umount", "-l", str(point)).returncode == 0
    for number in PROMPTS:
        save(store, number, TOKENS)
        assert store.flush(30)
        assert load(store, number, TOKENS).served_tokens == TOKENS
    store.evict("host")
    assert load(store, 0, TOKENS).wrong_pages == 0
    store.close()
    os.close(held)
    fresh = EXTENTS.open(point / "store")  # on the file system below: another, empty one
    assert load(fresh, 0, TOKENS).served_tokens == 0
    save(fresh, 0, TOKENS)
    assert fresh.flush(30)
    fresh.check()
    fresh.close()
    require_sound(point / "store", EXTENTS, {(0, 0): TOKENS})
