"""The experiment: the same long prompt, cold and from each tier, compared token by token and byte by byte."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from tierstore.errors import UsageError
from tierstore.units import MIB
from tierstore_engine.build import load_model
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.ranks.runner import RankedRunner
from tierstore_tools import corpus, limits
from tierstore_tools.limits import MachineLimits
from tierstore_tools.longctx.session import (
    LongContextAnswer,
    ask,
    ask_in_turn,
    logit_bound,
    logit_difference,
    open_engine,
    page_digests,
    same_bits,
)
from tierstore_tools.longctx.settings import TAIL_TOKENS, LongContext, Sizes
from tierstore_tools.longctx.worker import WorkerJob, run_in_new_process
from tierstore_tools.report import Phases

_STEPS_IN_TURN = 4
_HITS = 5  # hits per tier in memory
_LEAST_MEASURED = 32 * MIB
_MOST_MEASURED = 256 * MIB


@dataclass(frozen=True)
class LongContextRow:
    """One case. ``gb_per_s`` is the load's speed, compared with ``limit``. On a GPU a load overlaps with
    computing. There ``gb_per_s`` is the speed over the whole TTFT, and ``make gpu-check`` measures the limit
    of copies. ``speedup`` is over the cold run of the same prompt. Hits in memory are repeated, because they
    are short. The figures of a row are those of the repetition with the median TTFT. Only the fields after
    ``speedup`` cover all repetitions.

    ``identical`` is the verdict of three comparisons. Pages are equal in every byte (``pages_identical``).
    All hits of the prompt, from all tiers, have bit-equal logits (``hits_identical``). Logits differ from the
    cold run's by no more than rounding explains (``max_logit_diff`` within ``logit_bound``). A field is None
    if the case does not make that comparison."""

    case: str
    prompt_tokens: int
    reused_tokens: int
    ttft_s: float
    slowest_ttft_s: float
    itl_s: float
    moved_bytes: int
    gb_per_s: float | None
    limit: str | None
    limit_fraction: float | None
    speedup: float
    identical: bool
    max_logit_diff: float
    logit_bound: float
    hits_identical: bool | None = None
    pages_identical: bool | None = None


@dataclass(frozen=True)
class SweepRow:
    """TTFT by tier in seconds, for one prompt length."""

    prompt_tokens: int
    cold_s: float
    hbm_s: float
    host_s: float
    disk_s: float


@dataclass(frozen=True)
class RankedPart:
    """One part of the prompt's tokens in the cold run, computed by ranks of its own. ``sent_bytes_per_token``
    is how many bytes one rank of the part sends for each token of the whole prompt. ``held_bytes`` is the
    memory of the pages that the rank keeps for the prompt."""

    sent_bytes_per_token: float
    held_bytes: int


@dataclass(frozen=True)
class LongContextResult:
    """All results. ``save_overhead`` is (cold with a store − without) / without. ``parts`` is empty with one
    rank."""

    limits: MachineLimits
    rows: tuple[LongContextRow, ...]
    save_overhead: float
    parts: tuple[RankedPart, ...]
    sweep: tuple[SweepRow, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "limits": self.limits.to_json(),
            "rows": [asdict(row) for row in self.rows],
            "save_overhead": self.save_overhead,
            "parts": [asdict(part) for part in self.parts],
            "sweep": [asdict(row) for row in self.sweep],
        }


def run(settings: LongContext, phases: Phases) -> LongContextResult:
    """Measure the limits, cold runs with and without a store, each tier, and the sweep, in this order."""
    with phases.phase("loading the model", measurable=False):
        model = load_model(
            settings.model,
            device=settings.device,
            dtype=settings.dtype,
            kv_dtype=settings.kv_dtype,
            kv_scales=settings.kv_scales,
            tensor_parallel=settings.ranks,
            sequence_parallel=settings.parts,
        )
        prompt = corpus.long_prompt(
            model.tokenizer.encode, settings.tokens, text=settings.prompt_text, question=corpus.QUESTION
        )
        sizes = _sizes(model, settings, settings.tokens)
    with phases.phase("this machine's limits", measurable=False):
        measured = limits.measure(settings.directory, nbytes=_measured_bytes(model, sizes, settings))
    experiment = _LongContextExperiment(settings, model, sizes, measured, phases)
    rows, overhead = experiment.run(prompt)
    sweep = [_sweep_one(settings, model, tokens, phases) for tokens in settings.sweep]
    return LongContextResult(measured, tuple(rows), overhead, experiment.parts, tuple(sweep))


def _sizes(model: LoadedModel, settings: LongContext, tokens: int) -> Sizes:
    longest = tokens + TAIL_TOKENS + 128
    if longest > model.config.max_positions:
        raise UsageError(
            f"{tokens} tokens, a tail and the answers make {longest}, but {settings.model} allows "
            f"{model.config.max_positions}: use fewer --tokens"
        )
    sizes = Sizes.for_tokens(model.kv_spec(chunk_tokens=settings.chunk_tokens), tokens)
    sizes.check_disk(settings.directory)
    return sizes


def _measured_bytes(model: LoadedModel, sizes: Sizes, settings: LongContext) -> int:
    """Return how many bytes are copied to measure the limits: as many as the pages have, within bounds."""
    nbytes = sizes.pool_pages * model.kv_spec(chunk_tokens=settings.chunk_tokens).page_bytes
    return min(max(nbytes // MIB * MIB, _LEAST_MEASURED), _MOST_MEASURED)


def _parts_of(engine: Engine, tokens: int) -> tuple[RankedPart, ...]:
    """Return what each part of an engine with several ranks has sent and holds, after the engine has computed
    ``tokens`` tokens."""
    if not isinstance(engine.model, RankedRunner):
        return ()
    large = engine.connector.pools[0].large_pages
    return tuple(
        RankedPart(sent / tokens, held * large.large_bytes)
        for sent, held in zip(engine.model.sent_bytes, large.used, strict=True)
    )


@contextmanager
def _store_directory(parent: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tierstore-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class _LongContextExperiment:
    """The cases of one prompt."""

    def __init__(
        self, settings: LongContext, model: LoadedModel, sizes: Sizes, measured: MachineLimits, phases: Phases
    ) -> None:
        self._settings = settings
        self._model = model
        self._sizes = sizes
        self._limits = measured
        self._phases = phases
        # the first hit, with which all other hits of the prompt are compared
        self._first_hit: LongContextAnswer | None = None
        self.parts: tuple[RankedPart, ...] = ()

    def run(self, prompt: Sequence[int]) -> tuple[list[LongContextRow], float]:
        with ExitStack() as stack:
            directory = stack.enter_context(_store_directory(self._settings.directory))
            without = self._open(None)
            stack.callback(without.close)
            engine = self._open(str(directory))
            stack.callback(engine.close)

            off, cold = self._cold(without, engine, prompt)
            self.parts = _parts_of(engine, len(prompt) + len(cold.tokens) - 1)
            pages = page_digests(engine, prompt)
            rows = [
                self._row("store_off", [off], cold, len(prompt)),
                self._row("cold", [cold], cold, len(prompt)),
            ]
            rows += self._warm(engine, prompt, cold, pages)
            rows.append(self._tail(engine, without, prompt, cold, pages))
            engine.connector.close()
            rows.insert(4, self._disk(directory, prompt, cold, pages))
        return rows, cold.ttft_s / off.ttft_s - 1

    def _open(self, store: str | None) -> Engine:
        return open_engine(
            self._model,
            self._sizes,
            store,
            chunk_tokens=self._settings.chunk_tokens,
            prefill_chunk=self._settings.prefill_chunk,
            throttle=self._settings.throttle,
        )

    def _cold(self, without: Engine, engine: Engine, prompt: Sequence[int]) -> list[LongContextAnswer]:
        with self._phases.phase("cold, without and with a store in turn") as phase:
            return ask_in_turn([without, engine], prompt, steps=_STEPS_IN_TURN, progress=phase.update)

    def _warm(
        self, engine: Engine, prompt: Sequence[int], cold: LongContextAnswer, pages: list[bytes]
    ) -> Iterator[LongContextRow]:
        with self._phases.phase("hits in hbm") as phase:
            answers = [ask(engine, prompt, phase.update) for _ in range(_HITS)]
        yield self._hit("hbm", answers, cold, prompt, page_digests(engine, prompt) == pages)
        answers = []
        with self._phases.phase("hits in host memory") as phase:
            for _ in range(_HITS):
                engine.connector.evict(self._sizes.pool_pages)
                answers.append(ask(engine, prompt, phase.update))
        same_pages = page_digests(engine, prompt) == pages
        yield self._hit("host", answers, cold, prompt, same_pages, limit="memcpy")

    def _tail(
        self,
        engine: Engine,
        without: Engine,
        prompt: Sequence[int],
        cold: LongContextAnswer,
        pages: list[bytes],
    ) -> LongContextRow:
        """Measure the next turn of the conversation: the prompt, its answer and 1K new tokens."""
        new = corpus.long_prompt(
            self._model.tokenizer.encode, TAIL_TOKENS, skip=len(prompt) // 2, question=corpus.FOLLOW_UP
        )
        turn = [*prompt, *cold.tokens, *new]
        engine.connector.evict(self._sizes.pool_pages)
        with self._phases.phase("a prefix from the host tier, and a new end of 1K tokens") as phase:
            answer = ask(engine, turn, phase.update)
        with self._phases.phase("the same prompt computed without a hit, for comparison") as phase:
            reference = ask(without, turn, phase.update)
        same_pages = page_digests(engine, prompt) == pages
        row = self._row("tail", [answer], reference, len(turn), limit="memcpy", new_past=True)
        return replace(row, identical=row.identical and same_pages, pages_identical=same_pages)

    def _disk(
        self, directory: Path, prompt: Sequence[int], cold: LongContextAnswer, pages: list[bytes]
    ) -> LongContextRow:
        with self._phases.phase("hit on disk in a new process", measurable=False):
            answer, loaded = self._in_new_process(directory, prompt)
        return self._hit("disk", [answer], cold, prompt, loaded == pages, limit="disk_read")

    def _in_new_process(
        self, directory: Path, prompt: Sequence[int]
    ) -> tuple[LongContextAnswer, list[bytes]]:
        settings, sizes = self._settings, self._sizes
        job = WorkerJob(
            settings.model,
            settings.device,
            settings.dtype,
            settings.kv_dtype,
            settings.kv_scales,
            str(directory),
            list(prompt),
            settings.chunk_tokens,
            settings.prefill_chunk,
            settings.ranks,
            settings.parts,
            sizes.pool_pages,
            sizes.host_bytes,
            sizes.disk_bytes,
            torch.get_num_threads(),
            dict(settings.throttle),
        )
        with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as scratch:
            return run_in_new_process(job, Path(scratch))

    def _hit(
        self,
        case: str,
        answers: Sequence[LongContextAnswer],
        cold: LongContextAnswer,
        prompt: Sequence[int],
        pages_identical: bool,
        *,
        limit: str | None = None,
    ) -> LongContextRow:
        """Return a row of hits of ``prompt``. Each hit is also compared with the first one."""
        first = self._first_hit = self._first_hit or answers[0]
        # The order in which partial sums are added depends on which part of the tokens has a page.
        alone = self._settings.parts == 1
        hits_identical = all(same_bits(answer, first) for answer in answers) if alone else None
        row = self._row(case, answers, cold, len(prompt), limit=limit)
        return replace(
            row,
            identical=row.identical and hits_identical is not False and pages_identical,
            hits_identical=hits_identical,
            pages_identical=pages_identical,
        )

    def _row(
        self,
        case: str,
        answers: Sequence[LongContextAnswer],
        reference: LongContextAnswer,
        prompt_tokens: int,
        *,
        limit: str | None = None,
        new_past: bool = False,
    ) -> LongContextRow:
        by_time = sorted(answers, key=lambda each: each.ttft_s)
        answer = by_time[len(by_time) // 2]
        metrics = answer.metrics
        moved = metrics.loaded_bytes if limit else 0
        on_gpu = self._model.device != "cpu"
        rate = moved / (answer.ttft_s if on_gpu else metrics.load_s) / 1e9 if moved else None
        limit = None if on_gpu and limit == "memcpy" else limit
        most = {"memcpy": self._limits.memcpy_gb_per_s, "disk_read": self._limits.disk.read}.get(limit or "")
        config = self._model.config
        diff = max(logit_difference(each, reference) for each in answers)
        bound = logit_bound(
            reference,
            layers=config.layers,
            dtype=config.dtype,
            kv_epsilon=config.kv.epsilon,
            new_past=new_past,
        )
        return LongContextRow(
            case=case,
            prompt_tokens=prompt_tokens,
            reused_tokens=metrics.reused_tokens,
            ttft_s=answer.ttft_s,
            slowest_ttft_s=by_time[-1].ttft_s,
            itl_s=answer.itl_s,
            moved_bytes=moved,
            gb_per_s=rate,
            limit=limit,
            limit_fraction=rate / most if rate and most else None,
            speedup=reference.ttft_s / answer.ttft_s,
            identical=diff <= bound,
            max_logit_diff=diff,
            logit_bound=bound,
        )

    # -- the sweep -----------------------------------------------------------------------------------

    def times(self, prompt: Sequence[int]) -> SweepRow:
        """Measure only the TTFTs."""
        with _store_directory(self._settings.directory) as directory:
            engine = self._open(str(directory))
            try:
                cold = ask(engine, prompt)
                hbm = statistics.median(ask(engine, prompt).ttft_s for _ in range(_HITS))
                engine.connector.evict(self._sizes.pool_pages)
                host = ask(engine, prompt)
            finally:
                engine.close()
            disk, _ = self._in_new_process(directory, prompt)
        return SweepRow(len(prompt), cold.ttft_s, hbm, host.ttft_s, disk.ttft_s)


def _sweep_one(settings: LongContext, model: LoadedModel, tokens: int, phases: Phases) -> SweepRow:
    prompt = corpus.long_prompt(
        model.tokenizer.encode, tokens, text=settings.prompt_text, question=corpus.QUESTION
    )
    sizes = _sizes(model, settings, tokens)
    unused = MachineLimits(0.0, limits.DiskLimits(0.0, 0.0, 0.0, 0.0))
    with phases.phase(f"sweep: {tokens} tokens", measurable=False):
        return _LongContextExperiment(settings, model, sizes, unused, phases).times(prompt)
