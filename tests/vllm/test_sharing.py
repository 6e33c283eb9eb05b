"""Pages computed by vLLM are hits in the bundled engine, and the other way round."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sharing import (
    CHUNK,
    GROUPS,
    MODELS,
    SAME_KV,
    SAME_LOGITS,
    answer,
    bundled,
    kv_difference,
    own_pages,
    stored_pages,
)
from tests.vllm import models
from tests.vllm.engines import Ask, Engine, greatest_difference
from tests.vllm.harness import patient, wait_hit, wait_stored
from tests.vllm.models import prompt
from tierstore.spec import KVSpec


@pytest.mark.parametrize(("kind", "whole"), MODELS)
def test_both_directions(model, daemon, kind, whole):
    folder = model(kind)
    from_vllm, from_ours = prompt(whole + 4, seed=1), prompt(whole + 4, seed=2)
    options = patient(daemon.url, share_engines=True, chunk_tokens=CHUNK)
    lengths = {"max_model_len": 8192, "max_num_batched_tokens": 8192}
    with bundled(folder, share=False) as alone:
        expected, pages = answer(alone, from_vllm), own_pages(alone, from_vllm[:whole])
        with Engine(folder, connector=options, blocks=2048, **lengths) as vllm:
            computed = vllm.ask(Ask(from_vllm))
            assert computed.external_hit_tokens == 0
            wait_stored(daemon, GROUPS[kind] * whole // CHUNK)  # all window pages, which SGLang needs
            stored = stored_pages(daemon.url, folder, from_vllm[:whole])
            with bundled(folder, daemon.url) as ours:
                warm = answer(ours, from_vllm)
                assert warm.metrics.reused_tokens >= whole
                answer(ours, from_ours)
            # A salted request goes without the store.
            cold = vllm.ask(Ask(from_ours, salt="cold"))
            assert cold.external_hit_tokens == 0
            hit = wait_hit(vllm, Ask(from_ours), whole)
    differences = {
        "KV": kv_difference(stored, pages),
        "bundled engine's logits after vLLM's pages": float(np.abs(warm.logits - expected.logits).max()),
        "vLLM's log-probabilities after the bundled engine's": greatest_difference(
            hit.answers[0], cold.answers[0]
        ),
    }
    times = {"vLLM cold": cold.answers[0].ttft_s, "vLLM warm": hit.answers[0].ttft_s}
    times |= {"bundled cold": expected.metrics.ttft_s, "bundled warm": warm.metrics.ttft_s}
    print(kind, differences, times)  # noqa: T201
    assert warm.tokens == expected.tokens
    assert differences.pop("KV") <= SAME_KV
    assert max(differences.values()) <= SAME_LOGITS, differences


@pytest.mark.parametrize(
    ("kernels", "dtype", "head_dim"),
    [("vec", "float32", 64), ("vec", "bfloat16", 32), ("vec", "float16", 128), ("vec16", "bfloat16", 80)],
)
def test_blocks_are_read_as_vllm_writes_them(kernels, dtype, head_dim):
    """vLLM's own operation writes keys and values, and the converter reads them."""
    import torch
    from vllm import _custom_ops as ops

    from tierstore_connectors.common.shared_pages import BlockConverter, PagePart, PartSource
    from tierstore_connectors.vllm.sharing import engine_blocks

    heads, block, count = 3, 32, 5
    torch_dtype = getattr(torch, dtype)
    memory = torch.zeros(count, heads, block, 2 * head_dim, dtype=torch_dtype)
    keys, values = (torch.randn(CHUNK, heads, head_dim).to(torch_dtype) for _ in range(2))
    blocks = [3, 1]
    slots = torch.tensor([number * block + at for number in blocks for at in range(block)])
    halves = memory.view(count, heads, 2 * block, head_dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, kernels)
    spec = KVSpec.uniform(layers=1, kv_heads=heads, head_dim=head_dim, dtype=dtype, chunk_tokens=CHUNK)
    read = engine_blocks(
        {0: memory}, {0: f"CPU_ATTN({kernels})"}, num_blocks=count, heads=heads, head_dim=head_dim
    )
    page = np.zeros(spec.page_bytes, np.uint8)
    every = range(heads)
    converter = BlockConverter(spec.describe(), read, PartSource(PagePart(0, 1, (0,)), every, every))
    converter.gather([(blocks, page.ctypes.data)])
    expected = torch.stack([keys, values]).transpose(1, 2).contiguous()
    assert page.tobytes() == expected.view(torch.uint8).numpy().tobytes()


def test_ranks_share_with_one_engine(model, daemon):
    """Two ranks load what the bundled engine has saved as a whole, and vLLM without ranks what they save."""
    folder, first, second = model(models.LLAMA), prompt(901, seed=3), prompt(901, seed=4)
    whole = 896
    options = {"share_engines": True, "chunk_tokens": CHUNK}
    with bundled(folder, daemon.url) as ours:
        answer(ours, first)
    with Engine(folder, connector=patient(daemon.url, **options), tensor_parallel_size=2) as ranks:
        warm, cold = ranks.ask(Ask(first)), ranks.ask(Ask(first, salt="cold"))
        assert warm.answers[0].cached_tokens == whole
        assert greatest_difference(warm.answers[0], cold.answers[0]) <= SAME_LOGITS
        stored = daemon.stats().store.pages
        ranks.ask(Ask(second))
        wait_stored(daemon, stored + 2 * whole // CHUNK)
    with Engine(folder, connector=patient(daemon.url, share_sizes="2x1", **options)) as alone:
        warm, cold = alone.ask(Ask(second)), alone.ask(Ask(second, salt="cold"))
        assert warm.answers[0].cached_tokens == whole
        assert greatest_difference(warm.answers[0], cold.answers[0]) <= SAME_LOGITS


def test_what_cannot_be_shared_says_so_and_runs_without_the_cache(model, daemon):
    options = patient(daemon.url, share_engines=True, chunk_tokens=CHUNK)
    with Engine(model(models.LLAMA), connector=options, hf_overrides={"rms_norm_eps": 1e-4}) as vllm:
        assert vllm.ask(Ask(prompt(200))).external_hit_tokens == 0
        assert "share_engines: --hf-overrides may change KV" in vllm.log
        assert "leave share_engines out" in vllm.log
    assert daemon.stats().store.pages == 0
