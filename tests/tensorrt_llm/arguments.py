"""Stand-ins for TensorRT-LLM's arguments: iterable models with ``model_fields``, as pydantic's are."""

from __future__ import annotations

import json
from typing import ClassVar


class Model:
    model_fields: ClassVar = {}

    def __init__(self, **values):
        unknown = set(values) - set(self.model_fields)
        assert not unknown, unknown
        self.__dict__.update({**self.model_fields, **values})

    def __iter__(self):
        return iter(vars(self).items())


class KvCacheConfig(Model):
    model_fields: ClassVar = {
        "enable_block_reuse": True,
        "max_tokens": None,
        "max_attention_window": None,
        "sink_token_length": None,
        "free_gpu_memory_fraction": 0.9,
        "host_cache_size": None,
        "enable_partial_reuse": True,
        "dtype": "auto",
        "tokens_per_block": 32,
        "use_kv_cache_manager_v2": False,
    }


class TorchLlmArgs(Model):
    model_fields: ClassVar = {
        "model": "",
        "tokenizer": None,
        "dtype": "auto",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 1,
        "enable_attention_dp": False,
        "max_beam_width": 1,
        "max_batch_size": 8,
        "max_seq_len": 4096,
        "speculative_config": None,
        "sparse_attention_config": None,
        "quant_config": None,
        "attn_backend": "TRTLLM",
        "load_format": "LoadFormat.AUTO",
        "orchestrator_type": None,
        "enable_sleep": False,
        "mm_encoder_only": False,
        "checkpoint_loader": None,
        "kv_cache_config": None,
        "cuda_graph_config": None,
    }


def write_model(folder, weights=b"weights", architecture="LlamaForCausalLM"):
    """Write a model's folder: its weights are the seed of the stand-in's KV."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def arguments(model, *, cache=None, **values):
    return TorchLlmArgs(model=str(model), kv_cache_config=KvCacheConfig(**(cache or {})), **values)
