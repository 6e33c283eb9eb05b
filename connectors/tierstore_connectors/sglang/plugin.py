"""SGLang's plug-in: ``TIERSTORE=auto python -m sglang.launch_server …`` is an engine with the storage.

SGLang calls the plug-in in each of its processes (``tierstore_start.sglang_plugin``). Servers and ``Engine``
resolve their arguments once, in the parent of all other processes. So the arguments are set before that, and
the other processes receive them. Arguments that choose another cache, or that exclude this one, stay.
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

# SGLang refuses these together with a storage, or they are a cache of their own. A version may lack some.
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
_UNTESTED = {"dcp_size": 1, "disaggregation_mode": "null"}  # with the only tested value


def install() -> None:
    """Have SGLang call :func:`use_store` before it resolves its arguments."""
    HookRegistry.register("sglang.srt.server_args.ServerArgs.resolve_once", use_store, HookType.BEFORE)


def use_store(arguments: Any) -> None:
    """Set the arguments of a hierarchical cache over the store, unless the user has chosen otherwise or there
    is no store. Say which in one line."""
    if vars(arguments).get("_resolution_finished"):  # another process, or a second call
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
    told = " ".join(f"{name}={value}" for name, value in settings.items())
    _say(f"{VARIABLE} sets {told}. The daemon: {store.state}")


def _say(line: str) -> None:
    """Write a line to stderr: SGLang configures its logs after it has resolved its arguments."""
    sys.stderr.write(f"tierstore: {line}\n")
