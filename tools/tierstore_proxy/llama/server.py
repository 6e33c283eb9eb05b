"""llama-server's API, as far as the proxy uses it itself, and the model that it serves."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tierstore.errors import TierStoreError, UsageError
from tierstore.gguf import window_of
from tierstore_connectors.llamacpp.blocks import LlamaBlocks, ModelFacts
from tierstore_connectors.llamacpp.server import LlamaProcess
from tierstore_connectors.llamacpp.state import (
    LlamaSequence,
    LlamaStateError,
    Tokens,
    read_file,
    write_file,
)
from tierstore_proxy.llama.settings import LlamaSettings
from tierstore_proxy.llama.slots import SlotBook
from tierstore_proxy.prompts import token_ids
from tierstore_proxy.residency import read_bounded
from tierstore_proxy.upstream import Upstream, within

_MOST_ANSWER_BYTES = 64 << 20
_ASK_S = 2.0  # the time limit of answers that need no computation by the model
_STATE_S = 30.0  # for a slot's file
_PREFIX = "tierstore-"
_STALE_S = 600.0
_CONNECT_S = 1.0  # do not wait for the daemon here: one that starts later is used as well

_log = logging.getLogger(__name__)


class LlamaServerError(TierStoreError):
    """llama-server did not answer as expected. ``status`` is the HTTP status, or 0 if something else in the
    answer is wrong."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class LlamaServer:
    """The API of one llama-server. ``headers`` are a client's, with its key. Used on one event loop."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream

    async def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        document: object | None = None,
        *,
        limit_s: float = _ASK_S,
    ) -> Any:
        """Return the JSON that llama-server answers to a GET, or to a POST of ``document``. Raises
        :class:`LlamaServerError`, :class:`~tierstore_proxy.upstream.UpstreamError` and
        :class:`TimeoutError`."""

        async def answered() -> Any:
            method, body = ("GET", None) if document is None else ("POST", msgspec.json.encode(document))
            sent = {"content-type": "application/json", **headers}
            async with self.upstream.ask(method, path, body, sent) as answer:
                content = await read_bounded(answer, _MOST_ANSWER_BYTES)
                if answer.status_code != 200:
                    shown = content[:200].decode(errors="replace")
                    raise LlamaServerError(
                        f"{path} answers {answer.status_code}: {shown}", answer.status_code
                    )
            try:
                return msgspec.json.decode(content)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise LlamaServerError(f"{path} answers no JSON: {error}") from error

        return await within(limit_s, answered())

    async def tokenized(self, text: str, headers: Mapping[str, str]) -> Tokens:
        """Return the tokens of a prompt, with those that the model adds to it."""
        asked = {"content": text, "add_special": True, "parse_special": True}
        tokens = token_ids(_field(await self.ask("/tokenize", headers, asked), "tokens"))
        return np.empty(0, np.uint32) if tokens is None else tokens

    async def templated(self, body: bytes, headers: Mapping[str, str]) -> str:
        """Return the prompt that llama-server makes of a chat."""
        answer = await self.ask("/apply-template", headers, msgspec.Raw(body))
        prompt = _field(answer, "prompt")
        if not isinstance(prompt, str):
            raise LlamaServerError("/apply-template answers no prompt")
        return prompt

    async def slots(self, headers: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the slots: at least their ``id`` and whether they ``is_processing``."""
        slots = await self.ask("/slots", headers)
        if not isinstance(slots, list) or not all(isinstance(each, dict) for each in slots):
            raise LlamaServerError("/slots answers no list of slots")
        return slots

    async def compute(self, slot: int, tokens: Tokens, headers: Mapping[str, str]) -> None:
        """Bring a slot to exactly these tokens, and generate none. llama-server reuses what the slot has."""
        asked = {"prompt": tokens.tolist(), "n_predict": 0, "id_slot": slot, "cache_prompt": True}
        await self.ask("/completion", headers, asked, limit_s=_STATE_S)

    async def slot_action(
        self, slot: int, action: str, headers: Mapping[str, str], file: Path | None = None
    ) -> None:
        """Save, restore or erase a slot. llama-server waits while the slot is in use."""
        document = {} if file is None else {"filename": file.name}
        await self.ask(f"/slots/{slot}?action={action}", headers, document, limit_s=_STATE_S)


@dataclass
class ServedModel:
    """The model that a process of llama-server serves, and its slots."""

    process: LlamaProcess
    folder: Path
    book: SlotBook
    blocks: LlamaBlocks

    @contextmanager
    def slot_file(self) -> Iterator[Path]:
        """Return the path of a new file in the folder for slots. It is removed at the end."""
        file = self.folder / f"{_PREFIX}{uuid.uuid4().hex}.state"
        try:
            yield file
        finally:
            with suppress(OSError):
                file.unlink()

    @staticmethod
    def write(file: Path, state: LlamaSequence) -> None:
        """Write a slot's file, readable by this user only. Raises :class:`OSError`."""
        with open(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as opened:
            opened.writelines(part.data for part in write_file(state))

    @staticmethod
    def read(file: Path) -> LlamaSequence | None:
        """Read a slot's file. Raises :class:`OSError` and :class:`LlamaStateError`."""
        return read_file(np.fromfile(file, np.uint8))


async def identify(server: LlamaServer, settings: LlamaSettings, headers: Mapping[str, str]) -> ServedModel:
    """Return the model that llama-server serves now. Reads all of its weights, unless their digest is
    remembered, and computes one token in a free slot to learn the layout of its state.

    Raises :class:`UsageError` for a server that is not supported, and other errors while it is starting.
    """
    props = await server.ask("/props", headers)
    process = await asyncio.to_thread(LlamaProcess.listening_at, *settings.server_address)
    process.require_supported()
    model, slots = _field(props, "model_path"), _field(props, "total_slots")
    if not isinstance(model, str) or not model or not isinstance(slots, int):
        raise UsageError("llama-server's /props has no model_path and total_slots: this version is not known")
    if await server.ask("/lora-adapters", headers):
        raise UsageError("llama-server has LoRA adapters, which are not supported: their scale can change")
    folder = process.slot_folder
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"llama-server's folder for slots, {folder}, cannot be written here")
    _remove_stale(folder)
    weights = await asyncio.to_thread(process.weights, Path(model))
    generation = _field(props, "default_generation_settings")
    facts = [_field(props, "build_info"), _field(generation, "n_ctx")]
    engine = await asyncio.to_thread(process.engine, facts)
    served = ServedModel(process, folder, SlotBook(slots), None)  # type: ignore[arg-type]
    layout = (await _probed(server, served, headers)).layout
    window = window_of(process.path(model)) if len(layout.caches) > 1 else 0
    if not process.alive:
        raise LlamaServerError("llama-server has ended")
    name = str(_field(props, "model_alias") or Path(model).name)
    served.blocks = LlamaBlocks(settings.blocks, layout, ModelFacts(weights, engine, window, name), _log)
    await asyncio.to_thread(served.blocks.wait_connected, _CONNECT_S)
    return served


async def _probed(server: LlamaServer, served: ServedModel, headers: Mapping[str, str]) -> LlamaSequence:
    """Return the state of a sequence of a few tokens, computed in a free slot."""
    slots = [slot for slot in await server.slots(headers) if not slot.get("is_processing")]
    if not slots:
        raise LlamaServerError("all slots are in use")
    slot = int(min(slots, key=lambda each: each.get("n_prompt_tokens", 0))["id"])
    tokens = await server.tokenized("a", headers)
    await server.compute(slot, tokens, headers)
    with served.slot_file() as file:
        await server.slot_action(slot, "save", headers, file)
        try:
            state = served.read(file)
        except LlamaStateError as error:
            raise UsageError(
                f"the state of this model or llama.cpp version is not supported: {error}"
            ) from error
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    if state is None:
        raise LlamaServerError("the slot was used by another request")
    return state


def _field(document: object, name: str) -> Any:
    return document.get(name) if isinstance(document, dict) else None


def _remove_stale(folder: Path) -> None:
    """Remove files that a proxy has left behind."""
    for file in folder.glob(f"{_PREFIX}*.state"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > _STALE_S:
                file.unlink()
