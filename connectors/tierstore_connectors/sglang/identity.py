"""The identity of SGLang's pages, and the key of each page.

**Keys.** SGLang names a page by a SHA-256 hash over all tokens up to the page's end, the salt and the adapter
of the request (:mod:`tierstore_connectors.sglang.adapters`). The first 16 bytes of the hash are the page's
key. The whole hash is stored in place of tokens and compared.

**The identity** covers everything else: SGLang's version, every argument of the server, all bytes of the
model's files, the pool's layout in memory, this rank's part of the model, and the *epoch*. SGLang does not
report an update of the weights to a storage. But the update may set a new weight version, and ``clear``
always starts a new epoch.

Every argument is part of the identity unless :data:`HARMLESS` lists it, including arguments that a later
SGLang adds. If an argument is the path of a file or folder, its contents count instead of the path.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierstore.errors import UsageError
from tierstore.keys import NAME_BYTES, Identity, Prompt
from tierstore_connectors.common.contents import contents_of, has_weights, with_contents
from tierstore_connectors.common.facts import COMMIT, digest, words

_log = logging.getLogger("sglang.tierstore")


HARMLESS: frozenset[str] = frozenset().union(
    # Processes and addresses, access rights, logs and metrics.
    words("""
        base_gpu_id gpu_id_step watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray numa_node
        gc_threshold custom_sigquit_handler nccl_port dist_timeout dist_init_addr gated_launch_port nnodes
        node_rank load_balance_method enable_p2p_check enable_dp_attention_local_control_broadcast
        pre_warm_nccl host port fastapi_root_path enable_http_worker_reuseport smg_grpc_mode grpc_mode
        grpc_port grpc_response_timeout_secs grpc_worker_threads sidecar sidecar_args skip_server_warmup
        warmups enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile
        ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key
        served_model_name file_storage_path log_level log_level_http log_requests log_requests_level
        log_requests_format log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder
        show_time_cost enable_metrics smg_http_sidecar_port enable_mfu_metrics
        enable_metrics_for_all_schedulers load_snapshot_publish_interval
        tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
        bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency
        prompt_tokens_buckets generation_tokens_buckets gc_warning_threshold_secs decode_log_interval
        enable_request_time_stats_logging kv_events_config load_publish_endpoint enable_forward_pass_metrics
        forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace trace_modules
        otlp_traces_endpoint otlp_service_name export_metrics_to_file export_metrics_to_file_dir
        stat_loggers kv_canary kv_canary_real_data kv_canary_sweep_interval debug_tensor_dump_output_folder
        debug_tensor_dump_layers spec_trace_dir enable_layerwise_nvtx_marker enable_profile_cuda_graph
        enable_cudagraph_gc expert_distribution_recorder_mode expert_distribution_recorder_buffer_size
        expert_balancedness_report_mode elastic_ep_scale_timeout
    """),
    # Scheduling of requests, and sizes of memory.
    words("""
        mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size
        prefill_decode_interval prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens
        prefill_max_requests schedule_policy enable_priority_scheduling disable_priority_preemption
        default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first
        priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness
        swa_full_tokens_ratio disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval
        enable_mixed_chunk max_mamba_cache_size mamba_full_memory_ratio mamba_max_states_per_path
        mamba_track_interval int8_mamba_ckpt_size enable_prefill_delayer prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
        min_free_slots_delay pp_max_micro_batch_size pp_async_batch_depth cuda_graph_config
        cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill
        cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context torch_compile_max_bs
        enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup cpu_offload_gb
        offload_group_size offload_num_in_group offload_prefetch_step offload_mode ple_offload_embedding
        ple_offload_backend ple_offload_dir disaggregation_decode_allocation_policy
        disaggregation_transfer_backend disaggregation_enable_kv_checksum disaggregation_bootstrap_port
        disaggregation_ib_device disaggregation_decode_enable_radix_cache
        disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup
        num_reserved_decode_tokens disaggregation_decode_extra_slots disaggregation_decode_polling_interval
        enable_pd_role_switch optimistic_prefill_attempts disaggregation_decode_host_receive_threshold
        decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank
        encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder mooncake_ib_device
    """),
    # Caches. The identity counts the layout of a host pool and the namespace separately.
    words("""
        radix_eviction_policy radix_eviction_policy_config disable_radix_cache enable_session_radix_cache
        radix_cache_backend enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size
        hicache_host_memory_fraction hicache_write_policy hicache_io_backend hicache_mem_layout
        hicache_storage_backend hicache_storage_prefetch_policy hicache_storage_backend_extra_config
        hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
        enable_unified_cache_external_linker unified_cache_external_linker_backend
        unified_cache_external_linker_config enable_prefix_mm_cache enable_mm_global_cache
        mm_global_cache_backend mm_preprocess_cache_size_mb
    """),
    # Conversions from text to tokens and from logits to text, because pages are found by tokens.
    words("""
        enable_response_store tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num
        detokenizer_worker_num skip_tokenizer_init chat_template trust_request_chat_template
        hf_chat_template_name completion_template enable_cache_report return_input_ids return_output_ids
        reasoning_parser default_chat_template_kwargs strip_thinking_cache enable_strict_thinking
        tool_call_parser tool_server sampling_defaults asr_max_buffer_seconds asr_max_concurrent_sessions
        preferred_sampling_params allow_auto_truncate stream_interval batch_notify_size
        stream_response_default_include_usage incremental_streaming_output enable_streaming_session
        constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
        constrained_json_max_whitespace_cnt enable_dynamic_batch_tokenizer
        dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
        enable_tokenizer_batch_encode disable_tokenizer_batch_decode sampling_backend grammar_backend
        mlx_enable_sampling enable_custom_logit_processor enable_watermark watermark_config watermark_key
        watermark_key_b watermark_context_window watermark_mixing_probability watermark_max_probability
        watermark_default_enabled watermark_enforce_all sampling_mask_max_tokens disable_outlines_disk_cache
        enable_return_hidden_states return_hidden_states_mode enable_return_aux_hidden_states
        return_aux_hidden_state_layer_ids enable_return_routed_experts enable_return_indexer_topk
        speculative_accept_threshold_single speculative_accept_threshold_acc mm_processor_worker_num
        mm_io_worker_num allowed_media_domains media_url_max_file_size_mb limit_mm_data_per_request
        mm_feature_transport enable_broadcast_mm_inputs_process
    """),
    # Loading of weights. The identity counts the bytes of the weights separately.
    words("""
        download_dir weight_loader_disable_mmap weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
        remote_instance_weight_loader_send_weights_group_ports engine_info_bootstrap_port
        modelopt_checkpoint_save_path modelopt_export_path delete_ckpt_after_loading weight_cache_socket
        weight_cache_timeout
    """),
    # Adapters. The names of pages contain digests of the adapters' files.
    words("""
        lora_paths enable_lora_overlap_loading max_loaded_loras max_loras_per_batch lora_eviction_policy
        lora_drain_wait_threshold
    """),
)
"""The fields of SGLang's ``ServerArgs`` that are known not to change the KV of a token sequence."""

# The identity counts the weights separately, by the bytes of their files, a commit or the namespace, and by
# their version. The seed counts for dummy weights only, which are made from it.
_ELSEWHERE = frozenset({"model_path", "revision", "weight_version", "random_seed"})


def page_hash(key: str) -> bytes:
    """Return 32 bytes for a page's name: the decoded SHA-256 hash of SGLang, or the hash of another name."""
    if len(key) == 2 * NAME_BYTES:
        try:
            return bytes.fromhex(key)
        except ValueError:
            pass  # the name is not a hexadecimal hash
    return hashlib.sha256(key.encode()).digest()


def pages_named(identity: Identity, keys: Sequence[str], chunk_tokens: int, before: int = 0) -> Prompt:
    """Return a prompt that finds each of the pages ``keys`` by name. ``before`` is the number of the prompt's
    pages before them, if SGLang reports it."""
    names = [page_hash(key) for key in keys]
    return Prompt.named_pages(identity, names, chunk_tokens=chunk_tokens, pages_before=before)


def counting(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server arguments that are part of the identity."""
    found = {
        name: value
        for name, value in arguments.items()
        if name not in HARMLESS and name not in _ELSEWHERE and not name.startswith("_")
    }
    if arguments.get("load_format") == "dummy":
        found["random_seed"] = arguments.get("random_seed")
    return found


def model_digest(version: str, arguments: Mapping[str, Any], namespace: str, *, sampled: bool = False) -> str:
    """Return a digest of the model's computation: SGLang's version and all counted arguments. Raise
    :class:`UsageError` if an argument is the path of a file that cannot be read."""
    values = {
        name: with_contents(value, sampled=sampled, log=_log) for name, value in counting(arguments).items()
    }
    return digest([version, sorted(values.items()), namespace])


def weights_revision(arguments: Mapping[str, Any], namespace: str, *, sampled: bool = False) -> str:
    """Return an identification of the weights: a digest of the model's files, or the path and the hub's
    commit. Raise :class:`UsageError` without files, commit and ``namespace``."""
    require_known_weights(arguments, namespace)
    place, revision = str(arguments.get("model_path", "")), str(arguments.get("revision") or "")
    folder = Path(place)
    if has_weights(folder):
        return contents_of(folder, sampled=sampled, log=_log)
    own = contents_of(folder, sampled=sampled, log=_log) if folder.is_dir() else place
    return f"{own} {revision}"


def require_known_weights(arguments: Mapping[str, Any], namespace: str = "") -> None:
    """Raise :class:`UsageError` if :func:`weights_revision` cannot identify the weights. Read no weight
    file."""
    place, revision = str(arguments.get("model_path", "")), str(arguments.get("revision") or "")
    if not (COMMIT.fullmatch(revision) or namespace or has_weights(Path(place))):
        raise UsageError(
            f"the weights of {place} cannot be identified (no local weight files, revision is no commit): "
            'give a commit as revision, or hicache-storage-backend-extra-config a "namespace" that changes '
            "with them"
        )
