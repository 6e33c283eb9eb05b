"""The connector, with methods of its halves that raise when a file says so. For an engine in another process.

The file named by ``TIERSTORE_BREAK`` holds names like ``scheduler.matched`` or ``worker.load``, and behind a
colon how often each is to raise (nothing: always); it is read at every call.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

SCHEDULER = ("arrived", "matched", "allocated", "work", "reported", "finished")
WORKER = ("fence", "load", "save", "results", "report")


class InjectedError(Exception):
    pass


_raised: dict[str, int] = {}
_patched: list[bool] = []


def breakable(name, method):
    @functools.wraps(method)
    def call(*args, **kwargs):
        for line in Path(os.environ["TIERSTORE_BREAK"]).read_text().splitlines():
            which, _, times = line.partition(":")
            if which == name and (not times or _raised.get(line, 0) < int(times)):
                _raised[line] = _raised.get(line, 0) + 1
                raise InjectedError(name)
        return method(*args, **kwargs)

    return call


def __getattr__(name):
    """vLLM asks for the class in the processes that need it; nothing else here needs vLLM."""
    if name != "TierStoreConnector":
        raise AttributeError(name)
    from tierstore_connectors.vllm.connector import TierStoreConnector
    from tierstore_connectors.vllm.scheduler import SchedulerHalf
    from tierstore_connectors.vllm.worker import WorkerHalf

    if not _patched:
        _patched.append(True)
        for half, names, label in ((SchedulerHalf, SCHEDULER, "scheduler"), (WorkerHalf, WORKER, "worker")):
            for each in names:
                setattr(half, each, breakable(f"{label}.{each}", getattr(half, each)))
    return TierStoreConnector
