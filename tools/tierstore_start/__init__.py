"""The entry points of the command-line programs. They set a SIGTERM handler before they import anything else.

The kernel ignores SIGTERM for process 1 of a container until the process has a handler, and importing a
program's modules takes seconds on a busy machine. So this package imports only the standard library, and sets
a handler first. Until a server installs its own handler, which shuts down in order, the process exits at
once. The data on disk withstands that.
"""

from __future__ import annotations

import os
import signal
import sys

_ENDED_BY_SIGTERM = 128 + int(signal.SIGTERM)


def _end_on_sigterm(*, server: bool) -> None:
    """Exit at SIGTERM: with 0 if the program is a ``server``, whose normal end this is, otherwise with
    143."""
    code = 0 if server else _ENDED_BY_SIGTERM
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))


def tierstore() -> None:
    """Run ``tierstore``."""
    _end_on_sigterm(server=sys.argv[1:2] == ["serve"])
    from tierstore.cli import main

    main()


def engine() -> None:
    """Run ``tierstore-engine``."""
    _end_on_sigterm(server=sys.argv[1:2] == ["serve"])
    from tierstore_engine.cli import main

    main()


def bench() -> None:
    """Run ``tierstore-bench``."""
    _end_on_sigterm(server=False)
    from tierstore_tools.cli import main

    main()


def proxy() -> None:
    """Run ``tierstore-proxy``."""
    _end_on_sigterm(server=True)
    from tierstore_proxy.cli import main

    main()
