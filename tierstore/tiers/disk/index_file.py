"""Check an index file without LMDB, to find out whether LMDB can open it safely.

LMDB maps its file and does not check it. Two swapped pages end the process through an assertion in C. A free
list that names a page in use makes a later transaction overwrite that page. So :meth:`IndexFile.check` reads
every page that LMDB would follow, before LMDB opens the file. Each page must have the number and kind that
its parent expects, and its entries must fill it without gaps or overlaps. All leaves of a tree must have the
same depth, and together as many entries as the head of the tree says. No page may have two owners, or be both
free and in use. The check ignores the contents of entries, because records have checksums.

The check reads with ``pread``, so that a failing disk raises an error instead of a signal. The check
processes the leaves in file order, a thousand at a time, with numpy: 0.2 s of processor time for a million
records (0.54 GB), plus the time of the disk. Overflow pages, often most of the file, hold only payload. A
damaged overflow page harms no reader, only the transaction that removes it. So
:meth:`IndexFile.check_payloads` reads the overflow pages while the first lookups already run, and the store
removes no page before that check has succeeded.

The layout of the file is that of LMDB 0.9 on 64-bit machines (``mdb.c``). The check does not find damage that
occurs while the index is open: LMDB may still end the process when it reads such a page for the first time.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np
import numpy.typing as npt

from tierstore.errors import StoreUnavailableError
from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.records import FORMAT_KEY, META, TREES

_PAGE_SIZES = (4096, 8192, 16384, 32768)  # LMDB uses the kernel's page size, up to the last of these
_PAGE_SIZE_AT = 40  # offset in the first page
_BATCH_PAGES = 1024
_HEAD_BYTES = 16  # a page's head: number (8 bytes), padding, flags, end of node pointers, start of nodes
_NODE_BYTES = 8  # a node's head: length of the data (4 bytes) or the child's number, flags, length of the key
_LMDB = (0, 9)
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_MAGIC_AT = 16  # offset in the first page
_OTHER_VERSIONS = (2, 999)  # data versions of LMDB 1.0 and of its development versions
_META = struct.Struct("<16x II QQ 48s 48s QQ")  # magic, version, address, map size, two trees, last page, txn
_TREE = struct.Struct("<I HH QQQ QQ")  # page size, flags, depth, branches, leaves, overflow, entries, root
_NO_ROOT = (1 << 64) - 1
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 0x01, 0x02, 0x04, 0x08
# flags of a node: its data is in overflow pages; its data is the head of a tree
_ELSEWHERE, _IS_TREE = 0x01, 0x02
# flags of the tree of free pages: it has integer keys; the file was opened with subdir=False
_FREE_FLAGS, _NO_SUBDIR = 0x08, 0x4000
_MOST_DEPTH = 30
_MOST_KEY_BYTES = 511
_MOST_MAP_BYTES = 1 << 46

_Numbers = npt.NDArray[np.int64]


class DamagedIndexError(StoreUnavailableError):
    """An index that must not be opened."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path} is damaged or not an index of tierstore ({why}): "
            f"`tierstore fsck --repair {path.parent}` sets it aside and starts an empty one; "
            "or remove the directory to start afresh, or give another one"
        )
        self.why = why


def stored_format(path: Path) -> int | None:
    """Return the format of the index at ``path``; None if the file is missing or has no entries yet.

    Raise :class:`~tierstore.errors.StoreUnavailableError` if the file is no index or is damaged, or if the
    library or the file is of another version of LMDB.
    """
    _require_lmdb(path)
    if not path.exists() or path.stat().st_size == 0:
        return None
    value = IndexFile(path).get_format()
    if value is not None and not value.isdigit():
        raise StoreUnavailableError(f"{path} was not written by tierstore: give another directory")
    return int(value) if value is not None else None


def check_index(path: Path) -> IndexFile:
    """Run :meth:`IndexFile.check` on the index at ``path``, and return the file, for
    :meth:`IndexFile.check_payloads`."""
    index = IndexFile(path)
    index.check()
    return index


def _require_lmdb(path: Path) -> None:
    """Raise :class:`StoreUnavailableError` if the LMDB library or the file has a version with another page
    format."""
    found = ".".join(map(str, lmdb.version()))
    if lmdb.version()[:2] != _LMDB:
        raise StoreUnavailableError(
            f"the package lmdb {lmdb.__version__} comes with LMDB {found}, but tierstore reads only files of "
            f"LMDB 0.9: install lmdb 3.0.0; {path} was not changed"
        )
    if not path.exists():
        return
    with open(path, "rb") as file:
        head = file.read(64)
    at = head.find(_MAGIC.to_bytes(4, "little"))
    version = int.from_bytes(head[at + 4 : at + 8], "little")
    if at >= 0 and (at != _MAGIC_AT or version in _OTHER_VERSIONS):
        raise StoreUnavailableError(
            f"{path} was written by another version of LMDB (data version {version}; this tierstore reads "
            f"{_VERSION}): open it with the tierstore that wrote it, or give another directory"
        )


class _Damage(Exception):
    """The reason why a file is damaged, without its name."""


class _Tree(NamedTuple):
    flags: int
    depth: int
    branches: int
    leaves: int
    overflow_pages: int
    entries: int
    root: int

    @classmethod
    def decode(cls, data: bytes) -> _Tree:
        return cls(*_TREE.unpack(data)[1:])


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of several pages, one array element per node."""

    data: npt.NDArray[np.uint8]  # the bytes of all these pages
    page: _Numbers  # each node's page, as an index into the requested pages
    start: _Numbers  # where the node begins in ``data``
    key_bytes: _Numbers
    flags: _Numbers
    low: _Numbers  # length of the node's data or, in a branch, the low 32 bits of the child's page number

    def key(self, node: int) -> bytes:
        start = int(self.start[node]) + _NODE_BYTES
        return self.data[start : start + int(self.key_bytes[node])].tobytes()

    def value(self, node: int) -> bytes:
        """Return the data of a node whose data is not in overflow pages."""
        start = int(self.start[node] + _NODE_BYTES + self.key_bytes[node])
        return self.data[start : start + int(self.low[node])].tobytes()

    def numbers(self, nodes: npt.NDArray[np.intp]) -> _Numbers:
        """Return the first 8 bytes of the data of these nodes, as numbers."""
        at = self.start[nodes] + _NODE_BYTES + self.key_bytes[nodes]
        return np.asarray(_words(self.data)[at], np.int64)


class IndexFile:
    """The last durable state of an index that has no writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._page_bytes = 0
        self._file_pages = 0
        self._last = 1  # number of the last page that may be in use
        self._transaction = 0
        self._used: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._free = np.zeros(0, np.int64)  # free pages, in order
        self._payloads: list[tuple[_Numbers, _Numbers]] = []  # overflow pages of the trees: (first, count)

    def get_format(self) -> bytes | None:
        """Return the format in the tree ``meta``; None for an index without entries. Raise
        :class:`DamagedIndexError`, and :class:`OSError` for a file that cannot be read."""
        with self._open():
            trees = self._trees(self._meta()[1])
            if not any(tree.entries for tree in trees.values()):
                return None
            tree = trees.get(META)
            if tree is not None and tree.root != _NO_ROOT:
                # ``meta`` has few keys, so its root is its only leaf.
                nodes = next(self._nodes(_as_numbers(tree.root), _LEAF))
                for node in range(len(nodes.start)):
                    if nodes.key(node) == FORMAT_KEY:
                        return nodes.value(node)
            raise _Damage("it has entries, but no entry for their format")

    def check(self) -> None:
        """Check everything that LMDB follows, except the payloads. Raise :class:`DamagedIndexError`, and
        :class:`OSError` for a file that cannot be read."""
        with self._open():
            self._check()

    def check_payloads(self) -> None:
        """Check the overflow pages of all trees, which :meth:`check` skips. Raise :class:`DamagedIndexError`,
        and :class:`OSError` for a file that cannot be read."""
        firsts = np.concatenate([np.zeros(0, np.int64), *(first for first, _ in self._payloads)])
        counts = np.concatenate([np.zeros(0, np.int64), *(count for _, count in self._payloads)])
        self._payloads.clear()
        order = np.argsort(firsts)
        with self._open():
            self._check_overflow(firsts[order], counts[order])

    def give_back_free_pages(self, io: FileIO) -> None:
        """Return the disk blocks of free LMDB pages to the file system. LMDB writes such a page before it
        reads it.

        No other code may write to the index meanwhile. After a crash, LMDB may return to the state before the
        last commit: so commit once more after the transaction that freed the pages. Raise
        :class:`DamagedIndexError`, and :class:`OSError` if the disk fails or the file system cannot free a
        part of a file.
        """
        with self._open():
            self._check()
        borders = np.flatnonzero(np.diff(self._free) != 1) + 1
        fd = io.open(self.path, os.O_RDWR)
        try:
            for run in np.split(self._free, borders) if len(self._free) else ():
                io.free(fd, int(run[0]) * self._page_bytes, len(run) * self._page_bytes)
            io.sync(fd)
        finally:
            io.close(fd)

    @contextmanager
    def _open(self) -> Iterator[None]:
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._page_bytes = int.from_bytes(os.pread(self._fd, 4, _PAGE_SIZE_AT), "little")
            if self._page_bytes not in _PAGE_SIZES:
                raise _Damage("its first pages are not LMDB's")
            self._file_pages = os.fstat(self._fd).st_size // self._page_bytes
            yield
        except _Damage as damage:
            raise DamagedIndexError(self.path, str(damage)) from None
        finally:
            os.close(self._fd)

    # -- the walk ------------------------------------------------------------------------------------

    def _check(self) -> None:
        free, main, self._last = self._meta()
        self._used = np.zeros(min(self._last + 1, self._file_pages), np.bool_)
        trees = self._trees(main)
        if set(trees) not in (set(), set(TREES)):
            raise _Damage("it does not have the expected trees")
        if free.flags & ~_NO_SUBDIR != _FREE_FLAGS or any(tree.flags for tree in (main, *trees.values())):
            raise _Damage("its trees have flags that tierstore does not use")
        known = {b"the directory of trees": main, **trees}
        leaves = [self._walk(name, tree) for name, tree in known.items()]
        self._check_leaves(known, leaves)
        self._check_free(free)

    def _meta(self) -> tuple[_Tree, _Tree, int]:
        """Return the tree of free pages, the tree of trees, and the number of the last page in use. All three
        are read from the newer one of the two meta pages, as LMDB does."""
        pages = self._read(np.array([0, 1])).tobytes() if self._file_pages >= 2 else b""
        if not pages:
            raise _Damage("truncated")
        best = (-1, b"", b"", 0)
        for start in (0, self._page_bytes):
            magic, version, _, map_bytes, free, main, last, transaction = _META.unpack_from(pages, start)
            flags = int.from_bytes(pages[start + 10 : start + 12], "little")
            right = (magic, version, flags) == (_MAGIC, _VERSION, _META_PAGE)
            if not right or int.from_bytes(free[:4], "little") != self._page_bytes:
                raise _Damage("its first pages are not LMDB's")
            if not (last + 1) * self._page_bytes <= map_bytes <= _MOST_MAP_BYTES:
                raise _Damage(f"its page {start // self._page_bytes} names an impossible size")
            best = max(best, (transaction, free, main, last))
        self._transaction, free, main, last = best
        return _Tree.decode(free), _Tree.decode(main), last

    def _trees(self, main: _Tree) -> dict[bytes, _Tree]:
        """Return the named trees. The named trees are few, so the tree of trees has a single leaf."""
        if main.depth == 0 and main.root == _NO_ROOT:
            return {}
        if main.depth != 1:
            raise _Damage("its directory of trees is not a single page")
        nodes = next(self._nodes(_as_numbers(main.root), _LEAF))
        if not bool(((nodes.flags == _IS_TREE) & (nodes.low == _TREE.size)).all()):
            raise _Damage("its directory names an entry that is not a tree")
        return {nodes.key(node): _Tree.decode(nodes.value(node)) for node in range(len(nodes.start))}

    def _walk(self, name: bytes, tree: _Tree) -> _Numbers:
        """Follow the branches of a tree, and return the numbers of its leaves."""
        if tree.depth == 0 and tree.root == _NO_ROOT and not tree.entries:
            return np.zeros(0, np.int64)
        if not 0 < tree.depth <= _MOST_DEPTH:
            raise _Damage(
                f"its tree {name.decode()!r} has {tree.depth} levels, and the most is {_MOST_DEPTH}"
            )
        level = _as_numbers(tree.root)
        branches = 0
        for _ in range(tree.depth - 1):
            branches += len(level)
            children = [
                nodes.low | nodes.flags << np.int64(32) for nodes in self._nodes(self._take(level), _BRANCH)
            ]
            level = np.concatenate(children)
        if (branches, len(level)) != (tree.branches, tree.leaves):
            raise _Damage(f"its tree {name.decode()!r} has too few or too many pages")
        return self._take(level)

    def _check_leaves(self, trees: dict[bytes, _Tree], leaves: list[_Numbers]) -> None:
        """Check the leaves of all trees in the order of the file."""
        numbers = np.concatenate(leaves)
        owner = np.repeat(np.arange(len(leaves)), [len(each) for each in leaves])
        order = np.argsort(numbers)
        numbers, owner = numbers[order], owner[order]
        entries = np.zeros(len(leaves), np.int64)
        done = 0
        for nodes in self._nodes(numbers, _LEAF):
            of = owner[done + nodes.page]
            done += int(nodes.page[-1]) + 1
            entries += np.bincount(of, minlength=len(leaves))
            if bool((nodes.flags > np.where(of == 0, _IS_TREE, _ELSEWHERE)).any()):  # 0: the directory
                raise _Damage("an entry has flags that tierstore does not use")
            elsewhere = np.flatnonzero(nodes.flags == _ELSEWHERE)
            if len(elsewhere):
                self._payloads.append(self._overflow(nodes, elsewhere))
        for (name, tree), found in zip(trees.items(), entries.tolist(), strict=True):
            if found != tree.entries:
                raise _Damage(f"its tree {name.decode()!r} has {found} entries, not {tree.entries}")

    def _overflow(self, nodes: _Nodes, chosen: npt.NDArray[np.intp]) -> tuple[_Numbers, _Numbers]:
        """Return the numbers of the first overflow page of each chosen node, and how many it has."""
        first = nodes.numbers(chosen)
        count = (nodes.low[chosen] + _HEAD_BYTES + self._page_bytes - 1) // self._page_bytes
        self._take(first[count == 1])
        for start, pages in zip(first[count > 1].tolist(), count[count > 1].tolist(), strict=True):
            if start + pages > self._file_pages:
                raise _Damage("truncated")
            self._take(np.arange(start, start + pages))
        return first, count

    def _check_free(self, free: _Tree) -> None:
        """Check that no free page is in use or listed twice."""
        lists = [np.zeros(0, np.int64)]
        for nodes in self._nodes(self._walk(b"free", free), _LEAF):
            for node in range(len(nodes.start)):
                lists.append(self._free_list(nodes, node))
        if len(lists) - 1 != free.entries:
            raise _Damage(f"its list of free pages has {len(lists) - 1} entries, not {free.entries}")
        if free.entries:
            self._check_free_keys(free.root, free.depth, 1, self._transaction + 1)
        numbers = np.concatenate(lists)
        # LMDB does not write a page that one transaction has taken and freed. So such a page may be behind
        # the end of the file.
        behind = np.sort(numbers[numbers >= self._file_pages])
        if len(behind) and (behind[-1] > self._last or bool((np.diff(behind) == 0).any())):
            raise _Damage("its list of free pages is invalid")
        self._free = self._take(numbers[numbers < self._file_pages])

    def _check_free_keys(self, root: int, depth: int, least: int, end: int) -> None:
        """Check that the keys below ``root`` ascend, from ``least`` to less than ``end``.

        A key is the number of the transaction that freed the pages in the list. LMDB reads the lists in the
        order of the tree, removes them in the order of the keys, and ends the process if these orders differ.
        """
        nodes = next(self._nodes(_as_numbers(root), _BRANCH if depth > 1 else _LEAF))
        keys = [int.from_bytes(nodes.key(node), "little") for node in range(len(nodes.start))]
        if depth > 1:
            keys[0] = least  # LMDB never reads the first key of a branch
        right = keys[0] >= least and bool((nodes.key_bytes[int(depth > 1) :] == 8).all())
        if not right or any(one >= other for one, other in itertools.pairwise([*keys, end])):
            raise _Damage("its list of free pages is out of order")
        if depth > 1:
            children = (nodes.low | nodes.flags << np.int64(32)).tolist()
            for child, first, after in zip(children, keys, [*keys[1:], end], strict=True):
                self._check_free_keys(child, depth - 1, first, after)

    def _free_list(self, nodes: _Nodes, node: int) -> _Numbers:
        data = nodes.value(node)
        if nodes.flags[node] & _ELSEWHERE:
            first, count = self._overflow(nodes, np.array([node]))
            self._check_overflow(first, count)
            pages = self._read(np.arange(int(first[0]), int(first[0] + count[0])))
            data = pages.tobytes()[_HEAD_BYTES : _HEAD_BYTES + int(nodes.low[node])]
        numbers = np.frombuffer(data[: len(data) // 8 * 8], "<u8").astype(np.int64)
        if nodes.key_bytes[node] != 8 or not len(numbers) or not 0 <= numbers[0] < len(numbers):
            raise _Damage("its list of free pages is invalid")
        numbers = numbers[1 : 1 + int(numbers[0])]
        if bool((np.diff(numbers) >= 0).any()):  # LMDB merges these lists, and expects descending numbers
            raise _Damage("its list of free pages is out of order")
        return numbers

    # -- pages ---------------------------------------------------------------------------------------

    def _take(self, numbers: _Numbers) -> _Numbers:
        """Mark these pages as used. Return their numbers in ascending order."""
        numbers = np.sort(numbers)
        if not len(numbers):
            return numbers
        if numbers[0] < 2 or numbers[-1] > self._last:
            raise _Damage("it refers to a page beyond its end")
        if numbers[-1] >= self._file_pages:
            raise _Damage("truncated")
        if bool((np.diff(numbers) == 0).any()) or bool(self._used[numbers].any()):
            raise _Damage("one of its pages is used twice")
        self._used[numbers] = True
        return numbers

    def _nodes(self, numbers: _Numbers, kind: int) -> Iterator[_Nodes]:
        """Check these pages and yield their nodes, for one batch of pages at a time."""
        for start in range(0, len(numbers), _BATCH_PAGES):
            batch = numbers[start : start + _BATCH_PAGES]
            yield _nodes_of(batch, self._read(batch), kind)

    def _check_overflow(self, first: _Numbers, count: _Numbers) -> None:
        for start in range(0, len(first), _BATCH_PAGES):
            batch, counts = first[start : start + _BATCH_PAGES], count[start : start + _BATCH_PAGES]
            data = self._read(batch)
            flags = data.view("<u2")[:, 5]
            right = (data.view("<u8")[:, 0] == batch) & (flags == _OVERFLOW)
            right &= data.view("<u4")[:, 3] == counts
            _require(right, batch)

    def _read(self, numbers: _Numbers) -> npt.NDArray[np.uint8]:
        """Read these pages, with one call for each run of adjacent pages."""
        if int(numbers.max()) >= self._file_pages or int(numbers.min()) < 0:
            raise _Damage("truncated")
        pages = np.empty((len(numbers), self._page_bytes), np.uint8)
        view = memoryview(pages).cast("B")  # type: ignore[arg-type]  # an array is a buffer
        borders = np.flatnonzero(np.diff(numbers) != 1) + 1
        for start, stop in zip([0, *borders.tolist()], [*borders.tolist(), len(numbers)], strict=True):
            part = view[start * self._page_bytes : stop * self._page_bytes]
            if os.preadv(self._fd, [part], int(numbers[start]) * self._page_bytes) != len(part):
                raise _Damage("truncated")
        return pages


def _nodes_of(numbers: _Numbers, pages: npt.NDArray[np.uint8], kind: int) -> _Nodes:
    """Check that pages have these numbers and this kind, and that their nodes fill them without gaps or
    overlaps. Return the nodes."""
    page_bytes = pages.shape[1]
    halves = pages.view("<u2")
    lower, upper = (halves[:, column].astype(np.int64) for column in (6, 7))
    least = _HEAD_BYTES + (4 if kind == _BRANCH else 2)
    right = (pages.view("<u8")[:, 0] == numbers.astype(np.uint64)) & (halves[:, 5] == kind)
    right &= (least <= lower) & (lower <= upper) & (upper <= page_bytes) & (lower % 2 == 0)
    _require(right, numbers)
    counts = (lower - _HEAD_BYTES) // 2
    ends = np.cumsum(counts)
    page = np.repeat(np.arange(len(numbers)), counts)
    slot = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
    pointer = halves[page, _HEAD_BYTES // 2 + slot].astype(np.int64)
    inside = (pointer >= upper[page]) & (pointer <= page_bytes - _NODE_BYTES) & (pointer % 2 == 0)
    _require(inside, numbers[page])
    data = pages.reshape(-1)
    start = page * page_bytes + pointer
    heads = _words(data)[start]
    low = (heads & np.uint64(0xFFFFFFFF)).astype(np.int64)
    flags = (heads >> np.uint64(32) & np.uint64(0xFFFF)).astype(np.int64)
    key_bytes = (heads >> np.uint64(48)).astype(np.int64)
    sizes = _NODE_BYTES + key_bytes
    if kind == _LEAF:
        sizes += np.where(flags & _ELSEWHERE, 8, low)
    sizes += sizes % 2
    _require((key_bytes <= _MOST_KEY_BYTES) & (pointer + sizes <= page_bytes), numbers[page])
    _require(np.add.reduceat(sizes, ends - counts) == page_bytes - upper, numbers)
    # No two pointers may lead to one node, and a node must end where the next node begins or the page ends.
    # LMDB deletes a node by moving the bytes before it, so a node with two pointers would corrupt others.
    begins = np.zeros(len(data) // 2 + 1, np.bool_)
    begins[start // 2] = True
    _require(begins[(np.arange(len(numbers)) * page_bytes + upper) // 2], numbers)
    if np.count_nonzero(begins) != len(start):
        raise _Damage("an entry of one of its pages is listed twice")
    begins[np.arange(page_bytes, len(data) + 1, page_bytes) // 2] = True
    _require(begins[(start + sizes) // 2], numbers[page])
    return _Nodes(data, page, start, key_bytes, flags, low)


def _as_numbers(number: int) -> _Numbers:
    """Return a page's number as an array. A number of 2⁶³ or more becomes negative, and is rejected later."""
    return np.array([number], np.uint64).astype(np.int64)


def _words(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return for each byte of ``data`` the little-endian number in the 8 bytes that begin there."""
    words: npt.NDArray[np.uint64] = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    return words


def _require(right: npt.NDArray[np.bool_], numbers: _Numbers) -> None:
    if not bool(right.all()):
        raise _Damage(f"its page {int(numbers[np.argmin(right)])} has wrong contents")
