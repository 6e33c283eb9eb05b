"""LoRA adapters in PEFT's format, and what transformers computes with them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.tiny_models import reference_model


def write_adapter(
    folder: Path, model: torch.nn.Module, ends: Sequence[str], *, seed: int, rank: int = 4, **fields: Any
) -> Path:
    """An adapter of the linear layers whose names end so, strong enough that answers differ."""
    generator = torch.Generator().manual_seed(seed)
    ranks = fields.get("rank_pattern") or {}
    tensors = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or not name.endswith(tuple(ends)):
            continue
        own = next((each for end, each in ranks.items() if name.endswith(end)), rank)
        outputs, inputs = module.weight.shape
        for side, shape in (("A", (own, inputs)), ("B", (outputs, own))):
            values = torch.randn(shape, generator=generator) * shape[1] ** -0.5
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = values
    assert tensors
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in ends}),
        "bias": "none",
        "lora_dropout": 0.1,
        **fields,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(name: str, folder: Path, scales: Mapping[str, float], scale: float) -> torch.nn.Module:
    """The reference model with an adapter merged by hand. ``scales`` are those of layers by the end of their
    name, ``scale`` that of all others."""
    from safetensors.torch import load_file

    model = copy.deepcopy(reference_model(name))
    tensors = load_file(folder / "adapter_model.safetensors")
    for key in [each for each in tensors if ".lora_A." in each]:
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        own = next((each for end, each in scales.items() if module.endswith(end)), scale)
        change = own * (tensors[key.replace("lora_A", "lora_B")] @ tensors[key])
        with torch.no_grad():
            model.get_submodule(module).weight += change
    return model
