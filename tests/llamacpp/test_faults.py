"""Whatever happens to the daemon or to llama-server: no wrong token, and no failed request."""

from __future__ import annotations

import pytest

from tests.llamacpp.conftest import MISSING

if MISSING:
    pytest.skip("no llama.cpp here; make test-llamacpp", allow_module_level=True)

import random
import signal
import threading
import time
from contextlib import contextmanager

from tests.llamacpp.programs import complete, prompt
from tierstore.testing.clock import wait_until
from tierstore_tools.vllm.daemon import ServeProcess

_PROMPTS = [prompt(120 + 37 * at, at) for at in range(8)]
FAULTS = ("killed", "stopped", "full", "disk full")


@contextmanager
def disturbed(fault, daemon, rng):
    """Kill or stop the daemon now and then, while the block runs."""
    ending = threading.Event()

    def kill():
        while not ending.wait(rng.uniform(0.5, 1.5)):
            daemon.kill()
            time.sleep(rng.uniform(0, 0.3))
            daemon.start()

    def stop():
        while not ending.wait(rng.uniform(0.2, 0.8)):
            daemon.process.send_signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0.1, 1.5))
            daemon.process.send_signal(signal.SIGCONT)

    work = {"killed": kill, "stopped": stop}.get(fault)
    thread = threading.Thread(target=work) if work else None
    if thread:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        if thread:
            thread.join()


def campaign(fault, requests, models, server, proxy, directory):
    llama = server(models(), "-np", "2")
    expected = [complete(llama.http, tokens)["tokens"] for tokens in _PROMPTS]
    room = {"full": (1 << 20, 1 << 30), "disk full": (8 << 20, 16 << 20)}.get(fault, (64 << 20, 1 << 30))
    daemon = ServeProcess(directory, host_bytes=room[0], disk_bytes=room[1], disk=fault != "full").start()
    try:
        front = proxy(llama, daemon, "--lookup-s", "0.2", "--load-s", "0.5")
        front.wait_ready()
        for tokens in _PROMPTS:
            complete(front.http, tokens)
        wait_until(lambda: not front.metric("saves_under_way"))
        rng = random.Random(fault)
        with disturbed(fault, daemon, rng):
            for _ in range(requests):
                at = rng.randrange(len(_PROMPTS))
                fresh = prompt(200, rng.randrange(1000, 1_000_000))  # fills the store
                if rng.random() < 0.3:
                    complete(front.http, fresh, count=1)
                assert complete(front.http, _PROMPTS[at])["tokens"] == expected[at]
        assert front.metric("restored_tokens_total") > 0
    finally:
        daemon.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_daemon_in_trouble(fault, models, server, proxy, tmp_path):
    campaign(fault, 40, models, server, proxy, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_daemon_in_trouble_for_long(fault, models, server, proxy, tmp_path):
    campaign(fault, 500, models, server, proxy, tmp_path)


def test_a_daemon_that_dies_between_restore_and_answer(models, server, proxy, daemon):
    llama = server(models())
    tokens = prompt(700)
    expected = complete(llama.http, tokens, count=200)["tokens"]
    front = proxy(llama, daemon)
    front.wait_ready()
    complete(front.http, tokens)
    front.wait_saved(len(tokens))
    complete(llama.http, prompt(300, 9))
    threading.Timer(0.05, daemon.kill).start()
    assert complete(front.http, tokens, count=200)["tokens"] == expected
    complete(llama.http, prompt(300, 9))
    assert complete(front.http, tokens, count=200)["tokens"] == expected


def test_a_llama_server_that_is_killed(models, server, proxy, daemon):
    llama = server(models())
    tokens = prompt(700)
    front = proxy(llama, daemon)
    front.wait_ready()
    expected = complete(front.http, tokens)["tokens"]
    front.wait_saved(len(tokens))
    llama.kill()
    assert front.http.post("/completion", json={"prompt": "a"}).status_code == 502
    llama.start()
    assert complete(front.http, tokens)["tokens"] == expected


def test_slots_that_cannot_be_written(models, server, proxy, daemon):
    """Without room for slots' files nothing is restored, and the answers are the same."""
    llama = server(models())
    tokens = prompt(700)
    front = proxy(llama, daemon)
    front.wait_ready()
    expected = complete(front.http, tokens)["tokens"]
    front.wait_saved(len(tokens))
    complete(llama.http, prompt(300, 9))
    llama.slots.rmdir()
    assert complete(front.http, tokens)["tokens"] == expected
    assert front.outcome("failed") == 1
