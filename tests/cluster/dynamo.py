"""NVIDIA Dynamo's indexer and selector, as processes of their own, asked over HTTP."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from tierstore.testing.processes import free_port

_READY_S = 30.0


class DynamoProcess:
    """``python -m MODULE --port PORT``. (They listen on all addresses, and ask nobody who he is.)"""

    def __init__(self, module: str) -> None:
        self.port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "--port", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _READY_S
        while not self._listens():
            assert self._process.poll() is None, f"{module} has ended"
            assert time.monotonic() < deadline, f"{module} does not listen"
            time.sleep(0.02)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def post(self, path: str, **body: Any) -> Any:
        """What it answers. Raises :class:`AssertionError`, with its words, for what it refuses."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from error

    def stop(self) -> None:
        """Take it from the processor: it hears nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(10)


class Indexer(DynamoProcess):
    """Follows daemons, and says how much of a prompt each of them holds."""

    def __init__(self) -> None:
        super().__init__("dynamo.indexer")

    def follow(self, number: int, endpoint: str, replay: str, *, model: str, block_tokens: int) -> None:
        self.post(
            "/register",
            instance_id=number,
            endpoint=endpoint,
            replay_endpoint=replay,
            model_name=model,
            block_size=block_tokens,
            dp_rank=0,
        )

    def held(self, tokens: list[int], *, number: int, model: str, block_tokens: int) -> tuple[int, int]:
        """The leading tokens of a prompt that are in host memory, and that are there or on disk."""
        answer = self.post("/query", model_name=model, token_ids=tokens, block_size=block_tokens)
        instance = answer["instances"].get(str(number), {"cpu": 0, "disk": 0})
        return instance["cpu"], max(instance["cpu"], instance["disk"])


class Selector(DynamoProcess):
    """Chooses a worker for a request."""

    def __init__(self) -> None:
        super().__init__("dynamo.select_service")

    def add(self, number: int, endpoint: str, replay: str, *, model: str, block_tokens: int) -> None:
        self.post(
            "/workers",
            worker_id=number,
            model_name=model,
            endpoint=f"http://127.0.0.1:{8000 + number}",
            block_size=block_tokens,
            data_parallel_start_rank=0,
            data_parallel_size=1,
            kv_events_endpoints={"0": endpoint},
            replay_endpoint=replay,
            max_num_batched_tokens=8192,
            total_kv_blocks=10_000,
        )

    def held(self, tokens: list[int], *, number: int, model: str) -> int:
        """The leading blocks of a prompt that a worker's daemon holds."""
        workers = self.post("/overlap_scores", model_name=model, token_ids=tokens)["workers"]
        [worker] = [each for each in workers if each["worker_id"] == number]
        return int(worker["host_pinned_blocks"] + worker["disk_extension_blocks"])

    def select(self, request: str, tokens: list[int], *, model: str) -> int:
        """The worker for a request; it counts as under way until :meth:`done`."""
        body = {"selection_id": request, "model_name": model, "token_ids": tokens, "isl_tokens": len(tokens)}
        return int(self.post("/select_and_reserve", **body)["worker_id"])
