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

import asyncio
import importlib.util
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import typer

from tierstore.command_line import one_line_errors
from tierstore.errors import TierStoreError, UsageError
from tierstore.spec import KVSpec
from tierstore.testing.processes import free_port
from tierstore.units import format_size
from tierstore_engine.build import open_model
from tierstore_tools import machine, report
from tierstore_tools.plan import percentile
from tierstore_tools.processes import listens
from tierstore_tools.scenarios.endpoint import Reply, ScenarioRequest, connected
from tierstore_tools.scenarios.targets import Started
from tierstore_tools.vllm.daemon import ServeProcess

ROUTERS = ("round-robin", "sticky", "dynamo")
START_S = 120.0
REQUEST_S = 300.0
TURN_TOKENS = 4  # generated; only the first one is timed
POOL_TOKENS = 16_384  # KV capacity of each engine
VOCABULARY = 250


@dataclass(frozen=True)
class RoutedTurn:
    """A request: turn ``number`` of a session."""

    session: int
    number: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class RouterRow:
    """One router. Later turns are those that a daemon could hold. Times are in seconds."""

    router: str
    hit_rate: float
    hit_rate_later: float
    ttft_mean: float
    ttft_later_p50: float
    ttft_later_p99: float
    seconds: float


class RoutedEngine(Started):
    """A daemon that publishes KV events, and an engine above it."""

    def __init__(self, model: str, spec: KVSpec, host_bytes: int, scratch: Path) -> None:
        self.events, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        options = ("--events", self.events, "--events-replay", self.replay)
        daemon = ServeProcess(scratch, disk=False, host_bytes=host_bytes, options=options)
        port = free_port()
        pool_bytes = POOL_TOKENS // spec.chunk_tokens * spec.page_bytes
        command = [sys.executable, "-c", "from tierstore_engine.cli import main; main()", "serve"]
        command += [f"--model={model}", f"--store={daemon.url}", f"--port={port}", "--device=cpu"]
        command += [f"--hbm-bytes={pool_bytes}"]
        super().__init__("an engine", port, command, threads=1, daemon=daemon, scratch=scratch)


class Router:
    """Round robin, or (``sticky``) by session."""

    def __init__(self, engines: int, *, sticky: bool = False) -> None:
        self._engines, self._sticky, self._chosen = engines, sticky, 0

    def choose(self, turn: RoutedTurn) -> int:
        """Return the engine of a turn."""
        self._chosen += 1
        return (turn.session if self._sticky else self._chosen) % self._engines

    def answered(self, turn: RoutedTurn) -> None:
        """Report that a turn is complete."""

    def close(self) -> None:
        """End the router's process."""


class Dynamo(Router):
    """Dynamo's selector in a process of its own."""

    def __init__(self, engines: Sequence[RoutedEngine], block_tokens: int) -> None:
        port = free_port()
        command = [sys.executable, "-m", "dynamo.select_service", "--port", str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False)
        ends = time.monotonic() + START_S
        while not listens(port):
            if self._process.poll() is not None or time.monotonic() > ends:
                raise TierStoreError("Dynamo's selector does not start")
            time.sleep(0.05)
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

    def choose(self, turn: RoutedTurn) -> int:
        body = {"token_ids": turn.tokens, "isl_tokens": len(turn.tokens)}
        name = f"{turn.session}.{turn.number}"
        return int(self._post("/select_and_reserve", selection_id=name, model_name="m", **body)["worker_id"])

    def answered(self, turn: RoutedTurn) -> None:
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
    """Measure hits and TTFT of sessions over several engines, by router. A session's FIRST turn has that many
    tokens and each later turn MORE. ROOM is the capacity of all daemons in multiples of what all sessions
    take."""
    names = routers.split(",")
    longest = first + (turns - 1) * more
    if unknown := set(names) - set(ROUTERS):
        raise UsageError(f"--routers takes {', '.join(ROUTERS)}, got {', '.join(sorted(unknown))}")
    if longest + TURN_TOKENS > POOL_TOKENS:
        raise UsageError(f"a last turn of {longest} tokens is longer than a pool of {POOL_TOKENS}")
    if "dynamo" in names and importlib.util.find_spec("dynamo") is None:
        raise UsageError(
            "Dynamo is not installed: pip install --no-deps ai-dynamo ai-dynamo-runtime && "
            "pip install 'pydantic<=2.13.5' uvloop msgpack, or --routers round-robin,sticky"
        )
    report.require_targets(json)
    spec = open_model(model, device="cpu").config.kv_spec()
    pages = int(room * sessions * -(-longest // spec.chunk_tokens) / engines)
    host_bytes = max(pages, 2 * longest // spec.chunk_tokens) * spec.page_bytes
    order, rows = turns_of(sessions, [first + number * more for number in range(turns)], seed), []
    with report.phases() as shown:
        for name in names:
            with shown.phase(name, measurable=False), ExitStack() as stack:
                scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierstore-bench-")))
                started = [RoutedEngine(model, spec, host_bytes, scratch) for _ in range(engines)]
                for engine in started:
                    stack.callback(engine.close)
                    engine.start()
                router = Router(engines, sticky=name == "sticky")
                if name == "dynamo":
                    router = Dynamo(started, spec.chunk_tokens)
                stack.callback(router.close)
                rows.append(asyncio.run(drive(name, [each.url for each in started], router, order, at_once)))
    report.table(
        f"{sessions} sessions of {turns} turns, {engines} engines of {model}, {format_size(host_bytes)} each",
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
    report.write_json({"machine": machine.describe(), "routers": [asdict(row) for row in rows]}, json)


def turns_of(sessions: int, lengths: Sequence[int], seed: int) -> list[RoutedTurn]:
    """Return all turns in the order of their arrival: sessions are mixed, the turns of each are in order."""
    draw = random.Random(seed)
    said = [tuple(draw.randrange(VOCABULARY) for _ in range(lengths[-1])) for _ in range(sessions)]
    order = [session for session in range(sessions) for _ in lengths]
    draw.shuffle(order)
    so_far = [0] * sessions
    turns = []
    for session in order:
        turns.append(RoutedTurn(session, so_far[session], said[session][: lengths[so_far[session]]]))
        so_far[session] += 1
    return turns


async def drive(
    name: str, urls: Sequence[str], router: Router, turns: Sequence[RoutedTurn], at_once: int
) -> RouterRow:
    """Send the turns in order, ``at_once`` at a time. A turn waits for the one before it in its session."""
    done = {(turn.session, turn.number): asyncio.Event() for turn in turns}
    waiting, choosing = iter(turns), asyncio.Lock()
    found: list[tuple[RoutedTurn, float, Reply]] = []  # with the time before the router was asked

    async def worker() -> None:
        for turn in waiting:
            if turn.number:
                await done[turn.session, turn.number - 1].wait()
            began = time.perf_counter()
            async with choosing:
                at = await asyncio.to_thread(router.choose, turn)
            reply = await endpoints[at].ask(ScenarioRequest(turn.tokens, TURN_TOKENS))
            await asyncio.to_thread(router.answered, turn)
            done[turn.session, turn.number].set()
            if reply.error is not None:
                raise TierStoreError(f"an engine refuses: {reply.error}")
            found.append((turn, began, reply))

    async with AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(connected(url, request_s=REQUEST_S)) for url in urls]
        for endpoint in endpoints:
            await endpoint.warm_up(ScenarioRequest(tuple(range(64)), TURN_TOKENS))
        start = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(at_once)))
        seconds = time.perf_counter() - start
    later = [each for each in found if each[0].number]
    times = [reply.first_at - began for _, began, reply in later]
    return RouterRow(
        name,
        hit_rate([reply for *_, reply in found]),
        hit_rate([reply for *_, reply in later]),
        statistics.fmean(reply.first_at - began for _, began, reply in found),
        percentile(times, 0.5),
        percentile(times, 0.99),
        seconds,
    )


def hit_rate(replies: Sequence[Reply]) -> float:
    """Return the held prompt tokens over all prompt tokens."""
    return sum(reply.cached_tokens for reply in replies) / max(sum(r.prompt_tokens for r in replies), 1)


if __name__ == "__main__":
    with one_line_errors("routing"):
        typer.run(main)
