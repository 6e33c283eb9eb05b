"""``tierstore-engine serve`` as its users run it: a process that is started, killed and ended."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="needs pip install -e '.[dev]'")
pytest.importorskip("uvicorn")

import openai

from tierstore.testing.clock import wait_until

from .live import WAIT_S
from .processes import Process

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def process() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(*options: str) -> Process:
        started.append(Process(*options))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_the_cache_outlives_kill_9(process: Callable[..., Process], tmp_path: Path) -> None:
    store = str(tmp_path / "kv")
    first = process("--store", store)
    assert first.cached() == 0
    hbm = first.cached()
    assert hbm > 300
    wait_until(lambda: first.metric("store_pending_pages") == 0)
    first.end(signal.SIGKILL)
    second = process("--store", store)
    assert second.cached() == hbm
    assert second.metric('cached_tokens_total{tier="disk"}') == hbm
    assert second.end(signal.SIGTERM) == (0, "")


def test_sigterm_lets_requests_finish(process: Callable[..., Process]) -> None:
    server = process("--drain-s", "300")
    stream = server.client.completions.create(
        model="tiny", prompt="abc", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.http.get("/health").status_code == 503)
    with pytest.raises(openai.InternalServerError, match="shutting down") as error:
        server.client.completions.create(model="tiny", prompt="abc")
    assert error.value.status_code == 503
    assert list(chunks)[-1].choices[0].finish_reason == "length"
    assert server.process.wait(WAIT_S) == 0


def test_sigterm_cuts_off_what_takes_too_long(process: Callable[..., Process]) -> None:
    server = process("--drain-s", "0.2")
    stream = server.client.completions.create(
        model="tiny", prompt="abc", max_tokens=4000, stream=True, n=8, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(chunks)
    assert server.process.wait(WAIT_S) == 0
    assert server.said.read().count("were cut off") == 1


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--model", "huge"), 2, "neither a folder nor a preset"),
        (("--model", "tiny", "--host", "0.0.0.0"), 2, "give an --api-key"),
        (("--model", "tiny", "--host", "nowhere.invalid", "--api-key", "k"), 2, "cannot listen at nowhere"),
        (("--model", "tiny", "--port", "70000"), 2, "between 0"),
        (("--model", "tiny", "--generation-config", "vllm"), 2, "must be auto or none, got 'vllm'"),
        (("--model", "tiny", "--api-key", ""), 2, "must not be empty"),
        (("--model", "tiny", "--max-requests", "0"), 2, "max_requests must be at least 1"),
        (("--model", "tiny", "--max-body-bytes", "1"), 2, "at least 1 KiB"),
        (("--model", "tiny", "--chat-template", "gone.jinja"), 1, "cannot read gone.jinja"),
        (("--model", "tiny", "--draft", "magic"), 2, "magic"),
        (("--model", "tiny", "--kv-role", "both"), 2, "kv_role must be one of kv_both"),
        (("--model", "tiny", "--kv-role", "kv_producer"), 2, "engines that share a daemon"),
        (("--model", "tiny", "--handover-s", "11"), 2, "between 0 and 10"),
        (
            ("--model", "tiny", "--hbm-bytes", "8MiB", "--most-hbm-bytes", "4MiB"),
            2,
            "initial page pool (8 MiB)",
        ),
        (("--model", "tiny", "--most-hbm-bytes", "999TiB"), 2, "does not fit this machine's memory"),
        (("--model", "tiny", "--disk-codec", "magic"), 2, "magic"),
    ],
)
def test_mistakes(
    options: tuple[str, ...],
    code: int,
    message: str,
    run_command: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    found, _, err = run_command("serve", *options, "--store", "kv", "--device", "cpu")
    assert found == code, err
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use(run_command: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, _, err = run_command("serve", "--model", "tiny", "--port", str(port))
    assert code == 2
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in err


def test_a_missing_package_is_one_line(run_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run", "http"):
        monkeypatch.delitem(sys.modules, f"tierstore_engine.server.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = run_command("serve", "--model", "tiny")
    assert code == 1
    assert "this needs uvicorn, which the extra [serve] installs" in err
    assert err.count("\n") == 1
