"""Default values of settings that several modules use. This module imports nothing slow."""

from __future__ import annotations

from tierstore.units import GIB

DEFAULT_HOST_BYTES = 1 * GIB
DEFAULT_DISK_BYTES = 10 * GIB
CONNECT_S = 5.0
"""Seconds for which :func:`tierstore.connect` waits for a daemon that is busy or starting."""
MOVER_THREADS = 4
"""Number of threads that copy pages, in an embedded store or a daemon."""
STALL_S = 10.0
"""A disk that has not answered a call for this many seconds counts as stalled."""
