"""Keys, settings, wishes, groups, the breaker, refused keys, counts, errors."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from tierstore.errors import UsageError
from tierstore.keys import PageKey
from tierstore_connectors.vllm.breaker import Breaker, RefusedKeys
from tierstore_connectors.vllm.groups import read_groups
from tierstore_connectors.vllm.guard import Faults, guarded
from tierstore_connectors.vllm.identity import _plain, host_device, model_digest, revision_of
from tierstore_connectors.vllm.keys import chunk_keys, private_hashes, secret_of
from tierstore_connectors.vllm.layout import UnknownLayoutError
from tierstore_connectors.vllm.settings import Settings
from tierstore_connectors.vllm.stats import HELP, Counts, added
from tierstore_connectors.vllm.tables import Tables
from tierstore_connectors.vllm.wishes import Wishes
from tierstore_connectors.vllm.work import LoadReport


def test_a_chunk_has_the_key_of_its_last_block():
    hashes = [bytes([at]) * 32 for at in range(7)]
    plain = secret_of((), None)
    keys = chunk_keys(hashes, plain, 2)
    assert len(keys) == 3
    assert len(set(keys)) == 3
    assert keys[1:] == chunk_keys(hashes, plain, 2, first=1)
    changed = [*hashes[:2], b"x" * 32, *hashes[3:]]
    assert chunk_keys(changed, plain, 2) == keys  # the last block's hash covers the others, in vLLM
    others = [secret_of((), "salt"), secret_of(("a", "/a"), None), secret_of(("a",), "/a"), secret_of((), "")]
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


def test_wishes_are_taken_as_far_as_they_make_sense():
    assert Wishes.parse(None) == (Wishes(), None)
    assert Wishes.parse({"other": 1}) == (Wishes(), None)
    asked = {"pin": True, "no_save": True, "ttl_s": 5, "priority": -3}
    assert Wishes.parse({"tierstore": asked}) == (Wishes(True, True, 5, -3), None)
    wishes, problem = Wishes.parse({"tierstore": {"pin": "yes", "priority": 1000, "ttl_s": -1, "x": 1}})
    assert wishes == Wishes()
    assert all(name in problem for name in ("pin", "priority", "ttl_s", "x"))


@pytest.mark.parametrize("value", [None, "x", [], {}, float("nan"), float("inf"), -1, 2.5, True, 10**30])
def test_no_wish_is_an_error(value):
    for name in ("pin", "ttl_s", "no_save", "priority"):
        wishes, _ = Wishes.parse({"tierstore": {name: value}})
        assert wishes.ttl_s is None or 0 <= wishes.ttl_s < float("inf")
        assert isinstance(wishes.priority, int)
    assert Wishes.parse({"tierstore": value})[0] == Wishes()


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
    full, window = kind("FullAttentionSpec", block_size=16), kind("SlidingWindowSpec", block_size=16)
    one = read_groups(kv_config(full), CACHE, 0)
    assert (one.hash_tokens, one.chunk_tokens, one.count) == (16, 64, 1)
    two = read_groups(kv_config(full, window, hash_block_size=16), CACHE, 0)
    assert [group.windowed for group in two.groups] == [False, True]
    assert two.blocks_per_chunk(two.groups[1]) == 4
    uneven = read_groups(
        kv_config(full, kind("SlidingWindowSpec", block_size=48), hash_block_size=16), CACHE, 0
    )
    assert uneven.chunk_tokens == 96
    # Before 0.32: finer, where the user asks for it, but not of a model with one group.
    finer = SimpleNamespace(block_size=16, prefix_match_unit=8)
    assert read_groups(kv_config(full, window), CACHE, 0).hash_tokens == 16
    assert read_groups(kv_config(full, window), finer, 0).hash_tokens == 8
    assert read_groups(kv_config(full), finer, 0).hash_tokens == 16
    mixed = kind("UniformTypeKVCacheSpecs", block_size=16, kv_cache_specs={"l0": full})
    assert read_groups(kv_config(mixed), CACHE, 0).groups[0].windowed is False
    assert read_groups(kv_config(full), CACHE, 128).chunk_tokens == 128


def test_groups_of_anything_else_are_refused():
    full = kind("FullAttentionSpec", block_size=16)
    hidden = kv_config(full)
    hidden.kv_cache_groups[0].enable_kv_transfer = False
    for config, chunk in (
        (kv_config(kind("MambaSpec", block_size=16)), 0),
        (kv_config(full, kind("CircularBufferSpec", block_size=16)), 0),
        (kv_config(), 0),
        (hidden, 0),
        (kv_config(full), 40),
    ):
        with pytest.raises(UnknownLayoutError):
            read_groups(config, CACHE, chunk)


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


def test_refused_keys_cut_what_is_promised_for_a_while():
    refused = RefusedKeys()
    keys = [PageKey(bytes([at]) * 16) for at in range(5)]
    assert refused.allowed(keys, 0.0) == 5
    refused.add(keys[3], 0.0)
    assert refused.allowed(keys, 29.0) == 3
    refused.add(keys[1], 10.0)
    assert refused.allowed(keys, 29.0) == 1
    assert refused.allowed(keys, 31.0) == 1
    assert refused.allowed(keys, 41.0) == 5
    assert len(refused) == 0
    for at in range(5000):
        refused.add(PageKey(at.to_bytes(16, "big")), 50.0)
    assert len(refused) == 4096


class Guarded:
    def __init__(self):
        self.faults = Faults()

    @guarded(lambda self, x: ("miss", x))
    def method(self, x):
        if x > 1:
            raise ValueError(x)
        return x


def test_errors_stop_are_counted_and_are_logged_once(caplog):
    guard = Guarded()
    with caplog.at_level(logging.WARNING, logger="vllm.tierstore"):
        assert [guard.method(x) for x in (1, 2, 3)] == [1, ("miss", 2), ("miss", 3)]
        guard.faults.say("start", "runs without the cache")
        guard.faults.say("start", "runs without the cache")
    assert guard.faults.counts == {"method": 2, "start": 2}
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


def test_tables_of_versions_that_tell_them_step_by_step():
    tables = Tables()

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
    tables = Tables()

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
    assert private_hashes(algorithm, {}, fixed_seed=fixed_seed) is private
    assert not private_hashes(algorithm, {"PYTHONHASHSEED": "0"}, fixed_seed=fixed_seed)


def test_counts_add_up():
    counts = Counts()
    counts.add("loads")
    counts.add("loaded_bytes", 10)
    taken = counts.take()
    assert taken == {"loads": 1, "loaded_bytes": 10}
    assert counts.take() == {}
    assert added(taken, {"loads": 2, "saves": 1}) == {"loads": 3, "loaded_bytes": 10, "saves": 1}
    assert taken.keys() <= HELP.keys()
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
    )
    cache = SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256", calculate_kv_scales=False)
    load = SimpleNamespace(load_format=changes.pop("load_format", "auto"))
    for name, value in changes.items():
        setattr(model if name in vars(model) else cache, name, value)
    return SimpleNamespace(model_config=model, cache_config=cache, load_config=load)


def test_a_model_is_told_apart_by_all_that_changes_its_kv(tmp_path):
    def digest(version="1", backends=("b",), device="cpu", namespace="", **changes):
        return model_digest(vllm_config(tmp_path, **changes), version, list(backends), device, namespace)

    base = digest()
    assert digest() == base
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
    with pytest.raises(UnknownLayoutError, match="scales"):
        digest(calculate_kv_scales=True)


def test_other_weights_in_the_same_place_are_another_revision(tmp_path):
    config = vllm_config(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"x" * 10)
    first = revision_of(config)
    assert revision_of(config) == first
    (tmp_path / "a.safetensors").write_bytes(b"y" * 11)
    assert revision_of(config) != first
    config.model_config.model = "org/name"
    config.model_config.revision = "v1"
    assert revision_of(config) == "v1"
    config.model_config.hf_config._commit_hash = "abc"
    assert revision_of(config) == "v1@abc"


def test_configurations_are_made_plain_and_the_processor_has_a_name():
    assert _plain({"b": (1, {"z": None}), "a": 1.5, "transformers_version": "5"}) == {
        "a": 1.5,
        "b": [1, {"z": None}],
    }
    assert host_device() == host_device()
    assert host_device().startswith("cpu-")
