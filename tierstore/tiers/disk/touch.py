"""Reads all of an index, to see whether that can be done: a program of its own, which may die of it.

It imports nothing of this package, and so starts in a tenth of a second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import lmdb

_MOST_WANTED_PAGES = 1 << 14


def read_all(path: str, trees: Sequence[str]) -> None:
    """Touch every page of every tree and of the free list, and change none.

    Raises, or kills the process, when one is damaged.
    """
    with lmdb.open(
        path, subdir=False, readonly=True, lock=False, create=False, max_dbs=len(trees), readahead=True
    ) as env:
        with env.begin() as txn:
            names = [name.encode() for name in trees if txn.get(name.encode()) is not None]
        databases = [env.open_db(name, create=False) for name in names]
        with env.begin(buffers=True) as txn:
            for database in databases:
                for _, value in txn.cursor(database):
                    bytes(value)
        pages = int(env.info()["last_pgno"]) + 1
    # The free list cannot be read as such. But LMDB goes through all of it for a run that is not there.
    map_bytes = 2 * pages * 4096 + (1 << 20)
    env = lmdb.open(path, subdir=False, lock=False, create=False, map_size=map_bytes)
    with env, env.begin(write=True) as txn:
        txn.put(b"wanted", bytes(min(pages, _MOST_WANTED_PAGES) * 4096))
        txn.abort()


if __name__ == "__main__":
    read_all(sys.argv[1], sys.argv[2:])
