"""The plug-in for SGLang: with ``TIERSTORE=auto python -m sglang.launch_server …`` an engine uses the
storage.

SGLang calls the plug-in in each of its processes (``tierstore_start.sglang_plugin``). Servers and ``Engine``
resolve their arguments once, in the first process, and send them to all other processes. So the plug-in sets
the arguments before they are resolved, unless the user has chosen another cache or an option that excludes
the storage.
"""

from __future__ import annotations

import os
import sys
from json import dumps
from typing import Any

import msgspec
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from tierstore.cli.checks.sglang import proposed
from tierstore.daemon.background import VARIABLE, chosen_store
from tierstore_connectors.sglang.identity import require_known_weights

_PAGE_TOKENS = 64

# Arguments that choose another cache, or that SGLang refuses together with a storage. Some versions lack
# some.
_OTHERS = (
    "enable_hierarchical_cache",
    "hicache_storage_backend",
    "disable_radix_cache",
    "radix_cache_backend",
    "enable_lmcache",
    "enable_flexkv",
    "enable_unified_cache_external_linker",
    "dllm_algorithm",
    "encoder_only",
)
_UNTESTED = {"dcp_size": 1, "disaggregation_mode": "null"}  # the only tested values


def install() -> None:
    """Make SGLang call :func:`use_store` before it resolves its arguments."""
    HookRegistry.register("sglang.srt.server_args.ServerArgs.resolve_once", use_store, HookType.BEFORE)


def use_store(arguments: Any) -> None:
    """Set the arguments for a hierarchical cache with the store, unless the user has chosen another cache or
    no store can be used. Write one line about the result."""
    if vars(arguments).get("_resolution_finished"):  # the first process has resolved the arguments already
        return
    values = msgspec.structs.asdict(arguments)
    chosen = [name for name in _OTHERS if values.get(name)]
    chosen += [name for name, value in _UNTESTED.items() if values.get(name, value) != value]
    if chosen:
        _say(f"{VARIABLE} is ignored, because --{chosen[0].replace('_', '-')} is given")
        return
    try:
        require_known_weights(values)
        store = chosen_store(os.environ[VARIABLE])
    except Exception as error:  # noqa: BLE001  # the engine must start
        _say(f"runs without the cache: {error}")
        return
    settings: dict[str, Any] = {
        "enable_hierarchical_cache": True,
        "hicache_mem_layout": "page_first_direct",
        "hicache_io_backend": "direct",
        "hicache_host_memory_mode": "buffer_only",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": dumps(proposed(store.url)),
    }
    # Speculative decoding does not support every page size, and its default follows the attention backend.
    if arguments.page_size is None and arguments.speculative_algorithm is None:
        settings["page_size"] = _PAGE_TOKENS
    for name, value in settings.items():
        setattr(arguments, name, value)
    changes = " ".join(f"{name}={value}" for name, value in settings.items())
    _say(f"{VARIABLE} sets {changes}. The daemon: {store.state}")


def _say(line: str) -> None:
    """Write a line to stderr, because SGLang configures its logs only after resolving its arguments."""
    sys.stderr.write(f"tierstore: {line}\n")
