"""Captured decode steps, captured by remembering the step and replayed by running it again over its buffers.

What a CUDA graph would do wrong shows here as well: a step that looks at anything but its buffers gives the
answer of the moment when it was captured.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engine.kernels.executor import missing_tools
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tierstore.tiers.hbm import COMPLETED, PagePool
from tierstore_connectors.bundled import NoStore
from tierstore_engine import graphs as graphs_module
from tierstore_engine.attention.base import Span
from tierstore_engine.attention.cuda import CudaAttention
from tierstore_engine.config import ExpertsConfig, ModelConfig
from tierstore_engine.engine import Engine
from tierstore_engine.graphs import DecodeGraphs, Recorder, bucket_sizes
from tierstore_engine.images import PromptImage
from tierstore_engine.kernels.catalog import Instance
from tierstore_engine.kernels.launcher import Argument, Kernel
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.model import Model
from tierstore_engine.presets import preset
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Step
from tierstore_engine.tokenizer import ByteTokenizer
from tierstore_engine.weights import digest_weights, random_weights

from .test_cuda_attention import cuda_memory

CHUNK = 16
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True, keep_logits=True)

pytestmark = pytest.mark.skipif(
    missing_tools() is not None, reason=f"kernels cannot be executed: {missing_tools()}"
)


class Rerun(Recorder):
    """The step itself, run again. Its result is kept in one place, as a graph's is. Like a graph it keeps
    nothing alive: a step that has been dropped cannot be replayed."""

    def buffers(self, numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(numbers, dtype=torch.int32), torch.zeros(numbers, dtype=torch.int32)

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        result, known = step().clone(), weakref.ref(step)

        def replay() -> torch.Tensor:
            kept = known()
            assert kept is not None, "what the capture reads has been freed"
            return result.copy_(kept())

        return replay


class GraphRunner(Model):
    """A model that decodes by replaying."""

    graphs: DecodeGraphs

    def compute(self, step: Step) -> torch.Tensor:
        logits = self.graphs.compute(step)
        return super().compute(step) if logits is None else logits


def runner_over(model: LoadedModel, pool: PagePool, *, max_sequences: int, graphs: bool = True) -> Model:
    pages = torch.from_numpy(pool.array)
    attention = CudaAttention(pages, pool.spec, model.config, ExecutorLauncher(2))
    if not graphs:
        return Model(model.config, model.weights, [attention], device="cpu")
    runner = GraphRunner(model.config, model.weights, [attention], device="cpu")
    runner.graphs = DecodeGraphs(runner, [attention], Rerun(), max_sequences=max_sequences, width=20)
    return runner


@pytest.fixture(scope="module")
def model(loaded: Callable[..., LoadedModel]) -> LoadedModel:
    return loaded("tiny", dtype="float16")


def test_replayed_steps_have_the_bits_of_launched_ones(model: LoadedModel) -> None:
    """Sequences of different lengths that begin and end at different times, in buckets of 1, 2 and 4."""
    prompts = [[(7 * i + n) % 250 for i in range(n)] for n in (100, 1, 33)]
    answers = []
    for graphs in (True, False):
        spec = model.kv_spec(chunk_tokens=CHUNK)
        pool = PagePool(spec, 40)
        pool.array[:] = 0xFF  # NaN
        runner = runner_over(model, pool, max_sequences=3, graphs=graphs)
        engine = Engine(
            runner, model.tokenizer, NoStore(pool, model.identity(spec)), EngineSettings(prefill_chunk=48)
        )
        done = engine.generate(prompts, GREEDY)
        done += engine.generate(prompts[:1], GREEDY)
        answers.append([each.logits for each in done])
        if isinstance(runner, GraphRunner):
            assert runner.graphs.replayed > 20
            assert set(runner.graphs.eager) == {"prefill"}
            assert runner.graphs.replayed + runner.graphs.eager["prefill"] == engine.stats().steps
    for ours, theirs in zip(*answers, strict=True):
        # Products of more rows may be summed in another order; attention itself is the same to the bit.
        np.testing.assert_allclose(ours, theirs, atol=0.02)
        assert np.array_equal(ours.argmax(-1), theirs.argmax(-1))


def test_steps_over_codes_are_replayed(loaded: Callable[..., LoadedModel]) -> None:
    """By a batch of one, whose products are the same."""
    model = loaded("tiny", dtype="float16", kv_dtype="fp8_e4m3")
    answers = []
    for graphs in (True, False):
        spec = model.kv_spec(chunk_tokens=CHUNK)
        pool = PagePool(spec, 20)
        pool.array[:] = 0xFF
        runner = runner_over(model, pool, max_sequences=1, graphs=graphs)
        engine = Engine(
            runner, model.tokenizer, NoStore(pool, model.identity(spec)), EngineSettings(prefill_chunk=48)
        )
        answers.append(engine.generate([[7 * i % 250 for i in range(50)]], GREEDY)[0].logits)
        if isinstance(runner, GraphRunner):
            assert runner.graphs.replayed > 10
    assert np.array_equal(answers[0], answers[1])


def test_a_sequence_with_images_is_replayed() -> None:
    """Behind an image, positions are fewer than tokens."""
    tiny = preset("tiny", dtype="float16")
    half = tiny.head_dim // 2
    config = replace(tiny, rope=replace(tiny.rope, sections=(half - 4, 2, 2)), max_positions=320)
    rows = torch.randn(24, config.hidden_size, generator=torch.Generator().manual_seed(1))
    image = PromptImage(10, rows, bytes(32), grid=(4, 6))
    answers = []
    for graphs in (True, False):
        engine, runner = grouped_engine(config, graphs=graphs)
        with_image = engine.add([7 * i % 250 for i in range(50)], GREEDY, images=[image])
        text = engine.add([7 * i % 250 for i in range(50)], GREEDY)
        done = {each.request_id: each for each in engine._finish([with_image, text])}
        answers.append([done[each].logits for each in (with_image, text)])
        if isinstance(runner, GraphRunner):
            assert runner.graphs.replayed > 10
            assert set(runner.graphs.eager) == {"prefill"}
    for ours, theirs in zip(*answers, strict=True):
        assert ours is not None
        np.testing.assert_allclose(ours, theirs, atol=0.02)
    assert not np.allclose(*answers[0], atol=0.5)


GROUPED = {
    "windows": replace(
        preset("tiny-gemma3", dtype="float16"), windows=(37,) * 5 + (None,), score_cap=2.0, max_positions=320
    ),
    "latents": replace(
        preset("tiny-deepseek", dtype="float16"), experts=None, dense_layers=(), max_positions=320
    ),
    "delta": replace(preset("tiny-qwen3-next", dtype="float16"), experts=None, max_positions=320),
    "mamba2": replace(preset("tiny-nemotron-h", dtype="float16"), max_positions=320),
    "mamba2 alone": replace(preset("tiny-mamba2", dtype="float16"), max_positions=320),
}


def grouped_engine(config: ModelConfig, *, graphs: bool) -> tuple[Engine, Model]:
    """With pages whose numbers are not numbers, before somebody writes to them."""
    weights = random_weights(config, seed=3, device="cpu")
    digest = digest_weights(config, weights)
    model = LoadedModel(config, ByteTokenizer(), weights, digest, "cpu")
    spec = model.kv_spec(chunk_tokens=CHUNK)
    pools = [PagePool(part, 60) for part in spec.split()]
    for pool in pools:
        pool.array[:] = 0xFF
    memories = [cuda_memory(pool, config) for pool in pools]
    runner = (GraphRunner if graphs else Model)(config, weights, memories, device="cpu")
    if isinstance(runner, GraphRunner):
        runner.graphs = DecodeGraphs(runner, memories, Rerun(), max_sequences=3, width=20)
    settings = EngineSettings(prefill_chunk=48)
    return Engine(runner, model.tokenizer, NoStore(pools, model.identity(spec)), settings), runner


@pytest.mark.parametrize("kind", GROUPED)
def test_steps_over_groups_are_replayed(kind: str) -> None:
    """Of windows that give pages back, latents, states; and of samples, which share pages at first."""
    prompts = [[(7 * i + n) % 250 for i in range(n)] for n in (100, 1, 33)]
    sampled = SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=1.0, seed=4)
    answers = []
    for graphs in (True, False):
        engine, runner = grouped_engine(GROUPED[kind], graphs=graphs)
        done = [each.logits for each in engine.generate(prompts, GREEDY)]
        tokens = [each.tokens for each in engine.sample(prompts[0], sampled, n=2)]
        answers.append((done, tokens))
        if isinstance(runner, GraphRunner):
            assert runner.graphs.replayed > 20
            assert set(runner.graphs.eager) == {"prefill"}
    for ours, theirs in zip(answers[0][0], answers[1][0], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.02)
        assert np.array_equal(ours.argmax(-1), theirs.argmax(-1))
    assert answers[0][1] == answers[1][1]


def test_steps_with_experts_are_not() -> None:
    engine, runner = grouped_engine(replace(GROUPED["windows"], experts=ExpertsConfig(4, 2, 16)), graphs=True)
    engine.generate([[1, 2, 3]], replace(GREEDY, max_new_tokens=3))
    assert isinstance(runner, GraphRunner)
    assert runner.graphs.eager == {"experts": 3}


def test_short_sequences_launch_blocks_for_short_ones(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And have the bits that they have beside a long one, which takes the larger bucket."""
    monkeypatch.setattr(graphs_module, "SHORT_PAGES", 8)
    grids: list[Sequence[int]] = []

    class Watching(ExecutorLauncher):
        def load(self, instance: Instance) -> Kernel:
            kernel = super().load(instance)

            def launch(grid: Sequence[int], arguments: Sequence[Argument]) -> None:
                if instance.name.startswith("decode"):
                    grids.append(tuple(grid))
                kernel(grid, arguments)

            return launch

    pool = PagePool(model.kv_spec(chunk_tokens=CHUNK), 24)
    generator = np.random.default_rng(6)
    pool.array.view(np.float16)[:] = generator.standard_normal(pool.array.view(np.float16).shape)
    attention = CudaAttention(torch.from_numpy(pool.array), pool.spec, model.config, Watching())
    plain = Model(model.config, model.weights, [attention], device="cpu")
    graphs = DecodeGraphs(plain, [attention], Rerun(), max_sequences=2, width=20)
    short, long = Span((list(range(8)),), 120, 121), Span((list(range(20)),), 300, 301)

    def replayed(*spans: Span) -> torch.Tensor:
        grids.clear()
        logits = graphs.compute(Step(spans, [9] * len(spans), list(range(len(spans))), COMPLETED, CHUNK))
        assert logits is not None
        return logits

    alone = replayed(short, short)
    assert grids == [(model.config.kv_heads, 1, 2)] * model.config.layers
    beside = replayed(short, long)
    assert grids == [(model.config.kv_heads, 3, 2)] * model.config.layers  # 20 pages are 3 splits
    assert torch.equal(alone[0], beside[0])
    replayed(long)
    assert grids == [(model.config.kv_heads, 3, 1)] * model.config.layers
    replayed(short)
    assert grids == [(model.config.kv_heads, 1, 1)] * model.config.layers


def test_what_is_not_replayed_is_counted(model: LoadedModel) -> None:
    pool = PagePool(model.kv_spec(chunk_tokens=CHUNK), 8)
    runner = runner_over(model, pool, max_sequences=2)
    assert isinstance(runner, GraphRunner)
    one = Span(([0],), 3, 4)

    class OnTheirWay:
        pending = True

        def wait(self, layer: int) -> None: ...

    def step(*spans: Span, rows: int = 1, arrivals: object = COMPLETED) -> Step:
        return Step(spans, [1] * len(spans), list(range(rows)), arrivals, CHUNK)  # type: ignore[arg-type]

    for refused in (
        step(Span(([0],), 0, 4)),
        step(one, rows=0),
        step(replace(one, drafted=1)),
        step(one, arrivals=OnTheirWay()),
        replace(step(one), adapters=("a",)),
        step(one, one, one, rows=3),
        step(Span((list(range(21)),), 3, 4)),
    ):
        assert runner.graphs.compute(refused) is None
    assert runner.graphs.eager == {
        "prefill": 2,
        "drafts": 1,
        "pages on their way": 1,
        "adapters": 1,
        "too many sequences": 1,
        "too many pages": 1,
    }
    assert runner.graphs.replayed == 0


def test_a_table_is_written_again_when_it_is_another(model: LoadedModel) -> None:
    """Rows are told apart by the very list, and by its length."""
    pool = PagePool(model.kv_spec(chunk_tokens=CHUNK), 12)
    generator = np.random.default_rng(5)
    pool.array.view(np.float16)[:] = generator.standard_normal(pool.array.view(np.float16).shape)
    replaying = runner_over(model, pool, max_sequences=1)
    plain = runner_over(model, pool, max_sequences=1, graphs=False)
    table = [3]
    for pages, start in ((table, 5), (table, 15), ([7, 3], 20), ([7, 4], 20), (table, 6)):
        if start == 15:
            table += [8]
        step = Step((Span((pages,), start, start + 1),), [9], [0], COMPLETED, CHUNK)
        assert torch.equal(replaying.compute(step), plain.compute(step))


def test_capturing_and_dropping_need_no_collector(model: LoadedModel) -> None:
    """Device memory must not be given back in the middle of a capture, nor wait for the collector later."""
    pool = PagePool(model.kv_spec(chunk_tokens=CHUNK), 8)
    attention = CudaAttention(torch.from_numpy(pool.array), pool.spec, model.config, ExecutorLauncher(2))
    enabled: list[bool] = []

    class Watching(Rerun):
        def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            enabled.append(gc.isenabled())
            return super().record(step)

    plain = Model(model.config, model.weights, [attention], device="cpu")
    graphs = DecodeGraphs(plain, [attention], Watching(), max_sequences=2, width=20)
    assert enabled == [False, False]
    assert gc.isenabled()
    left = [weakref.ref(graphs), weakref.ref(plain), weakref.ref(attention)]
    gc.disable()
    try:
        del graphs, plain, attention
        assert [each() for each in left] == [None, None, None]
    finally:
        gc.enable()


def test_buckets() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(5) == [1, 2, 4, 8]
    assert bucket_sizes(32)[-1] == 32
