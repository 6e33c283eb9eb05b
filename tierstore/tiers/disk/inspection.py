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
from tierstore.tiers.disk.catalog import FORMAT_KEY, TREES, unreadable

_META_PAGES_BYTES = 2 * 4096
_MOST_WANTED_PAGES = 1 << 14


def stored_format(path: Path) -> int | None:
    """The format of the index at ``path``; None when there is none yet.

    Raises :class:`StoreUnavailableError` when the file is no index, or a damaged one.
    """
    if not path.exists() or path.stat().st_size == 0:
        return None
    try:
        if _is_short(path) and not _survives_reading(path):
            raise unreadable(path, "truncated")
        value = _format_value(path)
    except lmdb.Error as error:
        raise unreadable(path, str(error)) from error
    if value is not None and not value.isdigit():
        raise StoreUnavailableError(f"{path} was not written by tierstore: give another directory")
    return int(value) if value is not None else None


def read_all(path: Path) -> None:
    """Touch every page of every tree and of the free list, and change none.

    Raises, or kills the process, when one is damaged.
    """
    with _open(path) as env:
        with env.begin() as txn:
            names = [name for name in TREES if txn.get(name) is not None]
        databases = [env.open_db(name, create=False) for name in names]
        with env.begin(buffers=True) as txn:
            for database in databases:
                for _, value in txn.cursor(database):
                    bytes(value)
        pages = int(env.info()["last_pgno"]) + 1
    # The free list cannot be read as such. But LMDB goes through all of it for a run that is not there.
    map_bytes = 2 * pages * 4096 + (1 << 20)
    env = lmdb.open(str(path), subdir=False, lock=False, create=False, map_size=map_bytes)
    with env, env.begin(write=True) as txn:
        txn.put(b"wanted", bytes(min(pages, _MOST_WANTED_PAGES) * 4096))
        txn.abort()


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


def _survives_reading(path: Path) -> bool:
    reader = subprocess.run(
        [sys.executable, "-m", __name__, str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return reader.returncode == 0


def _open(path: Path) -> lmdb.Environment:
    return lmdb.open(
        str(path), subdir=False, readonly=True, lock=False, create=False, max_dbs=len(TREES), readahead=True
    )


if __name__ == "__main__":
    read_all(Path(sys.argv[1]))
