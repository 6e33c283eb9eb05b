"""``tierstore serve`` on a full disk: ``python full_disk.py SWITCH serve …``. As long as the file SWITCH
exists, every write and allocation of payloads fails with ENOSPC. The first leaves SWITCH.struck behind."""

from __future__ import annotations

import errno
import functools
import os
import sys
from pathlib import Path

from tierstore import cli
from tierstore.tiers.disk.io import FileIO


def full(method, switch):
    @functools.wraps(method)
    def call(*args, **kwargs):
        if switch.exists():
            switch.with_suffix(".struck").touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return method(*args, **kwargs)

    return call


if __name__ == "__main__":
    switch = Path(sys.argv.pop(1))
    for name in ("pwritev", "allocate"):
        setattr(FileIO, name, full(getattr(FileIO, name), switch))
    cli.main()
