"""Copies and checksums on the host: many pages in one call, without the GIL.

With the compiled part (:mod:`tierstore.native`), each call releases the GIL once and computes checksums while
it copies. Large copies bypass the caches, so that the overwritten memory need not be read first. On a Xeon
(Emerald Rapids) with pages of 1 MiB, a copy is 1.5 to 1.7 times as fast as libc's memcpy, with or without a
checksum. Without the compiled part, each page is a separate call. A checksum is then a second pass over
memory, in pieces that are still in the second-level cache: 0.75 times as fast as memcpy.
"""

from __future__ import annotations

import array
import ctypes
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from tierstore import native

# Smaller copies go through the caches: their bytes may be used while they are still cached.
_PAST_CACHES_FROM = 1 << 20  # least bytes of one call
_PAST_CACHES_RUN = 1 << 10  # least bytes of one contiguous run
_PIECE_BYTES = 256 << 10


def copy_all(copies: Iterable[tuple[int, int]], nbytes: int, *, read_next: bool = False) -> None:
    """Copy ``nbytes`` for each (destination, source) pair of addresses. ``read_next`` says that this
    processor reads the copied bytes soon, so they should stay in the caches."""
    if native.LIBRARY is None:
        _copy_in_runs(copies, nbytes)
        return
    pairs, count = _pairs(copies)
    past_caches = not read_next and _goes_past(count, nbytes)
    native.LIBRARY.tierstore_copy(pairs.buffer_info()[0], count, nbytes, past_caches)


def copy_and_hash(copies: Iterable[tuple[int, int]], nbytes: int) -> list[int]:
    """Copy as :func:`copy_all` does, and return the XXH3-64 of each source as it was copied. If a source
    changes during its copy, the checksum does not match the copied bytes."""
    pairs, count = _pairs(copies)
    if native.LIBRARY is None or nbytes < native.LEAST_HASHED:
        return [_copy_and_hash_one(to, of, nbytes) for to, of in zip(pairs[::2], pairs[1::2], strict=True)]
    checksums = array.array("Q", bytes(8 * count))
    native.LIBRARY.tierstore_copy_and_hash(
        pairs.buffer_info()[0], count, nbytes, _goes_past(count, nbytes), checksums.buffer_info()[0]
    )
    return checksums.tolist()


Runs = Iterable[tuple[int, Sequence[int]]]
"""Pages that are contiguous in one place and divided into runs in another. Each item is the page's contiguous
address, and the addresses of its runs in order."""


def gather_and_hash(pages: Runs, sizes: Sequence[int]) -> list[int]:
    """Copy the runs of each page to the page's contiguous address. ``sizes`` are the bytes of a page's runs.
    Return the XXH3-64 of each page as it was copied."""
    if len(sizes) == 1:
        return copy_and_hash(((page, runs[0]) for page, runs in pages), sizes[0])
    pages = list(pages)
    nbytes = sum(sizes)
    if native.LIBRARY is None or nbytes < native.LEAST_HASHED:
        _each_run(pages, sizes, to_page=True)
        return hash_all([page for page, _ in pages], nbytes)
    flat = array.array("Q", itertools.chain.from_iterable((page, *runs) for page, runs in pages))
    lengths = array.array("Q", sizes)
    checksums = array.array("Q", bytes(8 * len(pages)))
    native.LIBRARY.tierstore_gather_and_hash(
        flat.buffer_info()[0],
        len(pages),
        lengths.buffer_info()[0],
        len(sizes),
        _goes_past(len(pages), nbytes),
        checksums.buffer_info()[0],
    )
    return checksums.tolist()


def scatter(pages: Runs, sizes: Sequence[int]) -> None:
    """Copy each page from its contiguous address to its runs."""
    _each_run(list(pages), sizes, to_page=False)


def _each_run(pages: Sequence[tuple[int, Sequence[int]]], sizes: Sequence[int], *, to_page: bool) -> None:
    """Copy between pages and their runs, with one call for all runs of the same size."""
    offsets = [0, *itertools.accumulate(sizes)]
    for size in dict.fromkeys(sizes):
        own = [(offsets[at], at) for at, nbytes in enumerate(sizes) if nbytes == size]
        pairs = ((page + offset, runs[at]) for page, runs in pages for offset, at in own)
        copy_all(pairs if to_page else ((run, place) for place, run in pairs), size, read_next=to_page)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of items, which a copy reads with one layout and writes with another. The strides of the
    destination (``to``) and of the source (``of``) are the distances in bytes between rows and between
    columns."""

    rows: int
    columns: int
    item_bytes: int
    to: tuple[int, int]
    of: tuple[int, int]


def copy_matrices(pairs: npt.NDArray[np.uint64], matrix: Matrix) -> None:
    """Copy one matrix for each row of ``pairs``, which has the addresses of the first items of destination
    and source. Large copies bypass the caches.

    If rows are contiguous on one side and columns on the other, the compiled part transposes squares of items
    in registers, for items of 2 and 4 bytes. docs/sharing.md has measurements.

    >>> source, target = np.arange(6, dtype=np.uint32).reshape(2, 3), np.zeros((3, 2), np.uint32)
    >>> pairs = np.array([[target.ctypes.data, source.ctypes.data]], np.uint64)
    >>> copy_matrices(pairs, Matrix(2, 3, 4, to=(4, 8), of=(12, 4)))
    >>> target.tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    pairs = np.ascontiguousarray(pairs, np.uint64)
    if native.LIBRARY is None:
        for to, of in pairs.tolist():
            _view(to, matrix, matrix.to)[...] = _view(of, matrix, matrix.of)
        return
    sizes = (matrix.rows, matrix.columns, matrix.item_bytes, *matrix.to, *matrix.of)
    shape = array.array("Q", sizes)
    past_caches = _goes_past(len(pairs), matrix.rows * matrix.columns * matrix.item_bytes)
    native.LIBRARY.tierstore_copy_matrices(pairs.ctypes.data, len(pairs), shape.buffer_info()[0], past_caches)


def _view(address: int, matrix: Matrix, strides: tuple[int, int]) -> npt.NDArray[np.void]:
    """Return the matrix at ``address`` as an array of items."""
    extent = (matrix.rows - 1) * strides[0] + (matrix.columns - 1) * strides[1] + matrix.item_bytes
    memory = memoryview((ctypes.c_char * extent).from_address(address)).cast("B")
    found: npt.NDArray[np.void] = np.ndarray(
        (matrix.rows, matrix.columns), f"V{matrix.item_bytes}", buffer=memory, strides=strides
    )
    return found


def hash_all(addresses: Sequence[int], nbytes: int) -> list[int]:
    """Return the XXH3-64 of ``nbytes`` at each address."""
    return copy_and_hash(((_NOWHERE, address) for address in addresses), nbytes)


_NOWHERE = 0  # the destination if nothing is copied and only the checksum is computed


def _pairs(copies: Iterable[tuple[int, int]]) -> tuple[array.array[int], int]:
    pairs = array.array("Q", itertools.chain.from_iterable(copies))
    return pairs, len(pairs) // 2


def _goes_past(count: int, nbytes: int) -> bool:
    return nbytes >= _PAST_CACHES_RUN and count * nbytes >= _PAST_CACHES_FROM


# -- without the compiled part ---------------------------------------------------------------------------


def _copy_in_runs(copies: Iterable[tuple[int, int]], nbytes: int) -> None:
    """Copy, and join pairs that are adjacent on both sides into one copy. Each copy releases the GIL, which
    costs more than copying a small page if several threads are busy."""
    to, of, length = 0, 0, 0
    for destination, source in copies:
        if destination == to + length and source == of + length and length:
            length += nbytes
            continue
        if length:
            ctypes.memmove(to, of, length)
        to, of, length = destination, source, nbytes
    if length:
        ctypes.memmove(to, of, length)


def _copy_and_hash_one(to: int, of: int, nbytes: int) -> int:
    digest = xxhash.xxh3_64()
    for start in range(0, nbytes, _PIECE_BYTES):
        length = min(_PIECE_BYTES, nbytes - start)
        if to != _NOWHERE:
            ctypes.memmove(to + start, of + start, length)
        digest.update((ctypes.c_char * length).from_address(of + start))
    return int(digest.intdigest())
