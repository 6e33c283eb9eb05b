"""Hits, and no wrong token and no failed request whatever happens to the daemon."""

from __future__ import annotations

import random

import pytest

from tests.tensorrt_llm.arguments import arguments, write_model
from tierstore.errors import UsageError
from tierstore.testing.clock import wait_until
from tierstore_connectors.tensorrt_llm import TierStoreWorker
from tierstore_connectors.tensorrt_llm import scheduler as scheduler_module

STEPS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "start_load_kv",
    "wait_for_save",
    "request_finished",
)
FEW, MANY = 8, 500
ROUNDS = [FEW, pytest.param(MANY, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]


def prompt(count, seed=0):
    return [random.Random(seed).randrange(60_000) for _ in range(count)] if count else []


def saved(engine, *prompts, **options):
    """Generate, and wait until everything is stored. Return the tokens."""
    found = engine.generate(*prompts, **options)
    engine.flush()
    return found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [None, 48])
def test_a_prompt_is_hit_after_a_restart(engine, daemon, overlap, chunk):
    tokens = prompt(210)
    first = engine(overlap=overlap, chunk=chunk)
    expected = saved(first, tokens, count=50)
    daemon.wait_written()
    daemon.kill()
    daemon.start()
    second = engine(overlap=overlap, chunk=chunk)
    assert second.generate(tokens, count=50) == expected
    assert second.hits == 192  # whole pages of 64 tokens
    # The next turn: what was generated is stored as well.
    longer = tokens + expected[0] + prompt(20, 7)
    third = engine(overlap=overlap, chunk=chunk)
    third.generate(longer)
    assert third.hits == 256, [each.saved[0].totals() for each in (first, second, third)]
    assert third.errors == {}


def test_parts_of_blocks_and_of_pages(engine):
    """A prompt is never loaded as a whole, and only by pages."""
    for length in (1, 31, 32, 63, 64, 65, 96, 127, 128, 129):
        tokens = prompt(length, length)
        expected = saved(engine(), tokens)
        again = engine()
        assert again.generate(tokens) == expected
        assert again.hits == (length - 1) // 64 * 64


def test_blocks_that_the_engine_has_itself_are_not_loaded(engine):
    """A load begins behind them, also inside a page. They are shared and must not be written."""
    tokens = prompt(250)
    expected = saved(engine(), tokens)
    second = engine()
    saved(second, tokens[:110])  # its blocks end inside a page
    before = second.hits
    shared = [second.tree[tuple(tokens[:end])] for end in (32, 64, 96)]
    kept = [second.pools[0][block].clone() for block in shared]
    assert second.generate(tokens) == expected
    assert second.hits - before == 192 - 96
    for block, pool in zip(shared, kept, strict=True):
        assert (second.pools[0][block] == pool).all()


def test_pages_that_only_the_engine_has_are_stored_again(engine, daemon):
    """After a daemon without a disk has lost its pages, the next request of a prefix stores them."""
    first = engine()
    tokens = prompt(300)
    expected = saved(first, tokens[:200])
    daemon.kill()
    assert daemon.disk is not None
    for file in sorted(daemon.disk.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    daemon.start()
    assert first.saved[0]._store.wait_connected(60)

    def stored():
        assert saved(first, tokens[:200]) == expected
        return _stored(first, tokens)

    wait_until(stored)  # the breaker asks again after some seconds
    again = engine()
    again.generate(tokens[:200])
    assert again.hits == 192


def _stored(engine, tokens):
    pages = engine.scheduler._pages
    with pages.store._store.lookup(pages.prompt(tokens[:192], 0)) as hit:
        return hit.tokens == 192


def test_blocks_with_another_owner(engine, plain):
    """Few blocks, many prompts: blocks change their owners all the time."""
    prompts = [prompt(90 + 7 * at, at % 4)[: 60 + 9 * at] + prompt(30, 50 + at) for at in range(10)]
    expected = plain(*prompts, count=20)
    small = engine(blocks=12, overlap=True)
    for _ in range(3):
        assert saved(small, *prompts, count=20) == expected
    assert small.hits > 0
    assert small.errors == {}


def test_two_ranks_need_the_pages_of_both(engine, daemon):
    tokens = prompt(210)
    expected = saved(engine(ranks=2), tokens)
    second = engine(ranks=2)
    assert second.generate(tokens) == expected
    assert second.hits == 192
    # Other prompts are stored by one rank only.
    other = prompt(210, 1)
    half = engine(ranks=2)
    half.workers[1].wait_for_save = lambda stream: None
    expected = saved(half, other)
    third = engine(ranks=2)
    assert third.generate(other) == expected
    assert third.hits == 0
    assert third.generate(tokens) == second.generate(tokens)


def test_one_rank_and_two_share_nothing(engine):
    tokens = prompt(210)
    saved(engine(), tokens)
    two = engine(ranks=2)
    two.generate(tokens)
    assert two.hits == 0


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_daemon_that_is_killed_at_a_step(engine, daemon, step, ranks):
    tokens = prompt(210)
    expected = saved(engine(ranks=ranks), tokens, count=70)
    second = engine(ranks=ranks)

    def kill(name):
        if name == step:
            daemon.kill()

    second.before = kill
    assert second.generate(tokens, count=70) == expected
    killed_before_the_answer = step == "get_num_new_matched_tokens"
    assert (second.hits == 0) == killed_before_the_answer


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("fault", ["killed", "stopped", "full"])
def test_a_daemon_in_trouble(engine, daemon, plain, rounds, fault, monkeypatch):
    monkeypatch.setenv("TENSORRT_LLM_TIERSTORE", '{"lookup_s": 0.2, "load_s": 0.5}')
    chance = random.Random(fault)
    prompts = [prompt(80, at % 3) + prompt(40 + 13 * at, 10 + at) for at in range(8)]
    expected = plain(*prompts, count=6)
    saved(engine(blocks=64), *prompts, count=6)
    if fault == "full":
        daemon.kill()
        daemon.options = [each for each in daemon.options if not each.startswith("--disk")]
        daemon.options += ["--host-bytes=1MiB"]  # the last one counts
        daemon.start()
    here = engine(blocks=16, overlap=True)
    after = [0]

    def disturb(name):
        after[0] -= 1
        if after[0] == 0 and fault == "killed":
            daemon.kill()
        elif after[0] == 0 and fault == "stopped":
            daemon.hang()

    here.before = disturb
    for _ in range(rounds):
        after[0] = chance.randrange(1, 40)
        at = chance.randrange(len(prompts))
        assert here.generate(prompts[at], count=6) == [expected[at]]
        if fault == "killed" and chance.random() < 0.5:
            daemon.kill()
            daemon.start()
        elif fault == "stopped":
            daemon.go_on()
    assert set(here.errors) <= {"late lookups"}
    assert here.hits > 0 or rounds == FEW


def test_a_daemon_that_comes_later(engine, daemon):
    daemon.kill()
    here = engine()
    tokens = prompt(210)
    expected = here.generate(tokens)
    daemon.start()
    assert here.saved[0]._store.wait_connected(60)
    saved(here, tokens)
    again = engine()
    assert again.generate(tokens) == expected
    assert again.hits == 192


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_starts_again(engine, plain, overlap):
    """TensorRT-LLM's only scheduler for connectors never preempts. If a version does, nothing wrong is
    stored: its report may then miss blocks."""
    tokens = prompt(200)
    expected = plain(tokens, count=20)
    here = engine(overlap=overlap)
    asked = []
    ask = here._ask

    def twice(request, computed):
        ask(request, computed)
        asked.append(request)
        here.scheduler.update_state_after_alloc(request, list(range(here._count(request))))
        here.scheduler.build_connector_meta(here._report([request]))  # a pass that was lost
        here.hits -= request.matched
        ask(request, computed)

    here._ask = twice
    assert saved(here, tokens, count=20) == expected
    assert asked
    again = engine()
    assert again.generate(tokens, count=20) == expected
    assert again.hits == 0


def test_a_load_is_limited(engine, monkeypatch):
    """Loaded bytes of all requests that wait for one pass have a limit. The rest is computed."""
    prompts = [prompt(210, 1), prompt(210, 2)]
    expected = saved(engine(), *prompts)
    again = engine()
    monkeypatch.setattr(scheduler_module, "MOST_STAGED_BYTES", again.pools[0][:2].nbytes * 4)
    assert again.generate(*prompts) == expected
    assert again.hits == 192 + 64


# -- no wrong sharing ------------------------------------------------------------------------------------


def test_other_engines_get_no_pages(engine, tmp_path, monkeypatch):
    tokens = prompt(210)
    saved(engine(), tokens)
    other = write_model(tmp_path / "other", weights=b"weightz")

    def hits(*given, **values):
        found = engine(*given, **values)
        found.generate(tokens)
        return found.hits

    same = write_model(tmp_path / "elsewhere")
    assert hits(same) == 192  # the place of the model does not count
    assert hits(max_batch_size=64, tokenizer="t", cache={"free_gpu_memory_fraction": 0.5}) == 192
    assert hits(other) == 0
    assert hits(quant_config="FP8") == 0
    assert hits(dtype="bfloat16") == 0
    assert hits(attn_backend="FLASHINFER") == 0
    assert hits(max_seq_len=8192) == 0
    assert hits(cache={"dtype": "fp8"}) == 0
    assert hits(cache={"tokens_per_block": 64}) == 0
    monkeypatch.setenv("TRTLLM_ENABLE_PDL", "1")
    assert hits() == 0
    monkeypatch.delenv("TRTLLM_ENABLE_PDL")
    monkeypatch.setenv("TENSORRT_LLM_TIERSTORE", '{"namespace": "a"}')
    assert hits() == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_task_id": 1},
        {"multimodal_hashes": [[1]]},
        {"prompt_embedding_table": object()},
        {"mrope_rotary_cos_sin": object()},
        {"position_ids": [0]},
        {"cache_salt_id": 7},
        {"beam_width": 2},
    ],
)
def test_requests_with_more_than_tokens_are_computed(engine, fields):
    tokens = prompt(210)
    first = engine()
    saved(first, tokens, **fields)
    assert first.errors == {"requests": 1}
    second = engine()
    saved(second, tokens)
    assert second.hits == 0
    third = engine()
    third.generate(tokens, **fields)
    assert third.hits == 0


@pytest.mark.parametrize("fields", [{"py_multimodal_data": {}}, {"py_lora_path": "a"}])
def test_fields_that_a_lookup_does_not_see_are_not_saved(engine, fields):
    tokens = prompt(210)
    saved(engine(), tokens, **fields)
    second = engine()
    second.generate(tokens)
    assert second.hits == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cache": {"host_cache_size": 1 << 30}}, "host_cache_size"),
        ({"cache": {"use_kv_cache_manager_v2": True}}, "use_kv_cache_manager_v2"),
        ({"cache": {"max_attention_window": [512]}}, "max_attention_window"),
        ({"speculative_config": object()}, "speculative_config"),
        ({"max_beam_width": 4}, "max_beam_width"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"enable_attention_dp": True}, "enable_attention_dp"),
        ({"orchestrator_type": "ray"}, "orchestrator_type"),
        ({"load_format": "LoadFormat.DUMMY"}, "random weights"),
    ],
)
def test_engines_that_are_not_supported(engine, values, message):
    with pytest.raises(UsageError, match=message):
        engine(**values)


def test_models_that_are_not_supported(engine, tmp_path):
    with pytest.raises(UsageError, match="Gemma3ForConditionalGeneration"):
        engine(write_model(tmp_path / "images", architecture="Gemma3ForConditionalGeneration"))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"config\.json"):
        engine(empty)
    (empty / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="local folder"):
        TierStoreWorker(arguments(empty))


def test_settings(engine, monkeypatch):
    for given, message in (
        ("[]", "JSON object"),
        ('{"lookup": 1}', "lookup"),
        ('{"hash_weights": "some"}', "hash_weights"),
    ):
        monkeypatch.setenv("TENSORRT_LLM_TIERSTORE", given)
        with pytest.raises(UsageError, match=message):
            engine()


def test_off_is_an_engine_without_a_store(engine, plain, monkeypatch):
    tokens = prompt(210)
    expected = plain(tokens)
    saved(engine(), tokens)
    monkeypatch.setenv("TIERSTORE", "off")
    here = engine()
    assert here.generate(tokens) == expected
    assert here.hits == 0
    monkeypatch.setenv("TIERSTORE", "on")
    with pytest.raises(UsageError, match="must be auto, off or the address"):
        engine()


def test_an_engine_that_breaks_the_order_of_calls_stops(engine):
    """Loaded tokens without blocks would be wrong KV, so the connector raises."""
    tokens = prompt(210)
    saved(engine(), tokens)
    here = engine()
    update = here.scheduler.update_state_after_alloc
    here.scheduler.update_state_after_alloc = lambda request, blocks: update(request, blocks[:3])
    with pytest.raises(RuntimeError, match="as blocks for 6 loaded blocks"):
        here.generate(tokens)
    here = engine()
    here.scheduler.update_state_after_alloc = lambda request, blocks: None
    with pytest.raises(RuntimeError, match="no blocks"):
        here.generate(tokens)
