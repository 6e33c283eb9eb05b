"""Keys, settings, request options, groups, the breaker, recent keys, counts, errors."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace

import pytest

from tierstore.errors import UsageError
from tierstore.groups import GroupRule
from tierstore.keys import PageKey
from tierstore.types import Promise
from tierstore_connectors.common import handover
from tierstore_connectors.common.counters import ConnectorCounters, added
from tierstore_connectors.common.facts import host_device, plain
from tierstore_connectors.common.guard import Breaker, ErrorLog, RecentKeys, guarded
from tierstore_connectors.vllm.config import RequestOptions, VllmSettings
from tierstore_connectors.vllm.groups import BlockTables, blocks_to_load, read_groups
from tierstore_connectors.vllm.identity import (
    AdapterVersions,
    MediaContents,
    chunk_keys,
    described,
    hashes_are_private,
    model_digest,
    request_salt,
    weights_revision,
)
from tierstore_connectors.vllm.layout import UnsupportedError
from tierstore_connectors.vllm.orders import LoadReport


def test_a_chunk_has_the_key_of_its_last_block():
    hashes = [bytes([at]) * 32 for at in range(7)]
    plain = request_salt((), None)
    keys = chunk_keys(hashes, plain, 2)
    assert len(keys) == 3
    assert len(set(keys)) == 3
    assert keys[1:] == chunk_keys(hashes, plain, 2, first=1)
    changed = [*hashes[:2], b"x" * 32, *hashes[3:]]
    assert chunk_keys(changed, plain, 2) == keys  # the last block's hash covers the others, in vLLM
    others = [
        request_salt((), "salt"),
        request_salt(("a", "/a"), None),
        request_salt(("a",), "/a"),
        request_salt((), ""),
    ]
    assert len({plain, *others}) == 5


def test_settings_are_checked():
    assert VllmSettings.parse({}).store.startswith("ipc://")
    settings = VllmSettings.parse({"store": "tcp://h:1", "lookup_s": 1, "chunk_tokens": 128})
    assert (settings.store, settings.lookup_s, settings.chunk_tokens) == ("tcp://h:1", 1, 128)
    for wrong in (
        {"stor": "x"},
        {"store": 3},
        {"lookup_s": "1"},
        {"lookup_s": -1},
        {"threads": 0},
        {"ahead": 1.5},
        {"ahead": True},
        {"load_s": float("nan")},
    ):
        with pytest.raises(UsageError, match="kv_connector_extra_config"):
            VllmSettings.parse(wrong)


def options_of(params):
    return RequestOptions.parse(params, prompt_tokens=100)


def test_request_options_are_taken_as_far_as_they_make_sense():
    assert options_of(None) == (RequestOptions(), None)
    assert options_of({"other": 1}) == (RequestOptions(), None)
    asked = {"pin": True, "no_save": True, "ttl_s": 5, "priority": -3}
    assert options_of({"tierstore": asked}) == (RequestOptions(True, True, 5, -3), None)
    options, problem = options_of({"tierstore": {"pin": "yes", "priority": 1000, "ttl_s": -1, "x": 1}})
    assert options == RequestOptions()
    assert all(name in problem for name in ("pin", "priority", "ttl_s", "x"))


def test_both_sides_of_a_hand_over_are_understood():
    asks = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
    assert options_of(asks) == (RequestOptions(hands_over=True), None)
    promise = Promise(64, 0.5)
    assert options_of(handover.answer(promise)) == (RequestOptions(promise=promise), None)
    assert options_of(handover.answer(Promise(0))) == (RequestOptions(), None)
    assert options_of({"do_remote_prefill": True, "tierstore": None}) == (RequestOptions(), None)
    # Of others' connectors, and of nobody's.
    assert options_of({"do_remote_prefill": True, "remote_block_ids": [1]}) == (RequestOptions(), None)
    assert options_of({"tierstore": {"tokens": 64}}) == (RequestOptions(), None)


@pytest.mark.parametrize(
    "value", [None, "x", [], {}, float("nan"), float("inf"), -1, 2.5, True, 10**30, 10**400]
)
def test_no_request_option_is_an_error(value):
    for name in ("pin", "ttl_s", "no_save", "priority"):
        options, _ = options_of({"tierstore": {name: value}})
        assert options.ttl_s is None or 0 <= options.ttl_s < float("inf")
        assert isinstance(options.priority, int)
    assert options_of({"tierstore": value})[0] == RequestOptions()
    options, problem = options_of({"do_remote_prefill": True, "tierstore": {"tokens": value}})
    assert (options.promise, bool(problem)) == (None, True)
    options, _ = options_of({"do_remote_prefill": True, "tierstore": {"tokens": 64, "until_s": value}})
    assert options.promise is None or 0 <= options.promise.until_s <= 10
    assert options_of({"do_remote_decode": value})[0].hands_over is (value is True)


def kv_config(*specs, **more):
    groups = [
        SimpleNamespace(layer_names=[f"l{at}"], kv_cache_spec=spec, enable_kv_transfer=True)
        for at, spec in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups, **more)


CACHE = SimpleNamespace(block_size=16, prefix_match_unit=None)


def kind(name, **fields):
    return type(name, (SimpleNamespace,), {})(**fields)


def test_groups_of_attention_are_understood():
    full = kind("FullAttentionSpec", block_size=16)
    window = kind("SlidingWindowSpec", block_size=16, sliding_window=20)
    one = read_groups(kv_config(full), CACHE, 0)
    assert (one.hash_tokens, one.chunk_tokens, one.count) == (16, 64, 1)
    two = read_groups(kv_config(full, window, hash_block_size=16), CACHE, 0)
    assert [group.rule for group in two.groups] == [GroupRule.all(), GroupRule.window(19)]
    assert two.blocks_per_page(two.groups[1]) == 4
    chunked = kind("ChunkedLocalAttentionSpec", block_size=48, attention_chunk_size=160)
    uneven = read_groups(kv_config(full, chunked, hash_block_size=16), CACHE, 0)
    assert uneven.chunk_tokens == 96
    assert uneven.groups[1].rule == GroupRule.chunked(160)
    # Before 0.32: finer, where the user asks for it, but not of a model with one group.
    finer = SimpleNamespace(block_size=16, prefix_match_unit=8)
    assert read_groups(kv_config(full, window), CACHE, 0).hash_tokens == 16
    assert read_groups(kv_config(full, window), finer, 0).hash_tokens == 8
    assert read_groups(kv_config(full), finer, 0).hash_tokens == 16
    mixed = kind("UniformTypeKVCacheSpecs", block_size=16, kv_cache_specs={"l0": full})
    assert read_groups(kv_config(mixed), CACHE, 0).groups[0].rule == GroupRule.all()
    assert read_groups(kv_config(full), CACHE, 128).chunk_tokens == 128


def test_groups_of_anything_else_are_refused():
    states = kind("MambaSpec", **STATES)
    full = kind("FullAttentionSpec", block_size=16)
    hidden = kv_config(full)
    hidden.kv_cache_groups[0].enable_kv_transfer = False
    for config, chunk in (
        (
            kv_config(
                kind("UniformTypeKVCacheSpecs", block_size=16, kv_cache_specs={"a": full, "b": states})
            ),
            0,
        ),
        (kv_config(full, kind("CircularBufferSpec", block_size=16)), 0),
        (kv_config(), 0),
        (hidden, 0),
        (kv_config(full), 40),
    ):
        with pytest.raises(UnsupportedError):
            read_groups(config, CACHE, chunk)


STATES = {
    "block_size": 48,
    "num_speculative_blocks": 0,
    "mamba_type": "gdn",
    "shapes": ((3, 8), (2, 4)),
    "dtypes": ("bfloat16", "float32"),
}
ALIGNED = SimpleNamespace(block_size=48, mamba_cache_mode="align")


def test_a_page_of_states_is_one_block_at_the_end_of_a_chunk():
    full, states = kind("FullAttentionSpec", block_size=48), kind("MambaSpec", **STATES)
    groups = read_groups(kv_config(states, full, hash_block_size=16), ALIGNED, 0)
    assert groups.chunk_tokens == 48  # and not as long as others: states are at any block's end
    assert [group.rule for group in groups.groups] == [GroupRule.state(), GroupRule.all()]
    assert [groups.label(group) for group in groups.groups] == ["state0", "group0/1"]
    state, _ = groups.groups
    wide = read_groups(kv_config(states, full, hash_block_size=16), ALIGNED, 96)
    assert [wide.blocks_per_page(group) for group in wide.groups] == [1, 2]
    loaded = blocks_to_load(wide, wide.groups[0], [[0, 7, 0, 9]], 96, 192)
    assert (loaded.first, loaded.chunks) == (1, ((9,),))
    other = {**STATES, "shapes": ((8, 3), (2, 4))}  # the same bytes, in another order
    turned = read_groups(kv_config(kind("MambaSpec", **other), full, hash_block_size=16), ALIGNED, 0)
    assert turned.groups[0].meaning != state.meaning


@pytest.mark.parametrize(
    ("cache", "states", "offers", "why"),
    [
        ({"mamba_cache_mode": "none"}, {}, True, "'align' only, got 'none': enable prefix caching"),
        ({"use_replayssm": True}, {}, True, "use_replayssm"),
        ({}, {"num_speculative_blocks": 2}, True, "speculative decoding"),
        ({}, {}, False, "need vLLM 0.32 or later"),
    ],
)
def test_states_are_refused_where_blocks_do_not_hold_them_when_vllm_says_so(cache, states, offers, why):
    config = kv_config(kind("MambaSpec", **{**STATES, **states}), hash_block_size=16)
    with pytest.raises(UnsupportedError, match=why):
        read_groups(config, SimpleNamespace(**{**vars(ALIGNED), **cache}), 0, offers_states=offers)


def test_the_breaker_opens_after_two_failures_and_tries_again():
    breaker = Breaker()
    breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert not breaker.allows(0.4)
    assert breaker.allows(0.5)
    assert not breaker.allows(0.5)  # one question a second
    assert breaker.allows(1.5)
    breaker.failed(1.6)
    assert not breaker.allows(2.5)
    assert breaker.allows(2.6)
    breaker.succeeded()
    assert breaker.allows(2.6)
    assert breaker.allows(2.6)
    now = 0.0
    for _ in range(20):
        breaker.failed(now)
    assert breaker.allows(now + 8.0)


def test_recent_keys_are_known_for_a_while():
    recent = RecentKeys(30.0, 4096)
    keys = [PageKey(bytes([at]) * 16) for at in range(5)]
    assert (recent.before_first(keys, 0.0), recent.to_last(keys, 0.0)) == (5, 0)
    recent.add(keys[3], 0.0)
    assert (recent.before_first(keys, 29.0), recent.to_last(keys, 29.0)) == (3, 4)
    recent.add(keys[1], 10.0)
    assert (recent.before_first(keys, 29.0), recent.to_last(keys, 29.0)) == (1, 4)
    assert (recent.before_first(keys, 31.0), recent.to_last(keys, 31.0)) == (1, 2)
    assert (recent.before_first(keys, 41.0), recent.to_last(keys, 41.0)) == (5, 0)
    assert len(recent) == 0
    for at in range(5000):
        recent.add(PageKey(at.to_bytes(16, "big")), 50.0)
    assert len(recent) == 4096
    recent.discard([PageKey(at.to_bytes(16, "big")) for at in range(4990, 6000)])
    assert len(recent) == 4086
    recent.clear()
    assert len(recent) == 0


class Guarded:
    def __init__(self):
        self.errors = ErrorLog(logging.getLogger("vllm.tierstore"))

    @guarded(lambda self, x: ("miss", x))
    def method(self, x):
        if x > 1:
            raise ValueError(x)
        return x


def test_errors_stop_are_counted_and_are_logged_once(caplog):
    guard = Guarded()
    with caplog.at_level(logging.WARNING, logger="vllm.tierstore"):
        assert [guard.method(x) for x in (1, 2, 3)] == [1, ("miss", 2), ("miss", 3)]
        guard.errors.warn("start", "runs without the cache")
        guard.errors.warn("start", "runs without the cache")
    assert guard.errors.counts == {"method": 2, "start": 2}
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


def test_tables_of_versions_that_tell_them_step_by_step():
    tables = BlockTables()

    def step(new=(), cached=(), resumed=()):
        tables.take(
            SimpleNamespace(
                scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=blocks) for name, blocks in new],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[name for name, _ in cached],
                    new_block_ids=[blocks for _, blocks in cached],
                    resumed_req_ids=set(resumed),
                ),
            )
        )

    step(new=[("a", ([1, 2],)), ("b", ([3],))])
    step(cached=[("a", ([4],)), ("b", None)])
    assert (tables.of("a"), tables.of("b")) == ([[1, 2, 4]], [[3]])
    step(cached=[("a", ([7, 8],))], resumed=["a"])
    assert tables.of("a") == [[7, 8]]
    tables.forget("a")
    with pytest.raises(AssertionError):
        tables.of("a")


def test_tables_of_the_version_that_tells_those_that_have_changed():
    tables = BlockTables()

    def step(**block_ids):
        state = SimpleNamespace(block_ids=block_ids, boundary_state_offloads={})
        tables.take(SimpleNamespace(kv_connector_block_state=state))

    step(a=([1, 2],), b=([3],))
    step(a=([1, 2, 4],))  # b goes on in the block it has
    assert (tables.of("a"), tables.of("b")) == (([1, 2, 4],), ([3],))
    tables.forget("b")
    with pytest.raises(AssertionError):
        tables.of("b")


@pytest.mark.parametrize(
    ("algorithm", "fixed_seed", "private"),
    [
        ("sha256", True, False),
        ("sha256_cbor", True, False),
        ("xxhash", True, True),
        ("sha256", False, True),
        ("xxhash_cbor", False, True),
    ],
)
def test_hashes_that_only_one_process_knows(algorithm, fixed_seed, private):
    assert hashes_are_private(algorithm, {}, fixed_seed=fixed_seed) is private
    assert not hashes_are_private(algorithm, {"PYTHONHASHSEED": "0"}, fixed_seed=fixed_seed)


def test_counts_add_up():
    counts = ConnectorCounters()
    counts.add("loads")
    counts.add("loaded_bytes", 10)
    taken = counts.take()
    assert taken == {"loads": 1, "loaded_bytes": 10}
    assert counts.take() == {}
    assert added(taken, {"loads": 2, "saves": 1}) == {"loads": 3, "loaded_bytes": 10, "saves": 1}
    assert LoadReport({"a": 3}).merge(LoadReport({"a": 2, "b": 1})).failed == {"a": 2, "b": 1}


class HfConfig:
    """A configuration of transformers, as far as the connector looks at it."""

    def __init__(self, architectures, **shape):
        self.architectures = architectures
        self.shape = shape

    def to_dict(self):
        return {"architectures": self.architectures, **self.shape}


def config_class(name, **values):
    """A dataclass of vLLM's configuration with these values."""
    return make_dataclass(name, [(each, object, field(default=None)) for each in values])(**values)


def vllm_config(directory, **changes):
    """Some of vLLM's configuration. ``changes`` are of fields, wherever they are, or of the model's shape."""
    shape = {"layers": 4, "rope_scaling": None, **changes.pop("shape", {})}
    parts = {
        "model_config": {
            "model": str(directory),
            "model_weights": "",
            "tokenizer": str(directory),
            "revision": None,
            "dtype": "float32",
            "quantization": None,
            "seed": 0,
            "max_model_len": 1024,
            "hf_overrides": {},
            "served_model_name": "a",
            "hf_config": HfConfig(changes.pop("architectures", ["LlamaForCausalLM"]), **shape),
        },
        "cache_config": {
            "cache_dtype": "auto",
            "prefix_caching_hash_algo": "sha256",
            "calculate_kv_scales": False,
            "gpu_memory_utilization": 0.9,
        },
        "load_config": {"load_format": "auto", "model_loader_extra_config": {}},
        "scheduler_config": {"max_num_seqs": 8},
        "parallel_config": {"data_parallel_rank": 0, "master_port": 1, "tensor_parallel_size": 1},
    }
    made = {}
    for part, values in parts.items():
        values |= {name: changes.pop(name) for name in list(changes) if name in values}
        made[part] = config_class("".join(map(str.capitalize, part.split("_"))), **values)
    return config_class("VllmConfig", **made, **{"speculative_config": None, "instance_id": "x", **changes})


def test_a_model_is_told_apart_by_all_that_may_change_its_kv(tmp_path):
    def digest(version="1", backends=("b",), device="cpu", namespace="", environment=(), **changes):
        config = vllm_config(changes.pop("model", tmp_path), **changes)
        return model_digest(config, version, list(backends), device, namespace, dict(environment))

    base = digest()
    for same in (
        {"model": "/mounted/elsewhere"},  # the weights are in the revision
        {"seed": 1},  # of sampling
        {"max_model_len": 2048},
        {"gpu_memory_utilization": 0.5},
        {"max_num_seqs": 9},
        {"data_parallel_rank": 3},
        {"master_port": 2},
        {"instance_id": "y"},
        {"served_model_name": "b"},
        {"environment": {"VLLM_PORT": "1", "VLLM_A_SERVICE_HOST": "10.0.0.1", "PATH": "x"}},
        {"environment": {"VLLM_A_PORT_8000_TCP": "tcp://10.0.0.1:8000", "VLLM_LOGGING_LEVEL": "DEBUG"}},
        {"environment": {"VLLM_PORT_8000_TCP": "tcp://10.0.0.1:8000", "VLLM_SERVICE_PORT": "8000"}},
    ):
        assert digest(**same) == base, same
    others = [
        digest(version="2"),
        digest(backends=("c",)),
        digest(device="cpu2"),
        digest(namespace="x"),
        digest(shape={"layers": 5}),
        digest(dtype="bfloat16"),
        digest(quantization="fp8"),
        digest(cache_dtype="fp8"),
        digest(prefix_caching_hash_algo="xxhash"),
        digest(load_format="dummy"),
        digest(load_format="dummy", seed=1),
        digest(tensor_parallel_size=2),
        digest(hf_overrides={"rope_theta": 5.0}),
        digest(hf_overrides=lambda config: config),
        digest(hf_overrides=lambda config: None),
        digest(a_field_of_a_newer_vllm=1),
        digest(a_field_of_a_newer_vllm=2),
        digest(environment={"VLLM_USE_DEEP_GEMM": "0"}),
        digest(environment={"VLLM_OF_A_NEWER_VERSION": "0"}),
        digest(environment={"NVIDIA_TF32_OVERRIDE": "1"}),
    ]
    assert len({base, *others}) == len(others) + 1
    with pytest.raises(UnsupportedError, match="scales"):
        digest(calculate_kv_scales=True)


@pytest.mark.parametrize(
    ("counts", "changes"),
    [
        (False, {}),
        (False, {"shape": {"rope_parameters": {"rope_type": "llama3", "factor": 8}}}),
        (False, {"shape": {"rope_parameters": {"full": {"rope_type": "yarn"}, "window": {"rope_theta": 1}}}}),
        (True, {"shape": {"rope_parameters": {"rope_type": "longrope"}}}),
        (True, {"shape": {"rope_scaling": {"type": "su"}}}),
        (True, {"shape": {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}}),
        (True, {"shape": {"text_config": {"rope_parameters": {"rope_type": "longrope"}}}}),
        (True, {"shape": {"rope_parameters": {"full": {"rope_type": "longrope"}, "window": {}}}}),
        (True, {"architectures": ["Llama4ForCausalLM"]}),
        (True, {"architectures": []}),
    ],
)
def test_the_longest_prompt_counts_where_kv_may_depend_on_it(tmp_path, counts, changes):
    first, second = (
        model_digest(vllm_config(tmp_path, max_model_len=most, **changes), "1", ["b"], "cpu", "", {})
        for most in (4096, 8192)
    )
    assert (first != second) is counts


def write(path, content, *, time_ns=10**18):
    """A file of this content, last written then."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(time_ns, time_ns))
    return path


def revision(place, namespace="", **changes):
    return weights_revision(vllm_config(place, **changes), namespace).revision


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.gguf", "model.tensors"])
def test_other_weights_are_another_revision_wherever_they_are_mounted(tmp_path, name):
    here, there = tmp_path / "here", tmp_path / "there"
    content = bytearray(range(256)) * 16_000
    write(here / name, content)
    first = revision(here)
    shutil.copytree(here, there)
    assert revision(there) == first
    os.utime(there / name, ns=(10**18 + 1, 10**18 + 1))
    assert revision(there) == first
    content[2_000_003] ^= 1  # one byte between all samples, at one time, as in a reproducible image
    write(there / name, content)
    assert revision(there) != first
    sampled = weights_revision(vllm_config(here), "", sampled=True).revision
    assert sampled != first
    os.utime(there / name, ns=(10**18, 10**18))
    assert weights_revision(vllm_config(there), "", sampled=True).revision == sampled  # what the option costs


@pytest.mark.parametrize(
    "other", ["processor_config.json", "generation_config.json", "mmproj.gguf", "code/rope.py", "notes.txt"]
)
def test_every_file_beside_the_weights_counts(tmp_path, other):
    write(tmp_path / "model.safetensors", b"w")
    seen = {revision(tmp_path)}
    (tmp_path / other).parent.mkdir(exist_ok=True)
    for content in (b"1", b"2"):
        write(tmp_path / other, content)
        seen.add(revision(tmp_path))
    assert len(seen) == 3
    write(tmp_path / "README.md", b"x")
    assert revision(tmp_path) in seen


def test_a_tokenizer_and_a_draft_model_elsewhere_count(tmp_path):
    write(tmp_path / "model" / "model.safetensors", b"w")
    write(tmp_path / "tokens" / "tokenizer.json", b"1")
    before = revision(tmp_path / "model", tokenizer=str(tmp_path / "tokens"))
    write(tmp_path / "tokens" / "tokenizer.json", b"2")
    assert revision(tmp_path / "model", tokenizer=str(tmp_path / "tokens")) != before

    def with_draft():
        draft = vllm_config(tmp_path / "draft").model_config
        speculative = config_class("SpeculativeConfig", draft_model_config=draft, draft_load_config=None)
        return revision(tmp_path / "model", speculative_config=speculative)

    write(tmp_path / "draft" / "model.safetensors", b"1")
    before = with_draft()
    assert before != revision(tmp_path / "model")
    write(tmp_path / "draft" / "model.safetensors", b"2")
    assert with_draft() != before
    (tmp_path / "draft" / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match="namespace"):
        with_draft()


def test_weights_in_single_and_in_split_files(tmp_path):
    write(tmp_path / "a.gguf", b"a" * 10)
    write(tmp_path / "b.gguf", b"b" * 10)
    assert revision(tmp_path / "a.gguf") != revision(tmp_path / "b.gguf")
    before = revision(tmp_path / "a.gguf")
    write(tmp_path / "b.gguf", b"c" * 10)
    assert revision(tmp_path / "a.gguf") == before
    write(tmp_path / "mmproj-f16.gguf", b"c" * 10)
    assert revision(tmp_path / "a.gguf") != before
    for part in (1, 2):
        write(tmp_path / f"m-0000{part}-of-00002.gguf", b"m" * 10)
    before = revision(tmp_path / "m-00001-of-00002.gguf")
    write(tmp_path / "m-00002-of-00002.gguf", b"n" * 10)
    assert revision(tmp_path / "m-00001-of-00002.gguf") != before
    for rank in (0, 1):
        write(tmp_path / f"t-{rank:03}.tensors", b"t" * 10)
    streamed = {
        "load_format": "tensorizer",
        "model_loader_extra_config": {"tensorizer_uri": str(tmp_path / "t-%03d.tensors")},
    }
    before = revision("org/name", **streamed)
    write(tmp_path / "t-001.tensors", b"u" * 10)
    assert revision("org/name", **streamed) != before


def test_weights_that_nothing_tells_apart_need_a_namespace(tmp_path):
    write(tmp_path / "config.json", b"{}")
    extra = {"tensorizer_uri": "s3://bucket/m.tensors"}
    for place, changes in (
        (tmp_path, {}),
        ("org/name", {}),
        (tmp_path, {"model_weights": "s3://bucket/model"}),  # vLLM has fetched all but the weights
        ("org/name", {"load_format": "tensorizer", "model_loader_extra_config": extra}),
    ):
        with pytest.raises(UnsupportedError, match='give kv_connector_extra_config a "namespace"'):
            revision(place, **changes)
        assert revision(place, "version 1", **changes)
    fetched = tmp_path.with_name("fetched")  # vLLM's own folder, another one in each process
    shutil.copytree(tmp_path, fetched)
    streamed = {"model_weights": "s3://bucket/model"}
    assert revision(tmp_path, "version 1", **streamed) == revision(fetched, "version 1", **streamed)
    hub = vllm_config("org/name")
    hub.model_config.hf_config._commit_hash = "abc"
    assert weights_revision(hub, "").revision.endswith("@abc")
    hub.model_config.hf_config._commit_hash = None
    hub.model_config.revision = "0123456789" * 4
    assert weights_revision(hub, "").revision.endswith(hub.model_config.revision)
    assert revision("org/name", load_format="dummy")


def adapter(directory, number=1, name="a"):
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(directory))


def test_an_adapter_is_known_by_its_files_and_not_after_they_have_changed(tmp_path):
    write(tmp_path / "a" / "adapter_model.safetensors", b"1" * 10)
    write(tmp_path / "a" / "adapter_config.json", b"{}")
    versions = AdapterVersions()
    first = versions.version(adapter(tmp_path / "a"))
    assert versions.version(adapter(tmp_path / "a")) == first
    assert AdapterVersions().version(adapter(tmp_path / "a")) == first
    write(tmp_path / "a" / "adapter_model.safetensors", b"2" * 10, time_ns=10**18 + 1)
    with pytest.raises(UnsupportedError, match="have changed since its first request"):
        versions.version(adapter(tmp_path / "a"))
    second = versions.version(adapter(tmp_path / "a", number=2))  # vLLM has loaded it again
    assert second != first
    assert AdapterVersions().version(adapter(tmp_path / "a")) == second
    write(tmp_path / "a" / "adapter_config.json", b'{"lora_alpha": 4}')
    assert AdapterVersions().version(adapter(tmp_path / "a")) != second
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(UnsupportedError, match="have changed"):  # the number has another folder
        versions.version(adapter(tmp_path / "b", number=2))
    with pytest.raises(UnsupportedError, match="is no local directory"):
        versions.version(adapter("org/adapter", number=3))


def test_an_adapter_that_had_other_files_for_a_moment_stays_without_the_cache(tmp_path):
    """vLLM may have loaded it again at that moment (``load_inplace``)."""
    file = write(tmp_path / "a" / "adapter_model.safetensors", b"1" * 10)
    versions = AdapterVersions()
    versions.version(adapter(tmp_path / "a"))
    kept = file.rename(tmp_path / "kept")
    write(file, b"2" * 10)
    with pytest.raises(UnsupportedError, match="have changed"):
        versions.version(adapter(tmp_path / "a"))
    kept.rename(file)
    with pytest.raises(UnsupportedError, match="have changed"):
        versions.version(adapter(tmp_path / "a"))


class Element:
    def __init__(self, data):
        self.data = data


def feature(name, data, offset=0, modality="image"):
    position = SimpleNamespace(offset=offset)
    items = None if data is None else {key: Element(value) for key, value in data.items()}
    return SimpleNamespace(modality=modality, identifier=name, data=items, mm_position=position)


def test_images_are_known_by_what_the_processor_has_made_of_them():
    first = {"pixels": [1.0, [2, 3]], "size": (4,)}
    found = MediaContents().digests([feature("a", first, 40), feature("b", {"pixels": [1]})], 16)
    assert [block for block, _ in found] == [2, 0]
    [(_, digest), (_, other)] = found
    assert digest != other
    assert MediaContents().digests([feature("uuid", first)], 16) == [(0, digest)]  # whatever it is called
    for changed in ({"pixels": [1.0, [2, 4]], "size": (4,)}, {"pixels": [1.0, 2, 3], "size": (4,)}):
        assert MediaContents().digests([feature("a", changed)], 16) != [(0, digest)]


def test_a_name_with_two_images_goes_without_the_cache():
    media = MediaContents()
    assert media.digests([feature("uuid", {"pixels": [1]})], 16) == media.digests(
        [feature("uuid", {"pixels": [1]})], 16
    )
    for pixels in (2, 1):  # vLLM's encoder may have kept either
        with pytest.raises(UnsupportedError, match="multi_modal_uuids"):
            media.digests([feature("uuid", {"pixels": [pixels]})], 16)
    assert media.digests([feature("other", {"pixels": [2]})], 16)


def test_kv_over_our_own_embeddings_is_that_of_the_encoder():
    @dataclass
    class ECTransferConfig:
        ec_connector: str
        ec_role: str = "ec_both"

    assert described(ECTransferConfig("TierStoreECConnector")) is described(None)
    assert described(ECTransferConfig("ECExampleConnector")) == {"ec_connector": "ECExampleConnector"}


@pytest.mark.parametrize("data", [None, {"pixels": None}, {"address": 3, "monotonic_id": 1}])
def test_images_that_the_scheduler_does_not_see_go_without_the_cache(data):
    with pytest.raises(UnsupportedError, match="does not see"):
        MediaContents().digests([feature("a", data)], 16)


def test_prompts_with_different_images_share_the_text_before_them():
    hashes = [bytes([at]) * 32 for at in range(8)]
    text = chunk_keys(hashes, request_salt((), None), 2)
    one, other = (chunk_keys(hashes, request_salt((), None, [(3, image)]), 2) for image in ("x", "y"))
    assert text[0] == one[0] == other[0]
    assert all(len({*keys}) == 3 for keys in zip(text[1:], one[1:], other[1:], strict=True))


def test_configurations_are_made_plain_and_the_processor_has_a_name():
    assert plain({"b": (1, {"z": None}), "a": 1.5, "transformers_version": "5"}) == {
        "a": 1.5,
        "b": [1, {"z": None}],
    }
    assert host_device() == host_device()
    assert host_device().startswith("cpu-")
