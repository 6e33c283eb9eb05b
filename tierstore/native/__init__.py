"""The compiled parts ``pages.c``, ``codec.c`` and ``decode.c``, built if there was a C compiler when
tierstore was installed.

They are optional. Without the first, :data:`LIBRARY` is None, and :mod:`tierstore.copying` uses Python's
libraries instead, which is slower. The same holds for :data:`CODEC` and :mod:`tierstore.codec`, and for
:data:`DECODE` and the bundled engine's decode steps on the CPU.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("_pages.so")
CODEC_FILE = Path(__file__).with_name("_codec.so")
DECODE_FILE = Path(__file__).with_name("_decode.so")
# The number INTERFACE in the C sources. A built file with another number is of another version and is not
# used.
_INTERFACE = 5
_CODEC_INTERFACE = 1
_DECODE_INTERFACE = 7
_P, _N, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
DECODE_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2}
"""The numbers of decode.c's formats, by the names of dtypes."""
TABLE_FORMATS = {**DECODE_FORMATS, "float16": 3, "uint8": 4, "int16": 5}
"""The numbers of decode.c's formats of the scales and zeros of quantised weights."""
PACKED_FORMATS = {
    name: number
    for number, names in enumerate(
        (
            *(("F32", "float32"), ("BF16", "bfloat16"), ("F16", "float16"), ("Q4_0",), ("Q4_1",)),
            *(("Q5_0",), ("Q5_1",), ("Q8_0",), ("Q4_K",), ("Q5_K",), ("Q6_K",)),
            *(("fp8_e4m3",), ("fp8_e5m2",), ("int8",), ("uint8",), ("uint4",), ("mxfp4",)),
        )
    )
    for name in names
}
"""The numbers of decode.c's formats of quantised weights, by the names in the engine's weight_formats.py."""
CODED = 6
"""The number of decode.c's format for KV whose codes are named for each plane (``KV_CODES``)."""
KV_CODES = {
    **{name: PACKED_FORMATS[name] for name in ("fp8_e4m3", "fp8_e5m2", "int8")},
    "int4": PACKED_FORMATS["uint4"],
}
"""The numbers of decode.c's codes of KV, by the names in the engine's kv_format.py."""


class Packed(ctypes.Structure):
    """``struct packed`` of decode.c: a matrix of quantised weights."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("columns", ctypes.c_uint64),
        ("row_bytes", ctypes.c_uint64),
        ("table_width", ctypes.c_uint64),
        ("group", ctypes.c_uint64),
        ("block_rows", ctypes.c_uint64),
        ("format", ctypes.c_int32),
        ("scale_format", ctypes.c_int32),
        ("zero_format", ctypes.c_int32),
        ("zero", ctypes.c_float),
    )


def load(file: Path) -> ctypes.CDLL | None:
    """Return ``pages.c`` as built in ``file``, or None if this version cannot use it."""
    library = _opened(file, "tierstore_interface", _INTERFACE)
    if library is None:
        return None
    _declare(library.tierstore_copy, None, _P, _N, _N, _I)
    _declare(library.tierstore_copy_matrices, None, _P, _N, _P, _I)
    _declare(library.tierstore_copy_and_hash, None, _P, _N, _N, _I, _P)
    _declare(library.tierstore_gather_and_hash, None, _P, _N, _P, _N, _I, _P)
    _declare(library.tierstore_chunk_keys, None, ctypes.c_char_p, ctypes.c_char_p, _N, _N, _P)
    return library


def load_codec(file: Path) -> ctypes.CDLL | None:
    """Return ``codec.c`` as built in ``file``, or None if this version cannot use it."""
    library = _opened(file, "tierstore_codec_interface", _CODEC_INTERFACE)
    if library is None:
        return None
    _declare(library.tierstore_encode, _N, _P, _N, _P, _N)
    _declare(library.tierstore_decode, _I, _P, _N, _P, _N)
    return library


def load_decode(file: Path) -> ctypes.CDLL | None:
    """Return ``decode.c`` as built in ``file``, or None if this version cannot use it."""
    library = _opened(file, "tierstore_decode_interface", _DECODE_INTERFACE)
    if library is None:
        return None
    _declare(library.tierstore_attend, None, _P, _P, _N, _P, _P, _P, _P, _I, _I)
    _declare(library.tierstore_multiply, None, _P, _N, _P, _N, _N, _I, _P, _I)
    _declare(library.tierstore_multiply_packed, None, _P, _P, _N, _N, _N, _P, _I, _I)
    _declare(library.tierstore_unpack, None, _P, _P, _N, _P, _I)
    _declare(library.tierstore_recur, None, _P, _P, _N, _I)
    _declare(library.tierstore_convolve, None, _P, _P, _N, _P, _N, _P, _N, _P, _I)
    return library


def _declare(function: Any, result: Any, *arguments: Any) -> None:
    function.restype, function.argtypes = result, arguments


def _opened(file: Path, name: str, interface: int) -> ctypes.CDLL | None:
    if sys.byteorder != "little":
        return None
    try:
        library = ctypes.CDLL(str(file))
        found = library[name]
    # there is no such file, or it was built for another machine, or it is not this library
    except (OSError, AttributeError):
        return None
    return library if found() == interface else None


LIBRARY = load(FILE)
CODEC = load_codec(CODEC_FILE)
DECODE = load_decode(DECODE_FILE)
LEAST_HASHED = 241  # bytes of the shortest input, because the library computes XXH3 of long inputs only
MOST_CHUNK = 4096  # bytes
