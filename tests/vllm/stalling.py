"""``tierstore serve`` on a disk that stops answering: ``python stalling.py SWITCH serve …``.

As long as the file SWITCH exists, no read, write or sync of payloads returns. The first one that is held up
leaves a mark behind: SWITCH with ``.struck`` at its end.
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path

from tierstore import cli
from tierstore.tiers.disk.io import FileIO, QueuedIO

_LOOK_S = 0.005


def stalling(method, switch):
    @functools.wraps(method)
    def call(*args, **kwargs):
        while switch.exists():
            switch.with_suffix(".struck").touch()
            time.sleep(_LOOK_S)
        return method(*args, **kwargs)

    return call


if __name__ == "__main__":
    switch = Path(sys.argv.pop(1))
    for kind, names in ((FileIO, ("preadv", "pwritev", "sync")), (QueuedIO, ("read_many",))):
        for name in names:
            setattr(kind, name, stalling(getattr(kind, name), switch))
    cli.main()
