"""The connector, with methods of its parts that raise when a file says so. For an engine in another process.

The file named by ``TIERSTORE_BREAK`` holds names like ``SchedulerHalf.matched``, and behind a colon how often
each is to raise (nothing: always); it is read at every call.
"""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path

# What is called for every request, and how the log names the place where its error was caught.
SERVING = {
    "SchedulerHalf.arrived": "on_new_request",
    "SchedulerHalf.matched": "get_num_new_matched_tokens",
    "SchedulerHalf.allocated": "update_state_after_alloc",
    "SchedulerHalf.from_disk": "get_external_cache_hit_sources",
    "SchedulerHalf.work": "build_connector_meta",
    "SchedulerHalf.reported": "update_connector_output",
    "SchedulerHalf.finished": "request_finished_all_groups",
    "WorkerHalf.fence": "handle_preemptions",
    "WorkerHalf.load": "start_load_kv",
    "WorkerHalf.save": "wait_for_save",
    "WorkerHalf.results": "_results",
    "WorkerHalf.report": "build_connector_worker_meta",
    "ConnectorCounters.take": "get_kv_connector_stats",
    "VllmLookups._find": "looking up a prompt",
    "BlockLoad._start_parts": "starting a load",
    "HostBlocks.scatter": "copying to KV blocks",
    "Store.save_from": "starting a save",
    "HostBlocks.gather": "copying from KV blocks",
}
STARTING = {
    "SchedulerHalf.__init__": "_open",
    "SchedulerHalf.connect": "set_xfer_handshake_metadata_pp_aware",
    "WorkerHalf.__init__": "get_handshake_metadata",
    "WorkerHalf.shard": "get_handshake_metadata",
}
RESETTING = {"SchedulerHalf.forget_everything": "reset_cache"}
ENDING = {"SchedulerHalf.close": "shutdown", "WorkerHalf.close": "shutdown"}


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
    from tierstore import Store
    from tierstore_connectors.common.counters import ConnectorCounters
    from tierstore_connectors.vllm import scheduler
    from tierstore_connectors.vllm.connector import TierStoreConnector
    from tierstore_connectors.vllm.copies import HostBlocks
    from tierstore_connectors.vllm.lookup import VllmLookups
    from tierstore_connectors.vllm.scheduler import SchedulerHalf
    from tierstore_connectors.vllm.transfers import BlockLoad
    from tierstore_connectors.vllm.worker import WorkerHalf

    if not _patched:
        _patched.append(True)
        scheduler._REFUSED_S = 1.0  # for so long what failed is not tried again: here it is waited for often
        kinds = (SchedulerHalf, WorkerHalf, ConnectorCounters, VllmLookups, BlockLoad, HostBlocks, Store)
        named = {kind.__name__: kind for kind in kinds}
        for each in (*SERVING, *STARTING, *RESETTING, *ENDING):
            kind, _, method = each.partition(".")
            found = inspect.getattr_static(named[kind], method)
            broken = breakable(each, found.fget if isinstance(found, property) else found)
            setattr(named[kind], method, property(broken) if isinstance(found, property) else broken)
    return TierStoreConnector
