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
from tierstore_engine.build import load_model, open_model
from tierstore_engine.errors import ModelError
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.quantised import QuantisedMatrix

from .test_families import CHUNK, Pages, Sequence_, close, compute

WEIGHTS = "model.safetensors"
TOKENS = 70
Q = "model.layers.1.self_attn.q_proj."
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


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The matrices of experts, stored as ``[out, in]`` instead of ``[in, out]``."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(3) / 6).log2().ceil()
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    scaled = groups / exponents.exp2().unsqueeze(3)
    codes = (scaled.unsqueeze(4) - numbers).abs().argmin(4).to(torch.uint8)
    dense = (numbers[codes.long()] * exponents.exp2().unsqueeze(3)).flatten(2).transpose(1, 2)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return {"blocks": blocks, "scales": (exponents + 127).to(torch.uint8)}, dense


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
    "mxfp4": Case({"quant_method": "mxfp4"}, mxfp4, "gpt-oss"),
    "ct fp8": Case(ct("float-quantized", num_bits=8, type="float", strategy="channel"), fp8(None)),
}


def is_quantised(case: Case, name: str, tensor: torch.Tensor) -> bool:
    if case.quantise is mxfp4:
        return tensor.ndim == 3
    kept = ("embed", "lm_head", "norm", "gate.weight", "router", "conv1d", "in_proj_ba")
    return tensor.ndim == 2 and not any(each in name for each in kept)


def quantise_folder(case: Case, source: Path, folder: Path) -> Tensors:
    """Quantise a checkpoint. Return the numbers that it says, by name."""
    shutil.copytree(source, folder)
    torch.manual_seed(0)
    stored: Tensors = {}
    dense: Tensors = {}
    for name, tensor in load_file(source / WEIGHTS).items():
        if is_quantised(case, name, tensor):
            tensors, dense[name] = case.quantise(tensor.float())
            stem = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
            stored |= {stem + end: each.contiguous() for end, each in tensors.items()}
        else:
            stored[name] = dense[name] = tensor
    save_file(stored, folder / WEIGHTS)
    rewrite_json(folder / "config.json", quantization_config=dict(case.said))
    return dense


def reference(dense: Tensors, tokens: list[int], folder: Path) -> torch.Tensor:
    """What transformers computes with these numbers."""
    from transformers import AutoModelForCausalLM

    plain = folder.parent / f"{folder.name}-dense"
    shutil.copytree(folder, plain)
    config = json.loads((plain / "config.json").read_text())
    config.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config))
    dense = {name: tensor.contiguous() for name, tensor in dense.items()}
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


@pytest.fixture
def folder(checkpoints: Callable[..., Path], tmp_path: Path) -> Path:
    quantise_folder(CASES["gptq"], checkpoints("llama3"), tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)


def test_other_codes_and_other_scales_are_other_models(folder: Path) -> None:
    digests = {load_model(str(folder), device="cpu").digest}
    for end in ("qweight", "scales", "qzeros"):

        def nudge(tensors: Tensors, name: str = Q + end) -> None:
            tensors[name].view(-1)[0] += 1

        rewrite(folder, nudge)
        digests.add(load_model(str(folder), device="cpu").digest)
    assert len(digests) == 4


def test_a_quantised_model_takes_less_memory(folder: Path) -> None:
    """GPTQ's small groups take 5 bits for each number of the layers, instead of 32."""

    def nbytes(layers: object) -> int:
        matrices = [each.mixer.qkv for each in layers] + [each.mlp.down for each in layers]  # type: ignore[attr-defined]
        if isinstance(matrices[0], torch.Tensor):
            return sum(each.nbytes for each in matrices)
        parts = [packed for each in matrices for *_, packed in each.parts()]
        return sum(part.codes.nbytes + part.scales.nbytes + part.zeros.nbytes for part in parts)

    kept = load_model(str(folder), device="cpu").weights.layers
    expanded = load_model(str(folder), device="cpu", expand_weights=True).weights.layers
    assert nbytes(kept) * 5 < nbytes(expanded)


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def cut(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name][:-1]})


def fill(name: str, value: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].fill_(value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop(f"{Q}scales"), "scales is missing"),
        (drop(f"{Q}qweight"), "g_idx .* is not part of the model"),
        (cut(f"{Q}qweight"), "qweight has no gptq weights: .*"),
        (cut(f"{Q}scales"), "qweight has no gptq weights: scales or zeros have shape"),
        (cut(f"{Q}qzeros"), "qweight has no gptq weights: scales or zeros have shape"),
        (cut(f"{Q}g_idx"), "qweight has no gptq weights: g_idx"),
        (fill(f"{Q}g_idx", 2), "qweight has no gptq weights: g_idx"),
        (fill(f"{Q}g_idx", -1), "qweight has no gptq weights: g_idx"),
        (lambda tensors: tensors.update({f"{Q}weight": torch.ones(64, 64)}), "is not part of the model"),
    ],
)
def test_damaged_weights_are_named(damage: Callable[[Tensors], object], message: str, folder: Path) -> None:
    rewrite(folder, damage)
    with pytest.raises(ModelError, match=message) as refused:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)


REFUSED = {
    "gptq with 3 bits": {**GPTQ, "bits": 3},
    "gptq with parts of other bits": {**GPTQ, "bits": 4, "dynamic": {"x": {}}},
    "gptq for Marlin": {**GPTQ, "bits": 4, "checkpoint_format": "marlin"},
    "awq for another kernel": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "fp8 e5m2": {**FP8, "fmt": "e5m2"},
    "nvfp4": ct("nvfp4-pack-quantized", **INT4),
    "rotated": {**ct("pack-quantized", **INT4), "transform_config": {"x": 1}},
    "sparse": {**ct("pack-quantized", **INT4), "sparsity_config": {"format": "sparse-24-bitmask"}},
    "of several kinds": {
        **ct("pack-quantized", **INT4),
        "config_groups": {
            "a": group_of(**INT4)["group_0"],
            "b": group_of(**{**INT4, "num_bits": 8})["group_0"],
        },
    },
    "bitsandbytes": {"quant_method": "bitsandbytes"},
    "a number": 4,
    "groups that are numbers": ct("pack-quantized") | {"config_groups": {"a": 3}},
    "kinds that are lists": {"quant_method": "gptq", "bits": [4]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_schemes_are_refused(name: str, folder: Path) -> None:
    rewrite_json(folder / "config.json", quantization_config=REFUSED[name])
    with pytest.raises(ModelError, match=r"config\.json: .*weights.* are not read") as refused:
        open_model(str(folder), device="cpu")
    assert "\n" not in str(refused.value)


def test_rows_of_mixed_heads_are_expanded_only(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    quantise_folder(CASES["ct fp8"], checkpoints("gpt-neox"), tmp_path / "model")
    with pytest.raises(ModelError, match="give --expand-weights"):
        load_model(str(tmp_path / "model"), device="cpu")
    load_model(str(tmp_path / "model"), device="cpu", expand_weights=True)
