"""The worker's half, on every rank: copies between the engine's pool and host memory."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tierstore.errors import UsageError
from tierstore_connectors.common.guard import ErrorLog, guarded
from tierstore_connectors.tensorrt_llm.base import KvCacheConnectorWorker
from tierstore_connectors.tensorrt_llm.orders import PageSave, PassOrders
from tierstore_connectors.tensorrt_llm.pages import EnginePages

_log = logging.getLogger("tierstore_connectors.tensorrt_llm")


class TierStoreWorker(KvCacheConnectorWorker):
    """TensorRT-LLM's ``connector_worker_class``; see the package. All methods are called from the executor's
    one thread. Raises :class:`~tierstore.errors.UsageError` for an engine that is not supported."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.errors = ErrorLog(_log)
        self._pages = EnginePages.of(llm_args)
        self._blocks = torch.empty(0, 0, dtype=torch.uint8)  # until the pool is registered

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Take the pool, one block after the other, and open the store. Raises :class:`UsageError` at the
        engine's start for another layout, or files that cannot be read."""
        if kv_cache_tensor.ndim < 2 or not kv_cache_tensor.is_contiguous():
            raise UsageError(
                "tierstore needs a contiguous pool of blocks, got a tensor of shape "
                f"{tuple(kv_cache_tensor.shape)} and strides {kv_cache_tensor.stride()}"
            )
        self._blocks = kv_cache_tensor.view(len(kv_cache_tensor), -1).view(torch.uint8)
        self._pages.open(kv_cache_tensor)

    def start_load_kv(self, stream: Any) -> None:
        """Write the loaded blocks of the next pass. Errors are raised: the engine counts on these bytes."""
        orders = self._metadata
        if not isinstance(orders, PassOrders) or not orders.loads:
            return
        self._settle()  # the last pass may still write to a block that has a new owner
        for load in orders.loads:
            data = torch.from_numpy(load.data[self._pages.rank])
            for block, row in zip(load.blocks, data, strict=True):
                self._blocks[block].copy_(row)
        self._settle()

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: all layers are loaded before the pass."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: whole blocks are saved after the pass."""

    @guarded(lambda self, stream: None)
    def wait_for_save(self, stream: Any) -> None:
        """Copy the pages that the pass has completed. The store takes the copies in the background."""
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
        """Return the pages of an order. They are copied block by block, so no memory of the GPU is needed."""
        rows = torch.empty((len(save.blocks), self._blocks.shape[1]), dtype=torch.uint8)
        for row, block in zip(rows, save.blocks, strict=True):
            row.copy_(self._blocks[block])
        return rows.view(len(save.blocks) // self._pages.page_blocks, -1)

    @guarded(lambda self, finished_gen_req_ids, started_loading_req_ids: ([], []))
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return no requests: neither half starts anything that outlasts a pass."""
        return [], []

    def _settle(self) -> None:
        """Wait until the device has done everything that was queued."""
        if self._blocks.is_cuda:
            torch.cuda.synchronize(self._blocks.device)
