"""Prompts come back into a llama-server's slot, with the same answer; nothing is shared that must not be."""

from __future__ import annotations

import pytest

from tests.llamacpp.conftest import MISSING

if MISSING:
    pytest.skip("no llama.cpp here; make test-llamacpp", allow_module_level=True)

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.llamacpp.programs import complete, prompt
from tests.llamacpp.tiny import WINDOW
from tierstore.testing.clock import wait_until

PROMPT = prompt(700)


def restored(proxy, tokens, **fields):
    """The number of tokens that are restored for a prompt, and the answer."""
    before = proxy.metric("restored_tokens_total")
    answer = complete(proxy.http, tokens, **fields)
    return proxy.metric("restored_tokens_total") - before, answer


def restart(server, proxy):
    """Restart llama-server: its slots are empty."""
    times = sum("pages have identity" in line for line in proxy.lines)
    server.kill()
    server.start()
    proxy.wait_ready(times + 1)


@pytest.mark.parametrize("options", [(), ("-fa", "off"), ("-ctk", "q8_0", "-ctv", "q8_0"), ("-np", "3")])
def test_a_prompt_comes_back_after_a_restart(models, server, proxy, daemon, options):
    llama = server(models(), *options)
    expected = complete(llama.http, PROMPT)
    front = proxy(llama, daemon)
    front.wait_ready()
    count, first = restored(front, PROMPT)
    assert (count, first["tokens"]) == (0, expected["tokens"])
    front.wait_saved(len(PROMPT))
    restart(llama, front)
    count, second = restored(front, PROMPT)
    assert count == len(PROMPT) - 1
    assert second["tokens"] == expected["tokens"]
    assert second["timings"]["prompt_n"] == 1  # llama-server has computed one token
    assert not [*llama.slots.iterdir()]


def test_the_answer_belongs_to_the_prompt_of_the_next_turn(models, server, proxy, daemon):
    llama = server(models())
    front = proxy(llama, daemon)
    front.wait_ready()
    _, first = restored(front, PROMPT, count=40)
    front.wait_saved(len(PROMPT) + 39)
    restart(llama, front)
    turn = [*PROMPT, *first["tokens"], *prompt(100, 5)]
    count, second = restored(front, turn)
    assert count >= len(PROMPT) + 39
    restart(llama, front)
    assert complete(llama.http, turn)["tokens"] == second["tokens"]


def test_prompts_share_their_beginning(models, server, proxy, daemon):
    llama = server(models())
    front = proxy(llama, daemon)
    front.wait_ready()
    one, other = [*PROMPT[:512], *prompt(200, 1)[1:]], [*PROMPT[:512], *prompt(200, 2)[1:]]
    restored(front, one)
    front.wait_saved(len(one))
    restart(llama, front)
    count, answer = restored(front, other)
    assert count == 512
    restart(llama, front)
    assert complete(llama.http, other)["tokens"] == answer["tokens"]
    assert daemon.stats().store.pages <= 8 + 2 * 4


@pytest.mark.parametrize("length", [700, 640, WINDOW + 100])
def test_sliding_windows(models, server, proxy, daemon, length):
    llama = server(models(windows=True))
    tokens = prompt(length, 3)
    expected = complete(llama.http, tokens)
    front = proxy(llama, daemon)
    front.wait_ready()
    assert restored(front, tokens)[1]["tokens"] == expected["tokens"]
    whole = (length - 1) // 64 * 64
    front.wait_saved(whole)
    restart(llama, front)
    count, answer = restored(front, tokens)
    assert count == whole
    assert answer["tokens"] == expected["tokens"]
    assert answer["timings"]["prompt_n"] == length - whole
    # llama-server computes a prompt anew that leaves the restored sequence inside its window.
    other = [*tokens[: length - 90], *prompt(60, 9)]
    _, answer = restored(front, other)
    restart(llama, front)
    assert complete(llama.http, other)["tokens"] == answer["tokens"]


CHANGES = {
    "weights": ({"seed": 1}, ()),
    "quantisation": ({"quantized": True}, ()),
    "cache types": ({}, ("-ctk", "q8_0", "-ctv", "q8_0")),
    "transposed": ({}, ("-fa", "off")),
    "rope": ({}, ("--rope-freq-base", "20000")),
    "context": ({}, ("-c", "2048")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_not_shared(models, server, proxy, daemon, tmp_path, change):
    kind, options = CHANGES[change]
    place = tmp_path / "model.gguf"  # one name for both
    shutil.copy(models(), place)
    llama = server(place)
    front = proxy(llama, daemon)
    front.wait_ready()
    complete(front.http, PROMPT)
    front.wait_saved(len(PROMPT))
    front.close()
    llama.close()
    place.unlink()
    shutil.copy(models(**kind), place)
    other = server(place, *options)
    expected = complete(other.http, PROMPT)
    front = proxy(other, daemon)
    front.wait_ready()
    complete(front.http, prompt(200, 8))  # its slot has another prompt now
    count, answer = restored(front, PROMPT)
    assert (count, answer["tokens"]) == (0, expected["tokens"])


def test_the_same_model_elsewhere_is_shared(models, server, proxy, daemon, tmp_path):
    llama = server(models())
    front = proxy(llama, daemon)
    front.wait_ready()
    complete(front.http, PROMPT)
    front.wait_saved(len(PROMPT))
    shutil.copy(models(), tmp_path / "copy.gguf")
    other = server(tmp_path / "copy.gguf", "-t", "2", "--alias", "another")
    front = proxy(other, daemon)
    front.wait_ready()
    assert restored(front, PROMPT)[0] == len(PROMPT) - 1


def test_a_slot_in_use_is_not_touched(models, server, proxy, daemon):
    llama = server(models())
    front = proxy(llama, daemon)
    front.wait_ready()
    complete(front.http, PROMPT)
    front.wait_saved(len(PROMPT))
    long = prompt(300, 4)
    expected = complete(llama.http, long, count=1000)["tokens"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, llama.http, long, count=1000)
        with httpx.Client(base_url=llama.url) as http:
            wait_until(lambda: http.get("/slots").json()[0]["is_processing"])
        assert complete(front.http, PROMPT)["tokens"]
        found = running.result()["tokens"]
        assert len(found) == len(expected)
        assert found[:100] == expected[:100]  # later ones may differ, as its prompt was in the slot now
    assert front.outcome("all slots in use") == 1


def test_chats_and_streams(models, server, proxy, daemon):
    llama = server(models(), "--chat-template", "chatml")
    front = proxy(llama, daemon)
    front.wait_ready()
    chat = {
        "messages": [{"role": "user", "content": "What is a page? " * 20}],
        "max_tokens": 6,
        "temperature": 0,
    }
    first = front.http.post("/v1/chat/completions", json=chat).json()
    front.wait_saved(first["usage"]["prompt_tokens"])
    restart(llama, front)
    with front.http.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = "".join(answer.iter_text())
    assert text.rstrip().endswith("data: [DONE]")
    assert front.metric("restored_tokens_total") == first["usage"]["prompt_tokens"] - 1


def test_everything_else_passes_through(models, server, proxy, daemon):
    llama = server(models())
    front = proxy(llama, daemon)
    front.wait_ready()
    for path in ("/health", "/props", "/v1/models"):
        assert front.http.get(path).json().keys() == llama.http.get(path).json().keys()
    several = {"prompt": [PROMPT[:40], PROMPT[:50]], "n_predict": 2}
    assert len(front.http.post("/completion", json=several).json()) == 2
    grammar = {"prompt": "a" * 100, "n_predict": 4, "grammar": 'root ::= "x"+', "temperature": 0}
    assert set(front.http.post("/completion", json=grammar).json()["content"]) == {"x"}
    assert front.http.post("/completion", content=b"no JSON").status_code >= 400
    assert front.http.get("/no/such/path").status_code == 404
    assert front.outcome("not a single prompt of text") >= 1


def test_a_client_that_moves_cells_spoils_nothing(models, server, proxy, daemon):
    """After ``n_cache_reuse`` a slot's KV does not belong to its tokens: the slot is erased before its next
    use."""
    llama = server(models())
    expected = complete(llama.http, PROMPT)["tokens"]
    front = proxy(llama, daemon)
    front.wait_ready()
    complete(front.http, [*PROMPT[:64], *prompt(80, 7), *PROMPT[64:]])
    front.wait_saved(700)
    complete(front.http, PROMPT, n_cache_reuse=32)
    answer = complete(front.http, PROMPT)
    assert answer["tokens"] == expected


def test_a_server_without_slots_is_forwarded_to(models, server, proxy, daemon):
    llama = server(models(), "--context-shift")
    front = proxy(llama, daemon)
    wait_until(lambda: front.said("--context-shift, which is not supported"))
    assert complete(front.http, PROMPT)["tokens"]
    assert front.outcome("server not identified") == 1


def test_the_proxy_ends_in_order(models, server, proxy, daemon):
    llama = server(models())
    front = proxy(llama, daemon)
    front.wait_ready()
    complete(front.http, PROMPT)
    front.popen.send_signal(signal.SIGTERM)
    assert front.popen.wait(60) == 0
    again = proxy(llama, daemon)
    again.wait_ready()
    complete(llama.http, prompt(100, 6))
    assert restored(again, PROMPT)[0] == len(PROMPT) - 1  # the slot was saved before the end
