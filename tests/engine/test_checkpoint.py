"""Checkpoint folders: what is missing or does not fit is named, and other weights are another model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tierstore_engine.build import load_model, open_model
from tierstore_engine.checkpoint import read_config
from tierstore_engine.config import ModelConfig
from tierstore_engine.errors import ModelError, UnknownModelError
from tierstore_engine.presets import preset
from tierstore_engine.weights import random_weights, slots, weights_bytes

from .conftest import rewrite_json

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
        ("tokenizer.json", r"has no tokenizer\.json"),
        (WEIGHTS, "only safetensors are read"),
    ],
)
def test_missing_file(folder: Path, file: str, message: str) -> None:
    (folder / file).unlink()
    with pytest.raises(ModelError, match=message):
        load_model(str(folder))


def test_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
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
