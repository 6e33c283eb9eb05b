"""The worker half of vLLM's connector: it copies KV blocks to and from the daemon's arena, and decides
nothing.

vLLM calls the worker half on the model's thread. A call only starts work on other threads, or reads the
results of such work. The order in a step is: :meth:`WorkerHalf.fence`, before the step writes blocks, the
forward pass, :meth:`WorkerHalf.load`, :meth:`WorkerHalf.save`, :meth:`WorkerHalf.results`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tierstore import Store
from tierstore.groups import Past
from tierstore.keys import TOKEN_BYTES, Identity, PageKey, Prompt
from tierstore.spec import KVSpec
from tierstore.tiers.pinned import Pin
from tierstore_connectors.common.counters import ConnectorCounters
from tierstore_connectors.common.facts import under_epoch
from tierstore_connectors.common.guard import ErrorLog
from tierstore_connectors.common.sharing import shared_chunks
from tierstore_connectors.vllm.config import VllmSettings
from tierstore_connectors.vllm.copies import GroupBlockCopies, LoadedBlocks, SavedBlocks, valid_blocks
from tierstore_connectors.vllm.identity import ChunkNames
from tierstore_connectors.vllm.layout import PageLayout
from tierstore_connectors.vllm.orders import (
    RENEW_S,
    GroupBlocks,
    GroupShard,
    LoadOrder,
    LoadReport,
    PromptUpdate,
    SaveOrder,
    Shard,
    StepWork,
)
from tierstore_connectors.vllm.transfers import BlockLoad, BlockSave, LoadPart, Saves

_IDLE_WAIT_S = 0.002  # without this wait, the steps of an idle engine would take CPU time from its loads
_PIN_WAIT_S = 5.0
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class LoadSource:
    """Pages of one identity, and the copies between these pages and a group's blocks."""

    pages: GroupShard
    blocks: GroupBlockCopies


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """One KV cache group of this worker: its pages and its blocks."""

    pages: GroupShard
    layout: PageLayout
    blocks: GroupBlockCopies
    others: tuple[tuple[LoadSource, ...], ...] = ()
    """Pages that engines of other parallelism save and that this worker can load, as in ``Shard.others``."""

    def sources(self, size: int) -> Sequence[LoadSource]:
        """Return the sources that a load needs together, for the ``size`` of a :class:`LoadOrder`."""
        return self.others[size - 1] if size else (LoadSource(self.pages, self.blocks),)

    @property
    def copies(self) -> list[GroupBlockCopies]:
        """Return all copies to and from the group's blocks."""
        return [self.blocks, *(each.blocks for source in self.others for each in source)]


@dataclass(slots=True)
class Results:
    """The loads that ended since the last call.

    For a model with one KV cache group, ``blocks`` has the blocks that a failed load did not fill. For a
    model with several groups, ``failed`` has the requests whose load failed.
    """

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _KnownPrompt:
    """The keys and tokens of a prompt's leading chunks, as sent by the scheduler half."""

    names: ChunkNames
    keys: list[PageKey] = field(default_factory=list)
    tokens: bytearray = field(default_factory=bytearray)

    def grow(self, grown: PromptUpdate) -> None:
        """Replace the chunks from ``grown.first`` on by those of ``grown``."""
        if grown.first > len(self.keys):
            return  # an earlier update is missing, so the keys would have a gap
        self.names.cut(grown.first)
        del self.keys[grown.first :]
        del self.tokens[grown.first * self.names.chunk_tokens * TOKEN_BYTES :]
        self.keys += grown.keys
        self.tokens += grown.tokens

    def pages(
        self, pages: GroupShard, identity: Identity, chunks: range, model: Identity | None
    ) -> tuple[Prompt, int]:
        """Return a prompt that finds a group's pages of ``chunks``, and the index of the first of ``chunks``
        in this prompt. ``model`` is the whole model's identity if engines share the pages."""
        if not pages.rule.chained and model is None:
            return self.names.pages(identity, chunks, self.keys, self.tokens), 0
        chunk_tokens = self.names.chunk_tokens
        tokens = bytes(self.tokens[: chunks.stop * chunk_tokens * TOKEN_BYTES])
        if model is not None:
            named = not pages.rule.chained
            return shared_chunks(model, identity, tokens, chunks, chunk_tokens, named=named)
        keys = self.keys[: chunks.stop]
        return Prompt.with_keys(identity, tokens, keys, chunk_tokens=chunk_tokens), chunks.start


class WorkerStores:
    """The stores of a worker: one connection to the daemon for each page layout. Groups with equal layouts
    share a store.

    ``reach`` is called with each mapped arena, to register the arena with a device. One thread opens the
    stores; the stores are thread-safe.
    """

    def __init__(self, settings: VllmSettings, reach: Callable[[Pin], None]) -> None:
        self._settings = settings
        self._reach = reach
        self._stores: dict[str, Store] = {}

    def of(self, pages: GroupShard) -> Store:
        """Return the store for a group's pages, which the first call opens. Raise
        :class:`~tierstore.errors.UsageError` for an invalid address."""
        layout = pages.identity.layout
        store = self._stores.get(layout)
        if store is None:
            store = self._settings.connect(pages.identity, KVSpec.parse(layout), reach=self._reach)
            self._stores[layout] = store
        return store

    def wait_connected(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for each store's connection. Return whether all are connected."""
        return all(store.wait_connected(timeout) for store in self._stores.values())

    def close(self) -> None:
        """Close all stores. :meth:`of` opens a store again."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()


class WorkerHalf:
    """The worker half; see the module.

    ``groups`` has, by number, the KV cache groups that have layers on this worker. ``model_groups`` is the
    model's number of groups, which may be larger with pipeline stages. ``model`` is the whole model's
    identity if engines share the model's pages. Raise :class:`~tierstore.errors.UsageError` for an invalid
    address.
    """

    def __init__(
        self,
        settings: VllmSettings,
        groups: Mapping[int, WorkerGroup],
        model_groups: int,
        chunk_tokens: int,
        errors: ErrorLog,
        counters: ConnectorCounters,
        model: Identity | None = None,
    ) -> None:
        self._settings = settings
        self._model = model
        self._groups = dict(groups)
        self._model_groups = model_groups
        self._chunk_tokens = chunk_tokens
        self._errors = errors
        self._counters = counters
        self._stores = WorkerStores(settings, self._share)
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="tierstore-save")
        self._loader = ThreadPoolExecutor(2, thread_name_prefix="tierstore-load")
        self._saves = Saves(self._saver, counters, errors)
        self._prompts: dict[str, _KnownPrompt] = {}
        self._loads: dict[str, BlockLoad] = {}
        self._refused: dict[str, LoadOrder | None] = {}  # vLLM waits for these loads, which did not start
        self._report = LoadReport()
        self._moved = threading.Event()
        self._step = -1
        self._epoch = ""
        self._open()

    @property
    def shard(self) -> Shard:
        """Return the description of this worker's pages for the scheduler half."""
        groups = list(self._groups.values())
        sizes = zip(*(group.others for group in groups), strict=True)
        return Shard(
            self._chunk_tokens,
            tuple(group.pages for group in groups),
            tuple(tuple(each.pages for source in size for each in source) for size in sizes),
            self._model,
        )

    def close(self) -> None:
        """Cancel loads, wait up to 2 s for saves, and close the stores."""
        for load in self._loads.values():
            load.cancel()
        self._saves.fence(None, _CLOSE_S)
        self._saver.shutdown(wait=False, cancel_futures=True)
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._stores.close()

    # -- a step --------------------------------------------------------------------------------------

    def fence(self, work: StepWork) -> None:
        """End the saves that read blocks which the step may write. vLLM calls this before the step."""
        self._begin(work)
        self._saves.fence(None if work.all_fresh else work.fresh, self._settings.fence_s)

    def load(self, work: StepWork) -> None:
        """Start the loads of a step."""
        self._begin(work)
        for request in work.refused:
            self._refused.setdefault(request, None)
        if work.loads:
            self._note_computed()
        for order in work.loads:
            # The next results report the request, even if starting its load raises.
            self._refused[order.request] = order
            load = self._make_load(order)
            if load is not None:
                del self._refused[order.request]
                self._loads[order.request] = load
                load.start(self._loader, self._moved.set)

    def save(self, work: StepWork) -> None:
        """Start the saves of a step without waiting for the daemon."""
        self._begin(work)
        if work.saves:
            self._note_computed()
        made = (self._make_save(order, blocks) for order in work.saves for blocks in self._own(order.groups))
        self._saves.begin([save for save in made if save is not None])
        for request in work.pin:
            self._pin(request)
        for request in work.forget:
            self._prompts.pop(request, None)

    def results(self, work: StepWork | None) -> Results:
        """Return the loads that ended since the last call."""
        if self._loads and work is not None and work.idle:
            self._moved.wait(_IDLE_WAIT_S)
        self._moved.clear()
        results = Results()
        for request, load in list(self._loads.items()):
            chunks = load.poll()
            if chunks is None:
                continue
            del self._loads[request]
            results.finished.add(request)
            if chunks < load.order.chunks:
                self._failed(load.order, chunks, results)
            else:
                self._loaded(load)
        for request, order in list(self._refused.items()):
            del self._refused[request]
            results.finished.add(request)
            if order is None:
                results.failed.add(request)
                self._report.failed[request] = 0
            else:
                self._failed(order, min(each.first for each in order.groups) if order.groups else 0, results)
        return results

    def bail_out(self) -> Results:
        """Cancel all loads and report them as failed. Called if :meth:`results` raises."""
        results = Results()
        for request, load in list(self._loads.items()):
            load.cancel()
            del self._loads[request]
            results.finished.add(request)
            results.failed.add(request)
        results.finished.update(self._refused)
        results.failed.update(self._refused)
        self._refused.clear()
        return results

    def refuse(self, work: StepWork) -> None:
        """Report a step's loads as failed. Called if :meth:`load` raises."""
        for request in [*work.refused, *(order.request for order in work.loads)]:
            if request not in self._loads:
                self._refused.setdefault(request, None)

    def report(self) -> LoadReport | None:
        """Return the loads that failed since the last call for the scheduler half, or None."""
        if not self._report.failed:
            return None
        report, self._report = self._report, LoadReport()
        return report

    @property
    def busy(self) -> int:
        """Return the number of loads and saves in flight."""
        return len(self._loads) + len(self._saves)

    # -- making loads and saves
    # --------------------------------------------------------------------------------------

    def _begin(self, work: StepWork) -> None:
        """Apply the epoch and the prompt updates of a step, once."""
        if work.number == self._step:
            return
        self._step = work.number
        if work.epoch != self._epoch:
            self._renew(work.epoch)
        for grown in work.grown:
            known = self._prompts.get(grown.request)
            if known is None:
                known = self._prompts[grown.request] = _KnownPrompt(ChunkNames(self._chunk_tokens))
            known.grow(grown)

    def _share(self, pin: Pin) -> None:
        for group in self._groups.values():
            for blocks in group.copies:
                blocks.share(pin)

    def _open(self) -> None:
        for group in self._groups.values():
            for size in range(len(group.others) + 1):
                for source in group.sources(size):
                    self._stores.of(source.pages)

    def _renew(self, epoch: str) -> None:
        """Cancel the loads and saves of the earlier epoch, and connect to the daemon again.

        The daemon limits the number of a client's identities, and drops them only when the client
        disconnects.
        """
        self._epoch = epoch
        for load in self._loads.values():
            load.cancel()
        self._saves.fence(None, self._settings.fence_s)
        self._stores.close()
        self._open()
        self._stores.wait_connected(RENEW_S)

    def _note_computed(self) -> None:
        for group in self._groups.values():
            for blocks in group.copies:
                blocks.computed()

    def _pages(self, known: _KnownPrompt, pages: GroupShard, chunks: range) -> tuple[Prompt, int]:
        model = None if self._model is None else under_epoch(self._model, self._epoch)
        return known.pages(pages, under_epoch(pages.identity, self._epoch), chunks, model)

    def _own(self, groups: Sequence[GroupBlocks]) -> list[GroupBlocks]:
        return [blocks for blocks in groups if blocks.group in self._groups]

    def _make_load(self, order: LoadOrder) -> BlockLoad | None:
        known = self._prompts.get(order.request)
        if known is None or len(known.keys) < order.chunks or not order.groups:
            return None
        parts = []
        for blocks in self._own(order.groups):
            group = self._groups[blocks.group]
            if not self._valid(blocks):
                return None
            self._saves.fence(blocks.blocks, self._settings.fence_s)
            chunks = range(blocks.first, blocks.end)
            for source in group.sources(order.size):
                prompt, first = self._pages(known, source.pages, chunks)
                target = LoadedBlocks(source.blocks, blocks.chunks, first, self._errors.caught)
                parts.append(LoadPart(self._stores.of(source.pages), prompt, blocks, target, first))
        return BlockLoad(order, parts, deadline_s=self._settings.load_s, errors=self._errors)

    def _loaded(self, load: BlockLoad) -> None:
        tokens = max(len(each.chunks) for each in load.order.groups) * self._chunk_tokens
        self._counters.add("loads")
        self._counters.add("loaded_tokens", tokens)
        self._counters.add("loaded_bytes", load.nbytes)
        self._counters.add("load_seconds", time.monotonic() - load.began)

    def _failed(self, order: LoadOrder, chunks: int, results: Results) -> None:
        """Report that only the first ``chunks`` chunks were loaded.

        If the model has one KV cache group, with the KV of every token, vLLM continues after these chunks.
        Otherwise vLLM computes the request from its beginning.
        """
        self._report.failed[order.request] = chunks
        missing = order.groups[0] if len(order.groups) == 1 == self._model_groups else None
        if missing is None or self._groups[missing.group].pages.rule.past is not Past.ALL:
            results.failed.add(order.request)
            return
        for at, chunk in enumerate(missing.chunks, missing.first):
            if at >= chunks:
                results.blocks.update(block for block in chunk if block)

    def _make_save(self, order: SaveOrder, blocks: GroupBlocks) -> BlockSave | None:
        known = self._prompts.get(order.request)
        if known is None or len(known.keys) < blocks.end or not self._valid(blocks):
            self._errors.warn("orders", "a save has chunks whose keys this worker does not know")
            return None
        group = self._groups[blocks.group]
        chunks = range(blocks.first, blocks.end)
        prompt, first = self._pages(known, group.pages, chunks)
        return BlockSave(
            order.request,
            self._stores.of(group.pages),
            prompt,
            SavedBlocks(group.blocks, blocks.chunks, self._errors.caught),
            first,
            len(blocks.chunks),
            blocks.blocks,
            order.hint,
        )

    def _pin(self, request: str) -> None:
        known = self._prompts.get(request)
        if known is None or not known.keys:
            return
        chunks = range(len(known.keys))
        for group in self._groups.values():
            prompt, _ = self._pages(known, group.pages, chunks)
            store = self._stores.of(group.pages)

            def pin(store=store, prompt=prompt) -> None:  # type: ignore[no-untyped-def]
                self._saves.wait(request, _PIN_WAIT_S)
                store.pin(prompt)

            self._saver.submit(pin)

    def _valid(self, blocks: GroupBlocks) -> bool:
        group = self._groups[blocks.group]
        return valid_blocks(blocks.chunks, group.layout.num_blocks, group.layout.blocks)
