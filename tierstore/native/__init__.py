"""The compiled part: ``pages.c``, where there was a C compiler when tierstore was installed.

It is optional: :data:`LIBRARY` is None without it, and :mod:`tierstore.copying` then does the same with what
Python's libraries offer, slower.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

FILE = Path(__file__).with_name("_pages.so")
_INTERFACE = 4  # INTERFACE in pages.c: what lies there may have been built from another version of it


def load(file: Path) -> ctypes.CDLL | None:
    """The library in ``file``, or None if it is not one that this version can use."""
    if sys.byteorder != "little":
        return None
    try:
        library = ctypes.CDLL(str(file))
        interface = library.tierstore_interface
    except (OSError, AttributeError):  # not built, for another machine, or something else altogether
        return None
    if interface() != _INTERFACE:
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


LIBRARY = load(FILE)
LEAST_HASHED = 241  # bytes: it knows XXH3 for long inputs only
MOST_CHUNK = 4096  # bytes
