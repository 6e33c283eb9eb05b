"""OpenAI's client gets from the server what the engine gives, in the forms that it knows."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import subprocess
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs pip install -e '.[dev]'")
pytest.importorskip("uvicorn")

import openai
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming as ChatParamsNonStreaming,
)
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming

from tests.engine.stored import Stored
from tierstore.testing.clock import wait_until
from tierstore_engine.build import build_engine
from tierstore_engine.drafting import PromptLookupDrafter
from tierstore_engine.engine import Engine
from tierstore_engine.errors import ModelError
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.server.defaults import OPENAI_DEFAULTS, SamplingDefaults, load_defaults
from tierstore_engine.settings import EngineSettings

from .live import Live

PROMPT = "The quick brown fox jumps over the lazy dog. "
MESSAGES: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": PROMPT}]
CHAT = f"system: Be short.\nuser: {PROMPT}\nassistant: "
EXTRA = {"ignore_eos": True}


@pytest.fixture
def live(tiny: LoadedModel, engine_of: Callable[..., Engine], serve: Callable[..., Live]) -> Live:
    return serve(engine_of(tiny))


@pytest.fixture
def engine(tiny: LoadedModel, engine_of: Callable[..., Engine]) -> Engine:
    return engine_of(tiny)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 12, "ignore_eos": True, **fields})


def test_a_completion(live: Live, engine: Engine) -> None:
    answer = live.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, extra_body=EXTRA
    )
    [expected] = engine.generate([PROMPT], params())
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT) + 1
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == len(PROMPT) + 13


def test_a_model_without_attention(loaded: Callable[..., LoadedModel], serve: Callable[..., Live]) -> None:
    """Its room does not depend on lengths: the longest sequence is the model's, in four pages of states."""
    model = loaded("tiny-mamba2")
    live = serve(build_engine(model, pool_pages=8, chunk_tokens=16, settings=EngineSettings(max_sequences=2)))
    assert live.client.models.list().data[0].model_dump()["max_model_len"] == model.config.max_positions
    ask = {"model": "tiny", "max_tokens": 12, "temperature": 0, "n": 2, "extra_body": EXTRA}
    first = live.client.completions.create(prompt=PROMPT * 20, **ask)
    again = live.client.completions.create(prompt=PROMPT * 20, **ask)
    assert len({choice.text for answer in (first, again) for choice in answer.choices}) == 1
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == len(PROMPT * 20) // 16 * 16


def test_several_prompts_and_samples(live: Live, engine: Engine) -> None:
    """With a seed every choice is what the engine gives for the seed, the next one, and so on."""
    answer = live.client.completions.create(
        model="tiny", prompt=["abc", "defg"], max_tokens=12, seed=5, n=4, extra_body=EXTRA
    )
    expected = [
        *engine.sample("abc", params(temperature=1.0, seed=5), n=4),
        *engine.sample("defg", params(temperature=1.0, seed=9), n=4),
    ]
    assert [choice.text for choice in answer.choices] == [each.text for each in expected]
    assert [choice.index for choice in answer.choices] == list(range(8))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4 + 5
    assert answer.usage.completion_tokens == 8 * 12


def test_tokenize(live: Live, tiny: LoadedModel) -> None:
    """The ids that are answered continue as the text does."""
    for asked, text in ({"prompt": PROMPT}, PROMPT), ({"messages": MESSAGES}, CHAT):
        answer = live.http.post("/tokenize", json={"model": "tiny", **asked}).json()
        assert answer["tokens"] == tiny.tokenizer.encode(text, begin="prompt" in asked)
        assert answer["count"] == len(answer["tokens"])
    both = live.http.post("/tokenize", json={"model": "tiny", "prompt": "a", "messages": MESSAGES})
    assert both.status_code == 400
    assert "either a prompt or messages" in both.json()["error"]["message"]


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
def test_token_ids(prompt: Any, live: Live, engine: Engine) -> None:
    answer = live.client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
    assert answer.choices[0].text == engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=12))[0].text


def test_the_best_of_several(live: Live, engine: Engine) -> None:
    answer = live.client.completions.create(
        model="tiny", prompt="abc", max_tokens=12, seed=5, n=2, best_of=6, extra_body=EXTRA
    )
    samples = engine.sample("abc", params(temperature=1.0, seed=5, logprobs=0), n=6)
    likeliest = sorted(samples, key=lambda s: sum(e.chosen.logprob for e in s.logprobs), reverse=True)
    assert [choice.text for choice in answer.choices] == [each.text for each in likeliest[:2]]
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6 * 12


def test_a_chat(live: Live, engine: Engine) -> None:
    answer = live.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=12, temperature=0, extra_body=EXTRA
    )
    [expected] = engine.generate([list(CHAT.encode())], params())
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    # And the conversation goes on with what came back.
    parts: Any = [{"type": "text", "text": "x"}]
    again = live.client.chat.completions.create(
        model="tiny",
        messages=[*MESSAGES, answer.choices[0].message, {"role": "user", "content": parts}],
        max_tokens=3,
    )
    assert again.usage is not None
    assert again.usage.prompt_tokens > len(CHAT)


def test_streams_add_up(live: Live) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": "abc",
        "max_tokens": 20,
        "seed": 3,
        "n": 3,
        "logprobs": 2,
        "extra_body": EXTRA,
    }
    whole = live.client.completions.create(**asked)
    texts, reasons, tokens, usage = [""] * 3, [None] * 3, [[], [], []], None
    for chunk in live.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        assert usage is None, "the usage comes last"
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            tokens[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert tokens == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_chat_streams_add_up(live: Live) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 20,
        "seed": 3,
        "extra_body": EXTRA,
    }
    whole = live.client.chat.completions.create(**asked)
    chunks = list(live.client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_tokens_with_one_text_stay_apart(live: Live) -> None:
    """Parts of characters have one text, and the likelier one has the value there."""
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0, "extra_body": EXTRA}
    table = live.client.completions.create(prompt="What is é?", logprobs=20, **asked).choices[0].logprobs
    assert [len(top) for top in table.top_logprobs] == [20] * 12
    for text, own, top in zip(table.tokens, table.token_logprobs, table.top_logprobs, strict=True):
        assert top[text] == own == max(top.values())
    assert any(name.startswith("bytes:\\x") for top in table.top_logprobs for name in top)
    chat = live.client.chat.completions.create(
        messages=[{"role": "user", "content": "What is é?"}], logprobs=True, top_logprobs=20, **asked
    )
    for entry in chat.choices[0].logprobs.content:
        assert len({each.token for each in entry.top_logprobs}) == 20
        assert all(each.bytes is not None for each in entry.top_logprobs)
        assert entry.token == entry.top_logprobs[0].token


@pytest.mark.parametrize("stop", [None, ["e"], ["\n", "a"]])
def test_offsets_are_in_the_text(stop: list[str] | None, live: Live) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": [65, 66], "max_tokens": 80, "temperature": 1.5}
    asked |= {"logprobs": 2, "n": 2, "seed": 5, "stop": stop, "extra_body": EXTRA}
    whole = live.client.completions.create(**asked)
    told: list[list[int]] = [[], []]
    for chunk in live.client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            told[choice.index] += choice.logprobs.text_offset
    for choice in whole.choices:
        table, text = choice.logprobs, choice.text
        assert table.text_offset == sorted(table.text_offset) == told[choice.index]
        assert len(table.text_offset) == len(table.tokens)
        assert max(table.text_offset) <= len(text)
        for token, start in zip(table.tokens, table.text_offset, strict=True):
            if token.isascii() and start < len(text):
                assert text[start : start + len(token)] == token


def test_logprobs(live: Live, engine: Engine) -> None:
    [expected] = engine.generate([list(CHAT.encode())], params(logprobs=3))
    answer = live.client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body=EXTRA,
    )
    entries = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == [
        pytest.approx(each.chosen.logprob, abs=1e-4) for each in expected.logprobs
    ]
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert [entry.bytes for entry in entries] == [[token] if token < 256 else [] for token in expected.tokens]
    text = live.client.completions.create(
        model="tiny", prompt=list(CHAT.encode()), max_tokens=12, temperature=0, logprobs=3, extra_body=EXTRA
    )
    table = text.choices[0].logprobs
    assert table.token_logprobs == [entry.logprob for entry in entries]
    assert len(table.tokens) == len(table.text_offset) == len(table.top_logprobs) == 12
    assert table.text_offset[0] == 0


def test_stops_and_penalties(live: Live, engine: Engine) -> None:
    sampled = {"temperature": 1.0, "seed": 8, "max_new_tokens": 40}
    [whole] = engine.generate([PROMPT], params(**sampled))
    stop = whole.text[10:12]
    answer = live.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=40, seed=8, stop=[stop, "never"], extra_body=EXTRA
    )
    assert answer.choices[0].text == whole.text[: whole.text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    fields = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    [penalized] = engine.generate([PROMPT], params(**sampled, **fields, logit_bias={65: 3.0}))
    answer = live.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=40, seed=8, **fields, logit_bias={"65": 3}, extra_body=EXTRA
    )
    assert answer.choices[0].text == penalized.text != whole.text


@pytest.mark.parametrize(
    ("path", "kind"),
    [("completions", CompletionCreateParamsNonStreaming), ("chat/completions", ChatParamsNonStreaming)],
)
def test_fields_may_be_null(path: str, kind: type, live: Live) -> None:
    """Every field that OpenAI's client may send as null, and the fields of vLLM."""
    hints = typing.get_type_hints(kind)
    nullable = {name for name, hint in hints.items() if type(None) in typing.get_args(hint)} - {"prompt"}
    ours = {"top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "priority", "tools"}
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 2}
    body |= {"prompt": "abc"} if path == "completions" else {"messages": MESSAGES}
    assert {"n", "logprobs"} <= nullable
    nulls = dict.fromkeys((nullable | ours) - body.keys() - ({"tools"} if path == "completions" else set()))
    answer = live.http.post(f"/v1/{path}", json={**nulls, **body})
    assert answer.status_code == 200, answer.json()
    assert len(answer.json()["choices"]) == 1
    streamed = {**body, "stream": True, "stream_options": {"include_usage": None}}
    assert '"usage"' not in live.http.post(f"/v1/{path}", json=streamed).text


def test_echo(live: Live) -> None:
    """Every choice begins with the text of its prompt; in a stream it comes in the first chunk."""
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "seed": 1, "extra_body": EXTRA, "n": 2}
    for prompts, texts in (["é = 1", "b"], ["é = 1", "b"]), ([[65, 66], [67]], ["AB", "C"]):
        plain = live.client.completions.create(**asked, prompt=prompts)
        whole = live.client.completions.create(**asked, prompt=prompts, echo=True)
        wanted = [texts[choice.index // 2] + choice.text for choice in plain.choices]
        assert [choice.text for choice in whole.choices] == wanted
        assert whole.usage == plain.usage
        streamed = [""] * 4
        for chunk in live.client.completions.create(**asked, prompt=prompts, echo=True, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == wanted
    best = {**asked, "n": 1}
    [choice] = live.client.completions.create(**best, prompt="abc", echo=True, best_of=3).choices
    assert choice.text.startswith("abc")
    assert choice.logprobs is None


def test_a_repetition_penalty(live: Live, engine: Engine) -> None:
    """It covers the prompt, too: with a high one nothing of it comes again."""
    [expected] = engine.generate(["abcabcabc"], params(repetition_penalty=50.0))
    answer = live.client.completions.create(
        model="tiny",
        prompt="abcabcabc",
        max_tokens=12,
        temperature=0,
        extra_body={**EXTRA, "repetition_penalty": 50.0},
    )
    assert answer.choices[0].text == expected.text
    assert len(set(expected.tokens)) == 12
    assert not set(expected.tokens) & set(b"abc")


def test_sampling_defaults_of_the_model(
    tiny: LoadedModel, engine_of: Callable[..., Engine], serve: Callable[..., Live]
) -> None:
    """A request's own values come first, also those that switch something off."""
    defaults = SamplingDefaults(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2)
    live, engine = serve(engine_of(tiny), defaults=defaults), engine_of(tiny)

    def ask(**fields: Any) -> str:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "seed": 3, **EXTRA, **fields}
        return live.http.post("/v1/completions", json=body).json()["choices"][0]["text"]

    def expected(**fields: Any) -> str:
        return engine.generate([PROMPT], params(seed=3, **fields))[0].text

    own: dict[str, Any] = dataclasses.asdict(defaults)
    assert ask() == ask(temperature=None, top_k=None) == expected(**own)
    assert ask(temperature=0) == expected(**{**own, "temperature": 0.0})
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert ask(**off) == ask(**{**off, "top_k": -1}) == expected(temperature=0.7)


def test_generation_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "generation_config.json"
    assert load_defaults(None) == load_defaults(tmp_path) == OPENAI_DEFAULTS
    file.write_text('{"eos_token_id": 1, "do_sample": true, "top_p": null, "max_new_tokens": 7}')
    assert load_defaults(tmp_path) == OPENAI_DEFAULTS
    assert not caplog.records
    file.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}')
    assert load_defaults(tmp_path) == SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.05)
    assert "temperature 0.6, top_k 20, repetition_penalty 1.05" in caplog.text
    file.write_text('{"do_sample": false, "temperature": 0.6, "min_p": 0.1}')
    assert load_defaults(tmp_path) == SamplingDefaults(temperature=0.0, min_p=0.1)
    for content in ('{"top_p": 0}', "[]", "{"):
        file.write_text(content)
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            load_defaults(tmp_path)


def test_the_pool_gives_memory_back_and_takes_it_again(live: Live) -> None:
    whole = live.http.get("/pool").json()
    assert whole["bytes"] == whole["target_bytes"] == whole["most_bytes"]
    half = live.http.post("/pool", json={"bytes": whole["bytes"] // 2})
    assert half.status_code == 200
    assert half.json() == {**whole, "bytes": half.json()["bytes"], "target_bytes": half.json()["bytes"]}
    assert 0.4 * whole["bytes"] < half.json()["bytes"] <= 0.5 * whole["bytes"]
    assert live.http.post("/pool", json={"bytes": whole["bytes"]}).json() == whole
    refused = live.http.post("/pool", json={"bytes": 2 * whole["bytes"]})
    assert refused.status_code == 400
    assert "size must be" in refused.json()["error"]["message"]
    assert live.http.get("/pool").json() == whole


def test_the_pool_is_not_for_other_sites(live: Live) -> None:
    ask = {"bytes": 1 << 20}
    assert live.http.post("/pool", json=ask, headers={"Host": "evil.example"}).status_code == 421
    assert live.http.post("/pool", json=ask, headers={"Origin": "http://evil.example"}).status_code == 403
    assert live.http.post("/pool", json=ask, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403


def test_models(live: Live) -> None:
    [model] = live.client.models.list().data
    assert model.id == "tiny"
    assert live.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'huge' is not served here; 'tiny' is"):
        live.client.models.retrieve("huge")


def test_cached_tokens_by_tier(
    tiny: LoadedModel, stored_engine: Callable[..., Stored], serve: Callable[..., Live]
) -> None:
    stored = stored_engine(tiny)
    live = serve(stored.engine)

    def ask() -> Any:
        answer = live.client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=4, temperature=0, n=3, user="somebody"
        )
        assert answer.usage is not None
        return answer, answer.usage.prompt_tokens_details

    first, details = ask()
    assert details.cached_tokens == 0
    second, details = ask()
    assert details.cached_tokens == len(CHAT) - 1
    assert details.cached_tokens_by_tier == {"hbm": len(CHAT) - 1}
    assert stored.store.flush(30)
    stored.store.evict("hbm")
    third, details = ask()
    assert details.cached_tokens_by_tier == {"host": len(CHAT) - 1}
    texts = [[choice.message.content for choice in each.choices] for each in (first, second, third)]
    assert texts[0] == texts[1] == texts[2]
    metrics = live.http.get("/metrics").text
    assert f'tierstore_engine_cached_tokens_total{{tier="host"}} {len(CHAT) - 1}.0' in metrics
    assert 'tierstore_engine_requests_total{endpoint="chat",status="200"} 3.0' in metrics


def test_hints_reach_the_store(
    tiny: LoadedModel, stored_engine: Callable[..., Stored], serve: Callable[..., Live]
) -> None:
    stored = stored_engine(tiny)
    live = serve(stored.engine)

    def ask(prompt: str, **hints: Any) -> int:
        answer = live.client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=2,
            extra_body={"kv_transfer_params": {"tierstore": hints}},
            extra_headers={"X-Session-Id": "s"},
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    secret = "x" * 100
    ask(secret, no_save=True)
    assert ask(secret, reuse="done", ttl_s=0, priority=-5) == 0
    assert ask(secret) > 0
    with pytest.raises(openai.BadRequestError, match="unknown field `pin`"):
        ask(secret, pin=True)


def test_drafts_show_in_the_metrics(
    tiny: LoadedModel, engine_of: Callable[..., Engine], serve: Callable[..., Live]
) -> None:
    live = serve(engine_of(tiny, drafter=PromptLookupDrafter()))
    live.client.completions.create(model="tiny", prompt="abcabcabc" * 9, max_tokens=50, temperature=0)
    metrics = live.http.get("/metrics").text
    [drafted] = [
        line.split()[1]
        for line in metrics.splitlines()
        if line.startswith("tierstore_engine_drafted_tokens_total")
    ]
    assert float(drafted) > 0
    assert "tierstore_engine_accepted_tokens_total" in metrics


def test_200_connections_at_once(live: Live) -> None:
    def ask(number: int) -> str:
        asked = {"model": "tiny", "prompt": f"prompt {number % 10}", "max_tokens": 5, "temperature": 0}
        # A pool of connections for each thread: httpcore may close one that another thread has just taken.
        # Without certificates, which take longer to read than an answer.
        http = openai.DefaultHttpxClient(verify=False)
        options = {"api_key": "none", "timeout": 300, "max_retries": 0, "http_client": http}
        with openai.OpenAI(base_url=f"{live.url}/v1", **options) as client:
            if number % 2:
                return client.completions.create(**asked).choices[0].text
            return "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))

    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        texts = list(pool.map(ask, range(200)))
    for number in range(10):
        assert len(set(texts[number::10])) == 1


def test_curl(live: Live) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 3, "stream": True, "temperature": 0}
    command = [
        "curl",
        "-sN",
        f"{live.url}/v1/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        "@-",
    ]
    done = subprocess.run(command, input=json.dumps(body), capture_output=True, text=True, check=True)
    lines = done.stdout.split("\n\n")
    assert all(line.startswith("data: ") for line in lines[:-1])
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_who_hangs_up_ends_the_request(live: Live) -> None:
    stream = live.client.completions.create(
        model="tiny", prompt="abc", max_tokens=900, stream=True, n=4, extra_body=EXTRA
    )
    next(iter(stream))
    assert live.stats().admitted == 4
    stream.close()
    live.wait_until_idle()
    with pytest.raises(openai.APITimeoutError):
        live.client.with_options(timeout=0.05).completions.create(
            model="tiny", prompt="abc" * 100, max_tokens=900, extra_body=EXTRA
        )
    wait_until(lambda: live.server.metrics.hang_ups._value.get() >= 1)
    live.wait_until_idle()
