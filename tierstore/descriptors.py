"""File descriptors: the limit of this process, and whether it can open more.

A process without a free descriptor cannot accept, open or connect, and libzmq aborts it. So the programs of
this project raise their soft limit when they start, listeners reserve some descriptors for files, and clients
check that descriptors are free before they create ZMQ sockets.
"""

from __future__ import annotations

import contextlib
import os
import resource

from tierstore.errors import StoreUnavailableError

_MOST = 1 << 20  # used in place of a higher hard limit, or of none
_RESERVE = 64  # descriptors that listeners keep free for files …
_RESERVE_SHARE = 8  # … but at most 1/8 of the limit


def limit() -> int:
    """Return how many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> int:
    """Raise the soft limit to the hard limit. Return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return limit()


def in_reserve(fd: int) -> bool:
    """Return whether a newly opened descriptor is in the reserve. The kernel returns the lowest free number,
    so all lower numbers are in use."""
    most = limit()
    return fd >= most - min(_RESERVE, most // _RESERVE_SHARE)


def have_room(count: int) -> bool:
    """Return whether ``count`` descriptors are free now. The check opens that many."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    finally:
        for fd in opened:
            os.close(fd)
    return True


def require_room(count: int, what: str) -> None:
    """Raise :class:`StoreUnavailableError` unless ``count`` descriptors are free."""
    if not have_room(count):
        raise StoreUnavailableError(
            f"{what} needs {count} file descriptors, but fewer are free of the {limit()} that this process "
            "may have: raise the limit (ulimit -n, LimitNOFILE=)"
        )
