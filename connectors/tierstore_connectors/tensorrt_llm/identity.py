"""The identity of an engine's pages, and the engines and requests that are refused.

Two engines share pages only if all of these are equal:

- all bytes of the model's folder, and every argument of the engine except those in :data:`HARMLESS`,
- the environment variables ``TRTLLM_…`` and ``TLLM_…``, the versions of the packages that TensorRT-LLM
  computes with, and the GPU's name,
- the blocks' shape and dtype, and the rank's part of the model.

**An engine is refused** if its KV is not in one pool of blocks for all tokens, or if KV depends on more than
tokens (images). An engine that may offload blocks to host memory is refused too, because a block's number is
then not its index in the pool. The text models with full attention in :data:`ARCHITECTURES` are supported.

**A request is refused** if anything besides its tokens may change its KV: an adapter, images, prompt
embeddings, positions, a cache salt, beams.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore_connectors.common.contents import contents_of, has_weights, with_contents
from tierstore_connectors.common.facts import digest, host_device, installed_versions, words

_log = logging.getLogger("tierstore_connectors.tensorrt_llm")
_CODEC = "tensorrt-llm-blocks1"
_COMPUTES = ("tensorrt_llm", "torch", "tensorrt", "triton", "flashinfer-python", "transformers")

ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "DeepseekV3ForCausalLM",
    }
)

HARMLESS = words("""
    model tokenizer tokenizer_mode custom_tokenizer skip_tokenizer_init tokenizer_revision revision
    postprocess_tokenizer_dir num_postprocess_workers reasoning_parser guided_decoding_backend
    batched_logits_processor sampler_type sampler_force_async_worker disable_flashinfer_sampling
    stream_interval kv_connector_config scheduler_config disable_overlap_scheduler enable_chunked_prefill
    max_batch_size max_num_tokens max_input_len batch_wait_timeout_ms batch_wait_timeout_iters
    batch_wait_max_tokens_ratio cuda_graph_config garbage_collection_gen0_threshold peft_cache_config
    cache_transceiver_config attention_dp_config gpus_per_node ray_worker_extension_cls ray_placement_config
    enable_iter_perf_stats enable_iter_req_stats print_iter_log iter_stats_max_iterations
    request_stats_max_iterations max_stats_len perf_metrics_max_requests return_perf_metrics
    otlp_traces_endpoint enable_layerwise_nvtx_marker layer_wise_benchmarks_config
    kv_cache_config.enable_block_reuse kv_cache_config.max_tokens kv_cache_config.free_gpu_memory_fraction
    kv_cache_config.host_cache_size kv_cache_config.onboard_blocks kv_cache_config.cross_kv_cache_fraction
    kv_cache_config.secondary_offload_min_priority kv_cache_config.event_buffer_max_size
    kv_cache_config.attention_dp_events_gather_period_ms kv_cache_config.enable_partial_reuse
    kv_cache_config.copy_on_partial_reuse kv_cache_config.use_uvm kv_cache_config.max_gpu_total_bytes
    kv_cache_config.max_util_for_resume
""")
"""The arguments that are known not to change the KV of a token sequence. The identity counts the contents of
the ``model``'s files instead of its path."""

# Environment variables with these parts in their names do not change KV. Some of them
# differ between ranks or starts.
_NOT_COMPUTING = ("IPC", "SPAWN", "LOG", "PROFILE", "NVTX", "SINGLE_PROCESS", "PORT")

# The supported values of arguments. A TensorRT-LLM version may lack some of the arguments.
_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "kv_cache_config.host_cache_size": (None, 0),
    "kv_cache_config.use_kv_cache_manager_v2": (None, False),
    "kv_cache_config.max_attention_window": (None,),
    "kv_cache_config.sink_token_length": (None, 0),
    "speculative_config": (None,),
    "sparse_attention_config": (None,),
    "max_beam_width": (None, 1),
    "pipeline_parallel_size": (None, 1),
    "context_parallel_size": (None, 1),
    "enable_attention_dp": (None, False),
    "enable_sleep": (None, False),
    "orchestrator_type": (None, "rpc", "mpi"),
    "checkpoint_loader": (None,),
    "mm_encoder_only": (None, False),
}

_OF_REQUESTS = (
    "lora_task_id",
    "lora_weights",
    "prompt_embedding_table",
    "multimodal_embedding",
    "multimodal_hashes",
    "mrope_rotary_cos_sin",
    "position_ids",
    "cache_salt_id",
)
"""The properties of TensorRT-LLM's ``LlmRequest`` that are all None if only tokens determine a request's
KV."""


def arguments_of(llm_args: Any) -> dict[str, Any]:
    """Return TensorRT-LLM's arguments by name; fields of inner configurations have names ``outer.inner``."""
    found: dict[str, Any] = {}

    def visit(name: str, value: Any) -> None:
        if hasattr(type(value), "model_fields"):  # pydantic
            for inner, each in value:
                visit(f"{name}.{inner}" if name else inner, each)
        else:
            found[name] = value

    visit("", llm_args)
    return found


def require_supported(arguments: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError` for an unsupported engine. This reads no file of the model except
    ``config.json``."""
    for name, values in _SUPPORTED.items():
        value = arguments.get(name)
        if not any(value is each or (each is not None and value == each) for each in values):
            raise UsageError(
                f"tierstore does not support TensorRT-LLM's {name}={value!r}, only {values[-1]!r}"
            )
    if "dummy" in str(arguments.get("load_format", "")).lower():
        raise UsageError("tierstore does not support random weights (load_format=dummy)")
    folder = Path(str(arguments["model"]))
    if not has_weights(folder):
        raise UsageError(
            f"tierstore needs the model as a local folder with its weights, got {str(folder)!r}: download it "
            "and pass the folder"
        )
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {folder / 'config.json'}: {error}") from error
    named = found.get("architectures") or []
    if not named or not ARCHITECTURES.issuperset(named):
        raise UsageError(
            f"tierstore does not support the architecture {', '.join(named) or 'without a name'} with "
            f"TensorRT-LLM, only {', '.join(sorted(ARCHITECTURES))}"
        )


def refusal(request: Any) -> str | None:
    """Return the reason why TensorRT-LLM's ``request`` is refused, or None."""
    for name in _OF_REQUESTS:
        if getattr(request, name) is not None:
            return name
    return "beams" if request.sampling_config.beam_width > 1 else None


def identities_of(
    arguments: Mapping[str, Any], pool: torch.Tensor, chunk_tokens: int, *, namespace: str, sampled: bool
) -> list[Identity]:
    """Return the identity of each rank's pages. Hash all files of the model, unless their digests are cached.
    Raise :class:`UsageError` if a file cannot be read."""
    ranks = int(arguments.get("tensor_parallel_size") or 1)
    tokens_per_block = int(arguments["kv_cache_config.tokens_per_block"])
    block_bytes = pool[0].numel() * pool.element_size()
    spec = KVSpec.opaque(block_bytes * (chunk_tokens // tokens_per_block), chunk_tokens=chunk_tokens)
    counted = {name: value for name, value in arguments.items() if not _is_harmless(name)}
    model = digest(
        [
            with_contents(counted, sampled=sampled, log=_log),
            [str(pool.dtype), list(pool.shape[1:])],
            installed_versions(_COMPUTES),
            torch.cuda.get_device_name(pool.device) if pool.is_cuda else host_device(),
            sorted(_counted_variables(os.environ).items()),
        ]
    )
    revision = contents_of(Path(str(arguments["model"])), sampled=sampled, log=_log)
    return [
        Identity.of(
            spec,
            model=model,
            revision=revision,
            codec=_CODEC,
            shard=f"tp{rank}/{ranks},pp0/1",
            tenant=namespace,
        )
        for rank in range(ranks)
    ]


def _is_harmless(name: str) -> bool:
    return name in HARMLESS or name.partition(".")[0] in HARMLESS


def _counted_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(("TRTLLM_", "TLLM_")) and not any(part in name for part in _NOT_COMPUTING)
    }
