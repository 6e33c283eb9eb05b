"""Small models for these tests, made once and kept beside pytest's own cache."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.recipes import RECIPES
from tierstore_tools.vllm import models
from tierstore_tools.vllm.asks import prompt

__all__ = [
    "GEMMA",
    "LLAMA",
    "LLAMA3",
    "LLAMA4",
    "LLAMA_6_LAYERS",
    "LLAVA",
    "MLA",
    "OPT",
    "PHI3_LONGROPE",
    "QWEN2",
    "QWEN2_AUDIO",
    "QWEN2_VL",
    "QWEN3",
    "QWEN3_NEXT",
    "model",
    "prompt",
]

LLAMA = "tiny"  # 4 layers, one KV cache group: the main oracle, bit-equal in float32
LLAMA_6_LAYERS = "tiny-6-layers"
LLAVA = "tiny-llava"  # an image is 16 tokens
GEMMA = "tiny-gemma"  # 3 layers with a window of 64 tokens, 1 of full attention: 4 KV cache groups
LLAMA4 = "tiny-llama4"  # 3 layers that attend within chunks of 160 tokens, 1 of full attention
MLA = "tiny-mla"
OPT = "tiny-opt"
LLAMA3 = "tiny-llama3"  # a stretched RoPE
QWEN2 = "tiny-qwen2"  # biases of Q, K and V
QWEN2_VL = "tiny-qwen2-vl"  # an image of 112 × 112 pixels is 16 tokens
QWEN2_AUDIO = "tiny-qwen2-audio"  # a sound of 0.6 s is 15 tokens
QWEN3 = "tiny-qwen3"  # norms of Q and K
PHI3_LONGROPE = "tiny-phi3-longrope"  # other rotary factors where max_model_len is beyond 1024
QWEN3_NEXT = "tiny-qwen3-next"  # 3 layers with recurrent states, 1 of full attention


def model(kind: str, cache: Path) -> Path:
    """The directory of the model ``kind`` (one of the names above), made in ``cache`` if need be."""
    directory = cache / f"{kind}-2"  # count up when a recipe changes
    if kind in RECIPES:
        return models.make_with("tests.vllm.recipes", kind, directory)
    return models.make(kind, directory)
