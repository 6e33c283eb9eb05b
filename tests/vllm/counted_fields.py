"""The fields of vLLM's configuration (0.32) that were looked at and count in a page's identity, by class.

A field that is neither here nor in ``tierstore_connectors.vllm.fields.HARMLESS`` counts as well. The test
that reads this page fails until somebody has decided what it is.
"""

COUNTED = {
    name: frozenset(fields.split())
    for name, fields in {
        "AttentionConfig": """
            backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version
            flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv
            tq_max_kv_splits_for_cuda_graph use_trtllm_attention disable_flashinfer_q_quantization
            mla_prefill_backend use_prefill_query_quantization indexer_kv_dtype indexer_sparse_logits
            hisparse_config use_non_causal sparse_mla_force_mqa sparse_mla_prefill_workspace_factor
            flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size""",
        "HiSparseConfig": "device_buffer_size eager_host_mirror",
        "CacheConfig": """
            kv_cache_layout prefix_match_unit cache_dtype is_attention_free sliding_window
            prefix_caching_hash_algo kv_cache_dtype_skip_layers mamba_page_size_padded skip_page_size_padded
            mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode
            enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm use_kda_recoverssm
            kv_sharing_fast_prefill swa_bounded_replay""",
        "CompilationConfig": """
            mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder
            cudagraph_mm_encoder cudagraph_decoder_replay inductor_compile_config inductor_passes
            cudagraph_mode use_inductor_graph_partition pass_config dynamic_shapes_config
            fast_moe_cold_start""",
        "DynamicShapesConfig": "type evaluate_guards assume_32_bit_indexing",
        "PassConfig": """
            fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops fuse_allreduce_rms
            enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding fuse_mla_dual_rms_norm
            fuse_rope_kvcache fuse_qk_norm_rope_kvcache""",
        "DeviceConfig": "device_type",
        "DiffusionConfig": "canvas_length max_denoising_steps",
        "EncoderCacheManagerConfig": "encoder_cache_manager_cls manager_config",
        "ECTransferConfig": "ec_connector ec_connector_module_path",
        "EngramConfig": "cpu_offload embedding_across_dp dp_shared_memory use_thp",
        "IrOpPriorityConfig": "rms_norm fused_add_rms_norm gelu_and_mul_sparse",
        "KernelConfig": """
            ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune moe_backend
            sparse_indexer_topk_backend linear_backend linear_backend_per_quant""",
        "LoadConfig": "load_format model_loader_extra_config ignore_patterns",
        "LoRAConfig": """
            fully_sharded_loras lora_dtype target_modules default_mm_loras enable_tower_connector_lora
            enable_mixed_moe_lora_format enable_moe_shared_loras""",
        "MambaConfig": """
            backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm""",
        "ModelConfig": """
            runner convert tokenizer_mode trust_remote_code dtype hf_config hf_text_config
            is_submodel_config word_embeddings_untied_by_checkpoint code_revision tokenizer_revision
            quantization quantization_config enforce_eager enable_trace_replay disable_sliding_window
            disable_cascade_attn enable_prompt_embeds config_format hf_overrides model_class_overrides
            model_impl io_processor_plugin pooler_config multimodal_config""",
        "AudioDummyOptions": "count length",
        "BaseDummyOptions": "count",
        "ImageDummyOptions": "count width height",
        "MultiModalConfig": """
            language_model_only limit_per_prompt media_io_kwargs mm_processor_kwargs mm_device_do_normalize
            mm_hasher_algorithm mm_encoder_tp_mode mm_encoder_attn_backend
            mm_encoder_attn_dtype mm_encoder_fp8_scale_path interleave_mm_strings video_pruning_rate
            video_pruning_method""",
        "VideoDummyOptions": "count num_frames width height",
        "ParallelConfig": """
            pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size is_moe_model
            enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling all2all_backend
            disable_custom_all_reduce enable_dbo ubatch_size dbo_decode_token_threshold
            dbo_prefill_token_threshold worker_cls worker_extension_cls decode_context_parallel_size
            dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size
            _allow_auto_resolve_cp_interleave_size""",
        "PoolerConfig": """
            task pooling_type seq_pooling_type tok_pooling_type use_activation enable_flash_late_interaction
            dimensions enable_chunked_processing max_embed_len logit_mean logit_sigma step_tag_id
            returned_token_ids""",
        "QuantSpec": "weight activation",
        "QuantizationConfigArgs": "linear moe ignore targets",
        "SchedulerConfig": "runner_type is_multimodal_model disable_hybrid_kv_cache_manager",
        "SpeculativeConfig": """
            enforce_eager num_speculative_tokens method draft_tensor_parallel_size tensor_parallel_size
            quantization moe_backend attention_backend kv_cache_dtype code_revision
            index_share_for_mtp_iteration disable_padded_drafter_batch disable_eagle_block_drop
            use_local_argmax_reduction use_heterogeneous_vocab parallel_drafting
            num_speculative_tokens_per_batch_size draft_model_config draft_load_config
            enable_adaptive_verification dspark_draft_topk""",
        "Range": "start end",
        "VllmConfig": """
            model_config cache_config parallel_config scheduler_config device_config load_config
            attention_config engram_config mamba_config kernel_config lora_config speculative_config
            diffusion_config compilation_config ec_transfer_config ec_manager_config additional_config
            optimization_level performance_mode""",
    }.items()
}

# Classes of which no field counts: they are the values of harmless fields, or no part of an engine's
# configuration.
UNUSED = frozenset(
    {
        "AuxOutputConfig",
        "EPLBConfig",
        "FaultToleranceConfig",
        "KVEventsConfig",
        "KVTransferConfig",
        "LoggingConfig",
        "ModelArchitectureConfig",
        "ObservabilityConfig",
        "OffloadConfig",
        "PrefetchOffloadConfig",
        "ProfilerConfig",
        "ReasoningConfig",
        "SpeechToTextConfig",
        "SpeechToTextParams",
        "StructuredOutputsConfig",
        "UVAOffloadConfig",
        "WatermarkConfig",
        "WeightTransferConfig",
    }
)
