"""``tierstore-engine serve`` and its like, each in a process of its own."""

from __future__ import annotations

import os
import re
from typing import Any

from tests.forked import Forked

from .live import WAIT_S, clients_of

MESSAGES: list[Any] = [{"role": "user", "content": "What is a page? " * 20}]


class ServerProcess:
    """A program that says on its first line where it serves, and a client for it."""

    def __init__(self, main: str, *options: str) -> None:
        said, its_stderr = os.pipe()
        self.process = Forked(main, options, (0, 1, its_stderr))
        os.close(its_stderr)
        self.said = os.fdopen(said)
        self.first = self.said.readline()
        [url] = re.findall(r"http://\S+", self.first)
        self.url = url.removesuffix("/v1")
        self.client, self.http = clients_of(self.url)

    def metric(self, name: str) -> float:
        """The sum of all lines that begin so."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def end(self, number: int) -> tuple[int, str]:
        """Its exit code, and the rest of what it said."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_S), self.said.read()

    def close(self) -> None:
        """Kill it, if it has not ended."""
        self.client.close()
        self.http.close()
        self.process.kill()
        self.process.wait(WAIT_S)
        self.said.close()


class Process(ServerProcess):
    """An engine's server."""

    def __init__(self, *options: str) -> None:
        common = ("serve", "--model", "tiny", "--device", "cpu", "--port", "0")
        super().__init__("tierstore_engine.cli", *common, *options)

    def cached(self) -> int:
        """Tokens of the same chat that came out of the cache."""
        answer = self.client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    def metric(self, name: str) -> float:
        return super().metric(f"tierstore_engine_{name}")
