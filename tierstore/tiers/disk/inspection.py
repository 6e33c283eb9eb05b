"""A look at an index that is not trusted yet, without changing a byte of it.

LMDB reads its file through a memory map and believes what it finds: a page that lies beyond the end of a
truncated file kills the process. So when the file is shorter than the index says, all of it is read by
another process first. (It may be shorter for a good reason: pages that were taken and given back in one
transaction are never written.)
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lmdb

from tierstore.errors import StoreUnavailableError
from tierstore.tiers.disk import touch
from tierstore.tiers.disk.catalog import unreadable
from tierstore.tiers.disk.trees import FORMAT_KEY, TREES

_META_PAGES_BYTES = 2 * 4096
_RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def stored_format(path: Path) -> int | None:
    """The format of the index at ``path``; None when there is none yet.

    Raises :class:`StoreUnavailableError` when the file is no index, or a damaged one.
    """
    if not path.exists() or path.stat().st_size == 0:
        return None
    try:
        if _is_short(path) and not survives_reading(path):
            raise unreadable(path, "truncated")
        value = _format_value(path)
    except lmdb.Error as error:
        raise unreadable(path, str(error)) from error
    if value is not None and not value.isdigit():
        raise StoreUnavailableError(f"{path} was not written by tierstore: give another directory")
    return int(value) if value is not None else None


def _format_value(path: Path) -> bytes | None:
    with _open(path) as env:
        with env.begin() as txn:
            if txn.get(TREES[0]) is None:
                return None
        with env.begin(db=env.open_db(TREES[0], create=False)) as txn:
            value: bytes | None = txn.get(FORMAT_KEY)
            return value


def _is_short(path: Path) -> bool:
    size = path.stat().st_size
    if size < _META_PAGES_BYTES:
        return True
    with _open(path) as env:
        return size < (int(env.info()["last_pgno"]) + 1) * 4096


def survives_reading(path: Path) -> bool:
    """Whether another process can read all of the index, and is alive after that."""
    reader = subprocess.run(
        # By its path: importing it as a part of the package takes five times as long as starting Python.
        [sys.executable, "-c", _RUN, touch.__file__, str(path), *(tree.decode() for tree in TREES)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return reader.returncode == 0


def _open(path: Path) -> lmdb.Environment:
    return lmdb.open(
        str(path), subdir=False, readonly=True, lock=False, create=False, max_dbs=len(TREES), readahead=True
    )
