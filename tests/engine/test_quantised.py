"""Quantised checkpoints: logits are those of transformers with the numbers that the codes and scales say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import VOCAB, rewrite_json
from tierstore.errors import TierStoreError
from tierstore_engine.build import LoadedModel, load_model, open_model
from tierstore_engine.errors import ModelError
from tierstore_engine.quantised import QuantisedMatrix

from .test_families import CHUNK, Pages, Sequence_, close, compute

WEIGHTS = "model.safetensors"
TOKENS = 70
Tensors = dict[str, torch.Tensor]


def packed(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Words of the numbers in each row: the lowest bits have the first, or those that ``order`` says."""
    per = 32 // bits
    values = torch.nn.functional.pad(values.long(), (0, -values.shape[1] % per))
    words = sum(values[:, place::per] << bits * j for j, place in enumerate(order or range(per)))
    return torch.as_tensor(words).to(torch.int32)


def by_group(weight: torch.Tensor, group: int) -> torch.Tensor:
    return weight.unflatten(1, (-1, group))


def integers(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes from 0 on, scales and zeros of each group, and the numbers that they say."""
    groups, most = by_group(weight, group), (1 << bits) - 1
    low, high = groups.amin(2), groups.amax(2)
    if symmetric:
        scales = (groups.abs().amax(2) / (most // 2)).half()
        zeros = torch.full_like(low, (most + 1) // 2)
    else:
        scales = ((high - low) / most).half()
        zeros = (-low / scales).round().clamp(1, most)
    wide, zero = scales.float().unsqueeze(2), zeros.unsqueeze(2)
    codes = (groups / wide + zero).round().clamp(0, most)
    return codes.flatten(1), scales, zeros, ((codes - zero) * wide).flatten(1)


def gptq(bits: int, version: int, *, ordered: bool) -> Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        order = torch.arange(columns) if ordered else torch.randperm(columns)  # of the columns in groups
        codes, scales, zeros, dense = integers(weight[:, order], bits, 32, symmetric=False)
        back = order.argsort()
        tensors = {
            "qweight": packed(codes[:, back], bits).T,
            "qzeros": packed(zeros.T - (2 - version), bits),
            "scales": scales.T,
            "g_idx": (torch.arange(columns) // 32)[back].int(),
        }
        return tensors, dense[:, back]

    return quantise


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, dense = integers(weight, 4, 32, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": packed(codes.T, 4, order),
        "qzeros": packed(zeros.T, 4, order),
        "scales": scales.T,
    }, dense


def compressed(bits: int, *, symmetric: bool) -> Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, dense = integers(weight, bits, 32, symmetric=symmetric)
        tensors = {
            "weight_packed": packed(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed(zeros.T, bits).T
        return tensors, dense

    return quantise


def int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, _, dense = integers(weight, 8, weight.shape[1], symmetric=True)
    return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}, dense


def fp8(
    block: tuple[int, int] | None, name: str = "weight_scale", *, scalar: bool = False
) -> Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = block or (weight.shape[0] if scalar else 1, weight.shape[1])
        scales = torch.stack(
            [
                torch.stack([part.abs().amax() / 448 for part in band.split(columns, 1)])
                for band in weight.split(rows)
            ]
        )
        wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        wide = wide[: weight.shape[0], : weight.shape[1]]
        codes = (weight / wide).to(torch.float8_e4m3fn)
        stored = scales.reshape(()) if scalar else scales
        return {"weight": codes, name: stored, "input_scale": torch.ones(())}, codes.float() * wide

    return quantise


@dataclass(frozen=True)
class Case:
    """A scheme on a tiny model: what config.json says, and how a matrix is stored."""

    said: Mapping[str, Any]
    quantise: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    family: str = "llama3"


def group_of(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


def ct(form: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": group_of(**weights)}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "group_size": 32}
FP8 = {"quant_method": "fp8"}
BLOCKS = {**FP8, "weight_block_size": [48, 40]}  # does not divide the matrices
CASES = {
    "fp8 tensor": Case(FP8, fp8(None, scalar=True)),
    "fp8 channel": Case({"quant_method": "fbgemm_fp8"}, fp8(None)),
    "fp8 blocks": Case(BLOCKS, fp8((48, 40), "weight_scale_inv")),
    "fp8 experts and latents": Case(BLOCKS, fp8((48, 40), "weight_scale_inv"), "deepseek-v3"),
    "fp8 delta": Case(BLOCKS, fp8((48, 40), "weight_scale_inv"), "qwen3-next"),
    "fp8 joined": Case(BLOCKS, fp8((48, 40), "weight_scale_inv"), "granite-hybrid"),
    "gptq": Case({**GPTQ, "bits": 4}, gptq(4, 1, ordered=True)),
    "gptq act order": Case({**GPTQ, "bits": 4, "desc_act": True}, gptq(4, 1, ordered=False)),
    "gptq 8 bits, version 2": Case(
        {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}, gptq(8, 2, ordered=True), "qwen2"
    ),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "ct int4": Case(ct("pack-quantized", **INT4, symmetric=True), compressed(4, symmetric=True)),
    "ct int4 with zeros": Case(ct("pack-quantized", **INT4, symmetric=False), compressed(4, symmetric=False)),
    "ct int8 packed": Case(
        ct("pack-quantized", **{**INT4, "num_bits": 8}, symmetric=False), compressed(8, symmetric=False)
    ),
    "ct int8": Case(ct("int-quantized", num_bits=8, type="int", strategy="channel"), int8, "mixtral"),
    "ct fp8": Case(ct("float-quantized", num_bits=8, type="float", strategy="channel"), fp8(None)),
}


def is_quantised(name: str, tensor: torch.Tensor) -> bool:
    kept = ("embed", "lm_head", "norm", "gate.weight", "router", "conv1d", "in_proj_ba")
    return tensor.ndim == 2 and not any(each in name for each in kept)


def quantise_folder(case: Case, source: Path, folder: Path) -> Tensors:
    """Quantise a checkpoint. Return the numbers that it says, by name."""
    shutil.copytree(source, folder)
    torch.manual_seed(0)
    stored: Tensors = {}
    dense: Tensors = {}
    for name, tensor in load_file(source / WEIGHTS).items():
        if is_quantised(name, tensor):
            tensors, dense[name] = case.quantise(tensor.float())
            stem = name.removesuffix("weight")
            stored |= {stem + end: each.contiguous() for end, each in tensors.items()}
        else:
            stored[name] = dense[name] = tensor
    save_file(stored, folder / WEIGHTS)
    rewrite_json(folder / "config.json", quantization_config=dict(case.said))
    return dense


def reference(dense: Tensors, tokens: list[int], folder: Path) -> torch.Tensor:
    """What transformers computes with these numbers."""
    from transformers import AutoModelForCausalLM

    plain = folder.parent / "dense"
    shutil.copytree(folder, plain)
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file(dense, plain / WEIGHTS, metadata={"format": "pt"})
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(plain, **options).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def logits_of(model: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """In three steps, the last of one token."""
    one = Sequence_(Pages(model), tokens)
    return torch.cat([compute(one.pages, [(one, stop)])[0] for stop in (2 * CHUNK + 3, TOKENS - 1, TOKENS)])


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_numbers_that_the_codes_say(
    name: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    case = CASES[name]
    tokens = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()
    dense = quantise_folder(case, checkpoints(case.family), tmp_path / "model")
    right = reference(dense, tokens, tmp_path / "model")
    kept = load_model(str(tmp_path / "model"), device="cpu")
    expanded = load_model(str(tmp_path / "model"), device="cpu", expand_weights=True)
    close(logits_of(kept, tokens), right)
    close(logits_of(expanded, tokens), right)
    assert isinstance(kept.weights.head, QuantisedMatrix)
    assert isinstance(expanded.weights.head, torch.Tensor)
