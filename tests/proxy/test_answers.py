"""Real engines behind the proxy say what one engine says, whatever happens to those that are not needed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.engine.server.live import Live
from tierstore.testing.clock import wait_until
from tierstore_tools.vllm.daemon import ServeProcess

from .conftest import LiveProxy

MESSAGES: list[Any] = [{"role": "user", "content": "What is a page? " * 40}]
HELD = {"held or short": 1}
HANDED = {"handed over": 1}

Daemon = Callable[[], ServeProcess]
Engine = Callable[..., Live]
Proxy = Callable[..., LiveProxy]


def prompt(seed: int, tokens: int = 1000) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(250) for _ in range(tokens)]


def complete(server: Any, prompt: Any, **options: Any) -> Any:
    return server.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}, **options
    )


@pytest.mark.parametrize("asked", [prompt(1), "The quick brown fox. " * 50])
def test_a_prompt_is_computed_here_and_continued_there(
    daemon: Daemon, engine: Engine, proxy: Proxy, asked: Any
) -> None:
    store = daemon().url
    prefill, decode, alone = engine(store), engine(store), engine()
    live = proxy(prefill=(prefill.url,), decode=(decode.url,), daemon=(store,), look_s=2.0)
    answer = complete(live, asked)
    assert answer.choices[0].text == complete(alone, asked).choices[0].text
    assert live.ways() == HANDED
    assert prefill.stats().computed_tokens >= 1000
    assert decode.stats().computed_tokens < 64 + 12, "the end of the prompt, and what was generated"
    assert answer.usage.prompt_tokens_details.cached_tokens >= 960
    # The second time it is held where it is continued.
    assert complete(live, asked).choices[0].text == answer.choices[0].text
    assert live.ways() == HANDED | HELD


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat(daemon: Daemon, engine: Engine, proxy: Proxy, stream: bool) -> None:
    store = daemon().url
    prefill, decode, alone = engine(store), engine(store), engine()
    live = proxy(prefill=(prefill.url,), decode=(decode.url,), daemon=(store,), look_s=2.0)

    def say(server: Any) -> str:
        options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "seed": 1}
        options |= {"max_completion_tokens": 12, "extra_body": {"ignore_eos": True}}
        if not stream:
            return str(server.client.chat.completions.create(**options).choices[0].message.content)
        chunks = server.client.chat.completions.create(stream=True, **options)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert say(live) == say(alone)
    assert live.ways() == HANDED
    assert decode.stats().computed_tokens < 64 + 12


def test_a_prompt_goes_to_where_it_is_held(daemon: Daemon, engine: Engine, proxy: Proxy) -> None:
    """Two decode engines on two hosts: their daemons are asked, so a new proxy knows it, too."""
    daemons = [daemon().url for _ in range(2)]
    engines = [engine(store) for store in daemons]
    for _ in range(2):
        live = proxy(decode=tuple(each.url for each in engines), daemon=tuple(daemons), look_s=2.0)
        for seed in range(4):
            complete(engines[seed % 2], prompt(seed))
        before = [each.stats().computed_tokens for each in engines]
        for seed in (3, 0, 1, 2):
            answer = complete(live, prompt(seed))
            assert answer.usage.prompt_tokens_details.cached_tokens >= 960
        assert all(
            each.stats().computed_tokens - known < 500 for each, known in zip(engines, before, strict=True)
        )


def test_without_anybody_to_ask_it_remembers(daemon: Daemon, engine: Engine, proxy: Proxy) -> None:
    engines = [engine(daemon().url) for _ in range(2)]
    live = proxy(decode=tuple(each.url for each in engines))
    for seed in (0, 1, 2, 0, 1, 2):
        answer = complete(live, prompt(seed))
    assert answer.usage.prompt_tokens_details.cached_tokens >= 960
    computed = sum(each.stats().computed_tokens for each in engines)
    assert 3000 <= computed < 3600


def test_a_daemon_that_hangs_costs_little(daemon: Daemon, engine: Engine, proxy: Proxy) -> None:
    store, other = daemon(), daemon()
    live = proxy(decode=(engine(other.url).url,), daemon=(store.url,), look_s=0.2)
    store.hang()
    expected = complete(engine(), prompt(5)).choices[0].text
    assert complete(live, prompt(5)).choices[0].text == expected
    wait_until(lambda: store.url in live.http.get("/health").json()["lookups"])
    store.go_on()


def test_a_client_that_hangs_up_ends_its_request(daemon: Daemon, engine: Engine, proxy: Proxy) -> None:
    store = daemon().url
    decode = engine(store)
    live = proxy(decode=(decode.url,))
    stream = live.client.completions.create(
        model="tiny", prompt=prompt(6), max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: live.metric("hang_ups_total") >= 1)
    decode.wait_until_idle()
    wait_until(lambda: live.proxy.admission.requests == 0)


def test_engines_that_are_down_are_left_out(engine: Engine, proxy: Proxy) -> None:
    here = engine()
    nobody = "http://127.0.0.1:9"
    live = proxy(decode=(nobody, here.url), prefill=("http://127.0.0.1:19",))
    for seed in range(3):
        assert complete(live, prompt(seed)).choices[0].text == complete(here, prompt(seed)).choices[0].text
    wait_until(lambda: sum(not each["up"] for each in live.http.get("/health").json()["engines"]) == 2)
    health = live.http.get("/health")
    assert health.status_code == 200
    assert health.json()["status"] == "degraded"
    assert {each["url"]: each["up"] for each in health.json()["engines"]}[here.url]
    assert all("cannot connect" in each["problem"] for each in health.json()["engines"] if not each["up"])
    assert live.metric(f'up{{role="decode",url="{here.url}"}}') == 1
    assert live.metric(f'up{{role="decode",url="{nobody}"}}') == 0


def test_all_engines_down_is_503(proxy: Proxy) -> None:
    live = proxy(decode=("http://127.0.0.1:9",))
    with pytest.raises(openai.InternalServerError, match="no decode engine answers") as error:
        complete(live, "abc")
    assert error.value.status_code == 503
    wait_until(lambda: live.http.get("/health").status_code == 503)
    assert live.http.get("/health").json()["status"] == "down"


def test_what_an_engine_refuses_it_says_itself(engine: Engine, proxy: Proxy) -> None:
    live = proxy(decode=(engine().url,))
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        live.client.completions.create(model="tiny", prompt="a", max_tokens=100_000)
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        live.client.completions.create(model="other", prompt="a")
    assert [each.id for each in live.client.models.list()] == ["tiny"]
    assert live.client.models.retrieve("tiny").id == "tiny"


def test_keys(engine: Engine, proxy: Proxy) -> None:
    """A client's key is checked, and passed on."""
    live = proxy(decode=(engine(api_key="key").url,), api_key="key")
    assert complete(live, "abc").choices[0].text
    assert live.http.post("/v1/completions", json={}).status_code == 401
    assert live.http.get("/v1/models").status_code == 401
    assert live.http.get("/metrics").status_code == 401
    # Without it nobody learns where the engines are.
    health = live.http.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    with_key = {"authorization": "Bearer key"}
    assert live.http.get("/health", headers=with_key).json()["engines"]
    assert live.http.get("/metrics", headers=with_key).status_code == 200
