"""GGUF files: every format as gguf's own package reads it, and models as transformers computes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as FastTokenizer

from tests.engine.kernels.executor import missing_tools
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tests.tiny_models import VOCAB, rewrite_json, train_tokenizer
from tierstore.errors import TierStoreError
from tierstore_engine import build
from tierstore_engine.build import load_model, open_model
from tierstore_engine.errors import ModelError
from tierstore_engine.kernels.packed import PackedKernels
from tierstore_engine.quantised import PackedMatrix, QuantisedMatrix
from tierstore_engine.weight_formats import GGUF_FORMATS
from tierstore_engine.weights import digest_weights, load_weights

from .test_families import close
from .test_quantised import TOKENS, logits_of, reference

Kind = gguf.GGMLQuantizationType
RNG_SEED = 5


def random_blocks(form: str, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Bytes of a format that gguf cannot write: any codes, and small scales."""
    known = GGUF_FORMATS[form]
    blocks = np.random.default_rng(RNG_SEED).integers(
        0, 256, (rows * columns // known.block, known.block_bytes), dtype=np.uint8
    )
    small = np.random.default_rng(1).uniform(-0.01, 0.01, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if form == "Q6_K":
        blocks[:, -2:] = small[:, :2]
    else:
        blocks[:, :4] = small
    return blocks.reshape(rows, -1)


def packed_as(form: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(gguf.quants.quantize(values, Kind[form]))
    except NotImplementedError:
        return random_blocks(form, *values.shape)


@pytest.mark.parametrize("form", GGUF_FORMATS)
def test_every_format_is_read_as_gguf_reads_it(form: str) -> None:
    values = np.random.default_rng(0).standard_normal((6, 512), np.float32)
    stored = packed_as(form, values)
    right = np.array(gguf.quants.dequantize(stored, Kind[form]))
    found = PackedMatrix(GGUF_FORMATS[form], torch.from_numpy(stored.view(np.uint8).copy()))
    assert found.shape == values.shape
    assert np.array_equal(found.expanded().numpy(), right)
    assert np.array_equal(found.dense(torch.tensor([5, 2])).numpy(), right[[5, 2]])
    assert np.isfinite(right).all()
    assert right.std() > 0


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
LAST_NAMES = {
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}


def neighbours(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows in the order of llama.cpp, which rotates neighbours together."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_vocabulary(writer: gguf.GGUFWriter, vocabulary: FastTokenizer) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([vocabulary.id_to_token(number) or f"t{number}" for number in range(VOCAB)])
    writer.add_token_types([3, 3] + [1] * (VOCAB - 2))
    merges = json.loads(vocabulary.to_str())["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])


def write_gguf(
    source: Path, file: Path, form: str, *, vocabulary: FastTokenizer | None = None
) -> dict[str, torch.Tensor]:
    """Write a checkpoint as GGUF, as llama.cpp's converter does. Return the numbers that it says."""
    raw = json.loads((source / "config.json").read_text())
    architecture = "gemma3" if "gemma" in raw["model_type"] else "llama"
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    rope = raw.get("rope_parameters") or {}
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    if vocabulary is None:
        writer.add_token_list([f"t{number}" for number in range(VOCAB)])
    else:
        write_vocabulary(writer, vocabulary)
    writer.add_eos_token_id(7)
    if architecture == "gemma3":
        writer.add_sliding_window(raw["sliding_window"])
        rope = rope["full_attention"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))
    dense = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        values = tensor.float().numpy()
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = neighbours(values, heads if "q_proj" in name else kv_heads)
        stored = name.replace("model.layers.", "blk.")
        for part, renamed in {**NAMES, **LAST_NAMES[architecture]}.items():
            stored = stored.replace(part, renamed)
        if values.ndim == 1:
            writer.add_tensor(stored, values)
            dense[name] = tensor
            continue
        kind = Kind[form]
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(stored, packed, raw_dtype=kind)
        numbers = np.array(gguf.quants.dequantize(packed, kind))
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            count = heads if "q_proj" in name else kv_heads
            numbers = numbers.reshape(count, -1, 2, numbers.shape[1]).swapaxes(1, 2).reshape(numbers.shape)
        dense[name] = torch.from_numpy(numbers.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense


def llama3_factors(rope: dict[str, float], head_dim: int) -> np.ndarray[Any, Any]:
    """What llama.cpp divides the frequencies by, from the description of Llama 3.1."""
    factors = []
    for pair in range(0, head_dim, 2):
        length = 2 * np.pi * rope["rope_theta"] ** (pair / head_dim)
        turns = rope["original_max_position_embeddings"] / length
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - kept) / rope["factor"] + kept))
    return np.array(factors, np.float32)


# What a GGUF file leaves to the reader, where the tiny models have something else.
_AS_CONVERTED: dict[str, dict[str, Any]] = {
    "llama2": {},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "gemma3": {
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}


@pytest.fixture
def source(checkpoints: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint of a family that GGUF can hold."""

    def copy(family: str) -> Path:
        folder = Path(shutil.copytree(checkpoints(family), tmp_path / "model"))
        rewrite_json(folder / "config.json", **_AS_CONVERTED[family])
        return folder

    return copy


def tokens_of(seed: int = 3) -> Sequence[int]:
    return torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("form", ["Q4_0", "Q8_0", "F16"])
@pytest.mark.parametrize("family", _AS_CONVERTED)
def test_logits_are_those_of_transformers(family: str, form: str, source: Callable[[str], Path]) -> None:
    folder = source(family)
    file = folder / "model.gguf"
    dense = write_gguf(folder, file, form)
    tokens = list(tokens_of())
    right = reference(dense, tokens, folder)
    kept = load_model(str(file), device="cpu")
    close(logits_of(kept, tokens), right)
    close(logits_of(load_model(str(file), device="cpu", expand_weights=True), tokens), right)
    assert isinstance(kept.weights.layers[0].mlp.down, QuantisedMatrix)  # type: ignore[union-attr]
    assert kept.config.eos_ids == (7,)


@pytest.fixture
def file(source: Callable[[str], Path]) -> Path:
    folder = source("llama3")
    write_gguf(folder, folder / "model.gguf", "Q8_0")
    return folder / "model.gguf"


def refusal(file: Path) -> str:
    with pytest.raises(ModelError) as refused:
        load_model(str(file), device="cpu")
    [line] = str(refused.value).splitlines()
    assert str(file.parent) in line
    return line


def test_a_file_that_ends_early_is_named(file: Path) -> None:
    whole = file.read_bytes()
    for kept in (0, 3, 4, 10, 24, 100, 1000, 5000, len(whole) // 2, len(whole) - 40):
        file.write_bytes(whole[:kept])
        assert "is not a readable GGUF file" in refusal(file)


def test_damaged_headers_are_named_or_change_nothing(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    random = np.random.default_rng(2)
    refused = []
    for place in random.integers(0, 3000, 150):
        damaged = whole.copy()
        damaged[place] ^= 1 << int(random.integers(8))
        file.write_bytes(damaged)
        try:
            open_model(str(file), device="cpu")
        except TierStoreError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert not any("\n" in each for each in refused)


def test_foreign_files_are_named(file: Path) -> None:
    file.write_bytes(b"PK" + bytes(100))
    assert "does not begin with GGUF" in refusal(file)
    writer = gguf.GGUFWriter(file, "mamba")
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "architecture mamba is not read from GGUF (llama and gemma3 are)" in refusal(file)


def rewritten(file: Path, old: bytes, new: bytes) -> None:
    """Replace bytes, of which there must be some."""
    whole = file.read_bytes()
    assert old in whole
    assert len(old) == len(new)
    file.write_bytes(whole.replace(old, new, 1))


def test_what_is_not_known_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    rewritten(file, b"llama.rope.freq_base", b"llama.rope.something")
    assert "llama.rope.something is not read from GGUF" in refusal(file)
    file.write_bytes(whole)
    rewritten(file, b"blk.0.attn_q.weight", b"blk.0.attn_x.weight")
    assert "tensor blk.0.attn_q.weight is missing" in refusal(file)
    file.write_bytes(whole)
    (file.parent / "tokenizer.json").unlink()
    assert "give --tokenizer" in refusal(file)  # this file has no vocabulary


def test_the_vocabulary_in_the_file(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Without a tokenizer beside the file. With one, that counts."""
    file = tmp_path / "model.gguf"
    write_gguf(source("llama3"), file, "Q8_0", vocabulary=train_tokenizer())
    text = "<s>the cat and é日"
    ids = train_tokenizer().encode(text).ids
    assert open_model(str(file), device="cpu").tokenizer.encode(text) == ids
    other = train_tokenizer().to_str().replace("<s>", "<t>")
    (tmp_path / "tokenizer.json").write_text(other)
    assert open_model(str(file), device="cpu").tokenizer.encode(text) != ids


def test_the_tokenizer_may_be_elsewhere(file: Path, checkpoints: Callable[..., Path]) -> None:
    (file.parent / "tokenizer.json").unlink()
    opened = open_model(str(file), device="cpu", tokenizer=str(checkpoints("llama3")))
    assert opened.tokenizer.encode("the cat")
    assert opened.folder == checkpoints("llama3")


@pytest.mark.skipif(missing_tools() is not None, reason=f"kernels cannot be executed: {missing_tools()}")
@pytest.mark.parametrize("form", ["Q4_1", "Q8_0"])
def test_logits_by_the_kernels_of_a_gpu(form: str, source: Callable[[str], Path]) -> None:
    """The weights of a GPU's model, whose kernels run on the CPU here; attention is the CPU's."""
    file = source("llama3") / "model.gguf"
    write_gguf(file.parent, file, form)
    kept = load_model(str(file), device="cpu", dtype="bfloat16")
    launcher = ExecutorLauncher()
    kernels = PackedKernels(launcher, dtype="bfloat16", device="cpu")
    weights = load_weights(kept.config, file, device="cpu", kernels=kernels)
    assert digest_weights(kept.config, weights) == kept.digest
    tokens = list(tokens_of())
    ours, theirs = logits_of(replace(kept, weights=weights), tokens), logits_of(kept, tokens)
    assert (ours - theirs).abs().max() < 0.05 * theirs.std()
    assert {name.split("<")[0] for name in launcher.launches} == {"unpack", "multiply_packed"}


def test_a_gpu_keeps_quantised_weights(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "resolve_device", lambda device, dtype: "cuda")
    assert open_model(str(file)).device == "cuda"
    assert not open_model(str(file)).expand
