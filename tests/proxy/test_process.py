"""``tierstore-proxy`` as its users run it: a process before processes, of which each may be killed."""

from __future__ import annotations

import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engine.server.live import WAIT_S
from tests.engine.server.processes import Process, ServerProcess
from tierstore.testing.clock import wait_until
from tierstore_tools.vllm.daemon import ServeProcess

TOKENS = 400
LONG = 3000  # tokens that take long enough to be killed in the midst of
MAIN = "tierstore_proxy.cli"


class ProxyProcess(ServerProcess):
    """The proxy."""

    def __init__(self, *options: str) -> None:
        super().__init__(MAIN, "--listen", "127.0.0.1:0", *options)

    def ways(self) -> set[str]:
        found = re.findall(r'ways_total{way="(.*)"} (.*)', self.http.get("/metrics").text)
        return {way for way, count in found if float(count)}


@pytest.fixture
def engine(closing: ExitStack) -> Callable[..., Process]:
    def start(*options: str) -> Process:
        process = Process(*options)
        closing.callback(process.close)
        return process

    return start


@pytest.fixture
def proxy(closing: ExitStack) -> Callable[..., ProxyProcess]:
    def start(*options: str) -> ProxyProcess:
        process = ProxyProcess(*options)
        closing.callback(process.close)
        return process

    return start


def complete(server: ServerProcess, seed: int, tokens: int = TOKENS) -> str:
    draw = random.Random(seed)
    prompt = [draw.randrange(250) for _ in range(tokens)]
    answer = server.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].text


def test_everything_is_killed_once(
    engine: Callable[..., Process],
    proxy: Callable[..., ProxyProcess],
    daemon: Callable[[], ServeProcess],
) -> None:
    """The proxy, then the prefill engine in the midst of a prompt, then the daemon: answers stay the same."""
    store = daemon()
    flags = ("--store", store.url, "--prefill-chunk", "64")
    prefill, decode = engine(*flags), engine(*flags)
    alone = engine()
    options = ("--prefill", prefill.url, "--decode", decode.url, "--daemon", store.url)
    options += ("--prefill-s", "300", "--look-s", "2")

    first = proxy(*options)
    expected = complete(alone, 1)
    assert complete(first, 1) == expected
    assert first.ways() == {"handed over"}
    first.end(signal.SIGKILL)
    second = proxy(*options)
    assert complete(second, 1) == expected
    assert second.ways() == {"held or short"}, "a new proxy finds what was computed for the old one"

    computed = prefill.metric("computed_tokens_total")
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(complete(second, 2, LONG)))
    asking.start()
    wait_until(lambda: prefill.metric("computed_tokens_total") > computed)
    prefill.end(signal.SIGKILL)
    asking.join(WAIT_S)
    assert answers == [complete(alone, 2, LONG)]
    assert second.ways() == {"held or short", "prefill failed"}
    assert complete(second, 3) == complete(alone, 3)
    assert second.ways() == {"held or short", "prefill failed", "no prefill engine is up"}
    assert second.http.get("/health").json()["status"] == "degraded"

    store.kill()
    assert complete(second, 4) == complete(alone, 4)
    assert second.end(signal.SIGTERM)[0] == 0


def test_sigterm_lets_requests_finish(
    engine: Callable[..., Process], proxy: Callable[..., ProxyProcess], tmp_path: Path
) -> None:
    file = tmp_path / "proxy.toml"
    file.write_text(f'decode = ["{engine().url}"]\ndrain_s = 300\n')
    live = proxy("--config", str(file))
    stream = live.client.completions.create(
        model="tiny", prompt="abc", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    live.process.send_signal(signal.SIGTERM)
    wait_until(lambda: live.http.get("/health").json()["status"] == "draining")
    assert list(chunks)[-1].choices[0].finish_reason == "length"
    assert live.process.wait(WAIT_S) == 0


ENGINE = ("--decode", "http://127.0.0.1:8001")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "no decode engine: give --decode URL"),
        (("--decode", "8001"), "decode must be http://HOST:PORT, got '8001'"),
        (("--decode", "http://127.0.0.1:8001/v1"), "must be http://HOST:PORT"),
        ((*ENGINE, *ENGINE), "two of the decode engines have the same URL"),
        ((*ENGINE, "--listen", "8100"), "got '8100'"),
        ((*ENGINE, "--listen", "0.0.0.0:8100"), "give an --api-key, or listen at 127.0.0.1"),
        ((*ENGINE, "--api-key", ""), "must not be empty"),
        ((*ENGINE, "--daemon", "ipc:///a", "--daemon", "ipc:///b"), "2 daemons for 1 decode engines"),
        ((*ENGINE, "--daemon", "ipc:///a", "--selector", "http://h:1"), "either --daemon or --selector"),
        ((*ENGINE, "--daemon", "nothing"), "is no address of a daemon"),
        ((*ENGINE, "--daemon", "tcp://h:1", "--keys", "gone"), "give both keys"),
        ((*ENGINE, "--prefill-s", "0"), "prefill_s must be positive"),
        ((*ENGINE, "--min-prefill-tokens", "0"), "at least 1"),
        ((*ENGINE, "--max-body-bytes", "many"), "many"),
        ((*ENGINE, "--config", "gone.toml"), "cannot read gone.toml"),
        ((*ENGINE, "--config", "bad.toml"), "bad.toml is not TOML"),
        ((*ENGINE, "--config", "unknown.toml"), "unknown setting 'prefil'; did you mean 'prefill'?"),
        ((*ENGINE, "--config", "wrong.toml"), "drain_s: Expected `float`, got `str`"),
    ],
)
def test_mistakes(
    options: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    from tierstore_proxy.cli import main

    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("[")
    Path("unknown.toml").write_text('prefil = ["http://127.0.0.1:1"]')
    Path("wrong.toml").write_text('drain_s = "long"')
    monkeypatch.setattr("sys.argv", ["tierstore-proxy", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    err = capsys.readouterr().err
    assert ended.value.code == 2, err
    assert message in err
    assert err.count("\n") == 1


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        command = [sys.executable, "-m", MAIN, *ENGINE, "--listen", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2
    assert f"cannot listen at {address}: Address already in use" in done.stderr
