"""Checkpoint folders: what is missing or does not fit is named, and other weights are another model."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.portions import chosen
from tests.tiny_models import ARCHITECTURES, GROUPED, LLAMA_LIKE, STATES, VARIANTS, rewrite_json
from tierstore.spec import LayerGroup, LayerKind, layer_groups
from tierstore_engine.build import load_model, open_model
from tierstore_engine.checkpoint import read_config
from tierstore_engine.cli import main
from tierstore_engine.config import ModelConfig
from tierstore_engine.errors import ModelError, UnknownModelError
from tierstore_engine.presets import preset
from tierstore_engine.server import run as server
from tierstore_engine.weight_slots import slots
from tierstore_engine.weights import random_weights, weights_bytes

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(checkpoints: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoints("qwen3"), tmp_path / "model"))


@pytest.fixture
def sharded(checkpoints: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints("qwen3", sharded=True), tmp_path / "model"))


def rewrite_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_equal_weights_are_one_model_however_stored(folder: Path, checkpoints: Callable[..., Path]) -> None:
    whole = load_model(str(folder))
    sharded = load_model(str(checkpoints("qwen3", sharded=True)))
    assert whole.digest == sharded.digest
    assert whole.identity(whole.kv_spec()) == sharded.identity(sharded.kv_spec())


def test_changed_weights_are_another_model(folder: Path) -> None:
    before = load_model(str(folder))

    def nudge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1e-3

    rewrite_weights(folder, nudge)
    after = load_model(str(folder))
    assert after.digest != before.digest
    assert after.identity(after.kv_spec()).digest != before.identity(before.kv_spec()).digest


def test_a_changed_config_is_another_model(folder: Path) -> None:
    before = load_model(str(folder))
    rewrite_json(folder / "config.json", rms_norm_eps=0.01)
    after = load_model(str(folder))
    assert after.digest == before.digest
    assert after.identity(after.kv_spec()).digest != before.identity(before.kv_spec()).digest


def test_another_dtype_is_another_model(folder: Path) -> None:
    assert load_model(str(folder), dtype="bfloat16").digest != load_model(str(folder)).digest


def test_end_of_sequence_ids(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_config(folder).eos_ids == (7, 9)
    (folder / "generation_config.json").unlink()
    rewrite_json(folder / "config.json", eos_token_id=5)
    assert read_config(folder).eos_ids == (5,)


def test_missing_tensor(folder: Path) -> None:
    rewrite_weights(folder, lambda tensors: tensors.pop("model.layers.0.self_attn.k_norm.weight"))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.k_norm\.weight is missing"):
        load_model(str(folder))


def test_tensor_of_another_shape(folder: Path) -> None:
    rewrite_json(folder / "config.json", intermediate_size=100)
    with pytest.raises(
        ModelError, match=r"mlp\.gate_proj\.weight has shape \[96, 64\], .* asks for \[100, 64\]"
    ):
        load_model(str(folder))


def test_missing_shard(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=f"names {gone.name}, which is not in the folder"):
        load_model(str(sharded))


def test_truncated_weights(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "is not a model folder"),
        ("tokenizer.json", r"has neither tokenizer\.json nor tokenizer\.model"),
        (WEIGHTS, "only safetensors are read"),
    ],
)
def test_missing_file(folder: Path, file: str, message: str) -> None:
    (folder / file).unlink()
    with pytest.raises(ModelError, match=message):
        load_model(str(folder))


def test_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        read_config(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="does not hold a JSON object"):
        read_config(folder)


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="neither a folder nor a preset"):
        open_model(str(tmp_path / "nowhere"))


def test_preset_weights_are_seeded(tmp_path: Path) -> None:
    assert load_model("tiny").digest == load_model("tiny").digest
    assert load_model("tiny", seed=1).digest != load_model("tiny").digest


def tensors_of(part: object) -> list[torch.Tensor]:
    """All tensors of a layer, and of its mixer and MLP."""
    if isinstance(part, torch.Tensor):
        return [part]
    if not is_dataclass(part):
        return []
    return [tensor for each in fields(part) for tensor in tensors_of(getattr(part, each.name))]


def test_every_byte_of_the_weights_has_a_slot() -> None:
    """Nothing is left uninitialised, and nothing escapes the digest."""
    for config in (preset("tiny"), preset("qwen2.5-0.5b")):
        small = ModelConfig(**{**vars(config), "vocab_size": 300, "layers": 2, "hidden_size": 64})
        weights = random_weights(small, seed=0, device="cpu")
        owned = [weights.embed, weights.norm, *([] if small.tied_embeddings else [weights.head])]
        for layer in weights.layers:
            owned += tensors_of(layer)
        assert sum(slot.tensor.nbytes for slot in slots(small, weights)) == sum(t.nbytes for t in owned)
        assert weights_bytes(small) == sum(t.nbytes for t in owned)
        assert all(torch.isfinite(tensor).all() for tensor in owned)


FAMILIES = sorted({**ARCHITECTURES, **GROUPED, **VARIANTS, **STATES, **LLAMA_LIKE})


# Those that are like Llama differ in the names and the shapes of tensors: of these a part.
@pytest.fixture(params=chosen(FAMILIES, *(set(FAMILIES) - set(LLAMA_LIKE)), *list(LLAMA_LIKE)[::4]))
def family(
    request: pytest.FixtureRequest, checkpoints: Callable[..., Path], tmp_path: Path
) -> Iterator[Path]:
    """A copy of each family's checkpoint, to be damaged. It is good before, and when it is repaired."""
    folder = Path(shutil.copytree(checkpoints(request.param), tmp_path / "model"))
    before = load_model(str(folder), device="cpu").digest
    yield folder
    assert load_model(str(folder), device="cpu").digest == before


def matrix_of(tensors: dict[str, torch.Tensor]) -> str:
    """The name of a weight in the middle of a checkpoint."""
    names = sorted(name for name, tensor in tensors.items() if tensor.ndim == 2 and "embed" not in name)
    return names[len(names) // 2]


def test_every_tensor_of_a_checkpoint_is_accounted_for(family: Path) -> None:
    good = load_file(family / WEIGHTS)
    name = matrix_of(good)
    one = torch.ones(1)
    damages = {
        "model.layers.0.extra.weight": one,
        f"{name}_scale": one,
        f"{name}_scale_inv": one,
        f"{name.removesuffix('.weight')}.qweight": torch.ones(8, 8, dtype=torch.int32),
        "model.layers.99.self_attn.q_proj.weight": torch.ones(8, 8),
    }
    for extra, tensor in damages.items():
        save_file({**good, extra: tensor}, family / WEIGHTS)
        with pytest.raises(ModelError, match="is not part of the model") as refused:
            load_model(str(family), device="cpu")
        assert extra in str(refused.value)
        assert "\n" not in str(refused.value)
    for dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32):
        save_file({**good, name: good[name].to(dtype)}, family / WEIGHTS)
        with pytest.raises(ModelError, match="weights are read in BF16") as refused:
            load_model(str(family), device="cpu")
        assert name in str(refused.value)
    harmless = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.k_scale")
    save_file({**good, **{name: torch.ones(1) for name in harmless}}, family / WEIGHTS)


METHODS = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp4", "quanto", "new")
FILES: dict[str, object] = {
    "hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
    "quantize_config.json": {"bits": 4, "group_size": 128},
    "quant_config.json": {"w_bit": 4},
    "quanto_qmap.json": {"model.layers.0.mlp.up_proj": {"weights": "qint8"}},
}


def test_quantised_weights_are_refused_wherever_that_is_said(family: Path) -> None:
    config = json.loads((family / "config.json").read_text())
    for method in METHODS:
        for where in (
            {"quantization_config": {"quant_method": method}},
            {"compression_config": {"x": method}},
        ):
            for written in (where, {"text_config": {**config, **where}}, {"vision_config": where}):
                (family / "config.json").write_text(json.dumps({**config, **written}))
                with pytest.raises(ModelError, match=r"config\.json: .* weights are not read"):
                    open_model(str(family), device="cpu")
    (family / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    for file, value in FILES.items():
        (family / file).write_text(json.dumps(value))
        with pytest.raises(ModelError, match=f"{file}: .* weights are not read"):
            open_model(str(family), device="cpu")
        (family / file).unlink()


KV_ONLY = (
    ("config.json", {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}),
    ("config.json", {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}),
    ("hf_quant_config.json", {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}),
)


@pytest.mark.parametrize(("file", "said"), KV_ONLY)
def test_a_checkpoint_of_which_only_kv_is_quantised_is_read(
    file: str, said: dict[str, object], folder: Path
) -> None:
    before = load_model(str(folder), device="cpu").digest
    if file == "config.json":
        rewrite_json(folder / file, quantization_config=said)
    else:
        (folder / file).write_text(json.dumps(said))
    assert load_model(str(folder), device="cpu").digest == before


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("llama-linear-mqa-biased", "lm_head.weight"),
        ("qwen3-next", "mtp.layers.0.mlp.up_proj.weight"),
        ("nemotron-h", "mtp.layers.0.mixer.up_proj.weight"),
    ],
)
def test_what_a_family_leaves_out_is_no_reason_to_refuse_it(
    name: str, extra: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoints(name), tmp_path / "model"))
    before = load_model(str(folder), device="cpu").digest
    rewrite_weights(folder, lambda tensors: tensors.update({extra: torch.ones(2, 2)}))
    assert load_model(str(folder), device="cpu").digest == before


def test_layers_that_predict_further_tokens_are_left_out(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoints("deepseek-v3"), tmp_path / "model"))
    rewrite_weights(folder, lambda tensors: tensors.update({"model.layers.3.enorm.weight": torch.ones(4)}))
    rewrite_json(folder / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match=r"model\.layers\.3\.enorm\.weight"):
        load_model(str(folder), device="cpu")
    rewrite_json(folder / "config.json", num_nextn_predict_layers=1)
    load_model(str(folder), device="cpu")


def test_a_tensor_that_the_index_does_not_name_is_found(sharded: Path) -> None:
    file = sorted(sharded.glob("*.safetensors"))[1]
    save_file({**load_file(file), "model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}, file)
    with pytest.raises(ModelError, match=r"up_proj\.weight_scale .*is not part of the model"):
        load_model(str(sharded))


COMMANDS = {
    "generate": ["generate", "--prompt-file", "PROMPT", "--model", "BAD"],
    "serve": ["serve", "--port", "0", "--model", "BAD"],
    "serve with a draft model": ["serve", "--port", "0", "--model", "GOOD", "--draft", "BAD"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_quantised_weights_end_a_command_before_it_listens(
    command: str,
    folder: Path,
    tmp_path: Path,
    checkpoints: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        name = matrix_of(tensors)
        tensors[name] = tensors[name].to(torch.int8)

    rewrite_weights(folder, quantise)
    (tmp_path / "prompt").write_text("hello")
    names = {"PROMPT": str(tmp_path / "prompt"), "BAD": str(folder), "GOOD": str(checkpoints("qwen3"))}
    arguments = [names.get(each, each) for each in COMMANDS[command]]
    monkeypatch.setattr(sys, "argv", ["tierstore-engine", *arguments, "--device", "cpu"])
    listened: list[object] = []
    monkeypatch.setattr(server, "listening_at", listened.append)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    out, err = capfd.readouterr()
    [line] = err.strip().splitlines()
    assert "is I8, and weights are read in BF16" in line
    assert not out
    assert not listened


@pytest.mark.parametrize("name", FAMILIES)
def test_the_size_of_a_model_is_read_alike(checkpoints: Callable[..., Path], name: str) -> None:
    """``tierstore size`` reads heads and layers from the same fields as the engine, without torch."""
    raw, config = json.loads((checkpoints(name) / "config.json").read_text()), read_config(checkpoints(name))
    sized = layer_groups(raw)
    assert sum(len(group.layers) for group in sized) == config.layers

    def heads(groups: Sequence[LayerGroup]) -> set[tuple[int, int]]:
        with_heads = (each for each in groups if each.kind is not LayerKind.RECURRENT_STATE)
        return {(each.kv_heads, each.head_dim) for each in with_heads}

    assert heads(sized) == heads(config.groups)
