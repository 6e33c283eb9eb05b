"""Weights that stay in their file. A layer's weights are read while the layer before it is computed, and
dropped afterwards.

The file is mapped, and products read the mapped bytes as they are stored (:class:`PackedMatrix
<tierstore_engine.quantised.PackedMatrix>`). While a layer is computed, a thread reads the next one into the
page cache, and the layer before leaves memory and page cache. After the last layer comes the head, and then
the first layer of the next step. At most three layers therefore take memory at the same time. A step takes at
least the time in which the disk reads all weights, for any number of sequences. FlexGen (arXiv:2303.06865,
section 4.1) orders its work in this way: many sequences share the reading of each layer.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from tierstore.units import MIB

_MERGED_BYTES = 1 * MIB  # a gap between two tensors that is smaller is read, too
_PAGE = mmap.PAGESIZE


class MappedFile:
    """A file in this process's addresses. Its bytes are read when they are used. They must not be written."""

    def __init__(self, file: Path) -> None:
        """Raises :class:`OSError` or :class:`ValueError` for a file that cannot be mapped."""
        self.path = file
        self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self.data = mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)  # torch accepts no read-only memory
        self.bytes = torch.frombuffer(self.data, dtype=torch.uint8)
        self._address = self.bytes.data_ptr()

    def place(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return where in the file the tensor's bytes begin and end. Return None if the bytes are not in this
        file.

        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "weights"
        >>> _ = file.write_bytes(bytes(range(8)))
        >>> mapped = MappedFile(file)
        >>> mapped.place(mapped.bytes[2:6]), mapped.place(mapped.bytes.clone())
        ((2, 6), None)
        """
        start = tensor.data_ptr() - self._address
        stop = start + tensor.nbytes
        return (start, stop) if 0 <= start <= stop <= len(self.data) else None

    def read_ahead(self, start: int, stop: int) -> None:
        """Start to read these bytes. The disk reads them meanwhile."""
        os.posix_fadvise(self._fd, start, stop - start, os.POSIX_FADV_WILLNEED)

    def drop(self, start: int, stop: int) -> None:
        """Free the memory of those pages that these bytes fill completely. The bytes are read again when they
        are used."""
        first, end = -(-start // _PAGE) * _PAGE, stop // _PAGE * _PAGE
        if first < end:
            self.data.madvise(mmap.MADV_DONTNEED, first, end - first)
            os.posix_fadvise(self._fd, first, end - first, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class _Range:
    file: MappedFile
    start: int
    stop: int


class WeightStream:
    """The weights of each layer in mapped files; the head is the last one. Used by one thread."""

    def __init__(self, layers: Sequence[Iterable[torch.Tensor]], files: Sequence[MappedFile]) -> None:
        """``layers`` has the tensors of each layer. Raises :class:`ValueError` for a tensor that is in none
        of the files."""
        self._layers = [_ranges(tensors, files) for tensors in layers]
        self.files = files
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="tierstore-weights")
        self._reading: Future[None] | None = None
        self._last: int | None = None  # the layer that was computed last; None before the first

    def begin(self, layer: int) -> None:
        """Record that the computation of a layer begins: read the next one, and drop the one before."""
        if self._last is not None and self._last != layer:
            for each in self._layers[self._last]:
                each.file.drop(each.start, each.stop)
        self._last = layer
        self._reading = self._reader.submit(self._read, (layer + 1) % len(self._layers))

    def release(self) -> None:
        """Drop all layers."""
        for each in self.files:
            each.drop(0, len(each.data))

    def _read(self, layer: int) -> None:
        for each in self._layers[layer]:
            each.file.read_ahead(each.start, each.stop)


def _ranges(tensors: Iterable[torch.Tensor], files: Sequence[MappedFile]) -> list[_Range]:
    """Return the ranges of these tensors, in order. Neighbours are one range."""
    found: list[_Range] = []
    for tensor in tensors:
        places = [_Range(file, *place) for file in files if (place := file.place(tensor)) is not None]
        if not places:
            raise ValueError(f"a tensor of {list(tensor.shape)} is in no file")
        found += places[:1]
    found.sort(key=lambda each: (str(each.file.path), each.start))
    merged: list[_Range] = []
    for each in found:
        last = merged[-1] if merged else None
        if last is not None and last.file is each.file and each.start <= last.stop + _MERGED_BYTES:
            merged[-1] = _Range(last.file, last.start, max(last.stop, each.stop))
        else:
            merged.append(each)
    return merged
