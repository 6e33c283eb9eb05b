"""Clients and engines that do not behave: an error for that request at most, and no more than that."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.engine.server.live import WAIT_S, Live
from tierstore.testing.clock import wait_until

from .conftest import LiveProxy
from .scripted import Received, Script, Scripted, saying, whole

LONG = [1, 2, 3] * 200
ANSWER = b'{"choices": [{"text": "as it was"}],  "odd":1e2}'

Engine = Callable[..., Live]
Fake = Callable[[Script], Scripted]
Proxy = Callable[..., LiveProxy]


async def endless(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n")
    while True:
        writer.write(b" " * 65536)
        await writer.drain()


async def silent(request: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


def ask(live: LiveProxy, **fields: Any) -> httpx.Response:
    return live.http.post("/v1/completions", json={"model": "tiny", "prompt": LONG, **fields})


@pytest.mark.parametrize(
    ("script", "way"),
    [
        (saying(whole(b"[]")), "handed over"),
        (saying(whole(b'{"kv_transfer_params": 7}')), "handed over"),
        (saying(whole(b"{no json")), "prefill failed"),
        (saying(whole(b"\xff" * 99)), "prefill failed"),
        (saying(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n{"), "prefill failed"),
        (saying(b"nonsense\r\n\r\n"), "prefill failed"),
        (saying(b""), "prefill failed"),
        (saying(whole(b"{}", "429 Oh")), "prefill refused"),
        (saying(whole(b"{}", "500 Oh")), "prefill refused"),
        (saying(whole(b"{}", "503 Oh")), "prefill refused"),
        (saying(whole(b"", "302 Found", "location: http://127.0.0.1:9/")), "prefill refused"),
        (endless, "prefill failed"),
        (silent, "prefill was late"),
    ],
)
def test_whatever_a_prefill_engine_does_the_answer_comes(
    script: Script, way: str, scripted: Fake, proxy: Proxy
) -> None:
    prefill, decode = scripted(script), scripted(saying(whole(ANSWER)))
    live = proxy(prefill=(prefill.url,), decode=(decode.url,), prefill_s=1.0 if script is silent else WAIT_S)
    answer = ask(live)
    assert (answer.status_code, answer.content) == (200, ANSWER)
    assert live.ways() == {way: 1}
    assert len(prefill.received) == 1
    assert "kv_transfer_params" not in decode.received[0].fields
    if script is silent:
        wait_until(lambda: prefill.hang_ups == 1)


def test_what_a_prefill_answers_goes_on_as_it_is(scripted: Fake, proxy: Proxy) -> None:
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "x": {"y": [None, 1.5, "é"]}}
    prefill = scripted(saying(whole(json.dumps({"kv_transfer_params": params}).encode())))
    decode = scripted(saying(whole(ANSWER)))
    live = proxy(prefill=(prefill.url,), decode=(decode.url,))
    answer = ask(live, stream=True, max_tokens=40)
    assert answer.content == ANSWER
    [first], [second] = prefill.received, decode.received
    assert second.fields == {
        "model": "tiny",
        "prompt": LONG,
        "stream": True,
        "max_tokens": 40,
        "kv_transfer_params": params,
    }
    assert first.fields["max_tokens"] == 1
    assert first.fields["kv_transfer_params"]["do_remote_decode"] is True
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == answer.headers["x-request-id"]


def test_headers(scripted: Fake, proxy: Proxy) -> None:
    """Only those pass that an engine has to do with, or a client."""
    decode = scripted(
        saying(whole(ANSWER, "200 OK", "Retry-After: 7", "X-Hop: 1", "Proxy-Authenticate: x", "Server: me"))
    )
    live = proxy(decode=(decode.url,))
    asked = {
        "X-Request-Id": "mine-1",
        "X-Session-Id": "talk",
        "Authorization": "Bearer k",
        "Cookie": "secret",
        "X-Forwarded-For": "1.2.3.4",
        "TE": "trailers",
        "X-Made-Up": "1",
    }
    answer = live.http.post("/v1/completions", json={"prompt": "a"}, headers=asked)
    assert answer.content == ANSWER
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["retry-after"] == "7"
    assert "proxy-authenticate" not in answer.headers
    assert answer.headers.get_list("server") == ["uvicorn"]
    assert decode.received[0].headers == {
        "host": decode.url.removeprefix("http://"),
        "accept": "*/*",
        "authorization": "Bearer k",
        "x-session-id": "talk",
        "x-request-id": "mine-1",
        "content-type": "application/json",
        "content-length": str(len(decode.received[0].body)),
        "accept-encoding": "identity",
        "connection": "keep-alive",
        "user-agent": "tierstore-proxy",
    }
    bad = live.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "a b"})
    assert bad.headers["x-request-id"] != "a b"


def test_a_stream_passes_through_as_it_arrives(scripted: Fake, proxy: Proxy) -> None:
    """Byte for byte, and each part before the next one is there."""
    parts = [b'data: {"a": 1}\n\n', b"da", b"ta: \xff\x00 anything\r\n", b"data: [DONE]\n\n"]
    seen = [threading.Event() for _ in parts]

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for part, event in zip(parts, seen, strict=True):
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
            assert await asyncio.to_thread(event.wait, WAIT_S)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    live = proxy(decode=(scripted(script).url,))
    with live.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        arriving = answer.iter_raw()
        for part, event in zip(parts, seen, strict=True):
            arrived = b""
            while len(arrived) < len(part):
                arrived += next(arriving)
            assert arrived == part
            event.set()
        assert list(arriving) == []


def test_a_client_that_hangs_up_while_its_prompt_is_computed(scripted: Fake, proxy: Proxy) -> None:
    prefill, decode = scripted(silent), scripted(saying(whole(ANSWER)))
    live = proxy(prefill=(prefill.url,), decode=(decode.url,))
    body = json.dumps({"prompt": LONG}).encode()
    with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        wait_until(lambda: len(prefill.received) == 1)
    wait_until(lambda: prefill.hang_ups == 1)
    wait_until(lambda: live.metric("hang_ups_total") == 1)
    assert decode.received == []
    assert live.metric("requests_in_progress") == 0


def test_an_answer_without_end_is_cut_off_and_the_next_one_is_not(scripted: Fake, proxy: Proxy) -> None:
    fate = [endless, saying(whole(ANSWER))]

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        await fate.pop(0)(request, writer)

    live = proxy(decode=(scripted(script).url,), max_answer_bytes=1 << 20)
    with pytest.raises(httpx.RemoteProtocolError):
        ask(live)
    assert ask(live).content == ANSWER
    assert live.metric("cut_off_total") == 1


def test_an_answer_that_breaks_off_is_no_whole_one(scripted: Fake, proxy: Proxy) -> None:
    live = proxy(
        decode=(scripted(saying(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")).url,)
    )
    with pytest.raises(httpx.RemoteProtocolError):
        ask(live)
    assert live.metric("cut_off_total") == 1


def test_what_ends_engines_ends_two_of_them_at_most(scripted: Fake, proxy: Proxy) -> None:
    engines = [scripted(saying(b"")) for _ in range(4)]
    live = proxy(decode=tuple(each.url for each in engines))
    answer = ask(live)
    assert answer.status_code == 503
    assert sum(len(each.received) for each in engines) == 2


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 529])
def test_an_engine_that_is_busy_or_fails_is_left_for_another(
    status: int, scripted: Fake, proxy: Proxy
) -> None:
    refusing, other = scripted(saying(whole(b"{}", f"{status} No"))), scripted(saying(whole(ANSWER)))
    live = proxy(decode=(refusing.url, other.url))
    answers = [ask(live, prompt=[seed] * 300, stream=bool(seed % 2)) for seed in range(4)]
    assert [(answer.status_code, answer.content) for answer in answers] == [(200, ANSWER)] * 4
    assert live.http.get("/v1/models").status_code == 200
    assert len(refusing.received) >= 1
    assert live.metric("retried_total") == len(refusing.received)


def test_a_prefill_engine_that_is_busy_or_fails_is_left_for_another(scripted: Fake, proxy: Proxy) -> None:
    handing = whole(b'{"kv_transfer_params": {"do_remote_prefill": true}}')
    busy, failing, other = (
        scripted(saying(said)) for said in (whole(b"{}", "429 No"), whole(b"{}", "500 No"), handing)
    )
    decode = scripted(saying(whole(ANSWER)))
    live = proxy(prefill=(busy.url, failing.url, other.url), decode=(decode.url,))
    for seed in range(3):
        assert ask(live, prompt=[seed] * 300).content == ANSWER
    assert live.ways() == {"handed over": 3}
    assert busy.received
    assert failing.received


@pytest.mark.parametrize(
    ("statuses", "status"),
    [((429, 429), 429), ((500, 500), 500), ((429, 503), 503), ((503, 429), 503), ((500, 429, 503), 503)],
)
def test_the_client_gets_what_all_engines_say(
    statuses: tuple[int, ...], status: int, scripted: Fake, proxy: Proxy
) -> None:
    said = b'{"error": {"message": "said by an engine"}}'
    engines = [scripted(saying(whole(said, f"{each} No", "retry-after: 7"))) for each in statuses]
    live = proxy(decode=tuple(each.url for each in engines))
    answer = ask(live)
    assert answer.status_code == status
    assert all(len(each.received) == 1 for each in engines)
    if len(set(statuses)) == 1:
        assert (answer.content, answer.headers["retry-after"]) == (said, "7")
    else:
        assert all(f"answers {each}" in answer.json()["error"]["message"] for each in statuses)
        assert answer.headers["retry-after"] == "1"


def test_requests_that_name_another_host(scripted: Fake, proxy: Proxy) -> None:
    """A web page whose name leads to loopback has no answers, and engines do not hear of it."""
    decode = scripted(saying(whole(ANSWER)))
    live = proxy(decode=(decode.url,))
    body = {"model": "tiny", "prompt": "x"}
    for host in ("evil.example", "evil.example:8100", "127.0.0.1.evil.example", "user@127.0.0.1", "[::2]"):
        for path in ("/v1/models", "/v1/models/tiny", "/health", "/metrics"):
            assert live.http.get(path, headers={"Host": host}).status_code == 421, (host, path)
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert live.http.post(path, json=body, headers={"Host": host}).status_code == 421, (host, path)
    assert decode.received == []
    for host in ("localhost:1", "127.0.0.1", "[::1]:8100"):
        assert live.http.post("/v1/completions", json=body, headers={"Host": host}).status_code == 200
    keyed = proxy(decode=(decode.url,), api_key="key")  # it may have a name of its own
    headers = {"Host": "models.example", "Authorization": "Bearer key"}
    assert keyed.http.post("/v1/completions", json=body, headers=headers).status_code == 200


def test_time_is_up(scripted: Fake, proxy: Proxy) -> None:
    decode = scripted(silent)
    live = proxy(decode=(decode.url,), request_s=0.3)
    answer = ask(live)
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
    wait_until(lambda: decode.hang_ups == 1)


def test_limits_of_what_a_client_sends(scripted: Fake, proxy: Proxy) -> None:
    release = threading.Event()

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        assert await asyncio.to_thread(release.wait, WAIT_S)
        writer.write(whole(ANSWER))

    decode = scripted(script)
    live = proxy(decode=(decode.url,), max_body_bytes=2048, max_requests=1, max_queued_tokens=100)
    for body, kind, status in (
        (b"{" * 3000, "application/json", 413),
        (b"{}", "text/plain", 415),
        (b"[1]", "application/json", 400),
        (b'{"model": "tiny", "prompt": "\xff"}', "application/json", 400),
        ('{"prompt": "a"}'.encode("utf-16"), "application/json", 400),
    ):
        answer = live.http.post("/v1/completions", content=body, headers={"content-type": kind})
        assert answer.status_code == status, answer.text
    assert live.http.get("/v1/completions").status_code == 405
    assert live.http.post("/v1/nothing").status_code == 404
    first = threading.Thread(target=lambda: ask(live, prompt=[1] * 300))
    first.start()
    wait_until(lambda: len(decode.received) == 1)
    answer = ask(live, prompt=[1])
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    release.set()
    first.join(WAIT_S)


@pytest.mark.parametrize("path", ["/v1/models/../../metrics", "/v1/models/%2e%2e/%2e%2e/metrics"])
def test_no_other_path_of_an_engine_can_be_had(path: str, scripted: Fake, proxy: Proxy) -> None:
    engine = scripted(saying(whole(b"{}")))
    live = proxy(decode=(engine.url,))
    where = httpx.URL(str(live.http.base_url))
    with socket.create_connection((where.host, where.port), WAIT_S) as plain:
        plain.sendall(
            f"GET {path} HTTP/1.1\r\nhost: {where.host}:{where.port}\r\nconnection: close\r\n\r\n".encode()
        )
        assert b" 404 " in plain.makefile("rb").readline()
    assert not [each for each in engine.received if "metrics" in str(each)]
