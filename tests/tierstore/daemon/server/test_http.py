"""The HTTP port over real sockets: what is not about who may see the page."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading

import pytest

from tests.tierstore.daemon.server.client import prompt_of
from tierstore.dashboard.feed import MOST_VIEWERS
from tierstore.testing.processes import free_port
from tierstore.wire import messages as p

SYSTEM = list(range(100, 164))  # four chunks


@pytest.fixture
def daemon(start):
    return start(metrics_port=free_port())


def get(daemon, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", daemon.settings.metrics_port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


class Viewer:
    """Somebody who follows the feed."""

    def __init__(self, daemon):
        self.socket = socket.create_connection(("127.0.0.1", daemon.settings.metrics_port), timeout=30)
        self.socket.sendall(b"GET /dashboard/feed HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.lines = self.socket.makefile("rb")
        self.status = int(self.lines.readline().split()[1])

    def view(self):
        """The next one."""
        for line in self.lines:
            if line == b"event: sample\n":
                return json.loads(next(self.lines).removeprefix(b"data: "))[2]
        raise AssertionError("the feed has ended")

    def close(self):
        self.lines.close()
        self.socket.close()


def table(view, title):
    return next(each["rows"] for each in view["tables"] if each["title"] == title)


def test_names_of_other_hosts_are_not_answered(daemon):
    for path in ("/dashboard/", "/metrics", "/healthz"):
        assert get(daemon, path, Host="evil.example")[0] == 421
        assert get(daemon, path)[0] == 200


def test_places_are_bounded_and_come_back(daemon):
    viewers = [Viewer(daemon) for _ in range(MOST_VIEWERS)]
    assert {viewer.status for viewer in viewers} == {200}
    assert viewers[-1].view()["title"] == "tierstore daemon"
    assert get(daemon, "/dashboard/feed")[0] == 503
    for viewer in viewers:
        viewer.close()
    status = 503
    while status != 200:  # they are given back when the next event cannot be sent
        viewer = Viewer(daemon)
        status = viewer.status
        viewer.close()


def test_a_port_that_answers_says_whether_engines_are_served(daemon, monkeypatch):
    assert get(daemon, "/readyz") == (200, "ready\n")
    monkeypatch.setattr("tierstore.daemon.http._LOOP_S", 0.1)
    busy, done = threading.Event(), threading.Event()
    daemon.loop.call_soon_threadsafe(lambda: (busy.set(), done.wait(60)))
    assert busy.wait(30)
    try:
        assert get(daemon, "/readyz") == (503, "not ready\n")
        assert get(daemon, "/healthz")[0] == 503
        assert get(daemon, "/dashboard/")[0] == 200
    finally:
        done.set()
    while get(daemon, "/healthz")[0] != 200:
        pass


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), TimeoutError(), RuntimeError("odd")])
def test_an_error_of_the_daemon_is_an_answer(daemon, monkeypatch, error):
    def fails():
        raise error

    monkeypatch.setattr(daemon.daemon._http, "_stats", fails)
    assert get(daemon, "/healthz") == (500, "internal error: see the daemon's log\n")
    monkeypatch.undo()
    assert get(daemon, "/healthz")[0] == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /dashboard/ HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
        b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 150 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
)
def test_what_is_no_request_is_hung_up_on(daemon, request_):
    with socket.create_connection(("127.0.0.1", daemon.settings.metrics_port), timeout=30) as there:
        there.sendall(request_)
        with contextlib.suppress(ConnectionResetError):
            assert there.recv(1) == b""
    assert get(daemon, "/readyz")[0] == 200


def test_missed_tokens_are_shown_by_reason(daemon, connect):
    client = connect(daemon.url)
    client.register()
    client.save(SYSTEM)
    client.tell(p.Release([client.lookup(prompt_of(SYSTEM)).lease]))
    title = "Missed tokens by reason, last hour"
    viewer = Viewer(daemon)
    assert table(viewer.view(), title) == []
    assert 'tierstore_missed_tokens_total{reason="evicted"} 0.0' in get(daemon, "/metrics")[1]
    client.lookup(prompt_of([9] * 48))
    assert client.ask(p.Evict(0, "host", 1)).pages == 1
    client.lookup(prompt_of(SYSTEM))
    while len(rows := table(viewer.view(), title)) < 2:
        pass
    viewer.close()
    assert rows == [["never saved", "48", "75.0 %"], ["evicted", "16", "25.0 %"]]
    lines = get(daemon, "/metrics")[1].splitlines()
    assert 'tierstore_missed_tokens_total{reason="never_saved"} 48.0' in lines
    assert 'tierstore_missed_tokens_total{reason="evicted"} 16.0' in lines


def test_the_busiest_prefixes_end_where_prompts_part(daemon, connect):
    client = connect(daemon.url)
    client.register()
    prompts = [SYSTEM + [1000 * number + token for token in range(32)] for number in range(1, 4)]
    for tokens in prompts:
        client.save(tokens)
    for tokens in [*prompts, prompts[0]]:
        client.lookup(prompt_of(tokens))
    core = daemon.daemon.core
    daemon.wait_for(lambda _: sum(each.hits for each in core.busiest(10)) == 8)  # noted after the answers
    busiest = core.busiest(10)
    assert [(each.tokens, each.hits) for each in busiest] == [(64, 4), (96, 2), (96, 1), (96, 1)]
    assert {each.tier for each in busiest} == {"host"}
    assert {(each.model, each.tenant) for each in busiest} == {("test", "")}
    assert core.busiest(1) == busiest[:1]
    keys = {key.hex() for tokens in prompts for key in prompt_of(tokens).keys}
    assert not [each for each in busiest if any(each.name in key for key in keys)]
    viewer = Viewer(daemon)
    view = viewer.view()
    while [row[0] for row in table(view, "Busiest prefixes")] != [each.name for each in busiest]:
        view = viewer.view()
    assert [meter["label"] for meter in view["meters"]] == ["host 15.6 %"]  # 10 pages of 64
    viewer.close()
