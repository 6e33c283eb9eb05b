"""What vLLM does not tell a connector: that the weights may have changed, and that a reset has failed.

vLLM tells a connector to forget (``reset_cache``) at the end of a reset that has succeeded. It says nothing
when the reset raises before (while a load is on its way), when the weights are replaced by RPC, when the
engine is given a weight version, and when it sleeps. So the methods through which these go are wrapped, once
in a process, for every engine in it. Of RPCs all count but a short list of those that read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tierstore_connectors.vllm.fields import words

_ATTRIBUTE = "_tierstore_watches"
# RPCs to the workers that leave weights as they are.
_READING = words(
    """
    check_health compute_weight_checksums get_model_inspection get_supported_tasks get_kv_cache_spec
    get_kv_connector_handshake_metadata init_weight_transfer_engine shutdown_weight_transfer_engine
    list_loras profile release_late_interaction_query_cache reset_encoder_cache reset_mm_cache
    save_sharded_state supports_draft_weight_updates synchronize_device update_max_model_len
    """
)


class ChangeWatcher(Protocol):
    """A connector that wants to know."""

    def weights_changed(self) -> None: ...

    def adapter_loads(self, adapter: Any) -> None: ...


def watch_engines(kind: type[ChangeWatcher]) -> list[str]:
    """From now on tell connectors of this ``kind`` what their engines do. Returns what this vLLM lacks."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    def engine_changed(engine: Any, *args: Any, **kwargs: Any) -> list[ChangeWatcher]:
        return list(_watchers(kind, vars(engine).get("scheduler")))

    def rpc_changed(engine: Any, method: Any, *args: Any, **kwargs: Any) -> list[ChangeWatcher]:
        return [] if method in _READING else engine_changed(engine)

    def sleep_changed(engine: Any, level: int = 1, *args: Any, **kwargs: Any) -> list[ChangeWatcher]:
        return engine_changed(engine) if level >= 1 else []

    def reset_changed(
        scheduler: Any, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> list[ChangeWatcher]:
        return list(_watchers(kind, scheduler)) if reset_connector else []

    def adapter_loads(engine: Any, adapter: Any, *args: Any, **kwargs: Any) -> None:
        for watcher in engine_changed(engine):
            watcher.adapter_loads(adapter)

    return [
        *_wrap(EngineCore, "collective_rpc", after=rpc_changed),
        *_wrap(EngineCore, "sleep", after=sleep_changed),
        *_wrap(EngineCore, "add_lora", before=adapter_loads),
        *_wrap(EngineCore, "set_weight_version", after=engine_changed, needed=False),  # from 0.32 on
        *_wrap(Scheduler, "reset_prefix_cache", after=reset_changed),
    ]


def _watchers(kind: type[ChangeWatcher], scheduler: Any) -> Iterator[ChangeWatcher]:
    """The connectors of a scheduler, also those in vLLM's ``MultiConnector``."""
    connectors = [getattr(scheduler, "connector", None)]
    while connectors:
        connector = connectors.pop()
        if isinstance(connector, kind):
            yield connector
        connectors += getattr(connector, "_connectors", ())


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _wrap(
    owner: type,
    name: str,
    *,
    before: Callable[..., None] = _nothing,
    after: Callable[..., list[ChangeWatcher]] | None = None,
    needed: bool = True,
) -> list[str]:
    """Have ``after`` name those that hear of a change when the method has ended, also when it has failed."""
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
