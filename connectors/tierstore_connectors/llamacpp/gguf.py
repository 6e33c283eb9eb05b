"""The beginning of a GGUF file: its metadata, read from front to back."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierstore.errors import UsageError

_VERSIONS = (2, 3)
_KINDS = "BbHhIif?saQqd"  # of metadata, as struct names them, but s is a string and a an array


class GGUFHeader:
    """The part of a file before the bytes of its ``tensors``. ``errors`` is what happens to texts that are
    not UTF-8, as in :meth:`bytes.decode`. ``lists`` reads lists of metadata, such as the vocabulary.

    Raises :class:`ValueError` for what is not GGUF's, and :class:`struct.error` at the end of the file. Call
    :meth:`fields` once, before the descriptions of the tensors are read with :meth:`number` and :meth:`text`.
    """

    def __init__(self, data: mmap.mmap, *, errors: str = "strict", lists: bool = False) -> None:
        self._data = data
        self._lists = lists
        self._errors = errors
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self.at = 4
        version = self.number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, and versions 2 and 3 are read")
        self.tensors, self._fields = self.number("Q"), self.number("Q")

    def fields(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of the metadata. Lists are None unless they are read."""
        for _ in range(self._fields):
            yield self.text(), self._value()

    def number(self, kind: str) -> Any:
        """Return the next number of this kind, as struct names it."""
        [value] = struct.unpack_from(f"<{kind}", self._data, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return value

    def text(self) -> str:
        return self._bytes(self.number("Q")).decode(errors=self._errors)

    def _value(self) -> Any:
        kind = self._kind()
        if kind == "a":
            return self._list()
        return self.text() if kind == "s" else self.number(kind)

    def _kind(self) -> str:
        kind = self.number("I")
        if kind >= len(_KINDS):
            raise ValueError(f"metadata has a value of the unknown kind {kind}")
        return _KINDS[kind]

    def _bytes(self, length: int) -> bytes:
        if self.at + length > len(self._data):
            raise ValueError("it ends within its metadata")
        self.at += length
        return self._data[self.at - length : self.at]

    def _list(self) -> list[Any] | None:
        kind, length = self._kind(), self.number("Q")
        if kind == "a":
            raise ValueError("metadata has a list of lists")
        if self._lists and kind == "s":
            return [self.text() for _ in range(length)]
        if self._lists:
            width = struct.calcsize(f"<{kind}")
            return [value for [value] in struct.iter_unpack(f"<{kind}", self._bytes(length * width))]
        if kind == "s":
            for _ in range(length):
                self._bytes(self.number("Q"))
        else:
            self._bytes(length * struct.calcsize(f"<{kind}"))
        return None


def window_of(model: Path) -> int:
    """Return the length of a model's sliding window in tokens, 0 if the file names none. Raises
    :class:`UsageError` for a file that is not GGUF."""
    try:
        with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for name, value in GGUFHeader(data, errors="replace").fields():
                if name.endswith(".attention.sliding_window") and type(value) is int:
                    return value
    except (OSError, OverflowError, ValueError, struct.error) as error:
        raise UsageError(f"{model} cannot be read as GGUF: {error}") from error
    return 0
