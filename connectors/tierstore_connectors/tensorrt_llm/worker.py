"""The connector worker, on every rank: it copies between the engine's pool and host memory."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tierstore.errors import UsageError
from tierstore_connectors.common.guard import ErrorLog, guarded
from tierstore_connectors.tensorrt_llm.base import KvCacheConnectorWorker
from tierstore_connectors.tensorrt_llm.pages import EnginePages
from tierstore_connectors.tensorrt_llm.scheduler import PageSave, PassOrders

_log = logging.getLogger("tierstore_connectors.tensorrt_llm")


class TierStoreWorker(KvCacheConnectorWorker):
    """The ``connector_worker_class`` for TensorRT-LLM; see the package. All methods are called from the
    executor's one thread. Raises :class:`~tierstore.errors.UsageError` for an engine that is not
    supported."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.errors = ErrorLog(_log)
        self._pages = EnginePages.of(llm_args)
        self._blocks = torch.empty(0, 0, dtype=torch.uint8)  # until the pool is registered

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Record the pool, a tensor ``[blocks, …]``, and open the store. Raise :class:`UsageError` for a
        tensor that is not contiguous, and for model files that cannot be read."""
        if kv_cache_tensor.ndim < 2 or not kv_cache_tensor.is_contiguous():
            raise UsageError(
                "tierstore needs a contiguous pool of blocks, got a tensor of shape "
                f"{tuple(kv_cache_tensor.shape)} and strides {kv_cache_tensor.stride()}"
            )
        self._blocks = kv_cache_tensor.view(len(kv_cache_tensor), -1).view(torch.uint8)
        self._pages.open(kv_cache_tensor)

    def start_load_kv(self, stream: Any) -> None:
        """Write the loaded blocks for the next pass. Errors are raised, because the engine does not compute
        these tokens."""
        orders = self._metadata
        if not isinstance(orders, PassOrders) or not orders.loads:
            return
        self._settle()  # the last pass may still write to blocks that now belong to another request
        for load in orders.loads:
            data = torch.from_numpy(load.data[self._pages.rank])
            for block, row in zip(load.blocks, data, strict=True):
                self._blocks[block].copy_(row)
        self._settle()

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: :meth:`start_load_kv` has loaded all layers."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: :meth:`wait_for_save` saves whole blocks."""

    @guarded(lambda self, stream: None)
    def wait_for_save(self, stream: Any) -> None:
        """Copy the pages that the pass has completed to host memory. They are saved in the background."""
        orders, store = self._metadata, self._pages.store
        self._clear_connector_meta()
        if not isinstance(orders, PassOrders) or not orders.saves:
            return
        if store is None or not store.connected:
            return
        self._settle()
        for save in orders.saves:
            store.save(
                self._pages.prompt(save.tokens, self._pages.rank), self._copied(save), first=save.first
            )

    def _copied(self, save: PageSave) -> torch.Tensor:
        """Return the pages of an order in host memory. Copying block by block needs no further GPU memory."""
        rows = torch.empty((len(save.blocks), self._blocks.shape[1]), dtype=torch.uint8)
        for row, block in zip(rows, save.blocks, strict=True):
            row.copy_(self._blocks[block])
        return rows.view(len(save.blocks) // self._pages.page_blocks, -1)

    @guarded(lambda self, finished_gen_req_ids, started_loading_req_ids: ([], []))
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return no requests, because loads and saves end within a pass."""
        return [], []

    def _settle(self) -> None:
        """Wait until all queued work of the device has ended."""
        if self._blocks.is_cuda:
            torch.cuda.synchronize(self._blocks.device)
