"""The connector scheduler, on rank 0: it loads pages, keeps them until the next forward pass, and orders
saves.

TensorRT-LLM pickles the orders for ranks in other processes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import Hit
from tierstore_connectors.common.guard import ErrorLog, guarded
from tierstore_connectors.tensorrt_llm.base import KvCacheConnectorScheduler
from tierstore_connectors.tensorrt_llm.identity import refusal
from tierstore_connectors.tensorrt_llm.pages import EnginePages

_log = logging.getLogger("tierstore_connectors.tensorrt_llm")
MOST_STAGED_BYTES = 4 << 30  # loaded pages of all requests that wait for the next pass
MOST_BROADCAST_BYTES = 1 << 30  # the same limit with several ranks, which get the pages in one message


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """An order to write blocks before the pass. ``data`` has for each rank an array with one row of bytes per
    block."""

    blocks: Sequence[int]
    data: Sequence[npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class PageSave:
    """An order to save pages after the pass: all pages of the prompt ``tokens`` from page ``first`` on.
    ``blocks`` has the blocks of these pages."""

    tokens: npt.NDArray[np.uint32]
    first: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class PassOrders:
    """The orders for one forward pass."""

    loads: Sequence[BlockWrite] = ()
    saves: Sequence[PageSave] = ()


@dataclass(slots=True)
class _SavedRequest:
    """A request whose pages are saved: its tokens and blocks that the engine has reported, and the number of
    its leading pages that are saved."""

    pages: int
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _StagedLoad:
    """The loaded blocks of a request for each rank, from block ``first`` of the prompt on."""

    first: int
    data: Sequence[npt.NDArray[np.uint8]]


class TierStoreScheduler(KvCacheConnectorScheduler):
    """The ``connector_scheduler_class`` for TensorRT-LLM; see the package. All methods are called from the
    executor's one thread. Raises :class:`~tierstore.errors.UsageError` for an engine that is not
    supported."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.errors = ErrorLog(_log)
        self._pages = EnginePages.of(llm_args)
        self._saved: dict[int, _SavedRequest] = {}  # by request
        self._staged: dict[int, _StagedLoad] = {}  # by request, until its blocks are known
        self._staged_bytes = 0  # since the last pass
        self._loads: list[BlockWrite] = []

    @guarded(lambda self, request, num_computed_tokens: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Load pages after the computed tokens into memory of this process. Return the number of loaded
        tokens, and False: TensorRT-LLM need not wait, because :meth:`TierStoreWorker.start_load_kv` copies
        them before the next pass."""
        pages, number = self._pages, int(request.request_id)
        self._staged.pop(number, None)
        self._saved.pop(number, None)
        if pages.store is None or not pages.store.connected:
            return 0, False
        if (reason := refusal(request)) is not None:
            self.errors.warn("requests", f"requests with {reason} are neither loaded nor saved")
            return 0, False
        tokens = np.asarray(request.get_tokens(0)[: request.prompt_len], np.uint32)
        hits = self._find(tokens)
        held = min((hit.tokens for hit in hits), default=0) // pages.page_tokens
        self._saved[number] = _SavedRequest(held)
        matched = self._load(number, hits, num_computed_tokens, held)
        return matched, False

    def _find(self, tokens: npt.NDArray[np.uint32]) -> list[Hit]:
        """Return the hits of all ranks, or [] if a lookup fails. The hits leave at least one token to
        compute."""
        store, hits = self._pages.store, list[Hit]()
        assert store is not None
        for rank in range(len(self._pages.identities)):
            hit = store.find(self._pages.prompt(tokens, rank), max_tokens=len(tokens) - 1, counted=not rank)
            if hit is None:
                for each in hits:
                    each.release()
                return []
            hits.append(hit)
        return hits

    def _load(self, number: int, hits: Sequence[Hit], computed: int, held: int) -> int:
        """Load the pages after the first ``computed`` tokens, and release the hits. Return the number of
        loaded tokens."""
        pages, store = self._pages, self._pages.store
        assert store is not None
        first_page, inside = computed // pages.page_tokens, computed % pages.block_tokens
        most = MOST_STAGED_BYTES if len(pages.identities) == 1 else MOST_BROADCAST_BYTES
        room = (most - self._staged_bytes) // (pages.page_bytes * len(pages.identities))
        count = min(held - first_page, room)
        if count <= 0 or inside:  # the engine has reused a part of a block itself
            for hit in hits:
                hit.release()
            return 0
        loaded = [store.load_pages(hit, first_page, count) for hit in hits]
        arrived = min(len(each) for each in loaded)
        first_block = computed // pages.block_tokens
        skipped = first_block - first_page * pages.page_blocks
        data = [each[:arrived].numpy().reshape(arrived * pages.page_blocks, -1)[skipped:] for each in loaded]
        if not len(data[0]):
            return 0
        self._staged[number] = _StagedLoad(first_block, data)
        self._staged_bytes += arrived * pages.page_bytes * len(hits)
        store.counters.add("loaded_tokens", len(data[0]) * pages.block_tokens)
        return len(data[0]) * pages.block_tokens

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Record the blocks of a request's loaded tokens. Raise :class:`RuntimeError` if loaded tokens have
        no blocks, because the engine would compute with wrong KV."""
        number = int(request.request_id)
        if not self._is_text(request):
            self._saved.pop(number, None)
        staged = self._staged.pop(number, None)
        if staged is None:
            return
        count = len(staged.data[0])
        blocks = [int(each) for each in block_ids[staged.first : staged.first + count]]
        if len(blocks) < count or min(blocks) < 0:
            raise RuntimeError(f"TensorRT-LLM gave {blocks} as blocks for {count} loaded blocks")
        self._loads.append(BlockWrite(blocks, staged.data))

    @guarded(lambda self, request: False)
    def _is_text(self, request: Any) -> bool:
        """Return whether a request has no images and no adapter. (TensorRT-LLM passes a copy without these
        to :meth:`get_num_new_matched_tokens`.)"""
        return request.py_multimodal_data is None and request.py_lora_path is None

    def build_connector_meta(self, scheduler_output: Any) -> PassOrders:
        """Return the orders for the next pass. Raise :class:`RuntimeError` if the pass computes a request
        whose loaded tokens have no blocks."""
        new, known = scheduler_output.new_requests, scheduler_output.cached_requests
        if lost := [each.request_id for each in (*new, *known) if each.request_id in self._staged]:
            raise RuntimeError(f"TensorRT-LLM gave no blocks for the loaded tokens of requests {lost}")
        loads, self._loads = self._loads, []
        self._staged_bytes = 0
        return PassOrders(loads, self._saves(new, known))

    @guarded(lambda self, new, known: [])
    def _saves(self, new: Sequence[Any], known: Sequence[Any]) -> list[PageSave]:
        """Return orders for the pages that the pass completes."""
        for data in known:
            request = self._saved.get(data.request_id)
            if request is not None and not request.tokens:
                # The request was restarted, and its earlier tokens and blocks are not reported again.
                del self._saved[data.request_id]
        pages, orders = self._pages, []
        for data in (*new, *known):
            request = self._saved.get(data.request_id)
            if request is None:
                continue
            request.tokens.extend(data.new_tokens)
            request.blocks.extend(data.new_block_ids)
            # In the first pass after a load, tokens are reported late. The next pass saves their pages.
            end = min(data.computed_position + data.num_scheduled_tokens, len(request.tokens))
            last = min(end // pages.page_tokens, len(request.blocks) // pages.page_blocks)
            if last > request.pages:
                tokens = np.asarray(request.tokens[: last * pages.page_tokens], np.uint32)
                blocks = request.blocks[request.pages * pages.page_blocks : last * pages.page_blocks]
                orders.append(PageSave(tokens, request.pages, blocks))
                request.pages = last
        return orders

    @guarded(lambda self, request, cache_block_ids: False)
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Forget a request. Return False, because the engine may reuse its blocks at once."""
        self._saved.pop(int(request.request_id), None)
        self._staged.pop(int(request.request_id), None)
        return False
