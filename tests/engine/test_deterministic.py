"""``--deterministic``: a token's logits have the same bits in every step, and from every tier."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.kernels.device import kernel_launcher
from tests.engine.kernels.executor import missing_tools
from tests.engine.stored import Stored
from tests.engine.test_quantised import CASES, quantise_folder
from tests.portions import chosen, portion
from tests.tiny_models import ARCHITECTURES, GROUPED, LLAMA_LIKE, STATES, VARIANTS, VOCAB
from tierstore import native
from tierstore.errors import UsageError
from tierstore.testing.processes import DaemonProcess
from tierstore.tiers.hbm import COMPLETED, PagePool
from tierstore_engine.attention.base import Span
from tierstore_engine.build import load_model, make_runner, open_model
from tierstore_engine.deterministic import check_gpu
from tierstore_engine.drafting import PromptLookupDrafter
from tierstore_engine.errors import KernelError
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.presets import preset
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Step

from .same_bits import Campaign, World, place_of
from .test_cuda_attention import cuda_memory
from .test_oracle import finish

CHUNK, TOKENS, SEQUENCES = 16, 150, 3
PAGES = SEQUENCES * -(-TOKENS // CHUNK)
PROMPTS = [[random.Random(seed).randrange(VOCAB) for _ in range(TOKENS)] for seed in range(SEQUENCES)]

pytestmark = pytest.mark.skipif(native.DECODE is None, reason="tierstore was built without a C compiler")


class Sequences:
    """A model, and sequences in its pages, each computed up to a length."""

    def __init__(self, model: LoadedModel) -> None:
        self.pools = [PagePool(spec, PAGES) for spec in model.kv_spec(chunk_tokens=CHUNK).split()]
        self.runner = make_runner(model, self.pools, EngineSettings())
        self.lengths = [0] * SEQUENCES

    def table(self, number: int) -> range:
        pages = PAGES // SEQUENCES
        return range(number * pages, (number + 1) * pages)

    def compute(self, stops: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """One step: sequences up to a length each. Return the logits of their new tokens."""
        tables = {number: (self.table(number),) * len(self.pools) for number, _ in stops}
        spans = [Span(tables[number], self.lengths[number], stop) for number, stop in stops]
        tokens = [
            token
            for (number, _), span in zip(stops, spans, strict=True)
            for token in PROMPTS[number][span.start : span.stop]
        ]
        step = Step(tuple(spans), tokens, range(len(tokens)), COMPLETED, CHUNK)
        for number, stop in stops:
            self.lengths[number] = stop
        return list(torch.split(self.runner.compute(step), [span.tokens for span in spans]))


def in_other_steps(sequences: Sequences, chance: random.Random) -> list[torch.Tensor]:
    """Return the logits of all tokens of the sequences, computed in random steps."""
    found: list[list[torch.Tensor]] = [[] for _ in range(SEQUENCES)]
    while any(length < TOKENS for length in sequences.lengths):
        stops = []
        for number in chance.sample(range(SEQUENCES), chance.randint(1, SEQUENCES)):
            length = sequences.lengths[number]
            if length < TOKENS:
                most = chance.choice([1, 1, 4, 20, TOKENS])
                stops.append((number, min(length + chance.randint(1, most), TOKENS)))
        if stops:
            for (number, _), logits in zip(stops, sequences.compute(stops), strict=True):
                found[number].append(logits)
    return [torch.cat(logits) for logits in found]


FAMILIES = (*ARCHITECTURES, *GROUPED, *VARIANTS, *STATES, *LLAMA_LIKE)
EVENTS = {"from hbm", "from host", "from disk", "preempted"}
LATENTS = ("deepseek-v2", "deepseek-v3")  # GPUs compute no quantised latents
WITH_STATES = ("qwen3-next", "falcon-h1", "nemotron-h", "jamba", "lfm2", "mamba", "zamba2")
KINDS = ("llama3", "gemma3", "deepseek-v3", "qwen2-moe", "gpt-oss", "qwen3-next", "falcon-h1", "jamba")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", chosen(FAMILIES, *KINDS))
@pytest.mark.parametrize("cases", portion(3, 30))
def test_logits_have_the_same_bits_in_all_steps(
    name: str, dtype: str, cases: int, checkpoints: Callable[..., Path]
) -> None:
    model = load_model(str(checkpoints(name)), device="cpu", dtype=dtype, deterministic=True)
    sequences = Sequences(model)
    right = [sequences.compute([(number, TOKENS)])[0] for number in range(SEQUENCES)]
    threads = torch.get_num_threads()
    try:
        for seed in range(cases):
            torch.set_num_threads(1 + seed % 3)
            others = Sequences(model)
            for logits, whole in zip(in_other_steps(others, random.Random(seed)), right, strict=True):
                assert torch.equal(logits, whole)
            for pool, other in zip(sequences.pools, others.pools, strict=True):
                assert np.array_equal(pool.array, other.array)
    finally:
        torch.set_num_threads(threads)
    plain = Sequences(load_model(str(checkpoints(name)), device="cpu", dtype=dtype))
    [logits] = plain.compute([(0, TOKENS)])
    exact = 1e-3 if name == "zamba2" else 2e-4  # rounding grows from block to block: these have no residuals
    assert (logits - right[0]).abs().max() <= (exact if dtype == "float32" else 0.25)


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    file = os.environ.get("SAME_BITS_LOG")
    campaign = Campaign(None if file is None else Path(file))
    yield campaign
    # Few worlds may lack something by chance.
    assert campaign.worlds < len(FAMILIES) or set(campaign.tally.happened) >= EVENTS


@pytest.mark.parametrize("name", chosen(FAMILIES, "llama3", "gemma3", "deepseek-v3", *WITH_STATES))
@pytest.mark.parametrize("world", chosen(range(43), 0))
def test_requests_have_the_bits_of_a_cold_step(
    name: str,
    world: int,
    campaign: Campaign,
    checkpoints: Callable[..., Path],
    shared_daemon: DaemonProcess,
    tmp_path: Path,
) -> None:
    """In the soak, 40 requests in each of 42 further worlds of 59 families: 100,000 cases. Families take
    turns, so a part of the soak has all of them. ``SAME_BITS_LOG=FILE`` writes a line to FILE after each
    world, and skips the worlds that FILE has."""
    title = f"{name} {world}"
    if campaign.has_played(title):
        pytest.skip("played before")
    chance = random.Random(title)
    model = load_model(
        str(checkpoints(name)),
        device="cpu",
        dtype=chance.choice(["float32", "bfloat16"]),
        kv_dtype="auto" if name in STATES else chance.choice(["auto", "int8"]),
        deterministic=True,
    )
    place = place_of(chance, tmp_path / "store", shared_daemon.url)
    tally = World(model, place, world).play(40 if world else 10)
    campaign.add(title, tally)
    assert not tally.differing


def refused_on_a_gpu(model: LoadedModel) -> str:
    """Return why the kernels do not compute a model with the same bits; empty if they do."""
    try:
        check_gpu(model.config)
        for pool in (PagePool(spec, 1) for spec in model.kv_spec(chunk_tokens=CHUNK).split()):
            cuda_memory(pool, model.config)
    except (UsageError, KernelError) as error:
        return str(error)
    return ""


@pytest.mark.skipif(missing_tools() is not None, reason="kernels cannot be executed here")
@pytest.mark.parametrize("name", chosen(FAMILIES, "llama3", "deepseek-v3", "gpt-oss"))
@pytest.mark.parametrize("world", chosen(range(7), 0))
def test_requests_on_the_executor_have_the_bits_of_a_cold_step(
    name: str,
    world: int,
    campaign: Campaign,
    checkpoints: Callable[..., Path],
    shared_daemon: DaemonProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same by the kernels for GPUs: 5,000 cases in the soak. Parts of a sequence have 64 tokens here
    instead of 2,048."""
    title = f"executor {name} {world}"
    if campaign.has_played(title):
        pytest.skip("played before")
    chance, launcher = random.Random(title), kernel_launcher(fused=True)
    model = load_model(
        str(checkpoints(name)),
        device="cpu",
        dtype=chance.choice(["float16", "bfloat16"]),
        kv_dtype="auto" if name in (*STATES, *LATENTS) else chance.choice(["auto", "int8"]),
    )
    model = replace(model, config=replace(model.config, arithmetic="of a test"))
    if why := refused_on_a_gpu(model):
        pytest.skip(why)
    monkeypatch.setattr("tierstore_engine.attention.cuda.PART_TOKENS", 64)
    monkeypatch.setattr("tierstore_engine.build.make_memory", partial(cuda_memory, launcher=launcher))
    launcher.seed = world
    place = place_of(chance, tmp_path / "store", shared_daemon.url)
    tally = World(model, place, world, crowds=(1, 5, 12) if world else (2,)).play(20 if world else 3)
    assert any("multiply_rows" in each for each in launcher.launches)
    campaign.add(title, tally)
    assert not tally.differing


@pytest.fixture
def model(request: pytest.FixtureRequest, checkpoints: Callable[..., Path]) -> LoadedModel:
    return load_model(str(checkpoints("llama3")), device="cpu", kv_dtype=request.param, deterministic=True)


GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True, keep_logits=True)


@pytest.mark.parametrize("model", ["auto", "int8", "fp8_e4m3"], indirect=True)
def test_hits_from_every_tier_have_the_bits_of_a_cold_run(
    model: LoadedModel, stored_engine: Callable[..., Stored]
) -> None:
    """Another engine computed the shared beginnings: in other steps, beside other prompts, and while requests
    were preempted. Then a prompt's beginning comes from disk, from host memory and from the pool."""
    chance = random.Random(1)
    first = stored_engine(model, disk="store", pool_pages=22, prefill_chunk=48)
    begun = [[*PROMPTS[0][: chance.randrange(1, TOKENS)], *PROMPTS[number % 3][:40]] for number in range(6)]
    for prompt in (PROMPTS[1], PROMPTS[0][:-1], *begun):
        first.engine.add(prompt, replace(GREEDY, max_new_tokens=60))
    assert any(completion.metrics.preemptions for completion in finish(first.engine).values())
    first.close()
    [cold] = stored_engine(model, prefill_chunk=160).engine.generate([PROMPTS[0]], GREEDY)
    stored = stored_engine(model, disk="store", prefill_chunk=32)
    for tier in ("disk", "host", "hbm"):
        number = stored.engine.add(PROMPTS[0], GREEDY)
        for prompt in begun[:2]:
            stored.engine.add(prompt, GREEDY)
        warm = finish(stored.engine)[number]
        assert warm.metrics.reused_by_tier.get(tier, 0) > 0
        assert warm.tokens == cold.tokens
        assert warm.logits is not None
        assert warm.logits.tobytes() == cold.logits.tobytes()
        assert stored.store.flush(30)
        if tier == "disk":
            stored.store.evict("hbm")


@pytest.mark.parametrize("model", ["auto", "int8", "k8v4"], indirect=True)
def test_drafts_do_not_change_the_bits(model: LoadedModel, stored_engine: Callable[..., Stored]) -> None:
    prompt = PROMPTS[0][:20] * 4
    plain, drafted = (
        stored_engine(model, drafter=drafter).engine.generate([prompt], replace(GREEDY, max_new_tokens=40))[0]
        for drafter in (None, PromptLookupDrafter(tokens=4))
    )
    assert drafted.metrics.accepted_tokens > 0
    assert drafted.tokens == plain.tokens
    assert plain.logits is not None
    assert drafted.logits is not None
    assert drafted.logits.tobytes() == plain.logits.tobytes()


@pytest.mark.parametrize("model", ["auto"], indirect=True)
def test_pages_computed_otherwise_are_not_used(
    model: LoadedModel, checkpoints: Callable[..., Path], stored_engine: Callable[..., Stored]
) -> None:
    plain = stored_engine(load_model(str(checkpoints("llama3")), device="cpu"), disk="store")
    plain.engine.generate([PROMPTS[0]], GREEDY)
    plain.close()
    [completion] = stored_engine(model, disk="store").engine.generate([PROMPTS[0]], GREEDY)
    assert completion.metrics.reused_tokens == 0


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("tiny", {"dtype": "float16"}, "computes in float32 or bfloat16, not float16"),
    ],
)
def test_what_cannot_have_the_same_bits_is_refused(model: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=f"--deterministic {words}"):
        open_model(model, device="cpu", deterministic=True, **options)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("tiny", "computes in float16 or bfloat16 on a GPU, not float32: give --dtype"),
        ("tiny-gemma3", "takes no norms other than RMSNorm with plain weights on a GPU: add --device cpu"),
        ("tiny-qwen3-next", "takes no recurrent states on a GPU: add --device cpu"),
    ],
)
def test_what_a_gpu_cannot_compute_is_refused(model: str, words: str) -> None:
    config = preset(model, dtype="float32" if "float32" in words else "bfloat16")
    with pytest.raises(UsageError, match=f"--deterministic {words}"):
        check_gpu(config)


def test_quantised_weights_on_a_gpu_are_refused(
    checkpoints: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantise_folder(CASES["gptq"], checkpoints("llama3"), tmp_path / "model")
    monkeypatch.setattr("tierstore_engine.build.resolve_device", lambda device, dtype: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    options = {"deterministic": True, "dtype": "bfloat16"}
    with pytest.raises(UsageError, match=r"^--deterministic takes no weights in .* on a GPU: add --expand"):
        open_model(str(tmp_path / "model"), **options)
    opened = open_model(str(tmp_path / "model"), expand_weights=True, **options)
    assert "sm_90" in opened.config.arithmetic


def test_it_needs_the_compiled_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "DECODE", None)
    with pytest.raises(UsageError, match="install a C compiler, then tierstore again"):
        open_model("tiny", device="cpu", deterministic=True)
