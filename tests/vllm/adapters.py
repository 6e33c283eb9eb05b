"""Small random LoRA adapters for the models of these tests."""

from __future__ import annotations

import json
from pathlib import Path

_RANK = 8
_TARGETS = {"q_proj": (128, 128), "v_proj": (128, 64)}  # inputs and outputs of ``models.LLAMA``
_LAYERS = 4


def adapter(directory: Path, *, seed: int) -> Path:
    """An adapter in ``directory``, strong enough that answers differ."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    weights = {}
    for layer in range(_LAYERS):
        for name, (inputs, outputs) in _TARGETS.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = 0.2 * torch.randn(_RANK, inputs)
            weights[f"{place}.lora_B.weight"] = 0.2 * torch.randn(outputs, _RANK)
    directory.mkdir(parents=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "target_modules": list(_TARGETS),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
