from __future__ import annotations

import pytest

from tierstore.errors import SpecError
from tierstore.keys import Identity
from tierstore.spec import KVSpec, LayerGroup, LayerKind, is_opaque, worth_of

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def test_llama_3_8b_takes_128_kib_a_token():
    spec = KVSpec.from_hf_config(LLAMA_8B)
    assert spec.token_bytes == 128 * 1024
    assert spec.page_bytes == 8 << 20
    assert spec.num_layers == 32


def test_tiles_cover_a_page_without_gap_or_overlap():
    spec = KVSpec(
        (
            LayerGroup(LayerKind.FULL_ATTENTION, (0, 2), kv_heads=3, head_dim=8),
            LayerGroup(LayerKind.MLA_LATENT, (1,), head_dim=24),
            LayerGroup(LayerKind.RECURRENT_STATE, (3,), state_bytes=100),
        ),
        "bfloat16",
        chunk_tokens=16,
    )
    ranges = [spec.tile(layer, plane, head) for layer in (0, 2) for plane in (0, 1) for head in range(3)]
    ranges += [spec.tile(1, 0, 0), spec.layer(3)]
    assert [r.start for r in ranges] == [0, *(r.stop for r in ranges[:-1])]
    assert ranges[-1].stop == spec.page_bytes


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({**LLAMA_8B, "sliding_window": 4096}, {LayerKind.SLIDING_WINDOW}),
        ({**LLAMA_8B, "sliding_window": 4096, "use_sliding_window": False}, {LayerKind.FULL_ATTENTION}),
        (
            {
                **LLAMA_8B,
                "sliding_window": 512,
                "layer_types": ["full_attention", "sliding_attention"] * 16,
            },
            {LayerKind.FULL_ATTENTION, LayerKind.SLIDING_WINDOW},
        ),
        ({"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, {LayerKind.MLA_LATENT}),
        ({"text_config": LLAMA_8B}, {LayerKind.FULL_ATTENTION}),
    ],
)
def test_layer_kinds_of_hugging_face_configs(config, kinds):
    assert {group.kind for group in KVSpec.from_hf_config(config).groups} == kinds


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": None},
        {"hidden_size": "big"},
        {"layer_types": ["mamba"] * 32},
        {"hybrid_override_pattern": "M-*-"},
        {"torch_dtype": "int3"},
    ],
)
def test_configs_it_cannot_keep_are_refused_by_name(change):
    with pytest.raises(SpecError):
        KVSpec.from_hf_config({**LLAMA_8B, **change})


def test_a_layer_in_two_groups_is_refused():
    group = LayerGroup(LayerKind.FULL_ATTENTION, (0,), head_dim=8)
    with pytest.raises(SpecError, match="exactly one"):
        KVSpec((group, group), "float32")


def test_descriptions_differ_where_bytes_differ():
    specs = [
        KVSpec.uniform(layers=layers, kv_heads=heads, head_dim=8, dtype=dtype, chunk_tokens=chunk)
        for layers in (1, 2)
        for heads in (1, 2)
        for dtype in ("float16", "bfloat16")
        for chunk in (16, 64)
    ]
    assert len({spec.describe() for spec in specs}) == len(specs)


@pytest.mark.parametrize(
    "spec",
    [
        KVSpec.uniform(layers=3, kv_heads=2, head_dim=8, dtype="float16", chunk_tokens=16),
        KVSpec.from_hf_config(LLAMA_8B),
        KVSpec.opaque(4096, chunk_tokens=32),
        KVSpec.embedding(width=64, dtype="float16", worth=7),
        KVSpec(
            (
                LayerGroup(LayerKind.SLIDING_WINDOW, (0, 2), 2, 8, window=100),
                LayerGroup(LayerKind.MLA_LATENT, (1,), 1, 576),
                LayerGroup(LayerKind.RECURRENT_STATE, (3,), state_bytes=77),
            ),
            "bfloat16",
        ),
    ],
)
def test_a_description_leads_back_to_the_spec(spec):
    assert KVSpec.parse(spec.describe()) == spec


@pytest.mark.parametrize(
    "line",
    [
        "",
        "chunk=64",
        "chunk=64;dtype=float16",
        "chunk=64;dtype=float16;",
        "chunk=64;dtype=float99;full[0]x1x8/w0/s0",
        "chunk=0;dtype=float16;full[0]x1x8/w0/s0",
        "chunk=064;dtype=float16;full_attention[0]x1x8/w0/s0",
        "chunk=64;dtype=float16;full_attention[0,]x1x8/w0/s0",
        "chunk=64;dtype=float16;other[0]x1x8/w0/s0",
        "chunk=64;dtype=float16;full_attention[0]x1x8/w0/s0;x",
        "chunk=64;dtype=float16;full_attention[0]x1x8/w0/s0/v1",
        "chunk=64;dtype=float16;embedding[0]x1x8/w0/s0/v0",
        "chunk=64;dtype=float16;embedding[0]x1x8/w0/s0/v8",
        f"chunk={'9' * 5000};dtype=float16;full_attention[0]x1x8/w0/s0",
    ],
)
def test_a_line_that_describes_nothing_is_refused(line):
    with pytest.raises(SpecError):
        KVSpec.parse(line)
    assert not worth_of(line)


def test_pages_named_by_a_hash_have_a_layout_of_their_own():
    plain, hashed = (KVSpec.opaque(4096, chunk_tokens=8, hashed=named) for named in (False, True))
    assert plain.describe() != hashed.describe()
    assert KVSpec.parse(hashed.describe()) == hashed
    assert is_opaque(hashed.describe())
    assert Identity.of(hashed, model="m").whole_pages
