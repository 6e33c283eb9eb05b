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

FILE = Path(__file__).with_name("_pages.so")
CODEC_FILE = Path(__file__).with_name("_codec.so")
DECODE_FILE = Path(__file__).with_name("_decode.so")
# INTERFACE in the sources: a built file may be of another version.
_INTERFACE = 4
_CODEC_INTERFACE = 1
_DECODE_INTERFACE = 1


def load(file: Path) -> ctypes.CDLL | None:
    """Return ``pages.c`` as built in ``file``, or None if this version cannot use it."""
    library = _opened(file, "tierstore_interface", _INTERFACE)
    if library is None:
        return None
    library.tierstore_copy.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    library.tierstore_copy.restype = None
    library.tierstore_copy_and_hash.argtypes = (*library.tierstore_copy.argtypes, ctypes.c_void_p)
    library.tierstore_copy_and_hash.restype = None
    library.tierstore_gather_and_hash.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    )
    library.tierstore_gather_and_hash.restype = None
    library.tierstore_chunk_keys.argtypes = (
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_void_p,
    )
    library.tierstore_chunk_keys.restype = None
    return library


def load_codec(file: Path) -> ctypes.CDLL | None:
    """Return ``codec.c`` as built in ``file``, or None if this version cannot use it."""
    library = _opened(file, "tierstore_codec_interface", _CODEC_INTERFACE)
    if library is None:
        return None
    library.tierstore_encode.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)
    library.tierstore_encode.restype = ctypes.c_size_t
    library.tierstore_decode.argtypes = library.tierstore_encode.argtypes
    library.tierstore_decode.restype = ctypes.c_int
    return library


def load_decode(file: Path) -> ctypes.CDLL | None:
    """Return ``decode.c`` as built in ``file``, or None if this version cannot use it."""
    library = _opened(file, "tierstore_decode_interface", _DECODE_INTERFACE)
    if library is None:
        return None
    pointers = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_void_p,) * 3)
    library.tierstore_attend.argtypes = (*pointers, ctypes.c_int)
    library.tierstore_attend.restype = None
    sizes = (ctypes.c_size_t, ctypes.c_size_t)
    library.tierstore_multiply.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
        *sizes,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_int,
    )
    library.tierstore_multiply.restype = None
    return library


def _opened(file: Path, name: str, interface: int) -> ctypes.CDLL | None:
    if sys.byteorder != "little":
        return None
    try:
        library = ctypes.CDLL(str(file))
        found = library[name]
    except (OSError, AttributeError):  # not built, for another machine, or another file
        return None
    return library if found() == interface else None


LIBRARY = load(FILE)
CODEC = load_codec(CODEC_FILE)
DECODE = load_decode(DECODE_FILE)
LEAST_HASHED = 241  # bytes: it has XXH3 for long inputs only
MOST_CHUNK = 4096  # bytes
