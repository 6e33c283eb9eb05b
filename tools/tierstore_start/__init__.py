"""Where the command-line programs begin: SIGTERM first, then everything else.

The kernel drops a SIGTERM to process 1 of a container as long as the process has no handler, and importing
what a program needs takes seconds on a busy machine. So this package imports the standard library only, and
first sets a handler. Until a server has its own, which ends in order, the process just ends: what it has on
disk withstands that.
"""

from __future__ import annotations

import os
import signal
import sys

_ENDED_BY_SIGTERM = 128 + int(signal.SIGTERM)


def _end_on_sigterm(*, server: bool) -> None:
    """End at SIGTERM: with 0 if it is a ``server``, which is meant to be ended so, else with 143."""
    code = 0 if server else _ENDED_BY_SIGTERM
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))


def tierstore() -> None:
    """``tierstore``"""
    _end_on_sigterm(server=sys.argv[1:2] == ["serve"])
    from tierstore.cli import main

    main()


def engine() -> None:
    """``tierstore-engine``"""
    _end_on_sigterm(server=sys.argv[1:2] == ["serve"])
    from tierstore_engine.cli import main

    main()


def bench() -> None:
    """``tierstore-bench``"""
    _end_on_sigterm(server=False)
    from tierstore_tools.cli import main

    main()


def proxy() -> None:
    """``tierstore-proxy``"""
    _end_on_sigterm(server=True)
    from tierstore_proxy.cli import main

    main()
