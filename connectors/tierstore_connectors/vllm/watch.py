"""Watch for events that vLLM does not report to connectors: changed weights and failed resets.

vLLM calls a connector's ``reset_cache`` at the end of a successful reset only. It does not report a reset
that raises earlier (while a load is in flight), weights replaced by RPC, a new weight version, or sleep. So
this module wraps the vLLM methods for these events, once per process. Every RPC to workers counts as a change
of the weights, except the RPCs that only read (``_READING``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from tierstore_connectors.common.facts import words
from tierstore_connectors.common.guard import nothing

_ATTRIBUTE = "_tierstore_watches"
# RPCs to the workers that do not change weights.
_READING = words(
    """
    check_health compute_weight_checksums get_model_inspection get_supported_tasks get_kv_cache_spec
    get_kv_connector_handshake_metadata init_weight_transfer_engine shutdown_weight_transfer_engine
    list_loras profile release_late_interaction_query_cache reset_encoder_cache reset_mm_cache
    save_sharded_state supports_draft_weight_updates synchronize_device update_max_model_len
    """
)


class ChangeWatcher:
    """A connector that is notified of changed weights and of adapters."""

    def weights_changed(self) -> None:
        """Record that the engine may compute with other weights from now on."""
        raise NotImplementedError

    def adapter_loads(self, adapter: Any) -> None:
        """Record that vLLM is about to load a LoRA adapter. By default this does nothing."""


def watch_engines() -> list[str]:
    """Notify every :class:`ChangeWatcher` of an engine from now on. Return the names of methods to wrap that
    the installed vLLM lacks."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    def engine_changed(engine: Any, *args: Any, **kwargs: Any) -> list[ChangeWatcher]:
        return list(_watchers(vars(engine).get("scheduler")))

    def rpc_changed(engine: Any, method: Any, *args: Any, **kwargs: Any) -> list[ChangeWatcher]:
        return [] if method in _READING else engine_changed(engine)

    def sleep_changed(engine: Any, level: int = 1, *args: Any, **kwargs: Any) -> list[ChangeWatcher]:
        return engine_changed(engine) if level >= 1 else []

    def reset_changed(
        scheduler: Any, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> list[ChangeWatcher]:
        return list(_watchers(scheduler)) if reset_connector else []

    def adapter_loads(engine: Any, adapter: Any, *args: Any, **kwargs: Any) -> None:
        for watcher in engine_changed(engine):
            watcher.adapter_loads(adapter)

    return [
        *_wrap(EngineCore, "collective_rpc", after=rpc_changed),
        *_wrap(EngineCore, "sleep", after=sleep_changed),
        *_wrap(EngineCore, "add_lora", before=adapter_loads),
        *_wrap(EngineCore, "set_weight_version", after=engine_changed, needed=False),  # from vLLM 0.32 on
        *_wrap(Scheduler, "reset_prefix_cache", after=reset_changed),
    ]


def _watchers(scheduler: Any) -> Iterator[ChangeWatcher]:
    """Yield the watching connectors of a scheduler, for KV and for embeddings, including connectors inside
    vLLM's ``MultiConnector``."""
    connectors = [getattr(scheduler, "connector", None), getattr(scheduler, "ec_connector", None)]
    while connectors:
        connector = connectors.pop()
        if isinstance(connector, ChangeWatcher):
            yield connector
        connectors += getattr(connector, "_connectors", ())


def _wrap(
    owner: type,
    name: str,
    *,
    before: Callable[..., None] = nothing,
    after: Callable[..., list[ChangeWatcher]] | None = None,
    needed: bool = True,
) -> list[str]:
    """Wrap a method. ``after`` returns the connectors to notify when the method has returned or raised.
    Return the method's name in a list if the method is ``needed`` but missing, otherwise []."""
    method = vars(owner).get(name)
    if method is None:
        return [f"{owner.__name__}.{name}"] if needed else []
    if hasattr(method, _ATTRIBUTE):
        return []

    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, *args, **kwargs)
        try:
            return method(self, *args, **kwargs)
        finally:
            for watcher in after(self, *args, **kwargs) if after is not None else ():
                watcher.weights_changed()

    setattr(watched, _ATTRIBUTE, True)
    setattr(owner, name, watched)
    return []
