"""llama-server and ``tierstore llama`` as processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from tierstore.testing.clock import wait_until
from tierstore.testing.processes import free_port

WAIT_S = 120.0
_BESIDE = Path(sys.executable).with_name("llama-server")
LLAMA_SERVER = shutil.which("llama-server", path=f"{_BESIDE.parent}:{os.environ.get('PATH', '')}")


class LlamaServerProcess:
    """llama-server with one slot and one thread, until it is killed. It can be started again at the same
    address."""

    def __init__(self, model, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.slots = Path(tempfile.mkdtemp(prefix="ts-slots-", dir="/dev/shm"))
        self.http = httpx.Client(base_url=self.url)
        self._command = [
            *(str(LLAMA_SERVER), "-m", str(model), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--slot-save-path", str(self.slots), "-c", "4096", "-np", "1", "-t", "1", "--offline"),
            *options,
        ]
        self._log = Path(tempfile.mkdtemp(prefix="ts-llama-")) / "log"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it has loaded its model."""
        with self._log.open("ab") as log:
            self.popen = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_until(self._serves)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _serves(self) -> bool:
        assert self.popen.poll() is None, self.log[-2000:]
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(WAIT_S)

    def close(self) -> None:
        self.kill()
        self.http.close()
        shutil.rmtree(self.slots, ignore_errors=True)
        shutil.rmtree(self._log.parent, ignore_errors=True)


class ProxyProcess:
    """``tierstore llama`` before a llama-server, until it is killed."""

    def __init__(self, url: str, store: str, *options: str) -> None:
        program = "import sys; from tierstore_start import tierstore; tierstore()"
        command = [
            *(sys.executable, "-c", program, "llama", "--url", url, "--store", store),
            *("--listen", "127.0.0.1:0", "--least-tokens", "32", "--lookup-s", "2", *options),
        ]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        wait_until(lambda: self._found("tierstore llama at"))
        [self.url] = re.findall(r"(http://\S+)/v1", self._found("tierstore llama at"))
        self.http = httpx.Client(base_url=self.url)

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line.rstrip())

    def _found(self, text: str) -> str:
        return next((line for line in [*self.lines] if text in line), "")

    def wait_ready(self, times: int = 1) -> None:
        """Wait until llama-server is identified and the daemon is connected."""
        wait_until(lambda: sum("pages have identity" in line for line in [*self.lines]) >= times)
        wait_until(lambda: bool(self._found("connected to the daemon")))

    def said(self, text: str) -> bool:
        return bool(self._found(text))

    def metric(self, name: str) -> int:
        lines = self.http.get("/tierstore/metrics").text.splitlines()
        return int(
            sum(float(line.split()[-1]) for line in lines if line.startswith(f"tierstore_llama_{name}"))
        )

    def outcome(self, name: str) -> int:
        return self.metric(f'prompts_total{{outcome="{name}"}}')

    def wait_saved(self, tokens: int) -> None:
        """Wait until this many tokens have been saved since the proxy's start, and no save is under way."""
        wait_until(lambda: self.metric("saved_tokens_total") >= tokens and not self.metric("saves_under_way"))

    def close(self) -> None:
        self.http.close()
        self.popen.kill()
        self.popen.wait(WAIT_S)
        self._reading.join(WAIT_S)


def prompt(count: int, seed: int = 0) -> list[int]:
    """Return the token ids of bytes, without a beginning that other seeds share."""
    return [1, *((seed * 7919 + at * at * 31 + at * 17) % 251 + 3 for at in range(count - 1))]


def complete(http: httpx.Client, tokens, *, count: int = 8, **fields) -> dict:
    """Return llama-server's answer to a prompt, without randomness."""
    asked = {"prompt": tokens, "n_predict": count, "temperature": 0, "ignore_eos": True, **fields}
    answer = http.post("/completion", json={**asked, "return_tokens": True})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def timed_first_token(http: httpx.Client, tokens, *, count: int = 8) -> tuple[float, list[int]]:
    """Return the seconds to the first token of a streamed answer, and all of its tokens."""
    import json

    began, first, found = time.monotonic(), 0.0, []
    asked = {"prompt": tokens, "n_predict": count, "temperature": 0, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/completion", json={**asked, "return_tokens": True}, timeout=None) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                event = json.loads(line[6:])
                if event.get("tokens") and not event.get("stop"):
                    first = first or time.monotonic() - began
                    found += event["tokens"]
    return first, found
