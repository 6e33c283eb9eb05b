"""The metadata at the beginning of a GGUF file, as far as it is needed here."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from tierstore.errors import UsageError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST = 1 << 26  # the longest text or array that is read from a damaged file
# The sizes of GGUF's types of numbers, by their number. Texts are 8, arrays 9.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_WHOLE = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_TEXT, _ARRAY = 8, 9


def window_of(model: Path) -> int:
    """Return the length of a model's sliding window in tokens, 0 if the file names none. Raises
    :class:`UsageError` for a file that is not GGUF."""
    try:
        with model.open("rb") as file:
            return _window(file)
    except (OSError, struct.error, UnicodeDecodeError) as error:
        raise UsageError(f"{model} cannot be read as GGUF: {error}") from error


def _window(file: BinaryIO) -> int:
    magic, version = file.read(4), _number(file, "<I")
    if magic != _MAGIC or version not in _VERSIONS:
        raise UsageError(f"{file.name} is not a GGUF file of a known version: {magic!r} {version}")
    _number(file, "<Q")  # of tensors
    for _ in range(_number(file, "<Q")):
        name, kind = _text(file), _number(file, "<I")
        if name.endswith(".attention.sliding_window") and kind in _WHOLE:
            return _number(file, _WHOLE[kind])
        _skip(file, kind)
    return 0


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _TEXT:
        _text(file)
    elif kind == _ARRAY:
        inner, count = _number(file, "<I"), _number(file, "<Q")
        if inner in _SIZES and count <= _MOST:
            file.seek(_SIZES[inner] * count, 1)
        elif inner == _TEXT and count <= _MOST:
            for _ in range(count):
                _text(file)
        else:
            raise UsageError(f"{file.name} has an array of unknown type {inner}")
    elif kind in _SIZES:
        file.seek(_SIZES[kind], 1)
    else:
        raise UsageError(f"{file.name} has a value of unknown type {kind}")


def _text(file: BinaryIO) -> str:
    length = _number(file, "<Q")
    if length > _MOST:
        raise UsageError(f"{file.name} has a text of {length} bytes")
    return file.read(length).decode(errors="replace")


def _number(file: BinaryIO, kind: str) -> int:
    return int(struct.unpack(kind, file.read(struct.calcsize(kind)))[0])
