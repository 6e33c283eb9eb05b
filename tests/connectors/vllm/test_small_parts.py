"""Keys, settings, request options, groups, the breaker, recent keys, counts, errors."""

from __future__ import annotations

import logging
import os
import shutil
from types import SimpleNamespace

import pytest

from tierstore.errors import UsageError
from tierstore.groups import GroupRule
from tierstore.keys import PageKey
from tierstore.types import Promise
from tierstore_connectors.common import handover
from tierstore_connectors.common.counters import Counters, added
from tierstore_connectors.common.facts import host_device, plain
from tierstore_connectors.common.guard import Breaker, ErrorLog, RecentKeys, guarded
from tierstore_connectors.vllm.config import RequestOptions, Settings
from tierstore_connectors.vllm.groups import BlockTables, blocks_to_load, read_groups
from tierstore_connectors.vllm.identity import (
    AdapterVersions,
    chunk_keys,
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
    assert Settings.parse({}).store.startswith("ipc://")
    settings = Settings.parse({"store": "tcp://h:1", "lookup_s": 1, "chunk_tokens": 128})
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
            Settings.parse(wrong)


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
    loaded = blocks_to_load(wide, wide.groups[0], [0, 7, 0, 9], 96, 192)
    assert (loaded.first, loaded.chunks) == (1, ((9,),))
    other = {**STATES, "shapes": ((8, 3), (2, 4))}  # the same bytes, in another order
    turned = read_groups(kv_config(kind("MambaSpec", **other), full, hash_block_size=16), ALIGNED, 0)
    assert turned.groups[0].meaning != state.meaning


@pytest.mark.parametrize(
    ("cache", "states", "offers", "why"),
    [
        ({"mamba_cache_mode": "none"}, {}, True, "'align' only .this is 'none'.: switch prefix caching on"),
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
    counts = Counters()
    counts.add("loads")
    counts.add("loaded_bytes", 10)
    taken = counts.take()
    assert taken == {"loads": 1, "loaded_bytes": 10}
    assert counts.take() == {}
    assert added(taken, {"loads": 2, "saves": 1}) == {"loads": 3, "loaded_bytes": 10, "saves": 1}
    assert LoadReport({"a": 3}).merge(LoadReport({"a": 2, "b": 1})).failed == {"a": 2, "b": 1}


def vllm_config(directory, **changes):
    hf = SimpleNamespace(
        architectures=["A"], to_dict=lambda: {"layers": changes.pop("layers", 4), "x": object}
    )
    model = SimpleNamespace(
        model=str(directory),
        hf_config=hf,
        dtype="float32",
        quantization=None,
        seed=changes.pop("seed", 0),
        revision=None,
        model_weights=changes.pop("model_weights", ""),
    )
    cache = SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256", calculate_kv_scales=False)
    load = SimpleNamespace(
        load_format=changes.pop("load_format", "auto"),
        model_loader_extra_config=changes.pop("model_loader_extra_config", {}),
    )
    for name, value in changes.items():
        setattr(model if name in vars(model) else cache, name, value)
    return SimpleNamespace(model_config=model, cache_config=cache, load_config=load)


def test_a_model_is_told_apart_by_all_that_changes_its_kv(tmp_path):
    def digest(version="1", backends=("b",), device="cpu", namespace="", **changes):
        return model_digest(vllm_config(tmp_path, **changes), version, list(backends), device, namespace)

    base = digest()
    assert digest() == base
    assert digest(model="/mounted/elsewhere") == base
    assert digest(seed=1) == base  # of sampling
    others = [
        digest(version="2"),
        digest(backends=("c",)),
        digest(device="cpu2"),
        digest(namespace="x"),
        digest(layers=5),
        digest(dtype="bfloat16"),
        digest(cache_dtype="fp8"),
        digest(prefix_caching_hash_algo="xxhash"),
        digest(load_format="dummy"),
        digest(load_format="dummy", seed=1),
    ]
    assert len({base, *others}) == len(others) + 1
    with pytest.raises(UnsupportedError, match="scales"):
        digest(calculate_kv_scales=True)


def write(path, content, *, time_ns=10**18):
    """A file of this content, last written then."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(time_ns, time_ns))
    return path


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("model.safetensors", ["model-2.safetensors"]),
        ("pytorch_model.bin", ["more.pt"]),
        ("model.gguf", ["b.gguf"]),
        ("model.tensors", ["b.tensors"]),
    ],
)
def test_other_weights_are_another_revision_wherever_they_are_mounted(tmp_path, name, others):
    here, there = tmp_path / "here", tmp_path / "there"
    content = bytes(range(256)) * 4000
    write(here / name, content)
    first = weights_revision(vllm_config(here), "")
    shutil.copytree(here, there)
    assert weights_revision(vllm_config(there), "") == first  # and the same digest: see the test below
    write(there / name, content, time_ns=10**18 + 1)
    assert weights_revision(vllm_config(there), "") != first
    write(there / name, content + b"x")
    assert weights_revision(vllm_config(there), "") != first
    write(there / name, bytes(reversed(content)))  # of a size and a time, as in a reproducible image
    assert weights_revision(vllm_config(there), "") != first
    write(there / name, content)
    write(there / "notes.txt", b"x")
    assert weights_revision(vllm_config(there), "") == first
    for other in others:
        write(there / other, content)
    assert weights_revision(vllm_config(there), "") != first


def test_weights_in_single_and_in_split_files(tmp_path):
    def revision(place, **changes):
        return weights_revision(vllm_config(tmp_path / place, **changes), "")

    write(tmp_path / "a.gguf", b"a" * 10)
    write(tmp_path / "b.gguf", b"b" * 10)
    assert revision("a.gguf") != revision("b.gguf")
    before = revision("a.gguf")
    write(tmp_path / "b.gguf", b"c" * 10)
    assert revision("a.gguf") == before
    for part in (1, 2):
        write(tmp_path / f"m-0000{part}-of-00002.gguf", b"m" * 10)
    before = revision("m-00001-of-00002.gguf")
    write(tmp_path / "m-00002-of-00002.gguf", b"n" * 10)
    assert revision("m-00001-of-00002.gguf") != before
    for rank in (0, 1):
        write(tmp_path / f"t-{rank:03}.tensors", b"t" * 10)
    extra = {"tensorizer_uri": str(tmp_path / "t-%03d.tensors")}
    config = vllm_config("org/name", load_format="tensorizer", model_loader_extra_config=extra)
    before = weights_revision(config, "")
    write(tmp_path / "t-001.tensors", b"u" * 10)
    assert weights_revision(config, "") != before


def test_weights_that_nothing_tells_apart_need_a_namespace(tmp_path):
    remote = vllm_config(tmp_path, model_weights="s3://bucket/model")  # vLLM has fetched all but the weights
    config = {"tensorizer_uri": "s3://bucket/m.tensors"}
    streamed = vllm_config("org/name", load_format="tensorizer", model_loader_extra_config=config)
    for unknown in (vllm_config(tmp_path), vllm_config("org/name"), remote, streamed):
        with pytest.raises(UnsupportedError, match='give kv_connector_extra_config a "namespace"'):
            weights_revision(unknown, "")
        assert weights_revision(unknown, "version 1")
    hub = vllm_config("org/name")
    hub.model_config.hf_config._commit_hash = "abc"
    assert weights_revision(hub, "").endswith("@abc")
    hub.model_config.hf_config._commit_hash = None
    hub.model_config.revision = "0123456789" * 4
    assert weights_revision(hub, "").endswith(hub.model_config.revision)
    assert weights_revision(vllm_config("org/name", load_format="dummy"), "")


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
    with pytest.raises(UnsupportedError, match="is no local directory"):
        versions.version(adapter("org/adapter", number=3))


def test_configurations_are_made_plain_and_the_processor_has_a_name():
    assert plain({"b": (1, {"z": None}), "a": 1.5, "transformers_version": "5"}) == {
        "a": 1.5,
        "b": [1, {"z": None}],
    }
    assert host_device() == host_device()
    assert host_device().startswith("cpu-")
