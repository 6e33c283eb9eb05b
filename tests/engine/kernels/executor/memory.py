"""Arrays that a kernel cannot overrun unnoticed."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_PAGE = mmap.PAGESIZE
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


def guarded(array: np.ndarray) -> np.ndarray:
    """A copy of ``array`` between two pages that may not be touched: it ends right before the second, or up
    to 15 bytes earlier where its size is not a multiple of 16."""
    array = np.ascontiguousarray(array)
    padded = max(-(-array.nbytes // 16) * 16, 16)
    room = -(-padded // _PAGE) * _PAGE
    memory = mmap.mmap(-1, room + 2 * _PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for edge in (start, start + _PAGE + room):
        if _libc.mprotect(ctypes.c_void_p(edge), ctypes.c_size_t(_PAGE), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = _PAGE + room - padded
    copy = np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)
    copy[...] = array
    return copy
