"""Answers say why prompt tokens were not cached, and how a prompt differs from an earlier one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs pip install -e '.[dev]'")
pytest.importorskip("uvicorn")

import openai

from tests.engine.stored import Stored
from tierstore.explanation import Explanation
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.server.diagnostics import KeptPrompt, KeptPrompts
from tierstore_engine.server.requests import ChatMessage

from .live import WAIT_S, Live
from .test_places import FORGETS_THOUGHTS

DOCUMENT = "A page is what is stored. " * 20
CHAT: list[Any] = [
    {"role": "system", "content": f"It is 14:31. {DOCUMENT}"},
    {"role": "user", "content": "What is a page?"},
]


@pytest.fixture
def stored(tiny: LoadedModel, stored_engine: Callable[..., Stored]) -> Stored:
    return stored_engine(tiny, pool_pages=256)


@pytest.fixture
def live(stored: Stored, serve: Callable[..., Live]) -> Live:
    return serve(stored.engine)


def changed(place: int, **fields: Any) -> list[Any]:
    return [{**message, **fields} if at == place else message for at, message in enumerate(CHAT)]


def ask(live: Live, messages: list[Any] = CHAT, *, key: str = "key", **body: Any) -> Any:
    """The whole answer to a chat."""
    body = {"model": "tiny", "messages": messages, "max_tokens": 2, "temperature": 0, **body}
    headers = {"Authorization": f"Bearer {key}"}
    answer = live.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def reasons(answer: Any) -> dict[str, int]:
    """The missed tokens by reason. With the cached ones they are the whole prompt, without a gap."""
    usage = answer["usage"]
    at = usage["prompt_tokens_details"]["cached_tokens"]
    counts: dict[str, int] = {}
    for miss in usage["prompt_cache_misses"]:
        assert miss["first"] == at
        assert miss["tokens"] > 0
        assert miss["detail"]
        at += miss["tokens"]
        counts[miss["reason"]] = counts.get(miss["reason"], 0) + miss["tokens"]
    assert at == usage["prompt_tokens"]
    return counts


def test_a_new_prompt_a_known_one_and_an_evicted_one(live: Live, stored: Stored) -> None:
    first = ask(live, explain_cache=True)
    tokens = first["usage"]["prompt_tokens"]
    assert reasons(first) == {"never_saved": tokens - 1, "tail": 1}  # one is computed in any case
    again = ask(live, explain_cache=True)
    assert reasons(again) == {"tail": 1}
    assert stored.store.flush(30)
    stored.store.evict("hbm")
    stored.store.evict("host")
    gone = ask(live, explain_cache=True)
    chunk = stored.store.spec.chunk_tokens
    assert reasons(gone)["evicted"] == tokens // chunk * chunk
    evicted = gone["usage"]["prompt_cache_misses"][0]
    assert (evicted["reason"], evicted["policy"], evicted["tier"]) == ("evicted", "request", "host")


def test_where_a_chat_diverges(live: Live) -> None:
    """The message, the character in it, and nothing of the other prompt's text."""
    ask(live)
    answer = ask(live, changed(0, content=CHAT[0]["content"].replace("14:31", "14:32")), explain_cache=True)
    miss, tail = answer["usage"]["prompt_cache_misses"]
    assert (miss["reason"], tail["reason"], tail["tokens"]) == ("diverged", "tail", 1)
    assert (miss["message"], miss["role"], miss["character"]) == (0, "system", len("It is 14:3"))
    assert miss["at"] == len("system: It is 14:3")
    assert "held_tokens" not in miss
    reasons(answer)


def test_where_a_text_diverges(live: Live) -> None:
    def misses(prompt: Any) -> list[Any]:
        answer = live.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=1, extra_body={"explain_cache": True}
        )
        assert answer.usage is not None
        found = answer.usage.model_dump()
        cached = found["prompt_tokens_details"]["cached_tokens"]
        missing = sum(miss["tokens"] for miss in found["prompt_cache_misses"])
        assert missing + cached == answer.usage.prompt_tokens
        return list(found["prompt_cache_misses"])

    misses(DOCUMENT)
    miss, _ = misses("A pâge" + DOCUMENT[6:])
    assert (miss["reason"], miss["character"], miss["at"]) == ("diverged", len("A p"), 1 + len("A p"))
    several = misses([DOCUMENT, [7] * 20, DOCUMENT])
    assert [miss["prompt"] for miss in several] == [0, 1, 1, 2]
    assert [miss["reason"] for miss in several] == ["tail", "never_saved", "tail", "tail"]


def test_a_stream_says_it_in_its_last_chunk(live: Live) -> None:
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 2, "stream": True, "explain_cache": True}
    refused = live.http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "include_usage" in refused.json()["error"]["message"]
    body["stream_options"] = {"include_usage": True}
    body["prompt_cache_options"] = {"comparison_response_id": "none"}
    text = live.http.post("/v1/chat/completions", json=body).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert set(reasons(chunks[-1])) == {"never_saved", "tail"}
    assert chunks[-1]["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


def test_without_a_store_nothing_is_ever_saved(
    tiny: LoadedModel, engine_of: Callable[..., Engine], serve: Callable[..., Live]
) -> None:
    live = serve(engine_of(tiny))
    for _ in range(2):
        answer = ask(live, explain_cache=True)
        assert reasons(answer) == {"never_saved": answer["usage"]["prompt_tokens"]}


def test_an_engine_that_loads_nothing_says_so(
    tiny: LoadedModel, stored_engine: Callable[..., Stored], serve: Callable[..., Live]
) -> None:
    live = serve(stored_engine(tiny, plan="compute", pool_pages=256).engine)
    ask(live)
    stored = live.own_engine.connector
    assert stored.store.flush(30)  # pages that are being saved cannot be evicted
    for group in range(len(stored.pools)):
        stored.evict(256, group=group)
    answer = ask(live, explain_cache=True)
    assert set(reasons(answer)) >= {"declined"}


def test_only_requests_that_ask_are_explained(live: Live, stored: Stored, monkeypatch: Any) -> None:
    asked = []
    explain = stored.engine.connector.explain
    monkeypatch.setattr(
        stored.engine.connector, "explain", lambda *args, **more: (asked.append(1), explain(*args, **more))[1]
    )
    answer = ask(live)
    assert not asked
    assert "prompt_cache_misses" not in answer["usage"]
    assert "prompt_cache_diagnostics" not in answer
    ask(live, explain_cache=True)
    assert len(asked) == 1


def test_an_explanation_that_takes_long_delays_no_other_request(
    live: Live, stored: Stored, monkeypatch: Any
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    explain = stored.engine.connector.explain

    def slow(*args: Any, **more: Any) -> Explanation:
        begun.set()
        assert go_on.wait(WAIT_S)
        return explain(*args, **more)

    monkeypatch.setattr(stored.engine.connector, "explain", slow)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(ask(live, explain_cache=True)))
    waiting.start()
    assert begun.wait(WAIT_S)
    ask(live, [{"role": "user", "content": "meanwhile"}])
    go_on.set()
    waiting.join(WAIT_S)
    assert reasons(found[0])


# -- the comparison with an earlier prompt ---------------------------------------------------------------


def compared(live: Live, earlier: Any, messages: list[Any] = CHAT, **body: Any) -> Any:
    options = {"comparison_response_id": earlier if isinstance(earlier, str) else earlier["id"]}
    return ask(live, messages, prompt_cache_options=options, **body)["prompt_cache_diagnostics"]


def test_a_conversation_that_continues_is_a_hit(live: Live) -> None:
    first = ask(live)
    answer = first["choices"][0]["message"]
    longer = [*CHAT, answer, {"role": "user", "content": "And a chunk?"}]
    assert compared(live, first, longer) == {"type": "cache_hit"}
    assert compared(live, first) == {"type": "cache_hit"}
    assert compared(live, ask(live, longer), CHAT) == {"type": "cache_hit"}


def test_a_changed_message_is_named(live: Live) -> None:
    first = ask(live)
    tokens = first["usage"]["prompt_tokens"]
    found = compared(live, first, changed(0, content=CHAT[0]["content"].replace("14:31", "14:32")))
    at = len("system: It is 14:3")
    assert found == {
        "type": "cache_miss",
        "reason": "input_changed",
        "cache_missed_tokens": tokens - at,
        "comparison_reusable_tokens": tokens,
        "at": at,
        "message": 0,
        "role": "system",
        "character": len("It is 14:3"),
        "detail": "message 0 (system) differs at character 10",
    }
    other = compared(live, first, changed(1, role="assistant"))
    assert (other["message"], other["role"]) == (1, "assistant")
    assert other["detail"] == "message 1 (assistant) had the role user"
    removed = compared(live, first, CHAT[1:])
    assert removed["detail"] == "message 0 (user) had the role system"


def test_the_part_of_the_template_is_named(
    tiny: LoadedModel, stored_engine: Callable[..., Stored], serve: Callable[..., Live]
) -> None:
    template = (
        "{{ style }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    live = serve(stored_engine(tiny, pool_pages=256).engine, template=template)
    first = ask(live, chat_template_kwargs={"style": "short. "})
    found = compared(live, first, chat_template_kwargs={"style": "sharp. "})
    assert found["detail"] == "chat_template_kwargs differ in style"
    assert found["chat_template_kwargs"] == ["style"]
    assert (found["at"], "message" in found) == (2, False)


def test_only_the_beginning_of_the_answer_differs(
    tiny: LoadedModel, stored_engine: Callable[..., Stored], serve: Callable[..., Live]
) -> None:
    """A template that lets answers begin with something is as good as one that does not."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: <think>{% endif %}"
    )
    live = serve(stored_engine(tiny, pool_pages=256).engine, template=template)
    longer = [*CHAT, {"role": "assistant", "content": "Bytes."}, {"role": "user", "content": "And a chunk?"}]
    assert compared(live, ask(live), longer) == {"type": "cache_hit"}


def test_a_template_that_renders_equal_messages_differently(
    tiny: LoadedModel, stored_engine: Callable[..., Stored], serve: Callable[..., Live]
) -> None:
    template = (
        "There are {{ messages | length }} messages.\n"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    live = serve(stored_engine(tiny, pool_pages=256).engine, template=template)
    longer = [*CHAT, {"role": "assistant", "content": "Bytes."}, {"role": "user", "content": "And a chunk?"}]
    found = compared(live, ask(live), longer)
    assert found["at"] == len("There are ")
    assert found["detail"] == "the chat template renders equal messages differently from token 10 on"


def test_a_template_that_drops_old_reasoning_differs_in_that_message(
    tiny: LoadedModel, stored_engine: Callable[..., Stored], serve: Callable[..., Live]
) -> None:
    live = serve(stored_engine(tiny, pool_pages=256).engine, template=FORGETS_THOUGHTS)
    thought = {"role": "assistant", "content": "<think>Not a web page.</think>Bytes."}
    first = ask(live, [*CHAT, thought])
    longer = [*CHAT, thought, {"role": "user", "content": "And a chunk?"}]
    answer = ask(
        live, longer, explain_cache=True, prompt_cache_options={"comparison_response_id": first["id"]}
    )
    found = answer["prompt_cache_diagnostics"]
    place = {"message": 2, "role": "assistant", "character": 0}
    assert {name: found[name] for name in place} == place
    assert found["detail"] == (
        f"the chat template renders message 2 (assistant) differently from token {found['at']} on"
    )
    [diverged] = [each for each in answer["usage"]["prompt_cache_misses"] if each["reason"] == "diverged"]
    assert {name: diverged[name] for name in place} == place
    assert diverged["at"] == found["at"]


def test_completions_are_compared_by_character_or_token(live: Live) -> None:
    def complete(prompt: Any, earlier: str = "") -> Any:
        options = {"comparison_response_id": earlier} if earlier else {}
        answer = live.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=1, extra_body={"prompt_cache_options": options}
        )
        return answer.model_dump()

    first, ids = complete("Où est la page?")["id"], complete([65, 66, 67])["id"]
    found = complete("Où est le pain?", first)["prompt_cache_diagnostics"]
    assert (found["character"], found["at"]) == (len("Où est l"), 1 + len("Où est l".encode()))
    assert (
        complete([65, 66, 68], ids)["prompt_cache_diagnostics"]["detail"] == "the prompt differs at token 2"
    )
    assert complete(["a", "b"], first)["prompt_cache_diagnostics"] == {"type": "unavailable"}
    assert compared(live, first)["detail"].startswith("the prompt differs at token ")


def test_unknown_ids_and_those_of_another_key_get_one_answer(live: Live) -> None:
    first = ask(live, key="one")
    assert compared(live, first, key="one") == {"type": "cache_hit"}
    unknown = compared(live, "chatcmpl-0")
    assert unknown == compared(live, first, key="another") == {"type": "comparison_response_not_found"}


def test_options_that_the_server_lacks_are_refused(live: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt_cache_options"):
        live.client.chat.completions.create(
            model="tiny", messages=CHAT, extra_body={"prompt_cache_options": {"mode": "explicit"}}
        )


def test_the_kept_prompts_have_limits() -> None:
    prompt = KeptPrompt.of_text([1] * 1000, "x" * 1000)
    kept = KeptPrompts(most_prompts=4)
    for number in range(9):
        kept.add("key", f"cmpl-{number}", prompt)
    assert len(kept) == 4
    assert kept.find("key", "cmpl-5") is prompt
    assert kept.find("key", "cmpl-4") is None
    small = KeptPrompts(most_bytes=3 * prompt.nbytes)
    for number in range(9):
        small.add("key", f"cmpl-{number}", prompt)
    assert (len(small), small.nbytes) == (3, 3 * prompt.nbytes)
    chat = KeptPrompt.of_chat([1], [ChatMessage(role="user", content="y" * (4 * prompt.nbytes))], None)
    small.add("key", "chatcmpl-9", chat)  # larger than the limit: it is not kept
    assert (len(small), small.nbytes) == (0, 0)
