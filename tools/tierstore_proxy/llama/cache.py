"""Restore states from the store into llama-server's slots, and save the slots into the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tierstore.errors import UsageError
from tierstore_connectors.common.guard import ErrorLog
from tierstore_connectors.llamacpp.state import LlamaSequence, Tokens
from tierstore_proxy.llama.metrics import LlamaMetrics, LlamaOutcome
from tierstore_proxy.llama.requests import LlamaRequest
from tierstore_proxy.llama.server import LlamaServer, ServedModel, identify
from tierstore_proxy.llama.settings import LlamaSettings
from tierstore_proxy.llama.slots import KnownSlot, common_prefix
from tierstore_proxy.upstream import Upstream

_LOOK_AGAIN_S = 1.0
# the pause between two attempts to identify a model that is not supported: each computes a token
_REFUSED_AGAIN_S = 30.0
_FINDERS = 4
_MOST_WAITING_SAVES = 4

_log = logging.getLogger(__name__)


@dataclass
class SlotUse:
    """A slot that a request uses. ``held`` is how many of the slot's ``tokens`` the store has. ``answered``
    is set when llama-server has begun to answer."""

    served: ServedModel
    slot: KnownSlot
    tokens: Tokens
    held: int = 0
    turn: int = 0
    answered: bool = False


class SlotCache:
    """Restores prompts into slots and saves slots. Used on one event loop, from :meth:`start` to
    :meth:`close`. No error leaves this class: after an error, the request is forwarded unchanged."""

    def __init__(self, settings: LlamaSettings, upstream: Upstream, metrics: LlamaMetrics) -> None:
        self.errors = ErrorLog(_log)
        self._settings = settings
        self._server = LlamaServer(upstream)
        self._metrics = metrics
        self._served: ServedModel | None = None
        self._finders = ThreadPoolExecutor(_FINDERS, thread_name_prefix="tierstore-find")
        self._savers = ThreadPoolExecutor(1, thread_name_prefix="tierstore-save")
        self._saves: set[asyncio.Task[None]] = set()
        self._saving = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        key = settings.api_key
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def start(self) -> None:
        """Start to watch llama-server."""
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Finish the running save, and drop the saves that wait."""
        tasks = [*self._saves, *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._finders.shutdown(wait=False, cancel_futures=True)
        self._savers.shutdown(wait=True, cancel_futures=True)
        self._leave()

    async def settle(self) -> None:
        """Wait until all running saves have ended."""
        while self._saves:
            await asyncio.gather(*self._saves, return_exceptions=True)

    def taint(self) -> None:
        """Record that a client may have put KV into slots that does not belong to their tokens."""
        if self._served is not None:
            self._served.book.taint()

    # -- the server's process ------------------------------------------------------------------------

    @property
    def served(self) -> ServedModel | None:
        """The model that llama-server serves now. None while it is unknown."""
        if self._served is not None and not self._served.process.alive:
            self._leave()
        return self._served

    def _leave(self) -> None:
        if self._served is not None:
            self._served.blocks.close()
            self._served = None

    async def _watch(self) -> None:
        """Identify llama-server whenever it has been started."""
        while True:
            supported = self.served is not None or await self._identify()
            await asyncio.sleep(_LOOK_AGAIN_S if supported else _REFUSED_AGAIN_S)

    async def _identify(self) -> bool:
        """Identify llama-server. Return False if it is not supported."""
        try:
            served = await identify(self._server, self._settings, self._headers)
        except UsageError as error:
            self.errors.warn("identify", f"nothing is restored or saved: {error}")
            return False
        except Exception as error:  # noqa: BLE001  # the server starts or is busy: try again later
            _log.debug("llama-server is not ready: %r", error)
        else:
            self._served = served
            identity = served.blocks.identity.digest.hex()[:8]
            _log.info("%d slots; pages have identity %s", len(served.book.slots), identity)
        return True

    # -- before a request ----------------------------------------------------------------------------

    @asynccontextmanager
    async def slot_for(
        self, request: LlamaRequest, headers: Mapping[str, str]
    ) -> AsyncIterator[SlotUse | None]:
        """Find a slot for a request, restore what the store has of its prompt into it, and save the slot when
        the block has ended. Yields None if llama-server shall choose the slot."""
        use, outcome = None, LlamaOutcome.FAILED
        try:
            use, outcome = await self._prepared(request, headers)
        except Exception as error:  # noqa: BLE001  # the request is forwarded as it came
            self.errors.caught("restoring a prompt", error)
        self._metrics.went(outcome)
        try:
            yield use
        finally:
            if use is not None:
                self._release(use, headers)

    async def _prepared(
        self, request: LlamaRequest, headers: Mapping[str, str]
    ) -> tuple[SlotUse | None, LlamaOutcome]:
        served = self.served
        if served is None:
            return None, LlamaOutcome.UNKNOWN
        tokens = await self._tokens(request, headers)
        if len(tokens) <= self._settings.blocks.least_tokens:
            return None, LlamaOutcome.SHORT
        slots = await self._server.slots(headers)
        for each in slots:
            served.book.compare(each["id"], each.get("id_task"), each.get("n_prompt_tokens", 0))
        idle = {each["id"] for each in slots if each.get("is_processing") is False}
        slot = served.book.choose(tokens, idle, request.slot)
        if slot is None:
            return None, LlamaOutcome.BUSY
        served.book.take(slot)
        use = SlotUse(served, slot, tokens, turn=slot.used)
        try:
            outcome = await self._filled(use, headers)
        except BaseException:
            served.book.emptied(slot)
            slot.busy = False
            raise
        # llama-server may have been restarted meanwhile, and the new process has the state
        if served is not self.served:
            slot.busy = False
            return None, LlamaOutcome.UNKNOWN
        return use, outcome

    async def _tokens(self, request: LlamaRequest, headers: Mapping[str, str]) -> Tokens:
        if request.tokens is not None:
            return request.tokens
        text = request.text
        if text is None:
            text = await self._server.templated(request.body, headers)
        return await self._server.tokenized(text, headers)

    async def _filled(self, use: SlotUse, headers: Mapping[str, str]) -> LlamaOutcome:
        """Restore the longest held prefix into the slot, if that is more than the slot has."""
        served, slot = use.served, use.slot
        if slot.tainted:
            await self._server.slot_action(slot.number, "erase", headers)
            served.book.emptied(slot)
        known = common_prefix(slot.tokens, use.tokens)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._finders, lambda: served.blocks.find(use.tokens, known=known))
        use.held = max(found.tokens, min(slot.held, known))
        self._metrics.prompt_tokens.inc(len(use.tokens))
        if found.state is None:
            return LlamaOutcome.IN_SLOT if known else LlamaOutcome.MISS
        served.book.emptied(slot)
        with served.slot_file() as file:
            await loop.run_in_executor(self._finders, served.write, file, found.state)
            await self._server.slot_action(slot.number, "restore", headers, file)
        served.book.contains(slot, found.state.tokens, use.held)
        self._metrics.restored_tokens.inc(len(found.state.tokens))
        return LlamaOutcome.RESTORED

    # -- after a request -----------------------------------------------------------------------------

    def _release(self, use: SlotUse, headers: Mapping[str, str]) -> None:
        use.slot.busy = False
        if not use.answered or use.served is not self.served:
            use.served.book.emptied(use.slot)
            return
        use.served.book.contains(use.slot, use.tokens, use.held)
        if len(self._saves) < _MOST_WAITING_SAVES:
            task = asyncio.create_task(self._save(use, headers))
            self._saves.add(task)
            self._metrics.saves.inc()
            task.add_done_callback(self._ended)

    def _ended(self, save: asyncio.Task[None]) -> None:
        self._saves.discard(save)
        self._metrics.saves.dec()

    async def _save(self, use: SlotUse, headers: Mapping[str, str]) -> None:
        try:
            async with self._saving:
                await self._saved(use, headers)
        except Exception as error:  # noqa: BLE001  # the slot is not saved
            self.errors.caught("saving a slot", error)

    async def _saved(self, use: SlotUse, headers: Mapping[str, str]) -> None:
        """Save the new pages of the slot."""
        computed = await self._noted(use, headers)
        if not self._settings.save:
            return
        if computed - use.held < self._settings.blocks.least_tokens:
            return
        state = await self._state_of(use, headers)
        if state is None:
            return
        if not use.served.blocks.windowed:
            await self._store(use, state)
            return
        for length in self._page_ends(len(use.tokens), len(state.tokens)):
            if use.slot.used != use.turn:
                return  # another request uses the slot
            await self._server.compute(use.slot.number, state.tokens[:length], headers)
            part = await self._state_of(use, headers)
            if part is None or len(part.tokens) != length:
                return
            await self._store(use, part)
            await self._noted(use, headers)

    async def _noted(self, use: SlotUse, headers: Mapping[str, str]) -> int:
        """Record the number of the slot's last request. Return how many tokens the slot has."""
        slots = {slot["id"]: slot for slot in await self._server.slots(headers)}
        found = slots.get(use.slot.number, {})
        if use.slot.used == use.turn:
            use.slot.task = found.get("id_task")
        return int(found.get("n_prompt_tokens", 0))

    def _page_ends(self, prompt: int, computed: int) -> list[int]:
        """Return where a slot with sliding windows is saved: at the ends of its last page and of its prompt's
        last page. llama-server goes back there, because a state has the last window only."""
        chunk, least = self._settings.blocks.chunk_tokens, self._settings.blocks.least_tokens
        ends = {computed // chunk * chunk, (prompt - 1) // chunk * chunk}
        return [end for end in sorted(ends, reverse=True) if end >= least]

    async def _state_of(self, use: SlotUse, headers: Mapping[str, str]) -> LlamaSequence | None:
        """Return the slot's state. None if the slot is empty, or belongs to another process now."""
        with use.served.slot_file() as file:
            await self._server.slot_action(use.slot.number, "save", headers, file)
            loop = asyncio.get_running_loop()
            state = await loop.run_in_executor(self._savers, use.served.read, file)
        return state if use.served.process.alive else None

    async def _store(self, use: SlotUse, state: LlamaSequence) -> None:
        held = min(use.held, common_prefix(state.tokens, use.tokens))
        blocks = use.served.blocks
        loop = asyncio.get_running_loop()
        stored = await loop.run_in_executor(self._savers, lambda: blocks.save(state, held=held))
        self._metrics.saved_tokens.inc(max(stored - held, 0))
        use.held = max(use.held, stored)
        if use.slot.used == use.turn and not use.slot.tainted:
            use.served.book.contains(use.slot, state.tokens, stored)
