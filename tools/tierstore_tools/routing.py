"""What a router that knows is worth: sessions over several engines, each with a daemon and memory of its own.

Every engine is a ``tierstore-engine serve`` beside a ``tierstore serve`` that publishes KV events. Sessions
of several turns come in one order for all routers; each turn is the conversation so far and something new.
The daemons together have room for all sessions once, and for few of them twice, as hosts have in earnest.
Routers:

* ``round-robin``: turn after turn to the next engine;
* ``sticky``: a session stays where its first turn went (needs a session's name, and moves none);
* ``dynamo``: NVIDIA Dynamo's selector, which follows the daemons' events.

Every router begins with engines and daemons that have just been started.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
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
from rich.table import Table

from tierstore.errors import TierStoreError, UsageError
from tierstore.units import format_size
from tierstore_engine.build import open_model
from tierstore_tools import machine
from tierstore_tools.processes import free_port, listens
from tierstore_tools.report import phases, require_targets, stdout, write_json
from tierstore_tools.vllm.daemon import DaemonProcess

_START_S = 120.0
_REQUEST_S = 300.0
_TURN_TOKENS = 4  # generated: what is asked for is the first one
_POOL_TOKENS = 16_384  # of each engine
_VOCABULARY = 250
_WARM_UP = 64
_SERVER = "from tierstore_engine.cli import main; main()"


@dataclass(frozen=True, slots=True)
class Workload:
    """``first`` tokens in a session's first turn, ``more`` in each later one. ``room``: what all daemons
    together have room for, in multiples of what all sessions need."""

    model: str
    engines: int
    sessions: int
    turns: int
    first: int
    more: int
    room: float
    at_once: int
    seed: int

    def check(self) -> None:
        """Raises :class:`UsageError` for what cannot be run."""
        longest = self.first + (self.turns - 1) * self.more
        if longest + _TURN_TOKENS > _POOL_TOKENS:
            raise UsageError(f"the last turn has {longest} tokens: an engine here takes {_POOL_TOKENS}")
        if self.room <= 0:
            raise UsageError("--room is above 0")

    def host_bytes(self) -> int:
        """Of each daemon."""
        spec = open_model(self.model, device="cpu").config.kv_spec()
        longest = self.first + (self.turns - 1) * self.more
        pages = self.sessions * -(-longest // spec.chunk_tokens)
        return max(int(self.room * pages / self.engines), 2 * longest // spec.chunk_tokens) * spec.page_bytes


@dataclass(frozen=True, slots=True)
class Turn:
    session: int
    number: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """``at`` is the engine, ``ttft_s`` counts from before the router was asked."""

    turn: int
    at: int
    prompt: int
    cached: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """Of one router; later turns are those that could have been held. Times are in seconds."""

    router: str
    hit_rate: float
    hit_rate_later: float
    ttft_mean: float
    ttft_later_p50: float
    ttft_later_p99: float
    seconds: float


class Router(Protocol):
    """Says where turns go."""

    def choose(self, turn: Turn) -> int: ...

    def answered(self, turn: Turn) -> None: ...


class _RoundRobin:
    def __init__(self, engines: int) -> None:
        self._next = itertools.cycle(range(engines))

    def choose(self, turn: Turn) -> int:
        return next(self._next)

    def answered(self, turn: Turn) -> None: ...


class _Sticky:
    def __init__(self, engines: int) -> None:
        self._engines = engines

    def choose(self, turn: Turn) -> int:
        return turn.session % self._engines

    def answered(self, turn: Turn) -> None: ...


class _Dynamo:
    """A selector of its own, over the daemons' events."""

    def __init__(self, engines: Sequence[Engine], block_tokens: int) -> None:
        port = free_port()
        command = [sys.executable, "-m", "dynamo.select_service", "--port", str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10)
        _wait_for(port, self._process, "Dynamo's selector")
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
                max_num_batched_tokens=_POOL_TOKENS,
                total_kv_blocks=_POOL_TOKENS // block_tokens,
            )

    def choose(self, turn: Turn) -> int:
        body = {"token_ids": turn.tokens, "isl_tokens": len(turn.tokens)}
        chosen = self._post("/select_and_reserve", selection_id=_name(turn), model_name="m", **body)
        return int(chosen["worker_id"])

    def answered(self, turn: Turn) -> None:
        self._http.delete(f"/reservations/{_name(turn)}").raise_for_status()

    def close(self) -> None:
        self._http.close()
        self._process.kill()
        self._process.wait()

    def _post(self, path: str, **body: Any) -> Any:
        answer = self._http.post(path, json=body)
        if answer.is_error:
            raise TierStoreError(f"Dynamo's selector refuses {path}: {answer.text}")
        return answer.json()


class Engine:
    """A daemon and an engine over it."""

    def __init__(self, workload: Workload) -> None:
        self.events, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        flags = (f"--events={self.events}", f"--events-replay={self.replay}")
        self.daemon = DaemonProcess(disk=False, host_bytes=workload.host_bytes(), options=flags)
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._workload = workload
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.daemon.start()
        spec = open_model(self._workload.model, device="cpu").config.kv_spec()
        command = [sys.executable, "-c", _SERVER, "serve", "--model", self._workload.model]
        command += ["--store", self.daemon.url, "--port", str(self._port), "--device", "cpu"]
        command += ["--hbm-bytes", str(_POOL_TOKENS // spec.chunk_tokens * spec.page_bytes)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _wait_for(self._port, self._process, "an engine's server")
        with httpx.Client(timeout=_REQUEST_S) as http:
            self.ask(http, range(_WARM_UP))

    def ask(self, http: httpx.Client, tokens: Sequence[int]) -> tuple[float, int]:
        """When the first token came, and how many of the prompt's were held."""
        body = {
            "model": self._workload.model.rstrip("/").rpartition("/")[2],
            "prompt": list(tokens),
            "max_tokens": _TURN_TOKENS,
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
                if not line.startswith("data: {"):
                    continue
                first_at = first_at or time.monotonic()
                usage = json.loads(line.removeprefix("data: ")).get("usage")
                if usage:
                    cached = int(usage["prompt_tokens_details"]["cached_tokens"])
        return first_at, cached

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.daemon.close()


def turns_of(workload: Workload) -> list[Turn]:
    """All turns in the order in which they come: a session's one after the other, sessions mixed."""
    draw = random.Random(workload.seed)
    longest = workload.first + (workload.turns - 1) * workload.more
    said = [[draw.randrange(_VOCABULARY) for _ in range(longest)] for _ in range(workload.sessions)]
    order = [session for session in range(workload.sessions) for _ in range(workload.turns)]
    draw.shuffle(order)
    so_far = [0] * workload.sessions
    turns = []
    for session in order:
        number = so_far[session]
        so_far[session] += 1
        length = workload.first + number * workload.more
        turns.append(Turn(session, number, tuple(said[session][:length])))
    return turns


def drive(engines: Sequence[Engine], router: Router, turns: Sequence[Turn], at_once: int) -> list[Answered]:
    """Send the turns in order, ``at_once`` at a time; a turn waits for the one before it in its session."""
    done = {(turn.session, turn.number): threading.Event() for turn in turns}
    choosing = threading.Lock()

    def answer(turn: Turn) -> Answered:
        if turn.number:
            done[turn.session, turn.number - 1].wait(_REQUEST_S)
        begun = time.monotonic()
        with choosing:
            at = router.choose(turn)
        try:
            first_at, cached = engines[at].ask(http, turn.tokens)
        finally:
            router.answered(turn)
            done[turn.session, turn.number].set()
        return Answered(turn.number, at, len(turn.tokens), cached, first_at - begun)

    with httpx.Client(timeout=_REQUEST_S) as http, ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(answer, turns))


def measure(workload: Workload, routers: Sequence[str]) -> list[Result]:
    turns = turns_of(workload)
    results = []
    with phases() as shown:
        for name in routers:
            with shown.phase(name, measurable=False), _running(workload, name) as (engines, router):
                begun = time.monotonic()
                answers = drive(engines, router, turns, workload.at_once)
                results.append(_summary(name, answers, time.monotonic() - begun))
    return results


@contextmanager
def _running(workload: Workload, name: str) -> Iterator[tuple[list[Engine], Router]]:
    with ExitStack() as stack:
        engines = []
        for _ in range(workload.engines):
            engines.append(Engine(workload))
            stack.callback(engines[-1].close)
            engines[-1].start()
        if name == "dynamo":
            spec = open_model(workload.model, device="cpu").config.kv_spec()
            dynamo = _Dynamo(engines, spec.chunk_tokens)
            stack.callback(dynamo.close)
            yield engines, dynamo
        elif name == "sticky":
            yield engines, _Sticky(workload.engines)
        else:
            yield engines, _RoundRobin(workload.engines)


def _summary(name: str, answers: Sequence[Answered], seconds: float) -> Result:
    later = [each for each in answers if each.turn]
    times = sorted(each.ttft_s for each in later) or [0.0]
    return Result(
        name,
        _hit_rate(answers),
        _hit_rate(later),
        statistics.fmean(each.ttft_s for each in answers),
        statistics.median(times),
        times[min(len(times) - 1, int(len(times) * 0.99))],
        seconds,
    )


def _hit_rate(answers: Sequence[Answered]) -> float:
    return sum(each.cached for each in answers) / max(sum(each.prompt for each in answers), 1)


def run(workload: Workload, *, routers: str, json: str | None) -> None:
    """Measure, and print a table."""
    workload.check()
    names = routers.split(",")
    for name in names:
        if name not in ("round-robin", "sticky", "dynamo"):
            raise UsageError(f"there is no router {name!r}: known are round-robin, sticky, dynamo")
    if "dynamo" in names and importlib.util.find_spec("dynamo") is None:
        raise UsageError(
            "Dynamo is not installed: pip install --no-deps ai-dynamo ai-dynamo-runtime && "
            "pip install 'pydantic<=2.13.5' uvloop msgpack, or leave it out with --routers round-robin,sticky"
        )
    require_targets(json)
    results = measure(workload, names)
    table = Table(
        title=f"{workload.sessions} sessions of {workload.turns} turns over {workload.engines} engines of "
        f"{workload.model}, {format_size(workload.host_bytes())} each",
        title_justify="left",
    )
    for column in ("router", "held", "of later turns", "mean TTFT", "later turns p50", "p99", "all took"):
        table.add_column(column, justify="left" if column == "router" else "right")
    for each in results:
        table.add_row(
            each.router,
            f"{each.hit_rate:.0%}",
            f"{each.hit_rate_later:.0%}",
            f"{each.ttft_mean * 1e3:.0f} ms",
            f"{each.ttft_later_p50 * 1e3:.0f} ms",
            f"{each.ttft_later_p99 * 1e3:.0f} ms",
            f"{each.seconds:.0f} s",
        )
    stdout.print(table)
    measured = [asdict(each) for each in results]
    write_json({"machine": machine.describe(), "workload": asdict(workload), "routers": measured}, json)


def _name(turn: Turn) -> str:
    return f"{turn.session}.{turn.number}"


def _wait_for(port: int, process: subprocess.Popen[bytes], what: str) -> None:
    ends = time.monotonic() + _START_S
    while True:
        if listens(port):
            return
        if process.poll() is not None or time.monotonic() > ends:
            raise TierStoreError(f"{what} does not start")
        time.sleep(0.05)
