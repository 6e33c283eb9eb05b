"""LoRA adapters: the logits of transformers with the adapter merged by hand, pages apart, and bad folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import reference_model, rewrite_json
from tierstore.errors import UsageError
from tierstore_engine.adapters import read_adapter, read_adapters
from tierstore_engine.build import build_engine
from tierstore_engine.drafting import PromptLookupDrafter
from tierstore_engine.engine import Engine
from tierstore_engine.errors import ModelError, RequestError
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.outputs import Completion
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_tools.vllm.daemon import ServeProcess

from .adapters import merged, write_adapter
from .test_families import prompt

CHUNK = 16
MAX_LOGIT_DIFF = 2e-4  # the reference merges the adapter into the weights, which rounds once
NEW = 6
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True, keep_logits=True)
ATTENTION = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
TARGETS = {
    "llama3": (*ATTENTION, *MLP),
    "qwen2": ("k_proj", "v_proj", *MLP),
    "phi3": ("qkv_proj", "gate_up_proj", "down_proj"),
    "gpt-neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "falcon": ("query_key_value", "dense"),
    "qwen2-moe": (*ATTENTION, "layers.1.mlp.up_proj", "shared_expert.down_proj"),
    "deepseek-v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "gemma3": ATTENTION,
    "qwen3-next": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"),
    "jamba": ("in_proj", "x_proj", "dt_proj", "out_proj", "q_proj"),
    "lfm2": ("in_proj", "out_proj", "w1", "w2", "k_proj"),
    "apertus": (*ATTENTION, "up_proj", "down_proj"),
    "falcon-h1": ("in_proj", "out_proj", "k_proj", "gate_proj", "down_proj"),
    "granite-hybrid-dense": ("in_proj", "out_proj", "k_proj", "shared_mlp.input_linear"),
    "zamba2": ("in_proj", "out_proj"),
}


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    engines = []

    def make(model: LoadedModel, *, store: str | None = None, **options: Any) -> Engine:
        settings = EngineSettings(prefill_chunk=32, plan="load")
        engine = build_engine(
            model, pool_pages=96, chunk_tokens=CHUNK, store=store, settings=settings, **options
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def with_adapters(
    checkpoints: Callable[..., Path], loaded: Callable[..., LoadedModel]
) -> Callable[..., LoadedModel]:
    """A model with adapters by name."""

    def make(name: str, **folders: Path) -> LoadedModel:
        model = loaded(str(checkpoints(name)))
        given = [f"{each}={folder}" for each, folder in folders.items()]
        return replace(model, adapters=read_adapters(model.config, given))

    return make


def answers(engine: Engine, *wanted: tuple[list[int], str | None], **options: Any) -> list[Completion]:
    """All of these in the same steps: prompts with their adapters."""
    ids = [engine.add(tokens, GREEDY, adapter=adapter, **options) for tokens, adapter in wanted]
    return engine._finish(ids)


def check(completion: Completion, model: torch.nn.Module, tokens: list[int]) -> None:
    assert completion.logits is not None
    with torch.inference_mode():
        whole = model(torch.tensor([[*tokens, *completion.tokens]]), use_cache=False).logits[0]
    right = whole[len(tokens) - 1 : -1]
    assert right.std() > 0.2
    assert (torch.from_numpy(completion.logits) - right).abs().max() <= MAX_LOGIT_DIFF


@pytest.mark.parametrize("name", TARGETS)
def test_two_adapters_and_none_in_one_batch(
    name: str,
    tmp_path: Path,
    with_adapters: Callable[..., LoadedModel],
    make_engine: Callable[..., Engine],
) -> None:
    reference = reference_model(name)
    one = write_adapter(tmp_path / "one", reference, TARGETS[name], seed=1)
    rs = {"rank": 8, "lora_alpha": 4, "use_rslora": True}
    other = write_adapter(tmp_path / "other", reference, TARGETS[name][:1], seed=2, **rs)
    engine = make_engine(with_adapters(name, one=one, other=other))
    tokens = [prompt()[:100], prompt(8)[:77], prompt()[:100], prompt(9)[:45]]
    found = answers(engine, *zip(tokens, ("one", "other", None, "one"), strict=True))
    models = {
        "one": merged(name, one, {}, 2.0),
        "other": merged(name, other, {}, 4 * 8**-0.5),
        None: reference,
    }
    for completion, each, adapter in zip(found, tokens, ("one", "other", None, "one"), strict=True):
        check(completion, models[adapter], each)
    one_prompt = [torch.from_numpy(each.logits[0]) for each in (found[0], found[2])]  # type: ignore[index]
    assert (one_prompt[0] - one_prompt[1]).abs().max() > 0.1
    # and once more from their pages
    [again] = answers(engine, (tokens[0], "one"))
    assert again.metrics.reused_tokens >= 96
    check(again, models["one"], tokens[0])


def test_ranks_and_scales_of_single_layers(
    tmp_path: Path, with_adapters: Callable[..., LoadedModel], make_engine: Callable[..., Engine]
) -> None:
    ranks, alphas = {"layers.1.self_attn.v_proj": 2, "q_proj": 3}, {r"layers\.\d\.self_attn\.q_proj": 12}
    folder = write_adapter(
        tmp_path / "a",
        reference_model("llama3"),
        ATTENTION,
        seed=1,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        target_modules="all-linear",
    )
    [found] = answers(make_engine(with_adapters("llama3", a=folder)), (prompt()[:50], "a"))
    scales = {"layers.1.self_attn.v_proj": 8 / 2, "q_proj": 12 / 3}
    check(found, merged("llama3", folder, scales, 2.0), prompt()[:50])


def test_a_model_in_bfloat16_and_quantised_kv(
    tmp_path: Path, checkpoints: Callable[..., Path], loaded: Callable[..., LoadedModel], make_engine: Any
) -> None:
    folder = write_adapter(tmp_path / "a", reference_model("llama3"), ATTENTION, seed=1)
    model = loaded(str(checkpoints("llama3")), dtype="bfloat16", kv_dtype="int8")
    engine = make_engine(replace(model, adapters=read_adapters(model.config, [f"a={folder}"])))
    [found] = answers(engine, (prompt()[:50], "a"))
    assert found.logits is not None
    with torch.inference_mode():
        right = merged("llama3", folder, {}, 2.0)(torch.tensor([prompt()[:50]])).logits[0, -1]
    assert (torch.from_numpy(found.logits[0]) - right).abs().max() < 0.3 * right.std()


def test_no_page_is_shared_between_adapters_or_with_the_model(
    tmp_path: Path, with_adapters: Callable[..., LoadedModel], make_engine: Callable[..., Engine]
) -> None:
    reference = reference_model("llama3")
    one = write_adapter(tmp_path / "one", reference, ATTENTION, seed=1)
    other = write_adapter(tmp_path / "other", reference, ATTENTION, seed=2)
    engine = make_engine(with_adapters("llama3", one=one, other=other), store=str(tmp_path / "store"))
    tokens = prompt()[:100]
    for adapter in ("one", "other", None):
        assert answers(engine, (tokens, adapter))[0].metrics.reused_tokens == 0
    for adapter in ("one", "other", None):
        assert answers(engine, (tokens, adapter))[0].metrics.reused_tokens >= 96
    # at the same time, too: none waits for the other's prefix, or takes it
    tokens = prompt(8)[:100]
    found = answers(engine, (tokens, "one"), (tokens, "other"), (tokens, None))
    assert [each.metrics.reused_tokens for each in found] == [0, 0, 0]


def test_the_contents_are_the_identity(
    tmp_path: Path, with_adapters: Callable[..., LoadedModel], make_engine: Callable[..., Engine]
) -> None:
    """After a restart, a renamed adapter finds its pages on disk, and a changed one does not."""
    store, tokens = str(tmp_path / "store"), prompt()[:100]
    folder = write_adapter(tmp_path / "one", reference_model("llama3"), ATTENTION, seed=1)

    def reused(directory: Path, name: str) -> int:
        engine = make_engine(with_adapters("llama3", **{name: directory}), store=store)
        try:
            [found] = answers(engine, (tokens, name))
            assert engine.connector.store.flush(30)  # type: ignore[attr-defined]
        finally:
            engine.close()
        return found.metrics.reused_tokens

    assert reused(folder, "one") == 0
    renamed = Path(shutil.copytree(folder, tmp_path / "renamed"))
    assert reused(renamed, "two") >= 96
    rewrite_json(renamed / "adapter_config.json", lora_alpha=9)
    assert reused(renamed, "two") == 0
    tensors = load_file(folder / "adapter_model.safetensors")
    key = min(tensors)
    tensors[key][0, 0] += 1e-3
    save_file(tensors, folder / "adapter_model.safetensors")
    assert reused(folder, "one") == 0


def test_two_engines_share_an_adapters_pages_through_a_daemon(
    tmp_path: Path, with_adapters: Callable[..., LoadedModel], make_engine: Callable[..., Engine]
) -> None:
    folder = write_adapter(tmp_path / "one", reference_model("gemma3"), ATTENTION, seed=1)
    tokens = prompt()[:100]
    with ServeProcess(tmp_path, disk=False) as daemon:
        model = with_adapters("gemma3", one=folder)
        first, second = (make_engine(model, store=daemon.url) for _ in range(2))
        for engine in (first, second):
            assert engine.connector.store.wait_connected(60)  # type: ignore[attr-defined]
        [cold] = answers(first, (tokens, "one"))
        assert first.connector.store.flush(30)  # type: ignore[attr-defined]
        assert answers(second, (tokens, None))[0].metrics.reused_tokens == 0
        [warm] = answers(second, (tokens, "one"))
        assert warm.metrics.reused_tokens > 0
        assert warm.tokens == cold.tokens
        for engine in (first, second):
            engine.close()


def test_drafts_and_forks_keep_the_adapter(
    tmp_path: Path, with_adapters: Callable[..., LoadedModel], make_engine: Callable[..., Engine]
) -> None:
    folder = write_adapter(tmp_path / "a", reference_model("gpt-neox"), TARGETS["gpt-neox"], seed=1)
    model = with_adapters("gpt-neox", a=folder)
    tokens = prompt()[:20] * 3
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    plain = make_engine(model)
    drafting = make_engine(model, drafter=PromptLookupDrafter())
    expected = plain._finish([plain.add(tokens, params, adapter="a")])[0].tokens
    first = drafting.add(tokens, params, adapter="a")
    twin = drafting.fork(first)
    found = drafting._finish([first, twin])
    assert [each.tokens for each in found] == [expected, expected]
    assert drafting.stats().drafted_tokens > 0


def test_an_unknown_adapter(tiny: LoadedModel, make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(RequestError, match="no adapter 'a'"):
        make_engine(tiny).add([1, 2], adapter="a")


# -- folders that are refused ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "a", reference_model("llama3"), ATTENTION, seed=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
        {"lora_bias": True},
        {"fan_in_fan_out": True},
        {"init_lora_weights": "pissa"},
        {"peft_type": "LOHA"},
        {"layer_replication": [[0, 2]]},
        {"trainable_token_indices": [1]},
        {"target_parameters": ["experts"]},
        {"a_new_field": 1},
        {"lora_alpha": None},
        {"lora_alpha": "4"},
        {"rank_pattern": [1]},
        {"alpha_pattern": {"(": 4}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_that_are_refused(folder: Path, tiny: LoadedModel, fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ModelError, match=rf"\b{next(iter(fields))}\b") as caught:
        read_adapter(tiny.config, folder, "a")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "message"), [(0, "r must be a positive number, got 0"), (3, "its rank is 3")]
)
def test_another_rank_than_that_of_the_tensors(
    folder: Path, checkpoints: Any, loaded: Any, rank: int, message: str
) -> None:
    rewrite_json(folder / "adapter_config.json", r=rank)
    with pytest.raises(ModelError, match=message):
        read_adapter(loaded(str(checkpoints("llama3"))).config, folder, "a")


def _without_b(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(key for key in tensors if "lora_B" in key)]


def _too_long(tensors: dict[str, torch.Tensor]) -> None:
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key] = torch.cat((tensors[key], tensors[key]))


def _named(key: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        for side, shape in (("A", (4, 64)), ("B", (64, 4))):
            tensors[key.replace("SIDE", side)] = torch.zeros(shape)

    return add


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_b, "lacks lora_B"),
        (_too_long, "but the layer takes"),
        (dict.clear, "has no tensor"),
        (_named("base_model.model.model.layers.9.self_attn.q_proj.lora_SIDE.weight"), "layers.9"),
        (_named("base_model.model.lm_head.lora_SIDE.weight"), "lm_head"),
        (_named("base_model.model.model.embed_tokens.lora_embedding_SIDE"), "lora_embedding_"),
        (_named("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.SIDE"), "magnitude"),
    ],
)
def test_tensors_that_are_refused(
    folder: Path, checkpoints: Any, loaded: Any, change: Callable[[Any], None], message: str
) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = loaded(str(checkpoints("llama3"))).config
    with pytest.raises(ModelError, match=message) as caught:
        read_adapter(config, folder, "a")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v2", "zamba2"])
def test_layers_without_plain_products_are_refused(
    name: str, tmp_path: Path, checkpoints: Any, loaded: Any
) -> None:
    config = loaded(str(checkpoints(name))).config
    ends = ("kv_b_proj",) if name == "deepseek-v2" else ("q_proj",)
    folder = write_adapter(tmp_path / "a", reference_model(name), ends, seed=1)
    if name == "mixtral":
        tensors = {
            f"base_model.model.model.layers.0.block_sparse_moe.gate.lora_{side}.weight": torch.zeros(shape)
            for side, shape in (("A", (4, 64)), ("B", (4, 4)))
        }
        save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="is not a layer of this model"):
        read_adapter(config, folder, "a")


def test_files_that_are_no_adapter(folder: Path, tiny: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        read_adapter(tiny.config, tmp_path, "a")
    (folder / "adapter_model.safetensors").write_bytes(b"12345678nothing")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        read_adapter(tiny.config, folder, "a")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        read_adapter(tiny.config, folder, "a")


@pytest.mark.parametrize("given", [["a"], ["=b"], ["a="]])
def test_arguments_of_another_form(given: list[str], tiny: LoadedModel) -> None:
    with pytest.raises(UsageError, match="NAME=DIR"):
        read_adapters(tiny.config, given)


def test_a_name_twice(folder: Path, checkpoints: Any, loaded: Any) -> None:
    config = loaded(str(checkpoints("llama3"))).config
    with pytest.raises(UsageError, match="twice"):
        read_adapters(config, [f"a={folder}", f"a={folder}"])


# -- commands ------------------------------------------------------------------------------------------


def test_generate_with_an_adapter(folder: Path, checkpoints: Any, run_command: Any) -> None:
    arguments = ("generate", "--model", str(checkpoints("llama3")), "--prompt", "the cat", "--ignore-eos")
    arguments += ("--max-new-tokens", "12", "--device", "cpu", "--chunk-tokens", "16", "--json")
    code, plain, _ = run_command(*arguments)
    assert code == 0
    code, changed, _ = run_command(*arguments, "--adapter", f"a={folder}")
    assert code == 0
    assert json.loads(plain)["tokens"] != json.loads(changed)["tokens"]
    code, out, err = run_command(*arguments, "--adapter", f"a={folder}", "--adapter", f"b={folder}")
    assert (code, out) == (2, "")
    assert "give --adapter once" in err
    code, out, err = run_command(*arguments, "--adapter", f"a={folder / 'gone'}")
    assert (code, out, err.count("\n")) == (1, "", 1)
