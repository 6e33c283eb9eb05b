"""vLLM's own servers behind ``tierstore-proxy``: the contract as it goes over the wire. The proxy restarts, a
client leaves, and the engine that computes is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("starlette")

import httpx

from tests.engine.server.processes import ServerProcess
from tests.vllm import models
from tests.vllm.engines import ONE_THREAD, Ask, Engine
from tests.vllm.harness import patient
from tests.vllm.models import prompt
from tierstore.testing.processes import free_port
from tierstore_tools.vllm.daemon import ServeProcess
from tierstore_tools.vllm.engine import ENVIRONMENT

pytestmark = pytest.mark.timeout(1800)
TOKENS, ALIGNED = 901, 896
WAIT_S = 120.0
START_S = 900.0  # it takes vLLM's server a minute on an idle machine


class VllmServer:
    """``vllm serve``, more or less."""

    def __init__(self, model: Path, log: Path, connector: dict) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"),
            *("--served-model-name=tiny", "--host=127.0.0.1", f"--port={self.url.rpartition(':')[2]}"),
            *("--dtype=float32", "--enforce-eager", "--seed=0", "--max-model-len=4096", "--block-size=32"),
            *("--num-gpu-blocks-override=1024", "--kv-transfer-config", json.dumps(connector)),
        ]
        self._log = log
        with open(log, "wb") as said:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**ENVIRONMENT, **ONE_THREAD, **os.environ},
                start_new_session=True,
            )

    def wait_healthy(self) -> None:
        ends = time.monotonic() + START_S
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=WAIT_S).status_code == 200:
                    return
            except httpx.TransportError:
                assert self._process.poll() is None, self._log.read_text()[-4000:]
            assert time.monotonic() < ends, self._log.read_text()[-4000:]
            time.sleep(0.2)

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=WAIT_S).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}_total"))

    def kill(self) -> None:
        """Idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(WAIT_S)


@pytest.fixture(scope="module")
def reference(model):
    """``reference(prompt)``: the log-probabilities that one engine without a connector gives its tokens."""
    with Engine(model(models.LLAMA)) as engine:

        def logprobs(tokens):
            engine.reset_prefix_cache()
            [answer] = engine.ask(Ask(tokens)).answers
            return [place[token] for token, place in zip(answer.tokens, answer.logprobs, strict=True)]

        yield logprobs


def start_proxy(stack, *engines):
    proxy = ServerProcess("tierstore_proxy.cli", "--listen", "127.0.0.1:0", *engines)
    stack.callback(proxy.close)
    return proxy


def logprobs_of(proxy, tokens):
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = proxy.http.post("/v1/completions", json={**body, "logprobs": 1}, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["token_logprobs"]


def behind_the_proxy(stack, model, logs, reference, daemons, connectors):
    """A prefill and a decode server, each with its connector: the proxy restarts, a client leaves, the
    prefill server is killed, and then the ``daemons``."""
    servers = []
    for name, connector in zip(("prefill", "decode"), connectors, strict=True):
        servers.append(VllmServer(model, logs / name, connector))
        stack.callback(servers[-1].kill)
    prefill, decode = servers
    for server in servers:
        server.wait_healthy()
    engines = ("--prefill", prefill.url, "--decode", decode.url)
    proxy = start_proxy(stack, *engines)
    first = prompt(TOKENS, seed=1)
    assert logprobs_of(proxy, first) == pytest.approx(reference(first), abs=1e-4)
    assert decode.metric("vllm:tierstore_loaded_tokens") == ALIGNED
    assert prefill.metric("vllm:tierstore_handed_over_tokens") == ALIGNED
    assert daemons[-1].stats().service.broken_promises == 0

    proxy.end(signal.SIGKILL)
    proxy = start_proxy(stack, *engines)
    second = prompt(TOKENS, seed=2)
    assert logprobs_of(proxy, second) == pytest.approx(reference(second), abs=1e-4)
    assert decode.metric("vllm:tierstore_loaded_tokens") == 2 * ALIGNED

    body = {"model": "tiny", "prompt": prompt(3500, seed=3), "max_tokens": 500, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        proxy.http.post("/v1/completions", json=body, timeout=0.1)
    third = prompt(TOKENS, seed=4)
    assert logprobs_of(proxy, third) == pytest.approx(reference(third), abs=1e-4)

    prefill.kill()
    fourth = prompt(TOKENS, seed=5)
    assert logprobs_of(proxy, fourth) == pytest.approx(reference(fourth), abs=1e-4)
    for daemon in daemons:
        daemon.kill()
    fifth = prompt(TOKENS, seed=6)
    assert logprobs_of(proxy, fifth) == pytest.approx(reference(fifth), abs=1e-4)


def test_vllm_behind_the_proxy(model, reference, tmp_path):
    with ExitStack() as stack:
        daemon = stack.enter_context(ServeProcess(tmp_path, disk=False))
        both = 2 * [patient(daemon.url)]
        behind_the_proxy(stack, model(models.LLAMA), tmp_path, reference, [daemon], both)
