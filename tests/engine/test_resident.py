"""A quantised model takes less memory than the same model in float32, measured of whole processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file

from tests.tiny_models import VOCAB, rewrite_json

from .test_gguf import NAMES
from .test_quantised import group_of

HIDDEN, INNER, LAYERS, HEADS = 576, 1536, 6, 9
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (192, HIDDEN),
    "self_attn.v_proj": (192, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
NUMBERS = LAYERS * sum(rows * columns for rows, columns in MATRICES.values()) + 2 * VOCAB * HIDDEN
SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# Loads a model, decodes, and says what the process then holds and what it held before.
SCRIPT = """
import ctypes, json, os, sys
from pathlib import Path
import torch
from tests.engine.test_families import Pages, Sequence_, compute
from tierstore_engine.build import load_model

def resident():
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10

load_model("tiny", device="cpu")
torch.randn(64, 64) @ torch.randn(64, 64)
before = resident()
model = load_model(sys.argv[1], device="cpu", expand_weights=sys.argv[2] == "expand")
one = Sequence_(Pages(model), list(range(40)))
for stop in (38, 39, 40):
    logits = compute(one.pages, [(one, stop)])[0]
print(json.dumps([resident() - before, bool(logits.isfinite().all())]))
"""


def held(model: Path, how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), how],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    nbytes, finite = json.loads(done.stdout.splitlines()[-1])
    assert finite
    return int(nbytes)


@pytest.fixture
def folder(checkpoints: Callable[..., Path], tmp_path: Path) -> Path:
    copied = Path(shutil.copytree(checkpoints("llama3"), tmp_path / "model"))
    (copied / "model.safetensors").unlink()
    rewrite_json(copied / "config.json", **SHAPE)
    return copied


def norms() -> dict[str, torch.Tensor]:
    names = [
        f"model.layers.{i}.{end}"
        for i in range(LAYERS)
        for end in ("input_layernorm", "post_attention_layernorm")
    ]
    return {f"{name}.weight": torch.ones(HIDDEN) for name in [*names, "model.norm"]}


def write_gguf_model(folder: Path) -> tuple[Path, float]:
    """All matrices in Q4_0."""
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(3)
    writer.add_key_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    renamed = {**NAMES, "post_attention_layernorm": "ffn_norm"}
    names = {
        f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in MATRICES.items()
    }
    names |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}

    def stored(name: str) -> str:
        name = name.replace("model.layers.", "blk.")
        for part, other in renamed.items():
            name = name.replace(part, other)
        return name

    for name, norm in norms().items():
        writer.add_tensor(stored(name), norm.numpy())
    for name, (rows, columns) in names.items():
        values = torch.randn(rows, columns).numpy() * 0.02
        kind = gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(stored(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, 18 / 32


def write_int8_model(folder: Path) -> tuple[Path, float]:
    """The layers' matrices in 8 bits with a scale for each row, in compressed-tensors' form."""
    tensors = norms()
    tensors |= {
        name: torch.randn(VOCAB, HIDDEN) * 0.02 for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    for i in range(LAYERS):
        for name, shape in MATRICES.items():
            stem = f"model.layers.{i}.{name}."
            tensors[f"{stem}weight"] = torch.randint(-128, 128, shape).to(torch.int8)
            tensors[f"{stem}weight_scale"] = torch.full((shape[0], 1), 2e-4)
    save_file(tensors, folder / "model.safetensors")
    weights = group_of(num_bits=8, type="int", strategy="channel")
    said = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": weights}
    rewrite_json(folder / "config.json", quantization_config=said)
    return folder, 1.05


@pytest.mark.parametrize("write", [write_gguf_model, write_int8_model])
def test_the_weights_of_a_process_are_as_small_as_they_are_stored(
    write: Callable[[Path], tuple[Path, float]], folder: Path
) -> None:
    """Within 24 MB for the engine's own. The model has 22 million numbers, which take 86 MB in float32."""
    model, bytes_each = write(folder)
    kept, expanded = held(model, "keep"), held(model, "expand")
    assert expanded > 4 * NUMBERS
    assert kept < bytes_each * NUMBERS + (24 << 20)
    assert kept < expanded / 2
