"""Default values of settings that several modules share. Imports nothing heavy."""

from __future__ import annotations

from tierstore.units import GIB

DEFAULT_HOST_BYTES = 1 * GIB
DEFAULT_DISK_BYTES = 10 * GIB
CONNECT_S = 5.0
"""How long :func:`tierstore.connect` waits for a daemon that is busy or starting."""
MOVER_THREADS = 4
"""Threads of an embedded store, or a daemon, that copy pages."""
STALL_S = 10.0
"""A disk that has not answered a call for this many seconds counts as stalled."""
