"""The fields of vLLM's configuration that do not change KV.

**A field that is not listed here counts for a page's identity.** For example, a newer vLLM may have an
unlisted field. Engines with different values of the field then share no pages, which costs hits but never
makes an output wrong. A field may be listed only if the bytes of a KV block do not depend on it. The listed
fields are names and addresses, sizes of memory and of batches, options for sampling and output, and fields
that vLLM derives from counted fields.

A field that only changes rounding, such as the batch size, may be listed: vLLM's own prefix cache also reuses
blocks across batches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tierstore_connectors.common.facts import words

HARMLESS: Mapping[str, frozenset[str]] = {
    cls: words(names)
    for cls, names in {
        "VllmConfig": """
            instance_id kv_transfer_config kv_events_config observability_config logging_config
            profiler_config structured_outputs_config reasoning_config watermark_config aux_output_config
            weight_transfer_config offload_config shutdown_timeout
            quant_config""",  # vLLM derives `quant_config` from counted fields and files
        # `weights_revision` counts the files or commit of the model, its weights and its tokenizer.
        # `identity.py` counts the seed and the lengths where KV depends on them.
        "ModelConfig": """
            model model_weights tokenizer revision hf_config_path seed max_model_len spec_target_max_model_len
            served_model_name hf_token allowed_local_media_path allowed_media_domains
            allow_deprecated_quantization max_logprobs logprobs_mode use_fp64_gumbel return_sampling_mask
            generation_config override_generation_config logits_processors renderer_num_workers
            skip_tokenizer_init enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend
            sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator""",
        "MultiModalConfig": """
            mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb skip_mm_profiling
            mm_tensor_ipc mm_ipc_gpu_memory_gb mm_encoder_fp8_scale_save_path
            mm_encoder_fp8_scale_save_margin enable_mm_embeds allow_missing_mm_embeddings
            mm_encoder_only""",  # allow_missing_mm_embeddings and mm_encoder_only follow from `ec_role`
        # The identity counts the block size through the page layout and page size.
        "CacheConfig": """
            block_size user_specified_block_size _block_size_resolved effective_attention_block_size
            hash_block_size cache_hit_alignment_tokens gpu_memory_utilization kv_cache_memory_bytes
            num_gpu_blocks_override num_gpu_blocks num_cpu_blocks kv_cache_size_tokens
            kv_cache_max_concurrency enable_prefix_caching prefix_cache_retention_interval
            kv_offloading_size kv_offloading_backend""",
        # The identity counts a worker's part of the model separately (`Rank`).
        "ParallelConfig": """
            data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local
            data_parallel_index data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port
            _data_parallel_master_port_list _coord_store_port dp_sync_interval data_parallel_backend
            data_parallel_external_lb data_parallel_hybrid_lb disable_nccl_for_dp_synchronization
            rank node_rank nnodes world_size master_addr master_port distributed_timeout_seconds
            cpu_distributed_timeout_seconds _api_process_count _api_process_rank
            distributed_executor_backend max_parallel_loading_workers ray_workers_use_nsight
            ray_runtime_env placement_group numa_bind numa_bind_nodes numa_bind_cpus
            assigned_physical_gpu_ids enable_shm_tensor_arena enable_eplb eplb_config
            expert_placement_strategy enable_ep_weight_filter enable_elastic_ep elastic_ep_max_dp_size
            enable_fault_tolerance fault_tolerance_config""",
        "SchedulerConfig": """
            max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs
            max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold
            long_prefill_token_threshold_adaptive max_num_queued_reqs max_num_queued_tokens
            enable_chunked_prefill max_num_encoder_input_tokens encoder_cache_size policy
            disable_chunked_mm_input scheduler_cls scheduler_reserve_full_isl watermark
            prefill_schedule_interval async_scheduling stream_interval""",
        "DeviceConfig": "device",
        "LoadConfig": """
            download_dir device use_tqdm_on_load pt_load_map_location safetensors_load_strategy
            safetensors_prefetch_num_threads safetensors_prefetch_block_size""",
        "KernelConfig": "enable_cutedsl_warmup enable_jit_warmup",
        # Chunk keys count an adapter's files (`AdapterVersions`).
        "LoRAConfig": """
            max_lora_rank max_loras max_cpu_loras specialize_active_lora max_lora_cls_labels""",
        # The draft model's configuration, files and commit count like those of the model.
        "SpeculativeConfig": """
            model revision max_model_len target_model_config target_parallel_config draft_parallel_config
            prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth
            suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
            suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates
            synthetic_acceptance_length draft_sample_method""",
        # The listed sizes follow from the scheduler's sizes. The last three lines are recorded by vLLM at run
        # time.
        "CompilationConfig": """
            debug_dump_path cache_dir local_cache_dir compile_cache_save_format compile_sizes
            compile_ranges_endpoints cudagraph_capture_sizes max_cudagraph_capture_size
            cudagraph_num_of_warmups cudagraph_copy_inputs cudagraph_specialize_lora
            decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold
            encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch
            encoder_cudagraph_max_frames_per_batch
            enabled_custom_ops disabled_custom_ops traced_files compilation_time encoder_compilation_time
            static_forward_context static_all_moe_layers""",
        "PassConfig": "rope_kvcache_fusion_max_token_num fi_allreduce_fusion_max_size_mb",
        "ECTransferConfig": """
            engine_id ec_buffer_device ec_buffer_size ec_role ec_ip ec_port ec_connector_extra_config
            mm_encoder_output_widths""",
    }.items()
}
"""The fields that do not change KV, by the name of their configuration class."""

_COUNTED_VARIABLES = re.compile(
    r"(VLLM|AITER|FLASHINFER|FLASH_ATTENTION|DG|TORCH_ALLOW_TF32)_|NVIDIA_TF32_OVERRIDE$"
)
_HARMLESS_VARIABLES = re.compile(
    r"""VLLM_(
    # Addresses, names, ports, keys. Kubernetes sets variables for each service, such as VLLM_PORT.
    (.*_)?SERVICE_(HOST|PORT.*)|(.*_)?PORT(_\d+_.*)?|.*HOST|HOST_IP|LOOPBACK_IP|API_KEY|DIST_IDENT
    |DP_.*|NIXL_.*|P2P_.*|EC_SIDE_.*|MOONCAKE_.*|RAY_.*|RPC_BASE_PATH|RANDOMIZE_DP_DUMMY_INPUTS
    |OBJECT_STORAGE_SHM_BUFFER_NAME|PROCESS_NAME_PREFIX|SERVER_DEV_MODE|GPU_NIC_PCIE_MAPPING
    |NIC_SELECTION_VARS|LORA_RESOLVER_.*
    # Logs, traces, statistics.
    |LOGGING_.*|LOG_.*|CONFIGURE_LOGGING|DISABLE_LOG_LOGO|DEBUG_.*|TRACE_FUNCTION|NO_USAGE_STATS
    |DO_NOT_TRACK|USAGE_.*|.*_SCOPES_FOR_PROFILING|GC_DEBUG|PATTERN_MATCH_DEBUG|KV_EVENTS_.*
    # Folders, timeouts, limits of requests, sizes of memory and queues.
    |CACHE_ROOT|CONFIG_ROOT|ASSETS_.*|XLA_CACHE_PATH|.*_TIMEOUT(_S|_SECONDS)?|HTTP_.*|MEDIA_CACHE.*
    |MEDIA_FETCH_.*|MEDIA_LOADING_.*|MAX_N_SEQUENCES|MAX_COMPLETION_PROMPTS|MAX_STOP_STRINGS
    |MAX_NUM_BAD_WORDS|MAX_BAD_WORDS_TOTAL_TOKENS|RINGBUFFER_.*|MQ_.*|MSGPACK_.*|XGRAMMAR_CACHE_MB
    |CPU_KVCACHE_SPACE|CPU_OMP_THREADS_BIND|CPU_NUM_OF_RESERVED_CPU|V1_OUTPUT_PROC_CHUNK_SIZE
    # Start and end of processes, compile caches, builds.
    |ENABLE_V1_MULTIPROCESSING|WORKER_MULTIPROC_METHOD|KEEP_ALIVE_.*|ENABLE_STARTUP_PLAN
    |USE_RAY_.*|ELASTIC_EP_.*|DISABLE_COMPILE_CACHE|COMPILE_CACHE_SAVE_FORMAT|FORCE_AOT_LOAD
    |ALLOW_RUNTIME_LORA_UPDATING|ALLOW_LONG_MAX_MODEL_LEN|SKIP_MODEL_NAME_VALIDATION|USE_MODELSCOPE
    |BUILD_.*|IMAGE_TAG|DOCKER_.*|USE_RUST_.*|RUST_.*|USE_SPINLOOP_EXT|DISABLE_REQUEST_ID_RANDOMIZATION
    )""",
    re.VERBOSE,
)


def counted_variables(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the environment variables that may influence the choice of kernels, as sorted (name, value)."""
    return sorted(
        (name, value)
        for name, value in environment.items()
        if _COUNTED_VARIABLES.match(name) and not _HARMLESS_VARIABLES.fullmatch(name)
    )


# Models and kinds of rotary embedding whose code in vLLM does not read `max_model_len`. In contrast,
# "longrope" chooses its factors by `max_model_len`, and Llama 4 its attention temperature.
ANY_LENGTH_MODELS = words(
    """
    LlamaForCausalLM MistralForCausalLM MixtralForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM
    Qwen3ForCausalLM Qwen3MoeForCausalLM GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
    Phi3ForCausalLM GptOssForCausalLM GraniteForCausalLM OPTForCausalLM
    """
)
_ANY_LENGTH_ROPES = frozenset({"default", "linear", "llama3", "yarn"})


def length_counts(architectures: list[str], shape: Mapping[str, object]) -> bool:
    """Return whether KV may depend on ``max_model_len``. ``shape`` is the model's Hugging Face configuration
    as plain values."""
    return not (
        architectures and ANY_LENGTH_MODELS.issuperset(architectures) and _ropes(shape) <= _ANY_LENGTH_ROPES
    )


def _ropes(shape: object) -> set[str]:
    """Return the kinds of rotary embedding in a configuration and its nested configurations."""
    if isinstance(shape, (list, tuple)):
        return set().union(*map(_ropes, shape))
    if not isinstance(shape, Mapping):
        return set()
    found = set().union(*map(_ropes, shape.values()))
    for name in ("rope_parameters", "rope_scaling"):
        rope = shape.get(name)
        if isinstance(rope, Mapping):
            kind = rope.get("rope_type", rope.get("type"))
            of_layers = [each for each in rope.values() if isinstance(each, Mapping)]
            for each in of_layers:
                found.add(str(each.get("rope_type", each.get("type", "default"))))
            if kind is not None or not of_layers:
                found.add(str(kind or "default"))
    return found
