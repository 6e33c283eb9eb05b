"""One engine computes a prompt, another goes on with it: two servers over one daemon."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs pip install -e '.[dev]'")
pytest.importorskip("uvicorn")

import httpx

from tests.portions import diagonal
from tierstore.testing.clock import wait_until
from tierstore.testing.processes import DaemonProcess
from tierstore_connectors.common.handover import Role
from tierstore_engine.build import build_engine
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.settings import EngineSettings
from tierstore_tools.vllm.daemon import ServeProcess

from .handing import ASKS, CHUNK, TOKENS, WHOLE, Asked, a_prompt, ask, cached, check_same, promise, told
from .live import WAIT_S, Live
from .processes import Process


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ServeProcess]:
    with ServeProcess(tmp_path, disk=False) as daemon:
        yield daemon


@pytest.fixture
def pair(tiny: LoadedModel, daemon: ServeProcess, serve: Callable[..., Live]) -> tuple[Live, Live]:
    """An engine that is to compute prompts, and one that is to go on with them."""
    return serve(engine_over(tiny, daemon.url), owned=True), serve(engine_over(tiny, daemon.url), owned=True)


def engine_over(model: LoadedModel, url: str, role: str = "kv_both") -> Engine:
    settings = EngineSettings(prefill_chunk=64, plan="load")
    engine = build_engine(
        model, pool_pages=128, store=url, chunk_tokens=CHUNK, settings=settings, role=Role.parse(role)
    )
    assert engine.connector.store.wait_connected(WAIT_S)  # type: ignore[attr-defined]
    return engine


@pytest.fixture
def alone(tiny: LoadedModel, serve: Callable[..., Live], engine_of: Callable[..., Engine]) -> Live:
    """One engine that does both, without a store."""
    return serve(engine_of(tiny, prefill_chunk=64, pool_pages=128))


def test_one_computes_the_other_goes_on(pair: tuple[Live, Live], alone: Live) -> None:
    prefill, decode = pair
    for number in range(3):
        prompt = a_prompt(number)
        first = ask(prefill, prompt, max_tokens=1, kv_transfer_params=ASKS)
        params = first["kv_transfer_params"]
        assert params == promise(until_s=1.0)
        second = ask(decode, prompt, kv_transfer_params=params)
        assert cached(second) >= WHOLE
        expected = ask(alone, prompt)
        check_same(second, expected)
        assert first["choices"][0]["text"] == expected["choices"][0]["text"][:1]
        assert "kv_transfer_params" not in second


def test_a_chat_is_handed_over_too(pair: tuple[Live, Live], alone: Live) -> None:
    prefill, decode = pair
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "What is a page? " * 20}]}
    chat |= {"temperature": 0, "ignore_eos": True}

    def say(live: Live, **fields: Any) -> dict[str, Any]:
        answer = live.http.post("/v1/chat/completions", json={**chat, **fields})
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    first = say(prefill, max_completion_tokens=1, max_tokens=1, kv_transfer_params=ASKS)
    tokens = first["kv_transfer_params"]["tierstore"]["tokens"]
    assert tokens == first["usage"]["prompt_tokens"] // CHUNK * CHUNK
    second = say(decode, max_tokens=8, kv_transfer_params=first["kv_transfer_params"])
    assert cached(second) >= tokens
    assert second["choices"] == say(alone, max_tokens=8)["choices"]


@pytest.mark.parametrize(
    *diagonal(
        fields=[
            {"n": 3},
            {"n": 2, "best_of": 4},
            {"stream": True},
            {"stream": True, "n": 3, "stop": ["a"], "stream_options": {"include_usage": True}},
            {"stream": True, "n": 2, "echo": True, "logprobs": None},
        ],
        name=["tiny", "tiny-gemma3", "tiny-qwen3-next"],
    )
)
def test_several_continuations_and_streams(
    name: str,
    fields: dict[str, Any],
    loaded: Callable[..., LoadedModel],
    shared_daemon: DaemonProcess,
    serve: Callable[..., Live],
) -> None:
    """Each token is told once: those of the engine that goes on."""
    model = loaded(name)
    prefill, decode = (serve(engine_over(model, shared_daemon.url), owned=True) for _ in range(2))
    alone = serve(build_engine(model, pool_pages=128, chunk_tokens=CHUNK), owned=True)
    prompt = a_prompt(sum(map(ord, f"{name}{fields}")))
    asked = {"prompt": prompt, "seed": 7, **fields}
    _, params = told(prefill, **asked, max_tokens=1, kv_transfer_params=ASKS)
    assert params == promise(until_s=1.0)
    choices, none = told(decode, **asked, max_tokens=8, kv_transfer_params=params)
    assert none is None
    expected, _ = told(alone, **asked, max_tokens=8)
    assert len(choices) == fields.get("n", 1)
    for choice, other in zip(choices, expected, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (other["text"], other["finish_reason"])
        if choice["logprobs"] is not None:
            assert choice["logprobs"]["tokens"] == other["logprobs"]["tokens"]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(
                other["logprobs"]["token_logprobs"], abs=1e-4
            )
    assert decode.stats().computed_tokens < TOKENS - WHOLE + 8 * fields.get("best_of", len(choices)) + CHUNK
    assert prefill.stats().generated_tokens == fields.get("best_of", len(choices))


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3-next"])
@pytest.mark.parametrize("tokens", [5, 304])
def test_after_a_longer_answer_only_what_is_held_is_promised(
    name: str,
    tokens: int,
    loaded: Callable[..., LoadedModel],
    daemon: ServeProcess,
    serve: Callable[..., Live],
) -> None:
    """A state is kept at the prompt's save point and at the answer's end, not where the prompt ends."""
    prefill, decode = (serve(engine_over(loaded(name), daemon.url), owned=True) for _ in range(2))
    prompt = a_prompt(tokens, tokens)
    params = ask(prefill, prompt, max_tokens=40, kv_transfer_params=ASKS)["kv_transfer_params"]
    held = (tokens - 1) // CHUNK * CHUNK
    assert params["tierstore"]["tokens"] == held
    assert cached(ask(decode, prompt, kv_transfer_params=params)) >= held
    assert daemon.stats().service.broken_promises == 0


def test_promised_pages_are_waited_for_and_others_go_on(
    pair: tuple[Live, Live], alone: Live, daemon: ServeProcess
) -> None:
    prefill, decode = pair
    prompt = a_prompt(10)
    waiting = Asked(decode, prompt, kv_transfer_params=promise())
    wait_until(lambda: daemon.stats().service.promised_lookups == 1)
    ask(decode, a_prompt(11))  # is served meanwhile
    assert not waiting.done
    ask(prefill, prompt, max_tokens=1, kv_transfer_params=ASKS)
    answer = waiting.answer()
    assert cached(answer) >= WHOLE
    check_same(answer, ask(alone, prompt))
    assert daemon.stats().service.broken_promises == 0


def test_promised_pages_that_never_come_cost_what_was_said(
    pair: tuple[Live, Live], alone: Live, daemon: ServeProcess
) -> None:
    _, decode = pair
    prompt = a_prompt(20)
    began = time.monotonic()
    answer = ask(decode, prompt, kv_transfer_params=promise(until_s=0.5))
    assert time.monotonic() - began >= 0.5
    assert cached(answer) == 0
    check_same(answer, ask(alone, prompt))
    service = daemon.stats().service
    assert (service.promised_lookups, service.broken_promises) == (1, 1)


def test_pages_of_a_part_are_taken_when_the_time_is_over(
    pair: tuple[Live, Live], alone: Live, daemon: ServeProcess
) -> None:
    prefill, decode = pair
    prompt = a_prompt(30)
    ask(prefill, prompt[:320], max_tokens=1)
    answer = ask(decode, prompt, kv_transfer_params=promise(until_s=0.3))
    assert 320 <= cached(answer) < 320 + CHUNK
    check_same(answer, ask(alone, prompt))
    assert daemon.stats().service.broken_promises == 1


def test_a_daemon_that_is_killed_ends_the_wait(
    pair: tuple[Live, Live], alone: Live, daemon: ServeProcess
) -> None:
    _, decode = pair
    prompt = a_prompt(40)
    expected = ask(alone, prompt)
    waiting = Asked(decode, prompt, kv_transfer_params=promise(until_s=10.0))
    wait_until(lambda: daemon.stats().service.promised_lookups == 1)
    daemon.kill()
    check_same(waiting.answer(), expected)
    assert time.monotonic() - waiting.began < 10
    # Without a daemon nothing is promised.
    answer = ask(decode, prompt, max_tokens=1, kv_transfer_params=ASKS)
    assert answer["kv_transfer_params"] == promise(0, until_s=1.0)


def test_a_client_that_hangs_up_while_pages_are_waited_for(
    pair: tuple[Live, Live], daemon: ServeProcess
) -> None:
    _, decode = pair
    body = {"model": "tiny", "prompt": a_prompt(50), "max_tokens": 8, "kv_transfer_params": promise()}
    with pytest.raises(httpx.ReadTimeout):
        decode.http.post("/v1/completions", json=body, timeout=0.5)
    decode.wait_until_idle()
    wait_until(lambda: not daemon.stats().service.leases)


def test_nothing_is_held_behind_the_answer(pair: tuple[Live, Live], daemon: ServeProcess) -> None:
    prefill, _ = pair
    for number in range(60, 64):
        ask(prefill, a_prompt(number), max_tokens=1, kv_transfer_params=ASKS)
    prefill.wait_until_idle()  # every page of its pool is free, or cached and unused

    def free() -> bool:
        stats = daemon.stats()
        service, store = stats.service, stats.store
        return not (service.leases or service.reservations or service.reserved_bytes or store.open_hits)

    wait_until(free)
    assert daemon.stats().store.counters["saved_pages"] >= 4 * (WHOLE // CHUNK)


def test_a_save_only_and_a_load_only_engine(
    tiny: LoadedModel, daemon: ServeProcess, serve: Callable[..., Live], alone: Live
) -> None:
    producer = serve(engine_over(tiny, daemon.url, "kv_producer"), owned=True)
    consumer = serve(engine_over(tiny, daemon.url, "kv_consumer"), owned=True)
    prompt, own = a_prompt(80), a_prompt(81)
    first = ask(producer, prompt, max_tokens=1, kv_transfer_params=ASKS)
    assert first["kv_transfer_params"] == promise(until_s=1.0)
    second = ask(consumer, prompt, kv_transfer_params=first["kv_transfer_params"])
    assert cached(second) >= WHOLE
    check_same(second, ask(alone, prompt))
    # The one puts nothing in and promises nothing, and keeps what it computes in its own pool …
    saved = daemon.stats().store.counters["saved_pages"]
    nothing = ask(consumer, own, max_tokens=1, kv_transfer_params=ASKS)
    assert nothing["kv_transfer_params"] == promise(0, until_s=1.0)
    assert cached(ask(consumer, own)) >= WHOLE
    assert daemon.stats().store.counters["saved_pages"] == saved
    # … and the other takes nothing out, but finds what its own pool has.
    ask(producer, own, max_tokens=1)
    assert cached(ask(producer, own)) >= WHOLE
    producer.server.engine.post(lambda engine: engine.connector.evict(128))
    assert cached(ask(producer, own)) == 0
    assert cached(ask(consumer, own)) >= WHOLE


def test_the_engine_that_computes_is_killed_in_the_middle(
    tiny: LoadedModel, daemon: ServeProcess, serve: Callable[..., Live], alone: Live
) -> None:
    """A process of its own, with a step for each page."""
    prompt = a_prompt(70)
    decode = serve(
        build_engine(tiny, pool_pages=64, store=daemon.url, settings=EngineSettings(plan="load")), owned=True
    )
    prefill = Process("--store", daemon.url, "--prefill-chunk", "64", "--max-sequences", "1")
    body = {"model": "tiny", "max_tokens": 1, "kv_transfer_params": ASKS}
    with ThreadPoolExecutor() as pool:
        # It computes others first, so that this one is begun, and not done, when the first pages are there.
        others = [
            pool.submit(prefill.http.post, "/v1/completions", json={**body, "prompt": a_prompt(n)})
            for n in range(71, 75)
        ]
        begun = pool.submit(prefill.http.post, "/v1/completions", json={**body, "prompt": prompt})
        wait_until(lambda: daemon.stats().store.pages >= 1)
        waiting = Asked(decode, prompt, kv_transfer_params=promise(TOKENS // 64 * 64, until_s=1.0))
        prefill.process.kill()
        for each in (*others, begun):
            assert isinstance(each.exception(WAIT_S), (httpx.HTTPError, type(None)))
    answer = waiting.answer()
    assert cached(answer) < TOKENS - 1
    check_same(answer, ask(alone, prompt))
    prefill.close()
    wait_until(lambda: daemon.stats().service.reserved_bytes == 0)  # what it was saving
