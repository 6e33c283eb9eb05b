"""``tierstore-bench planner``: TTFT of each plan, against prompt length and the speed of a tier.

One engine for each plan over one store and one pool, in turn, so that a slow moment of the machine slows all
of them. The tier is this machine's host memory, throttled to a multiple of the speed at which the engine
computes: 1 is the rate at which loading a prompt takes as long as computing it. Before each run HBM is
emptied."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tierstore
from tierstore import open_pool
from tierstore.errors import TierStoreError
from tierstore.planner import Planner
from tierstore.store import Store
from tierstore.units import MIB
from tierstore_connectors.bundled import StoreConnector
from tierstore_engine.build import LoadedModel, load_model, make_runner
from tierstore_engine.engine import Engine
from tierstore_engine.outputs import Completion
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import PLANS, EngineSettings
from tierstore_tools import corpus, machine, report
from tierstore_tools.throttle import Throttle

_ANSWER = 4
_SETTLING = 2  # runs of each plan before those that count: the planner learns the rate from them
_COLOURS = {"compute": "#808080", "load": "#d1495b", "one-way": "#edae49", "both-ends": "#00798c"}


@dataclass(frozen=True)
class Sweep:
    """What is measured: prompts of ``tokens``, of which ``shares`` (0 to 1) are held in a tier of ``speeds``
    times the prefill speed; medians of ``rounds``."""

    model: str
    tokens: tuple[int, ...]
    speeds: tuple[float, ...]
    shares: tuple[float, ...]
    rounds: int
    prefill_chunk: int


@dataclass(frozen=True)
class Point:
    """Median TTFT in seconds by plan. ``ratio`` is the planned one (both ends) over computing alone,
    ``to_better`` over the better of computing and loading. ``reused`` are tokens that both-ends loaded.
    ``identical``: all answers chose the same tokens."""

    tokens: int
    share: float
    speed: float
    mb_per_s: float
    ttft_s: dict[str, float]
    ratio: float
    to_better: float
    reused: int
    identical: bool


def run(sweep: Sweep, *, json: str | None, plot: Path | None) -> None:
    """Measure, show and write. Raises :class:`TierStoreError` where answers differ."""
    report.require_targets(json, plot)
    with report.phases() as phases:
        with phases.phase("loading the model", measurable=False):
            model = load_model(sweep.model, device="cpu")
        points = []
        for tokens in sweep.tokens:
            with phases.phase(f"{tokens:,} tokens") as phase:
                bench = _Bench(model, tokens, sweep.prefill_chunk)
                try:
                    cases = [(share, speed) for share in sweep.shares for speed in sweep.speeds]
                    for done, (share, speed) in enumerate(cases, 1):
                        points.append(bench.measure(share, speed, sweep.rounds))
                        phase.update(done / len(cases))
                finally:
                    bench.close()
    _show(points, to_stderr=json == "-")
    described = machine.describe("cpu")
    document = {"machine": described, "model": sweep.model, "points": [asdict(point) for point in points]}
    report.write_json(document, json)
    if plot is not None:
        _draw(points, f"{sweep.model} on {described['cpu']}, {described['cores']} cores", plot)
    if not all(point.identical for point in points):
        raise TierStoreError("answers differ between plans")


class _Bench:
    """One prompt, one store, an engine for each plan."""

    def __init__(self, model: LoadedModel, tokens: int, prefill_chunk: int) -> None:
        spec = model.kv_spec()
        pages = -(-(tokens + 64) // spec.chunk_tokens) + 4
        self._prompt = corpus.long_prompt(model.tokenizer.encode, tokens, question=corpus.QUESTION)
        pool = open_pool(spec, 2 * pages)
        host_bytes = 4 * pages * spec.page_bytes + 64 * MIB
        store = tierstore.open(None, spec, identity=model.identity(spec), pools=pool, host_bytes=host_bytes)
        self._store: Store = store
        self._throttled = Throttle(store.backend, {})
        self._token_bytes = spec.page_bytes / spec.chunk_tokens
        connector = StoreConnector(store)
        self._engines = {}
        for plan in PLANS:
            settings = EngineSettings(prefill_chunk=prefill_chunk, plan=plan)
            runner = make_runner(model, [pool], settings)
            self._engines[plan] = Engine(runner, model.tokenizer, connector, settings)

    def close(self) -> None:
        next(iter(self._engines.values())).close()

    def measure(self, share: float, speed: float, rounds: int) -> Point:
        """One point. What is held is the prompt's beginning; the rest differs each time."""
        held = self._prompt[: max(int(len(self._prompt) * share) - (share >= 1), 1)]
        self._throttled.rates = {}
        self._store.planner = Planner()  # what the point before has taught is of another tier
        self._store.evict("hbm")
        self._store.evict("host")
        cold = self._ask("compute", self._prompt, save=False)
        self._engines["compute"].generate([[*held, 1]], SamplingParams(max_new_tokens=1, ignore_eos=True))
        self._store.flush()
        rate = speed * len(self._prompt) * self._token_bytes / cold.metrics.ttft_s
        self._throttled.rates = {"host": rate}
        times: dict[str, list[float]] = {plan: [] for plan in PLANS}
        answers = set()
        reused = []
        order = list(PLANS)
        for number in range(_SETTLING + rounds):
            for plan in order:
                answer = self._ask(plan, self._prompt, save=False)
                answers.add(answer.tokens)
                if number >= _SETTLING:
                    times[plan].append(answer.metrics.ttft_s)
                    if plan == "both-ends":
                        reused.append(answer.metrics.reused_tokens)
            order.reverse()
        ttft_s = {plan: statistics.median(each) for plan, each in times.items()}
        planned = ttft_s["both-ends"]
        better = min(ttft_s["compute"], ttft_s["load"])
        return Point(
            len(self._prompt),
            share,
            speed,
            rate / 1e6,
            ttft_s,
            planned / ttft_s["compute"],
            planned / better,
            round(statistics.median(reused)),
            len(answers) == 1,
        )

    def _ask(self, plan: str, prompt: Sequence[int], *, save: bool) -> Completion:
        engine = self._engines[plan]
        self._store.evict("hbm")
        params = SamplingParams(max_new_tokens=_ANSWER, ignore_eos=True)
        wanted = engine.add(prompt, params, save=save)
        while True:
            for output in engine.step():
                if output.request_id == wanted and output.completion is not None:
                    return output.completion


def _show(points: Sequence[Point], *, to_stderr: bool) -> None:
    columns = (
        "prompt", "held", "speed", "MB/s", *PLANS, "÷ compute", "÷ better", "loaded", "identical",
    )  # fmt: skip
    rows = [
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
    report.table("time to first token by plan", columns, rows, to_stderr=to_stderr)


def _draw(points: Sequence[Point], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = sorted({(point.share, point.speed) for point in points})
    figure, axes = plt.subplots(
        1, len(cases), figsize=(4.2 * len(cases), 3.8), squeeze=False, layout="constrained"
    )
    for axis, (share, speed) in zip(axes[0], cases, strict=True):
        chosen = [point for point in points if (point.share, point.speed) == (share, speed)]
        for plan in PLANS:
            axis.plot(
                [point.tokens for point in chosen],
                [point.ttft_s[plan] for point in chosen],
                marker="o",
                label=plan,
                color=_COLOURS[plan],
            )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(f"{share:.0%} held, {speed:g}× prefill speed")
        axis.set_xlabel("prompt tokens (log)")
    axes[0][0].set_ylabel("time to first token, seconds (log)")
    axes[0][0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)
