"""``tierstore-proxy`` before two of vLLM's own servers answers what one of them computes alone."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import httpx
import pytest

from tests.vllm.harness import EXACT, patient
from tierstore.testing.processes import free_port
from tierstore_tools.processes import listens
from tierstore_tools.vllm.daemon import ServeProcess
from tierstore_tools.vllm.engine import ENVIRONMENT

WAIT_S = 300.0
TOKENS, ALIGNED = 901, 896
PROXY = "from tierstore_proxy.cli import main; main()"


class Process:
    """A program that listens at ``url``."""

    def __init__(self, command, log, **environment):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        with open(log, "ab") as file:
            self.popen = subprocess.Popen(
                [part.format(port=self.port) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**ENVIRONMENT, **os.environ, **environment},
                start_new_session=True,
            )
        self._log = log

    def wait(self):
        ends = time.monotonic() + WAIT_S
        while not listens(self.port):
            said = self._log.read_text(errors="replace")[-2000:]
            assert self.popen.poll() is None, said
            assert time.monotonic() < ends, said
            time.sleep(0.1)
        return self

    def kill(self):
        """All of it: vLLM's engine is a process of its own."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(WAIT_S)


@pytest.fixture(scope="module")
def servers(model, tmp_path_factory):
    """``start(name)``: a proxy, or a vLLM server over the daemon; ``start("a", "b")`` both at a time."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        daemon = stack.enter_context(ServeProcess(folder, disk=False))

        def vllm(name):
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1"]
            command += ["--port={port}", "--dtype=float32", "--enforce-eager", "--seed=0", "--block-size=64"]
            command += [
                "--max-model-len=2048",
                "--max-num-batched-tokens=256",
                "--num-gpu-blocks-override=128",
            ]
            command += [f"--model={model('tiny-text')}", "--served-model-name=m"]
            command += [
                "--kv-transfer-config",
                json.dumps(patient(daemon.url)).replace("{", "{{").replace("}", "}}"),
            ]
            process = Process(command, folder / name, VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
            stack.callback(process.kill)
            return process

        def proxy(*options):
            command = [sys.executable, "-c", PROXY, "--listen", "127.0.0.1:{port}", *options]
            process = Process(command, folder / "proxy")
            stack.callback(process.kill)
            return process.wait()

        prefill, decode = vllm("prefill"), vllm("decode")
        yield prefill.wait(), decode.wait(), proxy


def ask(server, seed, *, salt=None, client=httpx, **fields):
    """The text of an answer and its log-probabilities. With a ``salt`` nothing can be found of the prompt."""
    draw = random.Random(seed)
    body = {"model": "m", "prompt": [draw.randrange(94) for _ in range(TOKENS)], "max_tokens": 8, "seed": 1}
    body |= {"temperature": 0, "logprobs": 1, **fields} | ({} if salt is None else {"cache_salt": salt})
    answer = client.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def same(found, expected):
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=EXACT)
    return True


def metric(server, name):
    text = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def ways(server):
    found = re.findall(
        r'ways_total{way="(.*)"} (.*)', httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text
    )
    return {way for way, count in found if float(count)}


def wait_for(condition):
    ends = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_vllm_computes_here_and_goes_on_there(servers):
    prefill, decode, proxy = servers
    options = ("--prefill", prefill.url, "--decode", decode.url, "--prefill-s", "300")
    first = proxy(*options)
    expected = ask(decode, 1, salt="alone")
    assert same(ask(first, 1), expected)
    assert ways(first) == {"handed over"}
    assert metric(decode, "vllm:tierstore_expected_tokens_total") == ALIGNED
    assert metric(decode, "vllm:tierstore_missing_tokens_total") == 0

    # The proxy is killed and started again.
    first.kill()
    second = proxy(*options)
    assert same(ask(second, 1), expected)

    # A client hangs up while it is answered, and another while its prompt is computed.
    body = {"model": "m", "prompt": [5] * TOKENS, "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{second.url}/v1/completions", json=body, timeout=WAIT_S) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{second.url}/v1/completions", json={**body, "prompt": [6] * TOKENS}, timeout=0.05)
    for server in (prefill, decode):
        wait_for(lambda server=server: metric(server, "vllm:num_requests_running") == 0)
        assert metric(server, "vllm:kv_cache_usage_perc") == 0
    assert metric(second, "tierstore_proxy_hang_ups_total") == 2

    # The prefill engine is killed while it has a prompt.
    expected = ask(decode, 2, salt="alone")
    prefill.popen.send_signal(signal.SIGSTOP)
    with httpx.Client() as client:
        found = []
        asking = threading.Thread(target=lambda: found.append(ask(second, 2, client=client)))
        asking.start()
        wait_for(lambda: metric(second, 'tierstore_proxy_requests_in_progress{role="prefill"') == 1)
        prefill.kill()
        asking.join(WAIT_S)
    assert same(found[0], expected)
    assert ways(second) == {"handed over", "prefill failed"}
    assert same(ask(second, 3), ask(decode, 3, salt="alone"))
