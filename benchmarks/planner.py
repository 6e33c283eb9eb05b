"""Measure the time to first token of each plan, by prompt length and by the speed of a tier.

    python benchmarks/planner.py --tokens 1000,4000,16000 --speeds 0.1,1,10 --shares 10,50,100

One engine for each plan shares a store and a pool. They answer in turn, so a slow moment of the machine slows
all of them. The tier is host memory, throttled to a multiple of the engine's prefill speed: at 1, loading a
prompt takes as long as computing it. With all of 16,000 tokens held at speed 1, loading from both ends took
.56 of the better of computing and loading, on 2 cores of a Xeon (docs/planner.md).
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

import typer

import tierstore
from tierstore import open_pool
from tierstore.command_line import one_line_errors
from tierstore.errors import TierStoreError
from tierstore.planner import Planner
from tierstore.units import MIB
from tierstore_connectors.bundled import StoreConnector
from tierstore_engine.build import load_model, make_runner
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.outputs import Completion
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import PLANS, EngineSettings
from tierstore_tools import corpus, machine, report
from tierstore_tools.throttle import Throttle

ANSWER_TOKENS = 4
SETTLING = 2  # uncounted runs of each plan: the planner learns the rate from them


@dataclass(frozen=True)
class Point:
    """Median TTFT in seconds by plan. ``ratio`` is both-ends over compute, ``to_better`` both-ends over the
    better of compute and load. ``reused`` tokens were loaded from both ends. ``identical``: all plans gave
    the same answer."""

    tokens: int
    share: float
    speed: float
    mb_per_s: float
    ttft_s: dict[str, float]
    ratio: float
    to_better: float
    reused: int
    identical: bool


class Bench:
    """One prompt, one store, an engine for each plan."""

    def __init__(self, model: LoadedModel, tokens: int, prefill_chunk: int) -> None:
        spec = model.kv_spec()
        pages = -(-(tokens + 64) // spec.chunk_tokens) + 4
        self.prompt = corpus.long_prompt(model.tokenizer.encode, tokens, question=corpus.QUESTION)
        pool = open_pool(spec, 2 * pages)
        host_bytes = 4 * pages * spec.page_bytes + 64 * MIB
        self.store = tierstore.open(
            None, spec, identity=model.identity(spec), pools=pool, host_bytes=host_bytes
        )
        self.throttle = Throttle(self.store.backend, {})
        self.token_bytes = spec.page_bytes / spec.chunk_tokens
        connector = StoreConnector(self.store)
        self.engines = {}
        for plan in PLANS:
            settings = EngineSettings(prefill_chunk=prefill_chunk, plan=plan)
            runner = make_runner(model, [pool], settings)
            self.engines[plan] = Engine(runner, model.tokenizer, connector, settings)

    def measure(self, share: float, speed: float, rounds: int) -> Point:
        """Measure with the first ``share`` of the prompt held in a tier of ``speed`` times the prefill
        speed."""
        held = self.prompt[: max(int(len(self.prompt) * share) - (share >= 1), 1)]
        self.throttle.rates = {}
        self.store.planner = Planner()  # forget the rates of the last point's tier
        self.store.evict("hbm")
        self.store.evict("host")
        cold = self.ask("compute")
        self.engines["compute"].generate([[*held, 1]], SamplingParams(max_new_tokens=1, ignore_eos=True))
        self.store.flush()
        rate = speed * len(self.prompt) * self.token_bytes / cold.metrics.ttft_s
        self.throttle.rates = {"host": rate}
        times: dict[str, list[float]] = {plan: [] for plan in PLANS}
        answers, reused, order = set(), [], list(PLANS)
        for number in range(SETTLING + rounds):
            for plan in order:
                answer = self.ask(plan)
                answers.add(answer.tokens)
                if number >= SETTLING:
                    times[plan].append(answer.metrics.ttft_s)
                    if plan == "both-ends":
                        reused.append(answer.metrics.reused_tokens)
            order.reverse()
        ttft_s = {plan: statistics.median(each) for plan, each in times.items()}
        planned, better = ttft_s["both-ends"], min(ttft_s["compute"], ttft_s["load"])
        return Point(
            len(self.prompt),
            share,
            speed,
            rate / 1e6,
            ttft_s,
            planned / ttft_s["compute"],
            planned / better,
            round(statistics.median(reused)),
            len(answers) == 1,
        )

    def ask(self, plan: str) -> Completion:
        """Empty HBM and answer the prompt without saving it."""
        engine = self.engines[plan]
        self.store.evict("hbm")
        wanted = engine.add(
            self.prompt, SamplingParams(max_new_tokens=ANSWER_TOKENS, ignore_eos=True), save=False
        )
        while True:
            for output in engine.step():
                if output.request_id == wanted and output.completion is not None:
                    return output.completion


def main(
    model: str = "demo",
    tokens: str = "1000,4000,16000",
    speeds: str = "0.1,1,10",
    shares: str = "100",
    rounds: int = 5,
    prefill_chunk: int = 256,
    json: str | None = None,
) -> None:
    """Measure the TTFT of each plan: compute, load, one way, both ends. SPEEDS are multiples of the prefill
    speed, SHARES are percent of the prompt that are held."""
    report.require_targets(json)
    loaded = load_model(model, device="cpu")
    cases = [(float(share) / 100, float(speed)) for share in shares.split(",") for speed in speeds.split(",")]
    points = []
    with report.phases() as phases:
        for length in map(int, tokens.split(",")):
            with phases.phase(f"{length:,} tokens") as phase:
                bench = Bench(loaded, length, prefill_chunk)
                for done, (share, speed) in enumerate(cases, 1):
                    points.append(bench.measure(share, speed, rounds))
                    phase.update(done / len(cases))
                next(iter(bench.engines.values())).close()
    columns = ("prompt", "held", "speed", "MB/s", *PLANS, "÷ compute", "÷ better", "loaded", "identical")
    lines = [
        (
            f"{point.tokens:,}",
            f"{point.share:.0%}",
            f"{point.speed:g}×",
            f"{point.mb_per_s:,.1f}",
            *(report.seconds(point.ttft_s[plan]) for plan in PLANS),
            f"{point.ratio:.2f}",
            f"{point.to_better:.2f}",
            f"{point.reused:,}",
            "yes" if point.identical else "NO",
        )
        for point in points
    ]
    report.table("time to first token by plan", columns, lines, to_stderr=json == "-")
    document = {"machine": machine.describe(), "model": model, "points": [asdict(point) for point in points]}
    report.write_json(document, json)
    if not all(point.identical for point in points):
        raise TierStoreError("answers differ between plans")


if __name__ == "__main__":
    with one_line_errors("planner"):
        typer.run(main)
