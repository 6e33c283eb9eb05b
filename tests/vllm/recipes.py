"""Make the models that only these tests use: ``python -m tests.vllm.recipes KIND DIR``.

Each has another kind of KV cache. Seed, tokenizer and files are those of :mod:`tierstore_tools.vllm.models`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierstore_tools.vllm.models import BASE, VOCAB, llama, write

MEDIUM_TOKEN = 259  # the place of an image or a sound in a prompt


def _gemma(**changes: Any) -> Any:
    """Return a model with three window layers (64 tokens) per full layer: several KV cache groups in vLLM."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **{**BASE, "tie_word_embeddings": True, **changes},
        sliding_window=64,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        query_pre_attn_scalar=32,
    )
    model = Gemma3ForCausalLM(config)
    model.model.embed_tokens.weight.data *= 0.4  # otherwise it always repeats the last token
    return model


def _qwen2() -> Any:
    """Return a model with biases of Q, K and V."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape: dict[str, Any] = {name: value for name, value in BASE.items() if name != "head_dim"}
    return Qwen2ForCausalLM(Qwen2Config(**shape))


def _qwen3() -> Any:
    """Return a model with norms of Q and K."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = dict(BASE)
    return Qwen3ForCausalLM(Qwen3Config(**shape))


def _llama3() -> Any:
    """Return a model whose RoPE is stretched."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    return llama(rope_parameters=rope)


def _llama4() -> Any:
    """Return a dense model with three layers that attend within chunks of 160 tokens per full layer without
    rotary. A hit of 896 tokens ends inside a chunk, a hit of 640 between two."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    shape: dict[str, Any] = {name: value for name, value in BASE.items() if name != "intermediate_size"}
    config = Llama4TextConfig(
        **shape,
        intermediate_size=256,
        intermediate_size_mlp=256,
        attention_chunk_size=160,
        no_rope_layers=[1, 1, 1, 0],
        interleave_moe_layer_step=0,
        moe_layers=[],
        num_local_experts=1,
        num_experts_per_tok=1,
    )
    return Llama4ForCausalLM(config)


def _qwen3_next() -> Any:
    """Return a model with three layers of gated delta rule per full layer. On a CPU vLLM accepts heads of 128
    in bfloat16, and none of 32."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    shape: dict[str, Any] = {**BASE, "head_dim": 128}
    config = Qwen3NextConfig(
        **shape,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return Qwen3NextForCausalLM(config)


def _opt(**changes: Any) -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        word_embed_proj_dim=128,
        ffn_dim=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=4096,
        init_std=0.2,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
        **changes,
    )
    return OPTForCausalLM(config)


def _mla() -> Any:
    """Return a model with latent attention (MLA) and dense layers."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    shape: dict[str, Any] = {
        name: value for name, value in BASE.items() if name not in ("head_dim", "num_key_value_heads")
    }
    config = DeepseekV2Config(
        **shape,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
    )
    return DeepseekV2ForCausalLM(config)


def _phi3_longrope() -> Any:
    """Return a model that has other rotary factors if the longest prompt exceeds 1024 tokens."""
    from transformers import Phi3Config, Phi3ForCausalLM

    shape: dict[str, Any] = {
        name: value for name, value in BASE.items() if name not in ("head_dim", "max_position_embeddings")
    }
    config = Phi3Config(
        **shape,
        max_position_embeddings=4096,
        original_max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0] * 16,
            "long_factor": [4.0] * 16,
            "original_max_position_embeddings": 1024,
        },
    )
    return Phi3ForCausalLM(config)


def _llava() -> Any:
    """Return a Llama with images of 56 × 56 pixels, 16 tokens each."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sees = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        initializer_range=0.2,
    )
    shape: dict[str, Any] = dict(BASE)
    config = LlavaConfig(
        vision_config=sees,
        text_config=LlamaConfig(**shape),
        image_token_index=MEDIUM_TOKEN,
        tie_word_embeddings=False,
    )
    return LlavaForConditionalGeneration(config)


def _qwen2_vl() -> Any:
    """Return a Qwen2 with images of any shape: a token for 28 × 28 pixels, and positions of rows and
    columns."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    sees = {"depth": 2, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2, "num_heads": 2}
    shape: dict[str, Any] = {name: value for name, value in BASE.items() if name != "head_dim"}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    config = Qwen2VLConfig(
        vision_config=sees,
        text_config={**shape, "rope_parameters": rope},
        image_token_id=MEDIUM_TOKEN,
        video_token_id=MEDIUM_TOKEN + 1,
        vision_start_token_id=MEDIUM_TOKEN + 2,
        vision_end_token_id=MEDIUM_TOKEN + 3,
        tie_word_embeddings=False,
    )
    return Qwen2VLForConditionalGeneration(config)


def _qwen2_audio() -> Any:
    """Return a Qwen2 with sounds: a token for 40 ms."""
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    hears = {
        "num_mel_bins": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "d_model": 64,
    }
    shape: dict[str, Any] = {name: value for name, value in BASE.items() if name != "head_dim"}
    config = Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", **hears},
        text_config={"model_type": "qwen2", **shape},
        audio_token_index=MEDIUM_TOKEN,
    )
    return Qwen2AudioForConditionalGeneration(config)


_LLAVA_FILES = {
    "preprocessor_config.json": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 56},
        "crop_size": {"height": 56, "width": 56},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
    },
    "processor_config.json": {
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    },
}
_QWEN2_VL_FILES = {
    "preprocessor_config.json": {
        "processor_class": "Qwen2VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 112 * 112,
    },
    "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor"},
    "tokenizer_config.json": {
        "extra_special_tokens": {"image_token": "<image>", "video_token": "<unused0>"},
    },
}
_QWEN2_AUDIO_FILES = {
    "preprocessor_config.json": {
        "processor_class": "Qwen2AudioProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 16,
    },
    "tokenizer_config.json": {
        "extra_special_tokens": {
            "audio_token": "<image>",
            "audio_bos_token": "<unused0>",
            "audio_eos_token": "<unused1>",
        },
    },
}
_FILES: dict[str, dict[str, dict[str, Any]]] = {
    "tiny-llava": _LLAVA_FILES,
    "tiny-qwen2-vl": _QWEN2_VL_FILES,
    "tiny-qwen2-audio": _QWEN2_AUDIO_FILES,
}


def _write_files(kind: str, directory: Path) -> None:
    """Write the files of a model's processor. Fields of a file that exists are kept."""
    for name, fields in _FILES.get(kind, {}).items():
        file = directory / name
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**known, **fields}))


RECIPES: dict[str, Callable[[], Any]] = {
    "tiny-6-layers": lambda: llama(num_hidden_layers=6),
    "tiny-llama3": _llama3,
    "tiny-qwen2": _qwen2,
    "tiny-qwen3": _qwen3,
    "tiny-gemma": _gemma,
    "tiny-opt": _opt,
    "tiny-mla": _mla,
    "tiny-llama4": _llama4,
    "tiny-qwen3-next": _qwen3_next,
    "tiny-phi3-longrope": _phi3_longrope,
    "tiny-llava": _llava,
    "tiny-qwen2-vl": _qwen2_vl,
    "tiny-qwen2-audio": _qwen2_audio,
}


if __name__ == "__main__":
    kind = sys.argv[1]
    write(RECIPES[kind], Path(sys.argv[2]), more=lambda directory: _write_files(kind, directory))
