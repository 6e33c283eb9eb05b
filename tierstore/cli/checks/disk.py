"""Checks of the file system of a store's directory, which need not exist yet."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierstore.cli.checks.check import Check, fail, ok, read_text, warn
from tierstore.memory import ALIGNMENT
from tierstore.units import GIB, format_size

_LEAST_FREE = 1 * GIB
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "ceph", "lustre", "glusterfs", "afs")
_VOLATILE = ("tmpfs", "ramfs")


def checks(directory: Path) -> Iterator[Check]:
    """Check the file system of ``directory``. The check creates and removes a temporary file in ``directory``
    or its nearest existing parent."""
    place = directory.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        yield fail("directory", f"{place} is a file", "give a directory")
        return
    yield _kind(place)
    yield _free(place)
    try:
        with _file(place, 0):
            pass
    except OSError as error:
        found = f"cannot write in {place}: {error.strerror}"
        yield fail(
            "directory", found, "give a directory that this user can write, on a file system mounted rw"
        )
        return
    yield ok(
        "directory", f"{directory} is writable" if place == directory.absolute() else f"{place} is writable"
    )
    yield _direct(place)


def _kind(place: Path) -> Check:
    kind = _file_system(place)
    if kind.partition(".")[0] in _REMOTE:
        advice = "LMDB and its locks need a local disk: give a directory on one"
        return fail("file system", f"{kind}, over the network", advice)
    if kind in _VOLATILE:
        return warn("file system", kind, "pages take memory and are lost at a reboot: use a disk")
    return ok("file system", kind)


def _free(place: Path) -> Check:
    info = os.statvfs(place)
    free = info.f_bavail * info.f_frsize
    if free < _LEAST_FREE:
        advice = "give less --disk-bytes than this, or free some space"
        return warn("free space", format_size(free), advice, free_bytes=free)
    return ok("free space", format_size(free), free_bytes=free)


def _direct(place: Path) -> Check:
    block = memoryview(mmap.mmap(-1, ALIGNMENT))  # page-aligned, as O_DIRECT requires
    try:
        with _file(place, os.O_DIRECT) as fd:
            os.pwritev(fd, [block], 0)
            os.preadv(fd, [block], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            return fail("O_DIRECT", error.strerror or str(error), "the disk fails: look at dmesg")
        return warn(
            "O_DIRECT", "not supported", "pages go through the page cache, which is slower: use ext4 or xfs"
        )
    return ok("O_DIRECT", f"works in blocks of {ALIGNMENT}")


@contextmanager
def _file(place: Path, flags: int) -> Iterator[int]:
    """Yield the descriptor of a temporary file without a name, which the kernel removes when it is closed."""
    try:
        fd = os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        fd, name = tempfile.mkstemp(prefix=".tierstore-doctor-", dir=place)
        os.close(fd)
        try:
            fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | flags)
        finally:
            os.unlink(name)
    try:
        yield fd
    finally:
        os.close(fd)


def _file_system(place: Path) -> str:
    """Return the type of the file system that contains ``place``."""
    device = place.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in (read_text("/proc/self/mountinfo") or "").splitlines():
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == wanted:
            return rest.split()[0]
    return "unknown"
