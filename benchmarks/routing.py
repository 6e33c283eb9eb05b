"""Measure the gain of a router that knows which pages each host holds.

    python benchmarks/routing.py --routers round-robin,sticky,dynamo

Every engine is a ``tierstore-engine serve`` above a ``tierstore serve`` that publishes KV events. Sessions of
several turns come in one order for all routers. A turn is the conversation so far and new tokens. All daemons
together hold every session about once. Routers:

* ``round-robin``: each turn goes to the next engine;
* ``sticky``: a session stays at one engine (this needs the session's name);
* ``dynamo``: NVIDIA Dynamo's selector, which follows the daemons' events.

Every router begins with new engines and daemons. The defaults answered on 2 cores: of the prompt tokens 29 %
were held with round robin and 63 % with Dynamo's selector (docs/routing.md).
"""

from __future__ import annotations

import importlib.util
import itertools
import json as json_format
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import httpx
import typer

from tierstore.command_line import one_line_errors
from tierstore.errors import TierStoreError, UsageError
from tierstore.units import format_size
from tierstore_engine.build import open_model
from tierstore_tools import machine, report
from tierstore_tools.processes import free_port, listens
from tierstore_tools.vllm.daemon import ServeProcess

ROUTERS = ("round-robin", "sticky", "dynamo")
START_S = 120.0
REQUEST_S = 300.0
TURN_TOKENS = 4  # generated; only the first one is timed
POOL_TOKENS = 16_384  # KV capacity of each engine
VOCABULARY = 250


@dataclass(frozen=True)
class Workload:
    """``first`` tokens in a session's first turn, ``more`` new ones in each later turn. ``room``: capacity of
    all daemons together, in multiples of what all sessions take."""

    model: str
    engines: int
    sessions: int
    turns: int
    first: int
    more: int
    room: float
    at_once: int
    seed: int

    @property
    def longest(self) -> int:
        """Tokens of a session's last turn."""
        return self.first + (self.turns - 1) * self.more

    def host_bytes(self) -> int:
        """Return the capacity of each daemon."""
        spec = open_model(self.model, device="cpu").config.kv_spec()
        pages = self.sessions * -(-self.longest // spec.chunk_tokens)
        least = 2 * self.longest // spec.chunk_tokens
        return max(int(self.room * pages / self.engines), least) * spec.page_bytes


@dataclass(frozen=True)
class Turn:
    """A request: turn ``number`` of a session."""

    session: int
    number: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Answered:
    """``ttft_s`` counts from before the router was asked."""

    turn: int
    prompt: int
    cached: int
    ttft_s: float


@dataclass(frozen=True)
class Row:
    """One router. Later turns are those that a daemon could hold. Times are in seconds."""

    router: str
    hit_rate: float
    hit_rate_later: float
    ttft_mean: float
    ttft_later_p50: float
    ttft_later_p99: float
    seconds: float


class Router(Protocol):
    """Chooses the engine of each turn."""

    def choose(self, turn: Turn) -> int: ...

    def answered(self, turn: Turn) -> None: ...


class Fixed:
    """Round robin, or (``sticky``) by session."""

    def __init__(self, engines: int, *, sticky: bool) -> None:
        self._engines, self._sticky, self._next = engines, sticky, itertools.count()

    def choose(self, turn: Turn) -> int:
        return (turn.session if self._sticky else next(self._next)) % self._engines

    def answered(self, turn: Turn) -> None: ...


class Dynamo:
    """Dynamo's selector in a process of its own."""

    def __init__(self, engines: Sequence[EngineProcess], block_tokens: int) -> None:
        port = free_port()
        command = [sys.executable, "-m", "dynamo.select_service", "--port", str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False)
        wait_for(port, self._process, "Dynamo's selector")
        for number, engine in enumerate(engines):
            self._post(
                "/workers",
                worker_id=number,
                model_name="m",
                endpoint=engine.url,
                block_size=block_tokens,
                data_parallel_start_rank=0,
                data_parallel_size=1,
                kv_events_endpoints={"0": engine.events},
                replay_endpoint=engine.replay,
                max_num_batched_tokens=POOL_TOKENS,
                total_kv_blocks=POOL_TOKENS // block_tokens,
            )

    def choose(self, turn: Turn) -> int:
        body = {"token_ids": turn.tokens, "isl_tokens": len(turn.tokens)}
        name = f"{turn.session}.{turn.number}"
        return int(self._post("/select_and_reserve", selection_id=name, model_name="m", **body)["worker_id"])

    def answered(self, turn: Turn) -> None:
        self._http.delete(f"/reservations/{turn.session}.{turn.number}").raise_for_status()

    def close(self) -> None:
        self._http.close()
        self._process.kill()
        self._process.wait()

    def _post(self, path: str, **body: Any) -> Any:
        answer = self._http.post(path, json=body)
        if answer.is_error:
            raise TierStoreError(f"Dynamo's selector refuses {path}: {answer.text}")
        return answer.json()


class EngineProcess:
    """A daemon and an engine above it."""

    def __init__(self, workload: Workload) -> None:
        self.events, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        options = ("--events", self.events, "--events-replay", self.replay)
        self.daemon = ServeProcess(disk=False, host_bytes=workload.host_bytes(), options=options)
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._model = workload.model
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.daemon.start()
        spec = open_model(self._model, device="cpu").config.kv_spec()
        server = "from tierstore_engine.cli import main; main()"
        command = [sys.executable, "-c", server, "serve", "--model", self._model]
        command += ["--store", self.daemon.url, "--port", str(self._port), "--device", "cpu"]
        command += ["--hbm-bytes", str(POOL_TOKENS // spec.chunk_tokens * spec.page_bytes)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(self._port, self._process, "an engine's server")
        with httpx.Client(timeout=REQUEST_S, trust_env=False) as http:
            self.ask(http, range(64))  # warms up

    def ask(self, http: httpx.Client, tokens: Sequence[int]) -> tuple[float, int]:
        """Return the time of the first token, and the number of prompt tokens that were held."""
        body = {
            "model": self._model.rstrip("/").rpartition("/")[2],
            "prompt": list(tokens),
            "max_tokens": TURN_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first_at, cached = 0.0, 0
        with http.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
            if answer.is_error:
                raise TierStoreError(f"the engine refuses: {answer.read().decode()}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first_at = first_at or time.monotonic()
                    usage = json_format.loads(line.removeprefix("data: ")).get("usage")
                    cached = int(usage["prompt_tokens_details"]["cached_tokens"]) if usage else cached
        return first_at, cached

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.daemon.close()


def main(
    model: str = "demo",
    engines: int = 3,
    sessions: int = 30,
    turns: int = 4,
    first: int = 3000,
    more: int = 1500,
    room: float = 1.2,
    at_once: int = 2,
    seed: int = 1,
    routers: str = ",".join(ROUTERS),
    json: str | None = None,
) -> None:
    """Measure hits and TTFT of sessions over several engines, by router."""
    workload = Workload(model, engines, sessions, turns, first, more, room, at_once, seed)
    names = routers.split(",")
    if unknown := set(names) - set(ROUTERS):
        raise UsageError(f"--routers takes {', '.join(ROUTERS)}, got {', '.join(sorted(unknown))}")
    if workload.longest + TURN_TOKENS > POOL_TOKENS:
        raise UsageError(f"a last turn of {workload.longest} tokens is longer than a pool of {POOL_TOKENS}")
    if "dynamo" in names and importlib.util.find_spec("dynamo") is None:
        raise UsageError(
            "Dynamo is not installed: pip install --no-deps ai-dynamo ai-dynamo-runtime && "
            "pip install 'pydantic<=2.13.5' uvloop msgpack, or --routers round-robin,sticky"
        )
    report.require_targets(json)
    order, rows = turns_of(workload), []
    with report.phases() as shown:
        for name in names:
            with shown.phase(name, measurable=False), running(workload, name) as (processes, router):
                began = time.monotonic()
                answers = drive(processes, router, order, at_once)
                rows.append(row_of(name, answers, time.monotonic() - began))
    report.table(
        f"{sessions} sessions of {turns} turns over {engines} engines of {model}, "
        f"{format_size(workload.host_bytes())} each",
        ("router", "held", "of later turns", "mean TTFT", "later turns p50", "p99", "took"),
        [
            (
                row.router,
                report.percent(row.hit_rate),
                report.percent(row.hit_rate_later),
                report.seconds(row.ttft_mean),
                report.seconds(row.ttft_later_p50),
                report.seconds(row.ttft_later_p99),
                report.seconds(row.seconds),
            )
            for row in rows
        ],
        to_stderr=json == "-",
    )
    document = {"machine": machine.describe(), "workload": asdict(workload)}
    report.write_json({**document, "routers": [asdict(row) for row in rows]}, json)


def turns_of(workload: Workload) -> list[Turn]:
    """Return all turns in the order of their arrival: sessions are mixed, the turns of each are in order."""
    draw = random.Random(workload.seed)
    said = [[draw.randrange(VOCABULARY) for _ in range(workload.longest)] for _ in range(workload.sessions)]
    order = [session for session in range(workload.sessions) for _ in range(workload.turns)]
    draw.shuffle(order)
    so_far = [0] * workload.sessions
    turns = []
    for session in order:
        number = so_far[session]
        so_far[session] += 1
        turns.append(Turn(session, number, tuple(said[session][: workload.first + number * workload.more])))
    return turns


def drive(
    engines: Sequence[EngineProcess], router: Router, turns: Sequence[Turn], at_once: int
) -> list[Answered]:
    """Send the turns in order, ``at_once`` at a time. A turn waits for the one before it in its session."""
    done = {(turn.session, turn.number): threading.Event() for turn in turns}
    choosing = threading.Lock()

    def answer(turn: Turn) -> Answered:
        if turn.number:
            done[turn.session, turn.number - 1].wait(REQUEST_S)
        began = time.monotonic()
        with choosing:
            at = router.choose(turn)
        try:
            first_at, cached = engines[at].ask(http, turn.tokens)
        finally:
            router.answered(turn)
            done[turn.session, turn.number].set()
        return Answered(turn.number, len(turn.tokens), cached, first_at - began)

    with httpx.Client(timeout=REQUEST_S, trust_env=False) as http, ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(answer, turns))


@contextmanager
def running(workload: Workload, name: str) -> Iterator[tuple[list[EngineProcess], Router]]:
    """Start the engines and the router, and end them afterwards."""
    with ExitStack() as stack:
        engines = []
        for _ in range(workload.engines):
            engines.append(EngineProcess(workload))
            stack.callback(engines[-1].close)
            engines[-1].start()
        if name == "dynamo":
            spec = open_model(workload.model, device="cpu").config.kv_spec()
            dynamo = Dynamo(engines, spec.chunk_tokens)
            stack.callback(dynamo.close)
            yield engines, dynamo
        else:
            yield engines, Fixed(workload.engines, sticky=name == "sticky")


def row_of(name: str, answers: Sequence[Answered], seconds: float) -> Row:
    """Summarise one router's answers."""
    later = [each for each in answers if each.turn]
    times = sorted(each.ttft_s for each in later) or [0.0]
    return Row(
        name,
        hit_rate(answers),
        hit_rate(later),
        statistics.fmean(each.ttft_s for each in answers),
        statistics.median(times),
        times[min(len(times) - 1, int(len(times) * 0.99))],
        seconds,
    )


def hit_rate(answers: Sequence[Answered]) -> float:
    """Return the held prompt tokens over all prompt tokens."""
    return sum(each.cached for each in answers) / max(sum(each.prompt for each in answers), 1)


def wait_for(port: int, process: subprocess.Popen[bytes], what: str) -> None:
    """Wait until ``process`` listens. Raises :class:`TierStoreError` if it ends or takes too long."""
    ends = time.monotonic() + START_S
    while not listens(port):
        if process.poll() is not None or time.monotonic() > ends:
            raise TierStoreError(f"{what} does not start")
        time.sleep(0.05)


if __name__ == "__main__":
    with one_line_errors("routing"):
        typer.run(main)
