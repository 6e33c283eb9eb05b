"""A baseline server: a loop over a transformers model with static batches.

``python -m tierstore_tools.scenarios.static_batches MODEL --port N --batch B --max-tokens N``. Up to ``B``
waiting requests form a batch. The next batch starts when every answer of the last one is complete. Each row
of a batch reserves contiguous keys and values for ``max-tokens`` tokens. They are dropped after the batch.
Prompts are padded on the left. Greedy, float32.

It serves the part of OpenAI's API that the benchmark needs: ``/v1/models``, streamed ``/v1/completions`` with
token ids, and its reserved KV at ``/metrics``.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, CacheLayerMixin

_log = logging.getLogger(__name__)
_GATHER_S = 0.02  # wait this long for requests that were sent at the same moment


_CacheLayer: Any = CacheLayerMixin  # only some versions of transformers have types


class _ContiguousLayer(_CacheLayer):
    """Keys and values of one layer, [row, head, token, dim], reserved for ``max_tokens`` tokens."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads, _, dim = key_states.shape
        self.keys = key_states.new_zeros(rows, heads, self._max_tokens, dim)
        self.values = torch.zeros_like(self.keys)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, self._length = self._length, self._length + key_states.shape[2]
        self.keys[:, :, first : self._length] = key_states
        self.values[:, :, first : self._length] = value_states
        return self.keys[:, :, : self._length], self.values[:, :, : self._length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return self._max_tokens

    get_max_cache_shape = get_max_length  # the method's name in earlier versions of transformers


@dataclass(eq=False)
class _Waiting:
    """A request, and the queue to its client's coroutine: token ids, then None."""

    tokens: list[int]
    max_tokens: int
    loop: asyncio.AbstractEventLoop
    out: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)

    def send(self, token: int | None) -> None:
        self.loop.call_soon_threadsafe(self.out.put_nowait, token)


class Batches:
    """The loop over batches, in a thread of its own."""

    def __init__(self, model: Any, *, batch: int, max_tokens: int) -> None:
        self._model = model
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # before transformers 5.24
        self._batch = batch
        self.max_tokens = max_tokens
        self.kv_slots = 0
        self._waiting: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="batches", daemon=True).start()

    def add(self, request: _Waiting) -> None:
        self._waiting.put(request)

    def _run(self) -> None:
        while True:
            taken = self._take()
            self.kv_slots = len(taken) * self.max_tokens
            try:
                self._complete(taken)
            # an error such as torch's out of memory ends this batch only, because the next one may fit
            except RuntimeError as error:
                _log.warning("a batch failed: %s", error)
            finally:
                self.kv_slots = 0
                for request in taken:
                    request.send(None)

    def _take(self) -> list[_Waiting]:
        taken = [self._waiting.get()]
        ends = time.monotonic() + _GATHER_S
        while len(taken) < self._batch:
            try:
                taken.append(self._waiting.get(timeout=max(ends - time.monotonic(), 0)))
            except queue.Empty:
                break
        return taken

    @torch.inference_mode()
    def _complete(self, requests: Sequence[_Waiting]) -> None:
        longest = max(len(each.tokens) for each in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(requests):
            ids[row, longest - len(each.tokens) :] = torch.tensor(each.tokens)
            mask[row, longest - len(each.tokens) :] = 1
        cache = Cache(
            layers=[_ContiguousLayer(self.max_tokens) for _ in range(self._model.config.num_hidden_layers)]
        )
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        for step in range(max(each.max_tokens for each in requests)):
            out = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                logits_to_keep=1,
                **{self._cache_name: cache},
            )
            ids = out.logits[:, -1:].argmax(-1)
            mask = torch.cat([mask, mask.new_ones(len(requests), 1)], 1)
            positions = positions[:, -1:] + 1
            for row, each in enumerate(requests):
                if step < each.max_tokens:
                    each.send(int(ids[row, 0]))


def build_app(batches: Batches, tokenizer: Any, name: str) -> Starlette:
    """Return the HTTP application."""

    async def complete(request: Request) -> StreamingResponse | JSONResponse:
        body = await request.json()
        tokens, max_tokens = body["prompt"], int(body.get("max_tokens", 16))
        if len(tokens) + max_tokens > batches.max_tokens:
            message = f"at most {batches.max_tokens} tokens, got {len(tokens)} + {max_tokens}"
            return JSONResponse({"error": {"message": message}}, 400)
        waiting = _Waiting(tokens, max_tokens, asyncio.get_running_loop())
        batches.add(waiting)
        return StreamingResponse(stream(waiting), media_type="text/event-stream")

    async def stream(waiting: _Waiting) -> AsyncIterator[str]:
        generated = 0
        while (token := await waiting.out.get()) is not None:
            generated += 1
            choice = {"index": 0, "text": tokenizer.decode([token]), "finish_reason": None}
            yield _event({"object": "text_completion", "model": name, "choices": [choice]})
        if generated < waiting.max_tokens:
            yield _event({"error": {"message": "the batch failed"}})
        usage = {"prompt_tokens": len(waiting.tokens), "completion_tokens": generated}
        yield _event({"object": "text_completion", "model": name, "choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"}]})

    async def metrics(_: Request) -> PlainTextResponse:
        return PlainTextResponse(f"static_batches_kv_slots {batches.kv_slots}\n")

    return Starlette(
        routes=[
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/models", models),
            Route("/metrics", metrics),
        ]
    )


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    options = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    batches = Batches(model.eval(), batch=options.batch, max_tokens=options.max_tokens)
    app = build_app(batches, AutoTokenizer.from_pretrained(options.model), options.model.name)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
