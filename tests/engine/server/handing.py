"""Requests that hand a prompt over, for tests with one daemon and with two hosts."""

from __future__ import annotations

import json
import random
import threading
import time
from typing import Any, TypeAlias

import pytest

from .live import WAIT_S, Live
from .processes import Process

Serves: TypeAlias = "Live | Process"
CHUNK = 16
TOKENS = 699
WHOLE = TOKENS // CHUNK * CHUNK
NULLS = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
ASKS = {"do_remote_decode": True, "do_remote_prefill": False, **NULLS}  # as vLLM's proxies say it


def a_prompt(number: int, tokens: int = TOKENS) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(250) for _ in range(tokens)]


def ask(server: Serves, prompt: Any, *, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = server.http.post("/v1/completions", json={**body, "logprobs": 1, **fields})
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def told(server: Serves, **fields: Any) -> tuple[list[dict[str, Any]], Any]:
    """Ask for sampled completions, whole or streamed. Return the choices, those of a stream put together, and
    the ``kv_transfer_params`` of the answer, which are the last thing that a stream says."""
    body = {"model": "tiny", "temperature": 1, "ignore_eos": True, "logprobs": 2, **fields}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        document = answer.json()
        return document["choices"], document.get("kv_transfer_params")
    *lines, end = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert end == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    choices: dict[int, dict[str, Any]] = {}
    for piece in (piece for chunk in chunks for piece in chunk["choices"]):
        whole = choices.setdefault(piece["index"], {**piece, "text": ""})
        whole["text"] += piece["text"]
        whole["finish_reason"] = piece["finish_reason"]
        if whole["logprobs"] is None:
            whole["logprobs"] = piece["logprobs"]
        elif whole["logprobs"] is not piece["logprobs"]:
            for name, values in piece["logprobs"].items():
                whole["logprobs"][name] += values
    assert all("kv_transfer_params" not in chunk for chunk in chunks[:-1])
    return [choices[index] for index in sorted(choices)], chunks[-1].get("kv_transfer_params")


def promise(tokens: int = WHOLE, until_s: float = 10.0) -> dict[str, Any]:
    ours = {"tokens": tokens, "until_s": until_s}
    return {"do_remote_prefill": True, "do_remote_decode": False, "tierstore": ours}


def cached(document: dict[str, Any]) -> int:
    found: int = document["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def check_same(document: dict[str, Any], expected: dict[str, Any]) -> None:
    [choice], [other] = document["choices"], expected["choices"]
    assert choice["text"] == other["text"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(
        other["logprobs"]["token_logprobs"], abs=1e-4
    )


class Asked:
    """A request that is under way on a thread."""

    def __init__(self, server: Serves, prompt: list[int], **fields: Any) -> None:
        self._answers: list[dict[str, Any]] = []
        self.began = time.monotonic()
        self._thread = threading.Thread(target=lambda: self._answers.append(ask(server, prompt, **fields)))
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def answer(self) -> dict[str, Any]:
        self._thread.join(WAIT_S)
        [answer] = self._answers
        return answer
