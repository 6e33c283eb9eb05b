"""The connector with a switch, for engines in one process. While it is switched off, it does as little as a
connector can.

Two engines differ by more than their connectors: the place of their memory makes one of them a few percent
faster. One engine with a switch has no such difference.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from tierstore_connectors.vllm.connector import TierStoreConnector

_SERVING = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
)

_on = [True]


def switch(on: bool) -> None:
    """Switch on or off, between two requests: no transfer may be pending."""
    _on[0] = on


class _NoOrders(KVConnectorMetadata):
    pass


class _Nothing(KVConnectorBase_V1, SupportsHMA):
    """A connector that finds and saves no pages."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> _NoOrders:
        return _NoOrders()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        return False, None


class SwitchedConnector(TierStoreConnector):
    """:class:`TierStoreConnector` while it is switched on."""


def _switched(name: str) -> Any:
    method, nothing = getattr(TierStoreConnector, name), getattr(_Nothing, name)

    @functools.wraps(method)
    def call(self: SwitchedConnector, *args: Any, **kwargs: Any) -> Any:
        return (method if _on[0] else nothing)(self, *args, **kwargs)

    return call


for _name in _SERVING:
    # some versions of vLLM do not have all of these methods
    if _name in dir(KVConnectorBase_V1) or _name in dir(SupportsHMA):
        setattr(SwitchedConnector, _name, _switched(_name))
