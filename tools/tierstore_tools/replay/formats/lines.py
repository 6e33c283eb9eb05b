"""Bytes of a trace, line by line, and what is said of those that make no sense."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tierstore.errors import UsageError

Progress = Callable[[float], None]  # the share that is done, 0 to 1

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding somebody else's bytes may end in: the last one where they are nested too deep."""

_MOST_UNREADABLE = 0.1
_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its end; ``number`` counts from 1."""

    number: int
    text: bytes


class Complaints:
    """What could not be read: how often, and the first time in words."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""
        self.read = 0  # requests that made sense

    def add(self, path: Path, line: int | None, what: object) -> None:
        """``line`` is None where the whole file is meant."""
        self.count += 1
        if not self.first:
            where = path.name if line is None else f"{path.name}:{line}"
            self.first = f"{where}: {what}"

    def check(self, path: Path, format_name: str) -> None:
        """Raises :class:`UsageError` when too little made sense to call this a trace of ``format_name``."""
        if self.count and self.count > _MOST_UNREADABLE * (self.count + self.read):
            raise UsageError(
                f"{path} does not read as a {format_name} trace: {self.count} of {self.count + self.read} "
                f"entries make no sense, first {self.first}"
            )
        if not self.read:
            raise UsageError(f"{path} has no requests")


def lines(path: Path, progress: Progress = lambda _: None) -> Iterator[Line]:
    """The lines of a file that are not blank, also of a gzipped one. Raises :class:`UsageError` when it
    cannot be read."""
    try:
        with path.open("rb") as file:
            size = max(1, os.fstat(file.fileno()).st_size)
            for number, text in enumerate(_unpacked(file), 1):
                if number % 256 == 1:
                    progress(min(1.0, file.tell() / size))
                stripped = (text.removeprefix(_BYTE_ORDER_MARK) if number == 1 else text).strip()
                if stripped:
                    yield Line(number, stripped)
    except (OSError, EOFError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def whole(path: Path) -> bytes:
    """All bytes of a file, unpacked. Raises :class:`UsageError` when it cannot be read."""
    try:
        with path.open("rb") as file:
            return _unpacked(file).read().removeprefix(_BYTE_ORDER_MARK)
    except (OSError, EOFError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def _unpacked(file: io.BufferedReader) -> io.BufferedIOBase:
    return gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == _GZIP else file
