"""Prefill and decode together or apart, on the same cores: what a mix of traffic sees of either.

Streams of short prompts decode all the time, and long prompts arrive among them at random. They go through
``tierstore-proxy`` to engines that share one daemon:

* ``one``: an engine with both cores;
* ``two``: two engines with a core each, both doing everything;
* ``apart``: two engines with a core each, of which one computes prompts and one continues them.

All of them run for the whole time and are asked in turn, round after round, so that what else the machine
does falls on all alike. Before that an idle pair is asked prompt by prompt, with several sizes of prefill
chunks: how much of a hand-over is done when the prompt is computed, and what is left. What was measured of
single steps is what :mod:`tierstore_tools.handover_plan` simulates from.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np

from tierstore.errors import TierStoreError, UsageError
from tierstore_engine.build import open_model
from tierstore_proxy.residency import PromptLookups
from tierstore_tools import machine, report
from tierstore_tools.processes import free_port
from tierstore_tools.scenarios import load
from tierstore_tools.scenarios.endpoint import Ask, Endpoint, Reply, connected
from tierstore_tools.scenarios.targets import Started
from tierstore_tools.vllm import models
from tierstore_tools.vllm.daemon import DaemonProcess

ARRANGEMENTS = ("one", "two", "apart")
_ENGINE = "from tierstore_engine.cli import main; main()"
_PROXY = "from tierstore_proxy.cli import main; main()"
_REQUEST_S = 300.0
_STREAM_TOKENS = 100  # of a stream's prompts: too short to be handed over
_STREAM_ANSWER = 128
_POLL_S = 0.001
_BATCHES = (1, 8)  # streams of which the steps are timed


Pair: TypeAlias = tuple[str, str]
"""Two engines' URLs."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """``streams`` decode all the time; prompts of ``tokens`` tokens with an answer of ``answer`` come at
    ``rate_per_s``. Every arrangement has ``seconds`` of it in each of ``rounds``."""

    model: str
    tokens: int
    answer: int
    streams: int
    rate_per_s: float
    seconds: float
    rounds: int
    prefill_chunk: int
    chunks: tuple[int, ...]
    pairs: int
    seed: int

    def __post_init__(self) -> None:
        if self.tokens < 4 * _STREAM_TOKENS:
            raise UsageError(
                f"--tokens is at least {4 * _STREAM_TOKENS}: shorter prompts are not handed over"
            )


@dataclass(frozen=True, slots=True)
class Mixed:
    """Of one arrangement, over all rounds. Times in seconds: ``ttft`` of the long prompts, ``itl`` between
    pieces of all answers, ``itl_p99_by_round`` of each."""

    arrangement: str
    prompts: int
    failed: int
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    itl_p99_by_round: tuple[float, ...]
    tokens_per_s: float
    prompt_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class HandOver:
    """Prompts handed over between idle engines with a prefill chunk of ``chunk`` tokens; medians, in seconds.
    ``overlapped``: of the promised pages, what is there when the prefill answers; ``rest_s`` until the others
    are. ``decode_ttft_s`` is the decode engine's part of ``ttft_s``, ``alone_s`` its TTFT where it
    computes the prompt itself."""

    chunk: int
    prefill_s: float
    overlapped: float
    rest_s: float
    decode_ttft_s: float
    ttft_s: float
    alone_s: float


@dataclass(frozen=True, slots=True)
class Costs:
    """What a simulation needs, in seconds. A step takes ``step_s``, ``sequence_s`` for each sequence that
    decodes in it and ``token_s`` for each token of a prompt, of which there are ``prefill_chunk`` at most;
    ``handover_s`` is between the end of a prefill and the first token elsewhere."""

    step_s: float
    sequence_s: float
    token_s: float
    prefill_chunk: int
    handover_s: float


def run(traffic: Traffic, directory: Path, *, json: str | None) -> None:
    """Measure, and print tables. Raises :class:`TierStoreError` when something does not start."""
    report.require_targets(json)
    model = models.make(traffic.model, directory / traffic.model) if traffic.model in models.KINDS else None
    folder = model or Path(traffic.model)
    if not (folder / "config.json").exists():
        raise UsageError(f"{folder} is no Hugging Face folder, and none of {', '.join(models.KINDS)}")
    with report.phases() as phases, _Bench(traffic, folder, directory) as bench:
        rows = []
        for chunk in dict.fromkeys((traffic.prefill_chunk, *traffic.chunks)):
            with phases.phase(f"hand-over, chunks of {chunk}") as phase, bench.pair(chunk) as pair:
                rows.append(bench.handed_over(chunk, pair, phase.update))
        with phases.phase("single steps", measurable=False):
            costs = bench.costs(rows[0])
        with phases.phase("mixed traffic") as phase:
            mixed = bench.mixed(phase.update)
    _show(traffic, mixed, rows, to_stderr=json == "-")
    by_name = {each.arrangement: each for each in mixed}
    document = {
        "machine": machine.describe(),
        "traffic": asdict(traffic),
        "mixed": [asdict(each) for each in mixed],
        "itl_p99_apart_to_two": by_name["apart"].itl_p99 / by_name["two"].itl_p99,
        "itl_p99_apart_to_one": by_name["apart"].itl_p99 / by_name["one"].itl_p99,
        "handovers": [asdict(each) for each in rows],
        "costs": asdict(costs),
    }
    report.write_json(document, json)


class _Bench:
    """The processes: a daemon, and engines and proxies for as long as they are needed."""

    def __init__(self, traffic: Traffic, model: Path, scratch: Path) -> None:
        self._traffic = traffic
        self._model = model
        self._scratch = scratch
        self._draw = random.Random(traffic.seed)
        self._stack = ExitStack()
        self._pair: Pair | None = None

    def __enter__(self) -> _Bench:
        spec = open_model(str(self._model), device="cpu").config.kv_spec()
        pages = -(-self._traffic.tokens // spec.chunk_tokens) + 4
        self._pool_bytes = (4 * pages + 8 * self._traffic.streams) * spec.page_bytes
        room = 64 * pages * spec.page_bytes
        self._daemon = self._stack.enter_context(DaemonProcess(disk=False, host_bytes=room))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- hand-overs, one at a time -------------------------------------------------------------------

    def handed_over(self, chunk: int, pair: Pair, progress: Callable[[float], None]) -> HandOver:
        """Prompts one by one, half of them watched page by page and half of them timed."""
        traffic = self._traffic
        lookups = PromptLookups(self._daemon.url)
        rests: list[float] = []
        overlapped: list[float] = []
        prefills: list[float] = []
        decodes: list[float] = []
        alone: list[float] = []
        prefill, decode = pair
        with httpx.Client(timeout=_REQUEST_S) as http:
            for url in pair:
                _ttft(http, url, self._model.name, self._prompt())
            for number in range(2 * traffic.pairs):
                prompt = self._prompt()
                begun = time.perf_counter()
                params = _prefill(http, prefill, self._model.name, prompt)
                answered = time.perf_counter()
                if number % 2:
                    promised = int(params["tierstore"]["tokens"])
                    tokens = np.array(prompt, dtype=np.uint32)
                    held = lookups.held(tokens, self._model.name, _REQUEST_S)
                    overlapped.append(min(held / promised, 1.0))
                    while held < promised and time.perf_counter() < answered + _REQUEST_S:
                        time.sleep(_POLL_S)
                        held = lookups.held(tokens, self._model.name, _REQUEST_S)
                    rests.append(time.perf_counter() - answered if overlapped[-1] < 1 else 0.0)
                else:
                    prefills.append(answered - begun)
                    decodes.append(_ttft(http, decode, self._model.name, prompt, params))
                    alone.append(_ttft(http, decode, self._model.name, self._prompt()))
                progress((number + 1) / (2 * traffic.pairs))
        lookups.close()
        whole = [one + other for one, other in zip(prefills, decodes, strict=True)]
        middle = [statistics.median(each) for each in (prefills, overlapped, rests, decodes, whole, alone)]
        return HandOver(chunk, *middle)

    def costs(self, measured: HandOver) -> Costs:
        """What steps of an idle engine take."""
        with self.pair(self._traffic.prefill_chunk) as (_, url):
            gaps = [asyncio.run(self._gap(url, streams)) for streams in _BATCHES]
        (one, many), (few, more) = gaps, _BATCHES
        per_sequence = max((many - one) / (more - few), 0.0)
        return Costs(
            step_s=max(one - per_sequence, 0.0),
            sequence_s=per_sequence,
            token_s=measured.alone_s / self._traffic.tokens,
            prefill_chunk=measured.chunk,
            handover_s=measured.decode_ttft_s,
        )

    async def _gap(self, url: str, streams: int) -> float:
        async with connected(url, request_s=_REQUEST_S) as endpoint:
            asks = [Ask(self._short(), _STREAM_ANSWER) for _ in range(streams)]
            replies = await asyncio.gather(*(endpoint.ask(ask) for ask in asks))
        return statistics.median(gap for reply in replies for gap in _good(reply).gaps_s)

    # -- mixed traffic -------------------------------------------------------------------------------

    def mixed(self, progress: Callable[[float], None]) -> list[Mixed]:
        """All arrangements in turn, round after round."""
        traffic, chunk = self._traffic, self._traffic.prefill_chunk
        with ExitStack() as stack:
            first, second = stack.enter_context(self.pair(chunk))
            urls = {
                "one": self._proxy(stack, decode=[stack.enter_context(self._engine("one", 2, chunk))]),
                "two": self._proxy(stack, decode=[first, second]),
                "apart": self._proxy(stack, prefill=[first], decode=[second]),
            }
            replies: dict[str, list[list[Reply]]] = {name: [] for name in ARRANGEMENTS}
            for url in urls.values():
                asyncio.run(self._warm_up(url))
            for number in range(traffic.rounds * len(ARRANGEMENTS)):
                turn, at = divmod(number, len(ARRANGEMENTS))
                name = ARRANGEMENTS[at]
                replies[name].append(asyncio.run(self._traffic_at(urls[name], turn)))
                progress((number + 1) / (traffic.rounds * len(ARRANGEMENTS)))
        return [_summary(name, replies[name], traffic) for name in ARRANGEMENTS]

    async def _warm_up(self, url: str) -> None:
        async with connected(url, request_s=_REQUEST_S) as endpoint:
            await endpoint.warm_up(Ask(self._prompt(), 2))

    async def _traffic_at(self, url: str, turn: int) -> list[Reply]:
        """A round's streams and prompts, until all have their answers. Prompts come at the same times
        in all arrangements, and none comes twice."""
        traffic = self._traffic
        draw = random.Random(f"{traffic.seed} {turn}")
        async with connected(url, request_s=_REQUEST_S) as endpoint:
            begun = time.perf_counter()
            ends, at = begun + traffic.seconds, begun
            streams = [asyncio.create_task(self._stream(endpoint, ends)) for _ in range(traffic.streams)]
            prompts = []
            while (at := at + draw.expovariate(traffic.rate_per_s)) < ends:
                await asyncio.sleep(at - time.perf_counter())
                ask = Ask(self._prompt(), traffic.answer)
                prompts.append(asyncio.create_task(endpoint.ask(ask)))
            streamed = await asyncio.gather(*streams)
            return [*await asyncio.gather(*prompts), *(reply for replies in streamed for reply in replies)]

    async def _stream(self, endpoint: Endpoint, ends: float) -> list[Reply]:
        replies = []
        while time.perf_counter() < ends:
            replies.append(await endpoint.ask(Ask(self._short(), _STREAM_ANSWER)))
        return replies

    # -- processes -----------------------------------------------------------------------------------

    @contextmanager
    def pair(self, chunk: int) -> Iterator[Pair]:
        """Two engines with a core each. Those with the traffic's own chunks are started once."""
        if chunk != self._traffic.prefill_chunk:
            with self._engine("prefill", 1, chunk) as prefill, self._engine("decode", 1, chunk) as decode:
                yield prefill, decode
            return
        if self._pair is None:
            engines = [
                self._stack.enter_context(self._engine(name, 1, chunk)) for name in ("first", "second")
            ]
            self._pair = (engines[0], engines[1])
        yield self._pair

    @contextmanager
    def _engine(self, name: str, threads: int, chunk: int) -> Iterator[str]:
        port = free_port()
        command = [sys.executable, "-c", _ENGINE, "serve", f"--model={self._model}", f"--port={port}"]
        command += ["--device=cpu", f"--hbm-bytes={self._pool_bytes}", f"--prefill-chunk={chunk}"]
        command += [f"--store={self._daemon.url}"]
        with self._started(name, port, command, threads) as url:
            yield url

    def _proxy(self, stack: ExitStack, *, decode: Sequence[str], prefill: Sequence[str] = ()) -> str:
        port = free_port()
        command = [
            sys.executable,
            "-c",
            _PROXY,
            "--listen",
            f"127.0.0.1:{port}",
            "--daemon",
            self._daemon.url,
        ]
        command += [part for url in decode for part in ("--decode", url)]
        command += [part for url in prefill for part in ("--prefill", url)]
        return stack.enter_context(self._started("proxy", port, command, 1))

    @contextmanager
    def _started(self, name: str, port: int, command: list[str], threads: int) -> Iterator[str]:
        server = Started(name, port, command, threads=threads, daemon=None, scratch=self._scratch)
        try:
            server.start()
            yield server.url
        finally:
            server.close()

    def _prompt(self) -> tuple[int, ...]:
        return load.tokens(self._draw.random(), self._traffic.tokens)

    def _short(self) -> tuple[int, ...]:
        return load.tokens(self._draw.random(), _STREAM_TOKENS)


def _prefill(http: httpx.Client, url: str, model: str, prompt: Sequence[int]) -> dict[str, Any]:
    """Have a prompt computed for somebody else: what it answers for that."""
    body = _body(model, prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    answer = http.post(f"{url}/v1/completions", json=body)
    if answer.status_code != httpx.codes.OK:
        raise TierStoreError(f"the prefill engine refuses: {answer.text}")
    return dict(answer.json()["kv_transfer_params"])


def _ttft(
    http: httpx.Client, url: str, model: str, prompt: Sequence[int], params: dict[str, Any] | None = None
) -> float:
    more = {} if params is None else {"kv_transfer_params": params}
    body = _body(model, prompt, max_tokens=2, stream=True, **more)
    begun, first = time.perf_counter(), 0.0
    with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            raise TierStoreError(f"the engine refuses: {answer.read().decode()}")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - begun
    return first


def _body(model: str, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": list(prompt), "temperature": 0, "ignore_eos": True, **fields}


def _good(reply: Reply) -> Reply:
    if reply.error is not None:
        raise TierStoreError(f"an engine fails: {reply.error}")
    return reply


def _summary(name: str, rounds: Sequence[Sequence[Reply]], traffic: Traffic) -> Mixed:
    good = [[reply for reply in replies if reply.error is None] for replies in rounds]
    everything = [reply for replies in good for reply in replies]
    long = [reply for reply in everything if len(reply.ask.tokens) == traffic.tokens]
    gaps = [gap for reply in everything for gap in reply.gaps_s]
    if not long or not gaps:
        raise TierStoreError(f"no prompt was answered ({name}): give more --seconds, or a higher --rate")
    took = sum(max(r.last_at for r in each) - min(r.sent_at for r in each) for each in good if each)
    times = [reply.ttft_s for reply in long]
    return Mixed(
        name,
        len(long),
        sum(map(len, rounds)) - len(everything),
        percentile(times, 0.5),
        percentile(times, 0.99),
        percentile(gaps, 0.5),
        percentile(gaps, 0.99),
        tuple(percentile([gap for reply in each for gap in reply.gaps_s], 0.99) for each in good),
        sum(reply.generated_tokens for reply in everything) / took,
        sum(reply.prompt_tokens for reply in everything) / took,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of them are; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


def _show(
    traffic: Traffic, mixed: Sequence[Mixed], handovers: Sequence[HandOver], *, to_stderr: bool
) -> None:
    report.table(
        f"prompts of {traffic.tokens:,} tokens, {traffic.rate_per_s:g} a second, beside {traffic.streams} "
        f"streams ({traffic.model})",
        ("", "prompts", "TTFT p50", "p99", "ITL p50", "p99", "generated/s", "prompt tokens/s"),
        [
            (
                each.arrangement,
                str(each.prompts),
                report.seconds(each.ttft_p50),
                report.seconds(each.ttft_p99),
                report.seconds(each.itl_p50),
                report.seconds(each.itl_p99),
                f"{each.tokens_per_s:.0f}",
                f"{each.prompt_tokens_per_s:,.0f}",
            )
            for each in mixed
        ],
        to_stderr=to_stderr,
    )
    report.table(
        "a hand-over between idle engines",
        ("prefill chunk", "prefill", "overlapped", "rest", "decode's part", "TTFT", "one engine"),
        [
            (
                str(each.chunk),
                report.seconds(each.prefill_s),
                report.percent(each.overlapped),
                report.seconds(each.rest_s),
                report.seconds(each.decode_ttft_s),
                report.seconds(each.ttft_s),
                report.seconds(each.alone_s),
            )
            for each in handovers
        ],
        to_stderr=to_stderr,
    )
