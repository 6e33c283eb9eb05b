"""The CUDA backend, its kernels on the executor (or a device), beside the CPU backend and transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.kernels.device import DEVICE, kernel_launcher
from tests.engine.kernels.executor import SCHEDULES, missing_tools
from tests.portions import chosen, diagonal
from tests.tiny_models import reference_model
from tierstore.spec import KVSpec, LayerKind
from tierstore.tiers.hbm import PagePool
from tierstore_connectors.bundled import NoStore
from tierstore_engine.attention.base import BatchLayout, SeenTokens, Span
from tierstore_engine.attention.cpu import CpuAttention
from tierstore_engine.attention.cuda import CudaAttention
from tierstore_engine.attention.cuda_latents import CudaLatentAttention
from tierstore_engine.attention.cuda_states import CudaDeltaStates, CudaMamba2States
from tierstore_engine.build import load_model
from tierstore_engine.config import ModelConfig, RopeConfig
from tierstore_engine.draft_model import DraftModel
from tierstore_engine.drafting import Drafter, PromptLookupDrafter
from tierstore_engine.engine import Engine
from tierstore_engine.errors import KernelError
from tierstore_engine.kernels.launcher import Launcher
from tierstore_engine.kv_format import KVFormat
from tierstore_engine.loaded import LoadedModel, make_memory
from tierstore_engine.model import Memory, Model
from tierstore_engine.outputs import EngineStats
from tierstore_engine.presets import preset
from tierstore_engine.rope import Rope, rotate
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_engine.weight_slots import slots

from .conftest import Oracle
from .test_drafting import Echo

CHUNK = 16
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True, keep_logits=True)
PARTS = (("tiny", "auto"), ("tiny-deepseek", "auto"), ("tiny", "int8"))
ONE_TOKEN = replace(GREEDY, max_new_tokens=1)


@pytest.fixture(autouse=True)
def executor() -> None:
    reason = missing_tools() if DEVICE == "executor" else None
    if reason:
        pytest.skip(f"kernels cannot be executed: {reason}")


def cuda_attention(pool: PagePool, config: ModelConfig, launcher: Launcher) -> CudaAttention:
    return CudaAttention(torch.from_numpy(pool.array), pool.spec, config, launcher)


def memory_kind(
    spec: KVSpec, config: ModelConfig
) -> type[CudaAttention | CudaLatentAttention | CudaDeltaStates | CudaMamba2States]:
    """What a layer group remembers by on a GPU."""
    kind = spec.groups[0].kind
    if kind is LayerKind.RECURRENT_STATE:
        return CudaDeltaStates if config.mamba is None else CudaMamba2States
    return CudaLatentAttention if kind is LayerKind.MLA_LATENT else CudaAttention


def cuda_memory(pool: PagePool, config: ModelConfig, *, launcher: Launcher | None = None) -> Memory:
    """The same, its kernels on the executor (or a device)."""
    kernels = launcher or kernel_launcher()
    return memory_kind(pool.spec, config)(torch.from_numpy(pool.array), pool.spec, config, kernels)


def runner_over(
    model: LoadedModel, remember: Callable[[PagePool, ModelConfig], Memory]
) -> tuple[Model, NoStore]:
    spec = model.kv_spec(chunk_tokens=CHUNK)
    connector = NoStore([PagePool(part, 64) for part in spec.split()], model.identity(spec))
    memories = [remember(pool, model.config) for pool in connector.pools]
    return Model(model.config, model.weights, memories, device="cpu"), connector


def engine_over(
    model: LoadedModel,
    remember: Callable[[PagePool, ModelConfig], Memory],
    *,
    drafter: Drafter | None = None,
    **settings: int,
) -> Engine:
    runnable, connector = runner_over(model, remember)
    made = EngineSettings(prefill_chunk=48, **settings)
    return Engine(runnable, model.tokenizer, connector, made, drafter=drafter)


def logits_of(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[np.ndarray]:
    completions = engine.generate(prompts, params)
    engine.close()
    found = [completion.logits for completion in completions]
    assert all(logits is not None for logits in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tiny_engine_beside_the_cpu_backend(dtype: str) -> None:
    """A mixed batch of chunked prefills and decodes: the same model on both backends.

    The backends round differently, so the logits agree as far as ``dtype`` is precise. In bfloat16 two tokens
    may be as likely as each other, and which of them comes first is up to the processor: the CPU backend is
    asked for the logits behind each token that ours has chosen.
    """
    model = load_model("tiny", device="cpu", dtype=dtype)
    prompts = [[(7 * i + n) % 250 for i in range(n)] for n in (100, 1, 33, 130)]
    launcher = kernel_launcher()
    launcher.seed = 3
    engine = engine_over(model, lambda pool, config: cuda_attention(pool, config, launcher))
    ours = engine.generate(prompts, GREEDY)
    engine.close()
    bound = 0.02 if dtype == "float16" else 0.15
    for prompt, answer in zip(prompts, ours, strict=True):
        begun = [[*prompt, *answer.tokens[:step]] for step in range(GREEDY.max_new_tokens)]
        theirs = np.concatenate(logits_of(engine_over(model, CpuAttention), begun, ONE_TOKEN))
        assert np.abs(answer.logits - theirs).max() / theirs.std() < bound
    kinds = {name.split("<")[0] for name in launcher.launches}
    assert kinds == {"rope_write", "prefill", "decode_simt", "combine_splits", "add_norm", "silu_mul"}


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("tiny", "int8"), ("tiny", "fp8_e4m3"), ("tiny-gemma3", "int8"), ("tiny-qwen3-next", "fp8_e4m3")],
)
def test_tiny_engine_over_codes(name: str, kv_dtype: str) -> None:
    """The same with quantised pages, also of windows and beside states. A last bit may put a number on
    another code, so the bound is wider."""
    model = load_model(name, device="cpu", dtype="float16", kv_dtype=kv_dtype)
    prompts = [[(7 * i + n) % 250 for i in range(n)] for n in (100, 33)]
    launcher = kernel_launcher()
    engine = engine_over(model, partial(cuda_memory, launcher=launcher))
    ours = engine.generate(prompts, GREEDY)
    engine.close()
    for prompt, answer in zip(prompts, ours, strict=True):
        begun = [[*prompt, *answer.tokens[:step]] for step in range(0, GREEDY.max_new_tokens, 5)]
        theirs = np.concatenate(logits_of(engine_over(model, make_memory), begun, ONE_TOKEN))
        assert np.abs(answer.logits[::5] - theirs).max() / theirs.std() < 0.25
    kinds = {launched.split("<")[0] for launched in launcher.launches}
    assert kinds >= {"quantise_write", "prefill", "decode_simt", "combine_splits"}


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("tiny", "auto"),
        ("tiny-gemma3", "int8"),
        ("tiny-deepseek", "auto"),
        ("tiny-qwen3-next", "int8"),
        ("tiny-nemotron-h", "auto"),
    ],
)
def test_drafts(name: str, kv_dtype: str, loaded: Callable[..., LoadedModel]) -> None:
    """From the prompt, right and wrong ones, and a draft model's: the tokens are those of the plain run. The
    draft model is the model itself, which is right unless two tokens are as likely as each other."""
    model = loaded(name, dtype="float16", kv_dtype=kv_dtype)
    asked = [[(7 * i + n) % 50 for i in range(n)] * 2 for n in (9, 17)]
    params = replace(GREEDY, max_new_tokens=16)

    def answers(drafter: Drafter | None) -> tuple[list[tuple[int, ...]], EngineStats]:
        engine = engine_over(model, cuda_memory, drafter=drafter)
        completions, stats = engine.generate(asked, params), engine.stats()
        for pool in engine.connector.pools:
            assert pool.free_pages == pool.num_pages
        engine.close()
        return [completion.tokens for completion in completions], stats

    plain, _ = answers(None)
    known = {tuple(prompt): tokens for prompt, tokens in zip(asked, plain, strict=True)}
    drafters: list[Drafter] = [
        PromptLookupDrafter(tokens=3),
        Echo(known, tokens=4, wrong=0.4),
        DraftModel(*runner_over(model, cuda_memory), tokens=3, settings=EngineSettings(prefill_chunk=48)),
    ]
    for drafter in drafters:
        drafted, stats = answers(drafter)
        assert drafted == plain
        assert stats.accepted_tokens <= stats.drafted_tokens
        if not isinstance(drafter, PromptLookupDrafter):
            assert stats.accepted_tokens > 0
    assert stats.accepted_tokens > 0.8 * stats.drafted_tokens


# The others of the suite are in test_device_groups: there the kernels' tokens are compared, from every tier.
HERE = ("llama3", "mistral-windowed", "llama-linear-mqa-biased", "gemma3", "gpt-oss", "deepseek-v3")


@pytest.mark.parametrize("name", chosen([*HERE, "gemma2", "llama4", "qwen3-next", "nemotron-h"], *HERE))
def test_against_transformers(
    name: str, oracles: Callable[[str], Oracle], loaded: Callable[..., LoadedModel]
) -> None:
    """Grouped heads, one KV head for all, windows, attention chunks, sinks, capped scores; layer groups that
    give pages back; latents; recurrent states. In float16 the rounding of weights and activations is most
    of the difference to transformers' float32; it is the CPU backend's as well, and ours may not be much
    more."""
    oracle = oracles(name)
    model = loaded(str(oracle.folder), dtype="float16")
    difference = [
        largest_difference(logits_of(engine, [oracle.prompt])[0], oracle.logits.numpy())
        for engine in (engine_over(model, cuda_memory), engine_over(model, make_memory))
    ]
    assert difference[0] < 1.5 * difference[1] + 1e-3
    assert difference[1] < 0.1


@pytest.mark.parametrize("name", ["granite-hybrid-dense", "nemotron-h-dense"])
def test_mamba2_with_limited_steps_against_transformers(
    name: str, checkpoints: Callable[..., Path], loaded: Callable[..., LoadedModel]
) -> None:
    """Which transformers computes without a cache only: over our own tokens, at once."""
    model = loaded(str(checkpoints(name)), dtype="float16")
    prompt, theirs = [(7 * i + 3) % 250 for i in range(130)], reference_model(name)
    difference = []
    for remember in (cuda_memory, make_memory):
        [ours] = logits_of(engine_over(model, remember), [prompt])
        with torch.inference_mode():
            rows = theirs(torch.tensor([[*prompt, *ours.argmax(-1)[:-1]]])).logits[0, len(prompt) - 1 :]
        difference.append(float(np.abs(ours - rows.numpy()).max() / rows.std()))
    assert difference[0] < 1.5 * difference[1] + 1e-3
    assert difference[1] < 0.1


def test_the_tiny_preset_against_transformers() -> None:
    """The preset's own weights in transformers' model, in float32, over what we answered."""
    import transformers

    model = load_model("tiny", device="cpu", dtype="float16")
    config = model.config
    assert config.rope.kind == "default"
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tied_embeddings,
        )
    ).eval()
    theirs.load_state_dict({slot.name: slot.tensor.float() for slot in slots(config, model.weights)})
    prompt = [(7 * i + 3) % 250 for i in range(130)]
    engine = engine_over(model, lambda pool, config: cuda_attention(pool, config, kernel_launcher()))
    [answer] = engine.generate([prompt], GREEDY)
    engine.close()
    assert answer.logits is not None
    with torch.inference_mode():
        rows = theirs(torch.tensor([[*prompt, *answer.tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    assert largest_difference(answer.logits, rows.numpy()) < 0.02


HYBRIDS: Mapping[str, Mapping[str, Any]] = {
    "tiny-granite-hybrid": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "intermediate_size": 64,
        "shared_intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0625,
        "logits_scaling": 2.0,
    },
    "tiny-nemotron-h": {
        "layers_block_type": [
            *("linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "linear_attention")
        ],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "time_step_min": 1e-9,
    },
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_presets_with_mamba2_against_transformers(name: str) -> None:
    """The same, all at once: with a cache transformers computes Mamba-2 another way."""
    import transformers

    model = load_model(name, device="cpu", dtype="float16")
    config = model.config
    family = "GraniteMoeHybrid" if config.experts else "NemotronH"
    shape = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
    }
    weights = {slot.name: slot.tensor.float() for slot in slots(config, model.weights)}
    theirs, loading = getattr(transformers, f"{family}ForCausalLM").from_pretrained(
        None,
        config=getattr(transformers, f"{family}Config")(**(shape | HYBRIDS[name])),
        state_dict={_named_by_them(name, family): tensor for name, tensor in weights.items()},
        output_loading_info=True,
    )
    assert not any(loading.values())
    prompt = [(7 * i + 3) % 250 for i in range(130)]
    [ours] = logits_of(engine_over(model, cuda_memory), [prompt])
    with torch.inference_mode():
        rows = theirs(torch.tensor([[*prompt, *ours.argmax(-1)[:-1]]])).logits[0, len(prompt) - 1 :]
    assert largest_difference(ours, rows.numpy()) < 0.02


def _named_by_them(name: str, family: str) -> str:
    """Nemotron-H's checkpoints call the first and the last tensor of a model as nobody else does."""
    if family == "NemotronH":
        name = name.replace("model.embed_tokens.", "model.embeddings.").replace(
            "model.norm.", "model.norm_f."
        )
    return name


def largest_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Of the logits ``[steps, vocab]`` up to the first token that differs, in standard deviations of
    ``theirs``; at least five tokens must be the same."""
    theirs = theirs[: len(ours)]
    same = (ours.argmax(-1) == theirs.argmax(-1)).tolist()
    steps = same.index(False) + 1 if False in same else len(same)
    assert steps >= 5
    return float(np.abs(ours[:steps] - theirs[:steps]).max() / theirs.std())


class Backends:
    """Both backends over pools of their own, and one batch that mixes everything."""

    def __init__(
        self,
        *,
        window: int | None = None,
        seed: int = 0,
        heads: int = 6,
        head_dim: int = 64,
        kv: KVFormat | None = None,
    ) -> None:
        self.config = replace(
            preset("tiny", dtype="float16"),
            heads=heads,
            kv_heads=2,
            head_dim=head_dim,
            windows=(None, window),
            kv=kv or KVFormat(),
        )
        self.pools = [PagePool(self.config.kv_spec(chunk_tokens=CHUNK), 40) for _ in range(2)]
        self.ours_launcher = launcher = kernel_launcher()
        launcher.seed = seed
        self.ours = cuda_attention(self.pools[0], self.config, launcher)
        self.theirs = CpuAttention(self.pools[1], self.config)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed)).tolist()
        lengths = [(0, 40), (77, 1), (16, 25), (31, 1), (100, 7), (295, 9)]
        self.spans = [
            Span(([order.pop() for _ in range(-(-sum(n) // CHUNK))],), n[0], sum(n)) for n in lengths
        ]
        for span in self.spans:
            if span.start:
                self.write(Span(span.tables, 0, span.start))

    def numbers(self, tokens: int, heads: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(tokens * 100 + heads)
        return torch.randn((tokens, heads, self.config.head_dim), generator=generator).half()

    def write(self, span: Span) -> None:
        batch = self.batch([span])
        for layer in range(self.config.layers):
            keys, values = self.numbers(span.tokens, 2), self.numbers(span.tokens, 2) * (layer + 1)
            for backend in (self.ours, self.theirs):
                backend.write(layer, keys, values, batch)

    def batch(self, spans: list[Span]) -> BatchLayout:
        return BatchLayout.of(spans, chunk_tokens=CHUNK, device="cpu")


@pytest.mark.parametrize(*diagonal(window=[None, 20], seed=SCHEDULES))
def test_mixed_batch_in_every_layer(window: int | None, seed: int) -> None:
    both = Backends(window=window, seed=seed)
    batch = both.batch(both.spans)
    tokens = sum(span.tokens for span in both.spans)
    queries = both.numbers(tokens, 6)
    for layer in range(2):
        for backend in (both.ours, both.theirs):
            backend.write(layer, both.numbers(tokens, 2), both.numbers(tokens, 2) + layer, batch)
        ours, theirs = both.ours.attend(layer, queries, batch), both.theirs.attend(layer, queries, batch)
        torch.testing.assert_close(ours, theirs, atol=4e-3, rtol=4e-3)
    assert np.array_equal(both.pools[0].array, both.pools[1].array)


@pytest.mark.parametrize(*diagonal(window=[None, 20], seed=SCHEDULES))
def test_tokens_of_an_image_see_one_another(window: int | None, seed: int) -> None:
    """Beside text in the same span and alone, in one part and in several, longer and shorter than windows."""
    both = Backends(window=window, seed=seed)
    images = [(range(3, 20), range(20, 39)), (), (range(16, 41),), (), (range(101, 102),), (range(296, 303),)]
    spans = [replace(span, mutual=mutual) for span, mutual in zip(both.spans, images, strict=True)]
    batch = both.batch(spans)
    tokens = sum(span.tokens for span in spans)
    queries = both.numbers(tokens, 6)
    for layer in range(2):
        for backend in (both.ours, both.theirs):
            backend.write(layer, both.numbers(tokens, 2), both.numbers(tokens, 2) + layer, batch)
        ours, lse = both.ours.attend_with_lse(layer, queries, batch)
        theirs, their_lse = both.theirs.attend_with_lse(layer, queries, batch)
        torch.testing.assert_close(ours, theirs, atol=4e-3, rtol=4e-3)
        torch.testing.assert_close(lse, their_lse, atol=4e-3, rtol=4e-3)
        assert not torch.allclose(ours, both.ours.attend(layer, queries, both.batch(both.spans)), atol=0.1)


def test_a_span_in_other_tables_keeps_its_images() -> None:
    span = Span(([1, 2, 3],), 20, 44, mutual=(range(20, 24), range(30, 44)))
    assert [(part.start, part.stop, part.mutual) for part in span.parts()] == [
        (20, 24, (range(20, 24),)),
        (24, 30, ()),
        (30, 44, (range(30, 44),)),
    ]
    assert span.moved(([3],), 16) == Span(([3],), 4, 28, mutual=(range(4, 8), range(14, 28)))


RANGES = (((3.0, 2.0), (1.5, 2.5)),) * 2  # what is larger is cut off


@pytest.mark.parametrize(
    ("name", "seed"),
    chosen(
        [
            *product(("fp8_e4m3", "k8v4, static"), SCHEDULES),
            *product(("fp8_e5m2", "int8", "int4", "fp8_e4m3, static"), SCHEDULES[:1]),
        ],
        ("fp8_e4m3", 1),
        ("k8v4, static", 0),
        ("int4", 0),
    ),
)
def test_quantised_pages(name: str, seed: int) -> None:
    """Pages equal in every bit, and attention over them by every kernel: decoding on CUDA cores and on tensor
    cores, chunks, chunks in splits, windows."""
    name, *static = name.split(", ")
    kv = replace(KVFormat.parse(name), ranges=RANGES if static else ())
    for heads, head_dim, window in ((6, 64, None), (2, 16, 20)):
        both = Backends(window=window, seed=seed, heads=heads, head_dim=head_dim, kv=kv)
        batch = both.batch(both.spans)
        tokens = sum(span.tokens for span in both.spans)
        queries = both.numbers(tokens, heads)
        for layer in range(2):
            for backend in (both.ours, both.theirs):
                backend.write(layer, both.numbers(tokens, 2), both.numbers(tokens, 2) + layer, batch)
            ours, theirs = both.ours.attend(layer, queries, batch), both.theirs.attend(layer, queries, batch)
            torch.testing.assert_close(ours, theirs, atol=4e-3, rtol=4e-3)
        assert np.array_equal(both.pools[0].array, both.pools[1].array)
        kinds = {launched.split("<")[0] for launched in both.ours_launcher.launches}
        decode = "decode_mma" if heads == 6 else "decode_simt"
        assert kinds == {"quantise_write", "prefill", "combine_chunks", decode, "combine_splits"}


def test_chunks_in_splits_are_launched_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a long past a chunk goes in splits, many of them in as many launches as memory asks for: that
    changes no bits."""
    found = []
    for bound in (1 << 17, 6 * 20):
        monkeypatch.setattr("tierstore_engine.attention.cuda.MOST_PARTS", bound)
        both = Backends()
        long = both.spans[5]
        spans = [Span(long.tables, stop - 4, stop) for stop in (270, 290, 304)] + [both.spans[4]]
        launcher = both.ours_launcher
        launcher.launches.clear()
        found.append(both.ours.attend(0, both.numbers(19, 6), both.batch(spans)))
        split = ["true" in name for name in launcher.launches if name.startswith("prefill")]
        assert sorted(split) == ([False, True] if bound > 1000 else [False, True, True])
    assert torch.equal(found[0], found[1])


def test_rotating_while_writing_changes_nothing() -> None:
    both = Backends()
    batch = both.batch(both.spans)
    tokens = sum(span.tokens for span in both.spans)
    queries, keys, values = torch.split(both.numbers(tokens, 10), [6, 2, 2], dim=1)
    positions = torch.cat([torch.arange(span.start, span.stop) for span in both.spans])
    rotations = Rope(RopeConfig(), 64, device="cpu").rotations(positions, torch.float16)
    rotated = both.ours.rotate_and_write(1, (queries, keys, values), rotations, batch)
    both.theirs.write(1, rotate(keys, *rotations), values, batch)
    assert torch.equal(rotated, rotate(queries, *rotations))
    assert np.array_equal(both.pools[0].array, both.pools[1].array)


def test_merging_with_attention_over_other_keys() -> None:
    """The first two pages here, the rest elsewhere, merged: as if all had been here."""
    both = Backends()
    table, length = both.spans[4].block_table, 100
    queries = both.numbers(1, 6)
    whole = both.ours.attend(0, queries, both.batch([Span((table,), length - 1, length)]))
    here = both.ours.partial(0, queries, both.batch([Span((table[:2],), 31, 32)]))
    there = both.ours.partial(0, queries, both.batch([Span((table[2:],), length - 33, length - 32)]))
    merged, _ = both.ours.merge(here, there)
    torch.testing.assert_close(merged, whole.float(), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("name", "kv_dtype"), chosen(PARTS, *PARTS[:2]))
def test_queries_over_a_part_of_the_pages(name: str, kv_dtype: str) -> None:
    """Each sees the tokens of a part that are before it: its own page's one by one, others completely. The
    pages are those of the pool, or one layer of them that came from another rank."""
    torch.manual_seed(3)
    config = replace(preset(name, dtype="float16"), kv=KVFormat.parse(kv_dtype))
    [spec], layer, pages = config.kv_spec(chunk_tokens=CHUNK).split(), 1, 24
    pool = PagePool(spec, pages)
    host, kernels = CpuAttention(pool, config), cuda_memory(pool, config)
    assert isinstance(kernels, CudaAttention | CudaLatentAttention)
    [group], at = spec.groups, torch.arange(pages * CHUNK)
    keys, values = torch.randn(2, len(at), group.kv_heads, group.head_dim).half()
    host.write(
        layer, keys, None if group.planes == 1 else values, BatchLayout((), (), at // CHUNK, at % CHUNK)
    )
    stops = [
        np.repeat([40, 41, 42, 80, 96], [1, 1, 1, 30, 2]),
        np.array([1]),
        np.concatenate([np.arange(1, 50), np.full(20, 49), np.arange(50, 65)]),
    ]
    seen, row = [], 0
    for each in stops:
        table = torch.randperm(pages)[: -(-int(each.max()) // CHUNK)]
        seen.append(SeenTokens(row, table, np.zeros_like(each), each))
        row += len(each)
    queries = torch.randn(row, config.heads, group.head_dim).half()
    there = spec.layer(layer)
    block = torch.from_numpy(pool.array)[:, there.start : there.start + there.nbytes].contiguous()
    for passed in (None, block):
        wanted, wanted_lse = host.over(layer, queries, host.plan(seen), passed)
        found, lse = kernels.over(layer, queries, kernels.plan(seen), passed)
        torch.testing.assert_close(found, wanted[..., : found.shape[-1]], rtol=0, atol=4e-3)
        torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=4e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "computes float16 and bfloat16, not float32"),
        ({"head_dim": 80}, "no kernels for head_dim 80"),
        ({"heads": 34, "kv_heads": 2}, "up to 16 query heads per KV head, got 17"),
    ],
)
def test_models_that_the_kernels_do_not_compute(changes: dict[str, int | str], message: str) -> None:
    config = replace(preset("tiny", dtype="float16"), **changes)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match=message):
        cuda_attention(PagePool(config.kv_spec(chunk_tokens=CHUNK), 2), config, kernel_launcher())


@pytest.mark.parametrize("name", ["tiny", "tiny-deepseek", "tiny-qwen3-next"])
def test_a_pool_on_a_gpu_gets_this_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as one gets without a GPU: the backend asks for CuPy."""
    config = preset(name, dtype="float16")
    pool = PagePool(config.kv_spec(chunk_tokens=CHUNK).split()[-1], 2)
    pool.device = "cuda:0"
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(KernelError, match=r"pip install 'tierstore\[cuda13\]'"):
        make_memory(pool, config)


def test_nothing_imports_cupy(tmp_path: Path) -> None:
    """On a machine without CUDA the engine must work, and this backend must be importable."""
    (tmp_path / "cupy.py").write_text("raise AssertionError('cupy was imported')")
    modules = ("engine", "attention.cuda", "kernels.cupy_launcher")
    code = ", ".join(f"tierstore_engine.{module}" for module in modules)
    subprocess.run(
        [sys.executable, "-c", f"import {code}"], env={"PYTHONPATH": str(tmp_path)}, check=True, timeout=120
    )
