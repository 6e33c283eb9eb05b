"""Llamas and Gemmas with random weights and a token for each byte, as GGUF files of a few hundred KB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

_WIDTH, _HEADS, _KV_HEADS, _HEAD, _FEED, _LAYERS = 128, 4, 2, 32, 256, 6
WINDOW = 128  # of the Gemma


def write_tiny(path: Path, *, seed: int = 0, windows: bool = False, quantized: bool = False) -> Path:
    """Write a model. ``windows``: a Gemma 3, in which the last layer has full attention."""
    rng = np.random.default_rng(seed)
    architecture = "gemma3" if windows else "llama"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(1 << 16)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_FEED)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    if windows:
        writer.add_sliding_window(WINDOW)
    vocabulary = _add_vocabulary(writer)

    def add(name: str, *shape: int, scale: float = 0.0) -> None:
        wide = rng.standard_normal(shape, np.float32) * (scale or shape[-1] ** -0.5)
        kind = gguf.GGMLQuantizationType.Q8_0
        if quantized and len(shape) > 1:
            writer.add_tensor(name, gguf.quants.quantize(wide, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, wide)

    def ones(name: str, length: int) -> None:
        writer.add_tensor(name, np.ones(length, np.float32))

    add("token_embd.weight", vocabulary, _WIDTH, scale=1.0)
    ones("output_norm.weight", _WIDTH)
    add("output.weight", vocabulary, _WIDTH)
    for layer in range(_LAYERS):
        block = f"blk.{layer}"
        ones(f"{block}.attn_norm.weight", _WIDTH)
        add(f"{block}.attn_q.weight", _HEADS * _HEAD, _WIDTH, scale=0.3)
        add(f"{block}.attn_k.weight", _KV_HEADS * _HEAD, _WIDTH, scale=0.3)
        add(f"{block}.attn_v.weight", _KV_HEADS * _HEAD, _WIDTH)
        add(f"{block}.attn_output.weight", _WIDTH, _HEADS * _HEAD)
        ones(f"{block}.ffn_norm.weight", _WIDTH)
        add(f"{block}.ffn_gate.weight", _FEED, _WIDTH)
        add(f"{block}.ffn_up.weight", _FEED, _WIDTH)
        add(f"{block}.ffn_down.weight", _WIDTH, _FEED)
        if windows:
            ones(f"{block}.attn_q_norm.weight", _HEAD)
            ones(f"{block}.attn_k_norm.weight", _HEAD)
            ones(f"{block}.post_attention_norm.weight", _WIDTH)
            ones(f"{block}.post_ffw_norm.weight", _WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: Any) -> int:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    return len(tokens)
