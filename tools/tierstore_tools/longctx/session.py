"""One prompt on one engine: asked, timed, and its pages fingerprinted."""

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
from tierstore_engine.build import LoadedModel, build_engine
from tierstore_engine.engine import Engine
from tierstore_engine.heap import freeze_heap
from tierstore_engine.outputs import Completion, RequestMetrics
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_tools.longctx.settings import ANSWER_TOKENS, Sizes
from tierstore_tools.throttle import Throttle

Share = Callable[[float], None]

_WARM_UP_TOKENS = 200
_LOAD_S = 600.0

# Machine epsilon by dtype: of the numbers that are kept, and of the float32 sums that they are made from.
_EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
_ROUNDINGS, _SUM_ROUNDINGS = 12, 256
_STEPS = 1.5  # of quantised KV
_NEW_PAST = 5  # where new keys and values were computed, too


@dataclass(frozen=True)
class LongContextAnswer:
    """``ttft_s`` and ``itl_s`` (median) are the engine's own time: that of other engines in between is left
    out. ``logits`` are float32 ``[ANSWER_TOKENS, vocab]``."""

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
    """An engine that has run once, so that nothing measured pays for the first call of a kernel. ``throttle``
    bounds tiers to so many bytes a second."""
    engine = build_engine(
        model,
        pool_pages=sizes.pool_pages,
        store=store,
        host_bytes=sizes.host_bytes,
        disk_bytes=sizes.disk_bytes,
        chunk_tokens=chunk_tokens,
        settings=EngineSettings(prefill_chunk=prefill_chunk, plan="load"),  # a tier is measured, not chosen
    )
    if throttle and isinstance(engine.connector, StoreConnector):
        Throttle(engine.connector.store.backend, throttle)
    engine.generate([[1] * _WARM_UP_TOKENS], SamplingParams(max_new_tokens=2, ignore_eos=True))
    freeze_heap()
    return engine


def logit_difference(answer: LongContextAnswer, reference: LongContextAnswer) -> float:
    """The largest difference between two answers' logits, over the steps that followed the same tokens: up to
    and including the first at which they chose differently."""
    same = np.equal(answer.tokens, reference.tokens)
    steps = len(same) if same.all() else int(same.argmin()) + 1
    return float(np.abs(answer.logits[:steps] - reference.logits[:steps]).max())


def logit_bound(
    reference: LongContextAnswer, *, layers: int, dtype: str, kv_epsilon: float = 0.0, new_past: bool = False
) -> float:
    """How far rounding alone may move the logits of a hit from those of ``reference``, its cold run.

    A hit computes one new row where the cold run computed a chunk of rows, and the sums of a product are
    taken in another order for each: equal pages lead to logits that differ by a few roundings per layer.
    These add up like independent errors, with the square root of the depth, in proportion to the spread of
    the logits. ``new_past``: a tail was computed behind the hit, whose keys and values differ likewise, and
    all that follows attends to them.

    The factors are about twice what was measured with random weights and 24 layers on a CPU, at a spread of
    3.0: bfloat16 .61, float16 .04, float32 1.9e-4; behind a tail 2.7, .41, 1e-3. A wrong page moves logits by
    several times the spread, but a wrong number in one need not: that the bytes of pages are equal is held
    apart from this.

    ``kv_epsilon``: new keys and values are quantised in steps of this. Now and then a number rounds the other
    way, a whole step, and more of them do in each of the next layers: in the end as if both runs were
    quantised independently. Measured behind a tail, with 12 layers in float32: int8 .33, k8v4 1.2,
    fp8_e4m3 .80, int4 4.1."""
    unit = _ROUNDINGS * _EPSILON[dtype] + _SUM_ROUNDINGS * _EPSILON["float32"]
    unit = max(unit, _STEPS * kv_epsilon)
    spread = float(np.std(reference.logits))
    return spread * math.sqrt(layers) * unit * (_NEW_PAST if new_past else 1)


def same_bits(answer: LongContextAnswer, other: LongContextAnswer) -> bool:
    """Whether two hits answered alike, bit for bit."""
    return answer.tokens == other.tokens and np.array_equal(answer.logits, other.logits)


class Run:
    """A request under way. Step it until it has ``finished``."""

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
        """Whether the first token is there."""
        return bool(self._token_times)

    @property
    def finished(self) -> bool:
        return self._completion is not None

    @property
    def share(self) -> float:
        """How much of the work is done, roughly: attention grows with the square of the tokens."""
        return 1.0 if self.started else (self._engine.computed_tokens(self._id) / self._prompt_tokens) ** 2

    def step(self) -> None:
        start = time.perf_counter()
        outputs = self._engine.step()
        self._spent += time.perf_counter() - start
        for output in outputs:
            if output.request_id == self._id:
                self._token_times += [self._spent] * len(output.tokens)
                self._completion = output.completion or self._completion

    def settle(self) -> None:
        """Wait until all that the steps have put to work is done, so that it is not in the time of others."""
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
    """Run one prompt to its end."""
    run = Run(engine, prompt)
    while not run.finished:
        run.step()
        progress(run.share)
    return run.answer()


def ask_in_turn(
    engines: Sequence[Engine], prompt: Sequence[int], *, steps: int, progress: Share = lambda _: None
) -> list[LongContextAnswer]:
    """The same prompt on several engines, ``steps`` steps each in turn, so that a slow moment of the machine
    slows all of them. Who goes first changes each time."""
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
    """The XXH3-128 of each whole page of ``prompt`` as the engine's store hands it out, through HBM. Without
    its last token, which every run computes for itself, and with it the page that it completes."""
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
