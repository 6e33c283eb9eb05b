"""Which pages of an index file hold nothing, read from LMDB's own list of them.

LMDB never gives a page back to the file system: what a transaction frees is written down, in a tree without a
name, and used again by later ones. Where an index has to leave room for a smaller one beside it, the blocks
of these pages can be given back as holes in the file (LMDB writes a free page before it reads it). Its
interface does not show the list, so the file is read here: two meta pages and a small tree. The layout is
that of all LMDB 0.9 on 64-bit machines, as in its ``mdb.c``; anything else is refused.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 4096

_HEAD = struct.Struct("<QHHHH")  # number, padding, flags, end of the node pointers, …
_HEAD_BYTES = 16
_META = struct.Struct("<II16x")  # magic number, version
_TREE = struct.Struct("<IHHQQQQQ")  # page size, flags, depth, branch, leaf, overflow pages, entries, root
_LAST = struct.Struct("<QQ")  # last page in use, number of the transaction
_NODE = struct.Struct("<HHHH")  # low and high part of the data's length (or child), flags, length of the key
_MAGIC = 0xBEEFC0DE
_VERSION = 1
_NONE = (1 << 64) - 1  # the root of an empty tree
_BRANCH, _LEAF, _META_PAGE = 0x01, 0x02, 0x08
_ELSEWHERE = 0x01  # a node's data is in overflow pages of its own
_MOST_DEPTH = 32


@dataclass(frozen=True, slots=True)
class _Meta:
    root: int  # of the tree of free pages
    pages: int
    transaction: int


def free_pages(path: Path) -> npt.NDArray[np.int64]:
    """The numbers of the pages that the last durable transaction left free, ascending. For an index that
    nobody writes to meanwhile.

    Raises :class:`OSError` when the file is not as it should be.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < 2 * PAGE_BYTES:
            raise _strange(path)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            try:
                meta = max((_meta(pages, number) for number in (0, 1)), key=lambda meta: meta.transaction)
                found = [*_lists(pages, meta.root, 0)] if meta.root != _NONE else []
            except (ValueError, struct.error) as error:
                raise _strange(path) from error
    free = np.sort(np.concatenate([np.empty(0, np.int64), *found]))
    if len(free) and not (free[0] > 1 and free[-1] < meta.pages and bool((np.diff(free) > 0).all())):
        raise _strange(path)
    return free


def runs(numbers: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of consecutive numbers, which ascend."""
    if len(numbers):
        starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
        counts = np.diff(starts, append=len(numbers))
        yield from zip(numbers[starts].tolist(), counts.tolist(), strict=True)


def _meta(pages: mmap.mmap, number: int) -> _Meta:
    at = number * PAGE_BYTES
    flags = _HEAD.unpack_from(pages, at)[2]
    magic, version = _META.unpack_from(pages, at + _HEAD_BYTES)
    at += _HEAD_BYTES + _META.size
    page_bytes, *_, root = _TREE.unpack_from(pages, at)
    last, transaction = _LAST.unpack_from(pages, at + 2 * _TREE.size)
    if not flags & _META_PAGE or (magic, version, page_bytes) != (_MAGIC, _VERSION, PAGE_BYTES):
        raise ValueError("no meta page")
    return _Meta(root, last + 1, transaction)


def _lists(pages: mmap.mmap, number: int, depth: int) -> Iterator[npt.NDArray[np.int64]]:
    """What the leaves below a page say."""
    at = number * PAGE_BYTES
    found, _, flags, lower, _ = _HEAD.unpack_from(pages, at)
    if found != number or depth > _MOST_DEPTH or not flags & (_BRANCH | _LEAF):
        raise ValueError("no page of a tree")
    for pointer in range(at + _HEAD_BYTES, at + lower, 2):
        node = at + int.from_bytes(pages[pointer : pointer + 2], "little")
        low, high, more, key_bytes = _NODE.unpack_from(pages, node)
        if flags & _BRANCH:
            yield from _lists(pages, low | high << 16 | more << 32, depth + 1)
            continue
        data = node + _NODE.size + key_bytes
        if more & _ELSEWHERE:
            data = int.from_bytes(pages[data : data + 8], "little") * PAGE_BYTES + _HEAD_BYTES
        count = int.from_bytes(pages[data : data + 8], "little")
        if 8 * (count + 1) > max(low | high << 16, 8) or data + 8 * (count + 1) > len(pages):
            raise ValueError("a list that is longer than its data")
        yield np.frombuffer(pages[data + 8 : data + 8 * (count + 1)], "<u8").astype(np.int64)


def _strange(path: Path) -> OSError:
    return OSError(errno.EIO, f"{path} is not laid out as LMDB does it")
