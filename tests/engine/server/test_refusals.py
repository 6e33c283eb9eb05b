"""What is refused: with the right status and one clear sentence, and nothing is left of it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs pip install -e '.[dev]'")
pytest.importorskip("uvicorn")

import httpx
import openai
from starlette.types import Message

from tierstore.errors import UsageError
from tierstore.testing.clock import wait_until
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.outputs import WaitReason
from tierstore_engine.server.errors import ApiError
from tierstore_engine.server.http import Exchange, MeteredRoute
from tierstore_engine.server.metrics import ServerMetrics
from tierstore_engine.server.settings import ServerSettings

from .live import WAIT_S, Live

EngineOf = Callable[..., Engine]
Serve = Callable[..., Live]

GOOD = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
LONG = {**GOOD, "max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def live(tiny: LoadedModel, engine_of: EngineOf, serve: Serve) -> Live:
    return serve(engine_of(tiny))


def post(live: Live, path: str, body: Any, **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **options.pop("headers", {})}
    return live.http.post(f"/v1/{path}", content=content, headers=headers, **options)


def handed(ours: Any, **others: Any) -> dict[str, Any]:
    """A request with what an engine has promised."""
    return {**GOOD, "kv_transfer_params": {"do_remote_prefill": True, "tierstore": ours, **others}}


PREFILL = {**GOOD, "kv_transfer_params": {"do_remote_decode": True}}

BAD: list[tuple[str, Any, int, str]] = [
    ("completions", b"", 400, "not JSON"),
    ("completions", b"{", 400, "not JSON"),
    ("completions", b"\xff\xfe", 400, "not JSON"),
    ("completions", b'{"model": "tiny", "prompt": "\xff"}', 400, "not JSON: 'utf-8' codec can't decode"),
    ("completions", b'{"model": "tiny", "prompt": "a", "\xc3": 1}', 400, "not JSON: 'utf-8' codec"),
    ("completions", '{"model": "tiny", "prompt": "a"}'.encode("utf-16"), 400, "not JSON"),
    (
        "chat/completions",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\x80"}]}',
        400,
        "not JSON",
    ),
    ("completions", b"[" * 100_000, 400, "Expected `object`"),
    ("completions", b'{"model":"tiny","prompt":' + b"[" * 100_000, 400, ""),
    ("completions", [], 400, "Expected `object`, got `array`"),
    ("completions", {"prompt": "x"}, 400, "missing required field `model`"),
    ("completions", {"model": "tiny"}, 400, "missing required field `prompt`"),
    ("completions", {**GOOD, "surprise": 1}, 400, "unknown field `surprise`"),
    ("completions", {**GOOD, "model": "huge"}, 404, "'huge' is not served here"),
    ("completions", {**GOOD, "prompt": []}, 400, "prompt is empty"),
    ("completions", {**GOOD, "prompt": [[]]}, 400, "prompt is empty"),
    ("completions", {**GOOD, "prompt": [1, "a"]}, 400, "not both"),
    ("completions", {**GOOD, "prompt": [258]}, 400, "between 0 and 257"),
    ("completions", {**GOOD, "prompt": [-1]}, 400, "prompt[0]: Expected `int` >= 0"),
    ("completions", {**GOOD, "prompt": [2**40]}, 400, "prompt[0]: Expected `int` <= 4294967295"),
    ("completions", {**GOOD, "prompt": "x" * 1100}, 400, "1101 tokens"),
    ("completions", {**GOOD, "max_tokens": 0}, 400, "max_tokens: Expected `int` >= 1"),
    ("completions", {**GOOD, "max_tokens": 5000}, 400, "max_tokens must be at most 4096, got 5000"),
    ("completions", {**GOOD, "temperature": -1}, 400, "temperature: Expected"),
    ("completions", {**GOOD, "top_p": 0}, 400, "top_p: Expected"),
    ("completions", {**GOOD, "stop": ""}, 400, "stop: Expected"),
    ("completions", {**GOOD, "stop": ["a"] * 17}, 400, "stop: Expected"),
    ("completions", {**GOOD, "n": 129}, 400, "129 continuations are too many: the limit is 128"),
    ("completions", {**GOOD, "n": 2, "best_of": 1}, 400, "best_of (1) must be at least n (2)"),
    ("completions", {**GOOD, "best_of": 2, "stream": True}, 400, "best_of cannot be streamed"),
    ("completions", {**GOOD, "logprobs": 21}, 400, "logprobs: Expected"),
    ("completions", {**GOOD, "stream_options": {}}, 400, "stream: true"),
    ("completions", {**GOOD, "logit_bias": {"x": 1}}, 400, "keys must be token ids"),
    ("completions", {**GOOD, "logit_bias": {"300": 1}}, 400, "logit_bias names token 300"),
    ("completions", {**GOOD, "user": "u" * 300}, 400, "1 to 256 characters"),
    ("completions", {**GOOD, "prompt": "\ud800"}, 400, "not JSON"),
    ("completions", {**GOOD, "priority": 2**40}, 400, "priority: Expected `int` <="),
    ("completions", {**GOOD, "ttft_slo_s": 0}, 400, "ttft_slo_s: Expected `float` > 0"),
    ("completions", handed({"tokens": -1}), 400, "kv_transfer_params.tierstore.tokens: Expected `int` >= 0"),
    ("completions", handed({"tokens": 2**70}), 400, "kv_transfer_params.tierstore.tokens: Expected"),
    ("completions", handed({"tokens": "64"}), 400, "tokens: Expected `int | null`, got `str`"),
    ("completions", handed({"tokens": 64}), 400, "tierstore.tokens is 64, but the prompt has 4 tokens"),
    ("completions", handed({"tokens": 2, "until_s": 1e9}), 400, "until_s: Expected `float` <= 10.0"),
    ("completions", handed({"tokens": 2, "until_s": -1}), 400, "until_s: Expected `float` >= 0.0"),
    ("completions", {**handed({"tokens": 2}), "prompt": ["ab", "cd"]}, 400, "exactly one prompt, got 2"),
    ("completions", handed({"tokens": 2}, do_remote_prefill=False), 400, "need do_remote_prefill: true"),
    ("completions", handed({}, do_remote_decode=True), 400, "cannot be combined with do_remote_prefill"),
    (
        "completions",
        handed({}, remote_host="10.0.0.1"),
        400,
        "kv_transfer_params.remote_host is not supported",
    ),
    ("completions", handed([]), 400, "kv_transfer_params.tierstore: Expected `object`"),
    ("completions", {**PREFILL, "prompt": ["ab", "cd"]}, 400, "needs exactly one prompt, got 2"),
    ("chat/completions", {**CHAT, "messages": []}, 400, "messages: Expected"),
    (
        "chat/completions",
        {**CHAT, "messages": [{"role": "god", "content": "x"}]},
        400,
        "Invalid enum value 'god'",
    ),
    ("chat/completions", {**CHAT, "tools": []}, 400, "tools is not supported: leave it out or send null"),
    ("completions", {**GOOD, "suffix": "x"}, 400, "suffix is not supported"),
    ("completions", {**GOOD, "echo": True, "logprobs": 0}, 400, "echo cannot be combined with logprobs"),
    ("completions", {**GOOD, "repetition_penalty": 0}, 400, "repetition_penalty: Expected `float` > 0"),
    ("chat/completions", {**CHAT, "top_logprobs": 2}, 400, "needs logprobs: true"),
    (
        "chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        400,
        "Invalid value 'input_audio'",
    ),
]


def test_bad_requests(live: Live) -> None:
    for path, body, status, message in BAD:
        answer = post(live, path, body)
        error = answer.json()["error"]
        assert answer.status_code == status, body
        assert message in error["message"], body
        assert "\n" not in error["message"], body
        assert live.server.admission.requests == 0, body
        assert post(live, "completions", GOOD).status_code == 200, body


def test_they_are_the_clients_own_exceptions(live: Live) -> None:
    create = live.client.completions.create
    with pytest.raises(openai.BadRequestError, match="between 0 and 257") as bad:
        create(model="tiny", prompt=[999])
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="huge", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="unknown field `surprise`"):
        create(model="tiny", prompt="x", extra_body={"surprise": True})


def test_a_body_of_100_mb(live: Live) -> None:
    answer = post(live, "completions", b"x" * (100 << 20))
    assert answer.status_code == 413
    assert "larger than the 4194304 bytes" in answer.json()["error"]["message"]
    with pytest.raises(openai.APIStatusError, match="larger than") as error:
        live.client.completions.create(model="tiny", prompt="x" * (5 << 20))
    assert error.value.status_code == 413


def test_other_paths_methods_and_content(live: Live) -> None:
    assert live.http.get("/v1/completions").status_code == 405
    assert live.http.get("/v2").json()["error"]["message"] == "/v2 does not exist"
    answer = live.http.post("/v1/completions", data={"a": "b"})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]


def test_clients_look_at_the_pool_and_the_operator_resizes_it(
    tiny: LoadedModel, engine_of: EngineOf, serve: Serve
) -> None:
    def ask(live: Live, method: str, key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        body = {"json": {"bytes": size}} if method == "POST" else {}
        return live.http.request(method, "/pool", headers=headers, **body).status_code

    live = serve(engine_of(tiny), api_key="client", operator_key="operator")
    size = live.http.get("/pool", headers={"Authorization": "Bearer client"}).json()["bytes"]
    assert [ask(live, "GET", key) for key in (None, "no", "client", "operator")] == [401, 401, 200, 200]
    assert [ask(live, "POST", key) for key in (None, "no", "client", "operator")] == [401, 401, 403, 200]
    live = serve(engine_of(tiny), api_key="client")  # nobody is the operator
    assert [ask(live, "POST", key) for key in (None, "client")] == [401, 403]
    live = serve(engine_of(tiny), operator_key="operator")
    assert [ask(live, "GET", None), ask(live, "POST", None), ask(live, "POST", "operator")] == [200, 403, 200]


def test_operators_and_clients_have_different_keys() -> None:
    for keys in ({"api_key": "k", "operator_key": "k"}, {"operator_key": ""}):
        with pytest.raises(UsageError, match="operator_key must"):
            ServerSettings(model_name="m", **keys)  # type: ignore[arg-type]


def test_an_api_key(tiny: LoadedModel, engine_of: EngineOf, serve: Serve) -> None:
    live = serve(engine_of(tiny), api_key="secret")
    with pytest.raises(openai.AuthenticationError, match="needs an API key"):
        live.client.models.list()
    assert live.client.with_options(api_key="secret").models.list().data[0].id == "tiny"
    assert live.http.get("/health").status_code == 200
    assert live.http.get("/v1/models").headers["www-authenticate"] == "Bearer"


def test_too_many_requests(tiny: LoadedModel, engine_of: EngineOf, serve: Serve) -> None:
    live = serve(engine_of(tiny), max_requests=1)
    with live.client.completions.create(**_client(LONG), stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="try again") as error:
            live.client.completions.create(**_client(GOOD))
        assert error.value.response.headers["retry-after"] == "1"
    live.wait_until_idle()
    live.client.completions.create(**_client(GOOD))


def test_too_many_tokens(tiny: LoadedModel, engine_of: EngineOf, serve: Serve) -> None:
    live = serve(engine_of(tiny), max_queued_tokens=100)
    with live.client.completions.create(**_client(LONG), stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="the limit is 100 together"):
            live.client.completions.create(model="tiny", prompt="x" * 97)
        live.client.completions.create(model="tiny", prompt="x" * 90, max_tokens=1)
    live.wait_until_idle()
    live.client.completions.create(model="tiny", prompt="x" * 300, max_tokens=1)  # alone it may have more


def test_what_would_be_late_is_refused(tiny: LoadedModel, engine_of: EngineOf, serve: Serve) -> None:
    live = serve(engine_of(tiny, max_sequences=1))
    prompt = {**GOOD, "prompt": "x" * 800, "ttft_slo_s": 1e-9}
    assert post(live, "completions", prompt).status_code == 200  # nothing is known yet
    alone = post(live, "completions", prompt)
    assert alone.status_code == 503
    assert "retry-after" not in alone.headers
    message = alone.json()["error"]["message"]
    alone_s = float(re.search(r"the prompt alone takes ([\d.e+-]+) s", message)[1])  # type: ignore[index]
    with (
        live.client.completions.create(**_client(LONG), stream=True) as stream,
        ThreadPoolExecutor(8) as threads,
    ):
        next(iter(stream))
        others = [threads.submit(post, live, "completions", {**GOOD, "prompt": "y" * 800}) for _ in range(8)]
        wait_until(lambda: live.stats().waiting == 8)
        late = post(live, "completions", {**prompt, "prompt": "z" * 800, "ttft_slo_s": 4 * alone_s})
        assert late.status_code == 429
        assert int(late.headers["retry-after"]) >= 1
        assert "with the requests before it" in late.json()["error"]["message"]
        patient = post(live, "completions", {**prompt, "ttft_slo_s": 3600})
        assert patient.status_code == 200
        assert all(other.result().status_code == 200 for other in others)
    assert live.stats().late_requests == 2
    assert "tierstore_engine_late_requests_total 2.0" in live.http.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(
    stream: bool, tiny: LoadedModel, engine_of: EngineOf, serve: Serve
) -> None:
    live = serve(engine_of(tiny), request_s=0.05)
    with pytest.raises(openai.APIError, match=r"longer than the limit of 0\.05 s"):
        list(live.client.completions.create(**_client(LONG), stream=stream))


def test_a_long_step_keeps_no_scrape_waiting(
    tiny: LoadedModel, engine_of: EngineOf, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes and metrics answer with what was true before the step; the pool's size is asked for again."""
    monkeypatch.setattr("tierstore_engine.server.app._POOL_S", 0.1)
    monkeypatch.setattr("tierstore_engine.server.dashboard._LONG_STEP_S", 0.0)
    live = serve(engine_of(tiny))
    post(live, "completions", {**GOOD, "max_tokens": 1})
    begun, done = threading.Event(), threading.Event()
    compute = live.own_engine.model.compute

    def slowly(step: Any) -> Any:
        begun.set()
        assert done.wait(WAIT_S)
        return compute(step)

    live.own_engine.model.compute = slowly  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(post, live, "completions", GOOD)
        try:
            assert begun.wait(WAIT_S)
            text = live.http.get("/metrics").text
            assert "tierstore_engine_generated_tokens_total 1.0" in text
            assert "tierstore_engine_running_sequences 1.0" in text or "waiting_sequences 1.0" in text
            reasons = [line for line in text.splitlines() if line.startswith("tierstore_engine_waiting_for{")]
            assert len(reasons) == len(WaitReason)
            waiting = sum(float(line.split()[-1]) for line in reasons)
            assert f"tierstore_engine_waiting_sequences {waiting}" in text
            assert live.http.get("/health").status_code == 200
            assert live.http.get("/v1/models").status_code == 200
            pool = live.http.get("/pool")
            assert (pool.status_code, pool.headers["retry-after"]) == (503, "1")
            with live.http.stream("GET", "/dashboard/feed") as feed:
                assert any("its current step takes more than" in line for line in feed.iter_lines())
        finally:
            done.set()
        assert asking.result().status_code == 200
    assert "tierstore_engine_generated_tokens_total 3.0" in live.http.get("/metrics").text


@pytest.mark.parametrize("error", [TimeoutError(), FileNotFoundError("model.json"), ConnectionResetError()])
def test_an_error_of_a_handler_is_answered_and_no_hang_up(error: OSError) -> None:
    """An ``OSError`` of a handler is a mistake; only one of the client's connection is a hang-up."""

    async def handler(exchange: Exchange) -> None:
        raise error

    counts = ServerMetrics()
    endpoint = MeteredRoute(
        "broken", handler, counts, api_key=None, error_of=lambda e: ApiError(500, repr(e))
    )

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(endpoint), base_url="http://here"
        ) as client:
            return await client.get("/")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, repr(error))
    assert counts.hang_ups._value.get() == 0


def test_a_client_whose_connection_is_lost_has_hung_up() -> None:
    async def handler(exchange: Exchange) -> None:
        await exchange.reply(200, {})

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        raise ConnectionResetError

    counts = ServerMetrics()
    endpoint = MeteredRoute("lost", handler, counts, api_key=None, error_of=lambda e: ApiError(500, repr(e)))
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}
    asyncio.run(endpoint(scope, receive, send))
    assert counts.hang_ups._value.get() == 1


def test_a_step_that_fails_ends_its_requests_and_no_others(live: Live) -> None:
    engine = live.own_engine
    compute = engine.model.compute
    engine.model.compute = lambda step: 1 / 0  # type: ignore[method-assign,misc]
    with pytest.raises(openai.InternalServerError, match="see the server's log"):
        live.client.completions.create(**_client(GOOD))
    engine.model.compute = compute  # type: ignore[method-assign]
    assert live.client.completions.create(**_client(GOOD)).choices[0].finish_reason == "length"
    assert "tierstore_engine_step_errors_total 1.0" in live.http.get("/metrics").text
    live.wait_until_idle()


def test_a_template_that_refuses(tiny: LoadedModel, engine_of: EngineOf, serve: Serve) -> None:
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(openai.BadRequestError, match="roles must alternate"):
        serve(engine_of(tiny), template=refusing).client.chat.completions.create(**CHAT)
    curious = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(openai.BadRequestError, match="cannot render these messages"):
        serve(engine_of(tiny), template=curious).client.chat.completions.create(**CHAT)
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        serve(engine_of(tiny), template=None).client.chat.completions.create(**CHAT)


def test_nothing_leaks(live: Live) -> None:
    _bad_requests(live, 100)


@pytest.mark.timeout(1800)
@pytest.mark.soak
def test_nothing_leaks_in_10_000_bad_requests(live: Live) -> None:
    _bad_requests(live, 10_000)


def _bad_requests(live: Live, count: int) -> None:
    """Refused ones, left ones and cut ones: afterwards there are as many pages, tasks and descriptors."""
    chance = random.Random(1)
    post(live, "completions", GOOD)
    live.wait_until_idle()
    before = _descriptors()
    for number in range(count):
        path, body, status, _ = BAD[number % len(BAD)]
        if number % 20 == 7:
            stream = live.client.completions.create(**_client(LONG), stream=True)
            for _ in range(chance.randrange(3)):
                next(iter(stream))
            stream.close()
        assert post(live, path, body).status_code == status
    live.wait_until_idle()
    wait_until(lambda: _descriptors() <= before + 4)
    assert live.server.admission.requests == live.server.admission.tokens == 0
    assert len(live.server.engine._jobs) == 0
    assert post(live, "completions", GOOD).status_code == 200


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _client(body: dict[str, Any]) -> dict[str, Any]:
    own = {"ignore_eos"}
    extra = {name: value for name, value in body.items() if name in own}
    return {**{name: value for name, value in body.items() if name not in own}, "extra_body": extra}


def test_requests_that_name_another_host(
    live: Live, tiny: LoadedModel, engine_of: EngineOf, serve: Serve
) -> None:
    """A web page whose name leads to loopback must not have answers."""
    for path in ("/v1/models", "/v1/models/tiny", "/health", "/metrics"):
        refused = live.http.get(path, headers={"Host": "evil.example:8000"})
        assert refused.status_code == 421
        assert "evil.example" in refused.json()["error"]["message"]
        assert live.http.get(path, headers={"Host": "localhost:8000"}).status_code == 200
    for path in ("completions", "chat/completions"):
        assert post(live, path, GOOD, headers={"Host": "evil.example"}).status_code == 421
    keyed = serve(engine_of(tiny), api_key="key")
    headers = {"Host": "models.example", "Authorization": "Bearer key"}
    assert keyed.http.get("/v1/models", headers=headers).status_code == 200
