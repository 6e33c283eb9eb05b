"""Run one prompt on one engine: ask, measure, hash its pages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from tierstore.memory import Memory
from tierstore_connectors.bundled import StoreConnector
from tierstore_engine.build import build_engine
from tierstore_engine.engine import Engine
from tierstore_engine.heap import freeze_heap
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.outputs import Completion, RequestMetrics
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_tools.longctx.settings import ANSWER_TOKENS, Sizes
from tierstore_tools.throttle import Throttle

Share = Callable[[float], None]

_WARM_UP_TOKENS = 200
_LOAD_S = 600.0

# Machine epsilon by dtype: of stored numbers, and of the float32 sums before them.
_EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
_ROUNDINGS, _SUM_ROUNDINGS = 12, 256
_STEPS = 1.5  # steps of quantised KV
_NEW_PAST = 5  # factor if new keys and values were computed too


@dataclass(frozen=True)
class LongContextAnswer:
    """An answer. ``ttft_s`` and ``itl_s`` (median) are the engine's own time, without that of other engines
    in between. ``logits`` are float32 ``[ANSWER_TOKENS, vocab]``."""

    tokens: tuple[int, ...]
    logits: npt.NDArray[np.float32]
    ttft_s: float
    itl_s: float
    metrics: RequestMetrics


def open_engine(
    model: LoadedModel,
    sizes: Sizes,
    store: str | None,
    *,
    chunk_tokens: int,
    prefill_chunk: int,
    throttle: Mapping[str, float],
) -> Engine:
    """Return an engine that has run once, so no measured run has the first call of a kernel. ``throttle``
    limits tiers, in bytes per second. Without a ``store`` the engine reuses nothing: each run is cold."""
    engine = build_engine(
        model,
        pool_pages=sizes.pool_pages,
        store=store,
        prefix_cache=store is not None,
        host_bytes=sizes.host_bytes,
        disk_bytes=sizes.disk_bytes,
        chunk_tokens=chunk_tokens,
        settings=EngineSettings(
            prefill_chunk=prefill_chunk, plan="load"
        ),  # always load: the tier is measured
    )
    if throttle and isinstance(engine.connector, StoreConnector):
        Throttle(engine.connector.store.backend, throttle)
    engine.generate([[1] * _WARM_UP_TOKENS], SamplingParams(max_new_tokens=2, ignore_eos=True))
    freeze_heap()
    return engine


def logit_difference(answer: LongContextAnswer, reference: LongContextAnswer) -> float:
    """Return the largest difference between two answers' logits, up to and including the first step that
    chose another token."""
    same = np.equal(answer.tokens, reference.tokens)
    steps = len(same) if same.all() else int(same.argmin()) + 1
    return float(np.abs(answer.logits[:steps] - reference.logits[:steps]).max())


def logit_bound(
    reference: LongContextAnswer, *, layers: int, dtype: str, kv_epsilon: float = 0.0, new_past: bool = False
) -> float:
    """Return how far rounding alone may move the logits of a hit from those of ``reference``, its cold run.

    A hit computes one new row and the cold run a chunk of rows. Their products sum in different orders, so
    equal pages give logits that differ by a few roundings per layer. These add up like independent errors,
    with the square root of the depth, in proportion to the spread of the logits. ``new_past``: a tail was
    computed behind the hit. Its keys and values differ in the same way, and all later tokens attend to them.

    The factors are about twice the values measured with random weights and 24 layers on a CPU, at a spread of
    3.0: bfloat16 .61, float16 .04, float32 1.9e-4; behind a tail 2.7, .41, 1e-3. A wrong page moves logits by
    several times the spread. A single wrong number may not, so page bytes are compared separately.

    ``kv_epsilon`` is the step of quantised keys and values. A number close to a border may round to the other
    step, and more numbers do in each later layer, until both runs are quantised independently. Measured
    behind a tail, with 12 layers in float32: int8 .33, k8v4 1.2, fp8_e4m3 .80, int4 4.1."""
    unit = _ROUNDINGS * _EPSILON[dtype] + _SUM_ROUNDINGS * _EPSILON["float32"]
    unit = max(unit, _STEPS * kv_epsilon)
    spread = float(np.std(reference.logits))
    return spread * math.sqrt(layers) * unit * (_NEW_PAST if new_past else 1)


def same_bits(answer: LongContextAnswer, other: LongContextAnswer) -> bool:
    """Return whether two hits have equal tokens and bit-equal logits."""
    return answer.tokens == other.tokens and np.array_equal(answer.logits, other.logits)


class Run:
    """A running request. Step it until it has ``finished``."""

    def __init__(self, engine: Engine, prompt: Sequence[int]) -> None:
        self._engine = engine
        self._prompt_tokens = len(prompt)
        self._spent = 0.0
        self._token_times: list[float] = []
        self._completion: Completion | None = None
        params = SamplingParams(max_new_tokens=ANSWER_TOKENS, ignore_eos=True, keep_logits=True)
        start = time.perf_counter()
        self._id = engine.add(list(prompt), params)
        self._spent += time.perf_counter() - start

    @property
    def started(self) -> bool:
        """Whether the first token has been computed."""
        return bool(self._token_times)

    @property
    def finished(self) -> bool:
        return self._completion is not None

    @property
    def share(self) -> float:
        """Rough share of the work that is done: attention grows with the square of the tokens."""
        return 1.0 if self.started else (self._engine.computed_tokens(self._id) / self._prompt_tokens) ** 2

    def step(self) -> None:
        """Run one step of the engine."""
        start = time.perf_counter()
        outputs = self._engine.step()
        self._spent += time.perf_counter() - start
        for output in outputs:
            if output.request_id == self._id:
                self._token_times += [self._spent] * len(output.tokens)
                self._completion = output.completion or self._completion

    def settle(self) -> None:
        """Wait for the device, so this engine's work does not run in the time of others."""
        start = time.perf_counter()
        self._engine.model.wait()
        self._spent += time.perf_counter() - start

    def answer(self) -> LongContextAnswer:
        completion = self._completion
        assert completion is not None
        assert completion.logits is not None
        gaps = np.diff(self._token_times)
        return LongContextAnswer(
            completion.tokens,
            completion.logits,
            self._token_times[0],
            float(np.median(gaps)),
            completion.metrics,
        )


def ask(engine: Engine, prompt: Sequence[int], progress: Share = lambda _: None) -> LongContextAnswer:
    """Run one prompt to its end and return the answer."""
    run = Run(engine, prompt)
    while not run.finished:
        run.step()
        progress(run.share)
    return run.answer()


def ask_in_turn(
    engines: Sequence[Engine], prompt: Sequence[int], *, steps: int, progress: Share = lambda _: None
) -> list[LongContextAnswer]:
    """Run one prompt on several engines, ``steps`` steps each in turn: a slow moment of the machine slows all
    of them. The order is reversed each time."""
    runs = [Run(engine, prompt) for engine in engines]
    order = list(runs)
    while not all(run.started for run in runs):
        for run in order:
            for _ in range(steps):
                if not run.started:
                    run.step()
            run.settle()
            progress(sum(each.share for each in runs) / len(runs))
        order.reverse()
    for run in runs:
        while not run.finished:
            run.step()
    return [run.answer() for run in runs]


def page_digests(engine: Engine, prompt: Sequence[int]) -> list[bytes]:
    """Return the XXH3-128 of each whole page of ``prompt``, loaded from the engine's store through HBM. The
    last token does not count, because every run computes it; nor does the page that it completes."""
    connector = engine.connector
    spec = connector.pool.spec
    whole = (len(prompt) - 1) // spec.chunk_tokens * spec.chunk_tokens
    loaded = connector.load(
        connector.lookup(connector.prompt(prompt), max_tokens=whole), deadline_s=_LOAD_S
    ).wait()
    scratch = Memory(spec.page_bytes, shared=False)
    digests = []
    for page in loaded.pages:
        connector.pool.read_pages([(page, scratch.address)])
        digests.append(xxhash.xxh3_128_digest(scratch.view(0, spec.page_bytes)))
    connector.release(loaded.pages)
    return digests
