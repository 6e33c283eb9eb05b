"""What of a server's arguments and files tells its pages apart: over SGLang's real ``ServerArgs``."""

from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec
import pytest

sglang_arguments = pytest.importorskip("sglang.srt.server_args")

from tierstore.errors import UsageError  # noqa: E402
from tierstore_connectors.sglang.identity import HARMLESS, counting, model_digest, weights_revision  # noqa: E402


def fields_named(names):
    return frozenset(names.split())


ELSEWHERE = {"model_path", "revision", "weight_version", "random_seed"}

COUNTING = fields_named(
    """
    attention_backend attn_cp_size attn_dp_size aux_hidden_state_capture bf16_gemm_backend boundary_reduction
    c128_page_size checkpoint_engine_wait_weights_before_ready context_length cp_strategy
    cuda_graph_backend_decode cuda_graph_backend_prefill custom_weight_loader dcp_comm_backend
    dcp_replicate_q_proj dcp_size debug_cuda_graph debug_tensor_dump_input_file decode_attention_backend
    decoupled_spec_role decrypted_config_file decrypted_draft_config_file deepep_config
    deepep_dispatcher_output_dtype deepep_mode deepep_v2_mode device disable_aiter_allreduce_fusion_in_decode
    disable_aiter_allreduce_fusion_in_prefill disable_attn_tp_gather disable_chunked_prefix_cache
    disable_cuda_graph disable_cuda_graph_padding disable_custom_all_reduce disable_decode_cuda_graph
    disable_fast_image_processor disable_flashinfer_autotune disable_flashinfer_cutlass_moe_fp4_allgather
    disable_hybrid_swa_memory disable_prefill_cuda_graph disable_shared_experts_fusion disaggregation_mode
    dllm_algorithm dllm_algorithm_config dllm_fdfo dp_size dsa_decode_backend dsa_paged_mqa_logits_backend
    dsa_prefill_backend dsa_topk_backend dsa_triton_union dsv4_attn_backend dsv4_prefill_backend dtype
    dwdp_size elastic_ep_backend elastic_ep_initial_size enable_aiter_allreduce_fusion enable_amd_monokernel
    enable_attn_tp_input_scattered enable_cp_decode_attn_tp enable_cp_tp_group_sharing
    enable_decoder_swa_bounded_replay enable_deepseek_v4_fp4_indexer enable_dense_mlp_attn_tp
    enable_deterministic_inference enable_dp_attention enable_dp_lm_head enable_dsa_cache_layer_split
    enable_dsa_fused_indexer enable_elastic_expert_backup enable_encoder_swa_bounded_replay enable_eplb
    enable_flashinfer_allreduce_fusion enable_flexkv enable_fp32_lm_head enable_fused_moe_sum_all_reduce
    enable_fused_qk_norm_rope enable_hisparse enable_int8_mamba_checkpoint enable_kv_cache_sharding
    enable_layernorm_sp enable_lean_attention enable_linear_replayssm enable_linear_replayssm_spec
    enable_linker_mla_dedup enable_lmcache enable_lora enable_mamba_cache_stochastic_rounding
    enable_megamoe_for_layernorm_sp enable_mis enable_mscclpp enable_multi_layer_eagle enable_multimodal
    enable_nccl_nvls enable_nvidia_megakernel enable_page_major_kv_layout enable_paged_experts enable_pdmux
    enable_precise_embedding_interpolation enable_prefill_cp enable_quant_communications
    enable_scattered_sconv enable_shared_experts_attn_tp enable_single_batch_overlap enable_symm_mem
    enable_tf32_matmul enable_torch_compile enable_torch_compile_debug_mode enable_torch_symm_mem
    enable_tp_lm_head_all_to_all enable_two_batch_overlap enable_unified_memory enable_w4a4_mxfp4_megamoe
    enable_waterfill encoder_only encoder_transfer_backend encoder_urls
    enforce_disable_flashinfer_allreduce_fusion enforce_shared_experts_fusion ep_dispatch_algorithm
    ep_join_mode ep_join_rank_offset ep_num_redundant_experts ep_size eplb_algorithm
    eplb_min_rebalancing_utilization_threshold eplb_rebalance_layers_per_chunk eplb_rebalance_num_iterations
    experts_shared_outer_loras flashinfer_a2a_dispatch_type flashinfer_allreduce_fusion_backend
    flashinfer_autotune_skip_ops flashinfer_mla_disable_ragged flashinfer_mxfp4_moe_precision
    flexkv_config_file forward_hooks fp4_gemm_runner_backend fp8_gemm_runner_backend fuseep_mode
    hisparse_config image_processor_backend init_expert_location is_embedding json_model_override_args
    kt_cpuinfer kt_max_deferred_experts_per_token kt_method kt_num_gpu_experts kt_threadpool_count
    kt_weight_path kv_cache_dtype language_model_only language_only linear_attn_backend
    linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
    linear_replayssm_cache_len lmcache_config_file load_format lora_backend lora_strict_loading
    lora_target_modules lora_use_virtual_experts mamba_backend mamba_cache_philox_rounds
    mamba_radix_cache_strategy mamba_ssm_dtype max_ep_size max_lora_chunk_size max_lora_rank
    mm_attention_backend mm_enable_dp_encoder mm_process_config model_checksum model_config_parser model_impl
    model_loader_extra_config modelexpress_config modelopt_checkpoint_restore_path modelopt_quant
    moe_a2a_backend moe_dense_tp_size moe_dp_size moe_runner_backend msprobe_dump_config page_size
    paged_experts_num_resident pdmux_config_path pp_size prefill_attention_backend
    prefill_kv_cache_dequant_dtype prefill_only_disable_kv_cache qsa_indexer_dtype quantization
    quantization_param_path quantize_and_serve remote_instance_weight_loader_backend
    remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port
    remote_instance_weight_loader_start_seed_via_transfer_engine rl_on_policy_target rl_quant_profile
    shared_experts_tp_size sm_group_num speculative_adaptive speculative_adaptive_config
    speculative_algorithm speculative_attention_mode speculative_boundary_reduction
    speculative_dflash_block_size speculative_domino_candidate_pool_size speculative_draft_attention_backend
    speculative_draft_kv_cache_dtype speculative_draft_load_format speculative_draft_model_path
    speculative_draft_model_quantization speculative_draft_model_revision speculative_draft_sink_size
    speculative_draft_window_size speculative_dsa_topk_backend
    speculative_dspark_align_verify_tokens_to_graph_tier speculative_dspark_block_size
    speculative_dspark_confidence_sts_path speculative_dspark_sps_table_path speculative_eagle_topk
    speculative_enable_w4a4_mxfp4_megamoe speculative_moe_a2a_backend speculative_moe_runner_backend
    speculative_ngram_capacity speculative_ngram_external_corpus_max_tokens
    speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget speculative_ngram_match_type
    speculative_ngram_max_bfs_breadth speculative_ngram_max_trie_depth speculative_ngram_min_bfs_breadth
    speculative_num_draft_tokens speculative_num_steps speculative_token_map
    speculative_use_block_verification speculative_use_rejection_sampling startup_weight_load_mode
    swa_prefix_tails tbo_token_distribution_threshold tp_size triton_attention_num_kv_splits
    triton_attention_reduce_in_fp32 triton_attention_split_tile_size trust_mm_content_hashes
    trust_remote_code uno_lora_path uses_mamba_radix_cache weight_cache_mode
    """
)
"""Every field of SGLang 0.5.23 that was looked at and may change what a page holds."""


def fields():
    return {each.name for each in msgspec.structs.fields(sglang_arguments.ServerArgs)}


def test_every_field_of_sglang_is_known_to_be_harmless_or_counts():
    """A field that this SGLang has newly: does it change KV? It belongs into HARMLESS or COUNTING."""
    known = {name for name in fields() if not name.startswith("_")}
    assert known - HARMLESS - COUNTING - ELSEWHERE == set()
    assert set() == HARMLESS & COUNTING
    assert HARMLESS - known == set(), "not a field of SGLang any more"
    assert COUNTING - known == set(), "not a field of SGLang any more"


def digest_of(**changed):
    defaults = dict.fromkeys(fields())
    return model_digest("0.5.23", {**defaults, **changed}, "")


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_what_is_harmless_changes_nothing(name):
    assert digest_of(**{name: 7}) == digest_of() == digest_of(**{name: ["a", "b"]})


@pytest.mark.parametrize("name", sorted(COUNTING))
def test_what_counts_is_another_identity(name):
    assert len({digest_of(**{name: value}) for value in (None, 7, 8, "a", ["a", "b"])}) == 5


def test_what_is_not_known_counts():
    assert digest_of(of_a_later_version=1) != digest_of(of_a_later_version=2)


def test_sets_have_no_order():
    names = [f"proj_{at}" for at in range(50)]
    assert digest_of(lora_target_modules=set(names)) == digest_of(lora_target_modules=set(names))


def test_a_seed_counts_where_it_makes_the_weights():
    assert digest_of(random_seed=1) == digest_of(random_seed=2)
    assert digest_of(random_seed=1, load_format="dummy") != digest_of(random_seed=2, load_format="dummy")
    assert "random_seed" in counting({"random_seed": 1, "load_format": "dummy"})


@pytest.mark.parametrize(
    "name",
    ["quantization_param_path", "speculative_token_map", "dllm_algorithm_config", "of_a_later_version"],
)
def test_a_file_counts_by_its_contents_and_not_by_its_path(name, tmp_path):
    one, other = tmp_path / "one.json", tmp_path / "elsewhere" / "other.json"
    other.parent.mkdir()
    one.write_text(json.dumps({"scale": 1.0}))
    other.write_text(json.dumps({"scale": 1.0}))
    before = digest_of(**{name: str(one)})
    assert digest_of(**{name: str(other)}) == before
    one.write_text(json.dumps({"scale": 2.0}))  # as long as before
    assert digest_of(**{name: str(one)}) != before


def test_a_folder_counts_by_all_files_in_it(tmp_path):
    folder = tmp_path / "draft"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"a" * 1000)
    (folder / "sub" / "more.py").write_text("x = 1")
    before = digest_of(speculative_draft_model_path=str(folder))
    moved = folder.rename(tmp_path / "moved")
    assert digest_of(speculative_draft_model_path=str(moved)) == before
    (moved / "sub" / "more.py").write_text("x = 2")
    assert digest_of(speculative_draft_model_path=str(moved)) != before


def test_weights_count_by_every_byte_and_every_file_beside_them(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    data = bytearray(2 << 20)
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text("{}")

    def revision():
        return weights_revision({"model_path": str(folder)}, "")

    seen = [revision()]
    data[(1 << 20) + 12345] = 1
    (folder / "model.safetensors").write_bytes(data)
    seen.append(revision())
    (folder / "config.json").write_text('{"rope_theta": 1}')
    seen.append(revision())
    (folder / "modeling_own.py").write_text("")
    seen.append(revision())
    assert len(set(seen)) == 4
    (folder / "README.md").write_text("said")
    assert revision() == seen[-1]


def test_weights_that_nothing_identifies(tmp_path):
    with pytest.raises(UsageError, match="cannot be identified"):
        weights_revision({"model_path": "org/model", "revision": "main"}, "")
    with pytest.raises(UsageError, match="cannot be identified"):
        weights_revision({"model_path": str(tmp_path)}, "")
    assert weights_revision({"model_path": "org/model"}, "mine")
    (tmp_path / "model.safetensors").mkdir()
    assert weights_revision({"model_path": "org/model", "revision": "a" * 40}, "")


def test_requests_are_named_by_the_files_of_their_adapter(tmp_path):
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    from tests.sglang.engine import write_adapter
    from tierstore_connectors.sglang.adapters import ADAPTERS, digest_of_adapter

    def key(lora_id, extra_key=None):
        return Req("r", "", [1, 2, 3], SamplingParams(), lora_id=lora_id, extra_key=extra_key).extra_key

    folder = tmp_path / "adapter"
    write_adapter(folder, seed=1)
    first = digest_of_adapter(str(folder))
    refs = [
        SimpleNamespace(lora_id="a" * 32, lora_path=str(folder)),
        SimpleNamespace(lora_id="b" * 32, lora_path=str(tmp_path / "gone")),
    ]
    ADAPTERS.watch(refs, server="here")
    ADAPTERS.watch(refs, server="here")
    assert (key("a" * 32), key("a" * 32, "salt")) == (first, f"salt{first}")
    assert (key(None), key(None, "salt")) == (None, "salt")
    unknown = {key("b" * 32), key("c" * 32)}
    assert len(unknown - {first, "b" * 32, "c" * 32}) == 2, "each has a name of this server alone"
    write_adapter(folder, seed=2)  # names, sizes and times are as before
    assert digest_of_adapter(str(folder)) != first
    assert key("a" * 32) == first, "SGLang goes on with what it has loaded"
    moved = folder.rename(tmp_path / "moved")
    write_adapter(moved, seed=1)
    assert digest_of_adapter(str(moved)) == first
