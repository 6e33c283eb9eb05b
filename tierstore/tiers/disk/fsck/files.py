"""Check the files of a store directory: whether they belong to the store, and whether their sizes are
right."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore.memory import ALIGNMENT
from tierstore.tiers.disk.directory import StoreDirectory, extent_number
from tierstore.tiers.disk.fsck.findings import Category, Finding, Findings
from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.records import INLINE
from tierstore.units import format_size


@dataclass(slots=True)
class ExtentFileSet:
    """The existing extent files, by number."""

    directory: Path
    file_bytes: int
    found: dict[int, Path] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: StoreDirectory, file_bytes: int) -> ExtentFileSet:
        files = cls(directory.extents, file_bytes)
        if directory.extents.is_dir():
            for path in sorted(directory.extents.iterdir()):
                number = extent_number(path)
                if number is not None:
                    files.found[number] = path
        return files

    def nbytes(self, number: int) -> int | None:
        """Return the size of a file; None if it does not exist."""
        return self.found[number].stat().st_size if number in self.found else None

    def path(self, number: int) -> Path:
        return self.directory / f"{number:06d}"

    def needed(self, rows: npt.NDArray[np.void]) -> dict[int, int]:
        """Return the least size of each file, by number, with the pages in ``rows``. A file before another
        file with pages must have its full size."""
        outside = rows[rows["place"] != INLINE]
        if not len(outside):
            return {}
        end = int((outside["place"] + -(-outside["nbytes"] // ALIGNMENT) * ALIGNMENT).max())
        count = -(-end // self.file_bytes)
        if count > 1 << 20:  # a place that no store with files of this size can have
            return {}
        return {number: min(end - number * self.file_bytes, self.file_bytes) for number in range(count)}


def check_files(directory: StoreDirectory, findings: Findings) -> None:
    """Report foreign files, which a repair does not remove, and files of an interrupted rebuild."""
    for name in directory.foreign():
        why = "not a file of the store, but it takes space under its cap: move it away yourself"
        findings.add(Finding(Category.UNACCOUNTED, "file", why, name=name, mendable=False))
    for path in directory.leftovers():
        why = "left behind by an unfinished rebuild of the index"
        findings.add(Finding(Category.UNACCOUNTED, "leftover", why, name=path.name))


def check_capacity(taken_bytes: int, capacity_bytes: int, findings: Findings) -> None:
    """Report if all files together exceed the capacity. Only foreign files can cause that."""
    if taken_bytes > capacity_bytes:
        over = format_size(taken_bytes - capacity_bytes)
        why = (
            f"all files take {over} more than the cap of {format_size(capacity_bytes)}: remove foreign files"
        )
        findings.add(Finding(Category.UNACCOUNTED, "capacity", why, name="the directory", mendable=False))


def check_extent_files(files: ExtentFileSet, rows: npt.NDArray[np.void], findings: Findings) -> None:
    """Report extent files that are missing, too short for the pages in ``rows``, too long, or unreachable."""
    needed = files.needed(rows)
    for number, nbytes in needed.items():
        found = files.nbytes(number)
        name = f"extents/{number:06d}"
        if found is None:
            why = f"it is missing; pages need {format_size(nbytes)} of it"
            findings.add(Finding(Category.DAMAGED, "extent file", why, name=name))
        elif found < nbytes:
            why = f"it has {found} bytes, but its pages need {nbytes}"
            findings.add(Finding(Category.DAMAGED, "extent file", why, name=name))
    for path in files.found.values():
        size = path.stat().st_size
        if size > files.file_bytes:
            why = f"it is {size - files.file_bytes} bytes too long"
            findings.add(Finding(Category.UNACCOUNTED, "extent file", why, name=f"extents/{path.name}"))
    for path in beyond_a_gap(files, needed):
        why = "files before it are missing, and it has no pages"
        findings.add(Finding(Category.UNACCOUNTED, "extent file", why, name=f"extents/{path.name}"))


def mend_files(
    directory: StoreDirectory, files: ExtentFileSet, rows: npt.NDArray[np.void], io: FileIO
) -> None:
    """Extend or truncate extent files to the sizes that the pages in ``rows`` need, durably. Raise
    :class:`OSError` if the disk fails."""
    directory.remove_leftovers(io)
    needed = files.needed(rows)
    for path in beyond_a_gap(files, needed):
        io.unlink(path)
        del files.found[int(path.name)]
    for path in files.found.values():
        if path.stat().st_size > files.file_bytes:
            _resize(path, io, 0, files.file_bytes)
    for number, nbytes in needed.items():
        if (files.nbytes(number) or 0) < nbytes or number not in files.found:
            _resize(files.path(number), io, nbytes, nbytes)
    if files.directory.is_dir():
        io.sync_directory(files.directory)
    io.sync_directory(directory.path)


def beyond_a_gap(files: ExtentFileSet, needed: dict[int, int]) -> list[Path]:
    """Return files without pages that a store would not open, because a file before them is missing."""
    there = files.found.keys() | needed.keys()  # a repair creates missing files that pages need
    first_missing = next(number for number in range(len(there) + 1) if number not in there)
    return [path for number, path in files.found.items() if number > first_missing and number not in needed]


def _resize(path: Path, io: FileIO, least: int, most: int) -> None:
    fd = io.open(path, os.O_RDWR | os.O_CREAT)
    try:
        size = io.size(fd)
        if size < least:
            io.allocate(fd, size, least - size)
        elif size > most:
            io.truncate(fd, most)
        io.sync(fd)
    finally:
        io.close(fd)
