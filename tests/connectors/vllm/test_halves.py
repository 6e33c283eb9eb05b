"""What one engine has computed another one loads, block by block; and what goes wrong becomes a miss."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from tests.connectors.vllm.conftest import BLOCK, CHUNK, Request, step
from tierstore.groups import GroupRule
from tierstore.keys import Prompt, encode_tokens
from tierstore_connectors.vllm import transfers
from tierstore_connectors.vllm.copies import HostBlocks
from tierstore_connectors.vllm.orders import StepWork

LoRA = dataclasses.make_dataclass("LoRA", ["lora_name", "lora_path", "lora_int_id"])
TOKENS = list(range(70))  # 4 chunks, and 6 tokens
TABLE = ([5, 6, 7, 8, 9, 10, 11, 12, 13],)
OTHER = ([20, 21, 22, 23, 24, 25, 26, 27, 28],)


def equal_blocks(one, other, pairs, group=0):
    return all((one.memory[group][a] == other.memory[group][b]).all() for a, b in pairs)


def load(engine, request, table, local=0, expected=64):
    assert engine.matched(request, local) == expected - local
    engine.scheduler.allocated(request, table, expected - local)
    return engine.until_loaded()


def test_a_producer_only_saves_and_a_consumer_only_loads(engine):
    producer, consumer = engine(loads=False), engine(saves=False)
    producer.save(Request("a", TOKENS), TABLE, 70)
    assert producer.matched(Request("b", TOKENS)) == 0
    load(consumer, Request("c", TOKENS), OTHER)
    assert equal_blocks(producer, consumer, zip(TABLE[0][:8], OTHER[0][:8], strict=True))
    consumer.save(Request("d", [7, *TOKENS]), TABLE, 71)
    assert consumer.matched(Request("e", [7, *TOKENS])) == 0


def test_an_adapter_whose_files_have_changed_goes_without_the_cache(engine, tmp_path):
    def request(name, number):
        lora = LoRA("adapter", str(tmp_path), number)
        return Request(name, TOKENS, lora_request=lora)

    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"old")
    first, second = engine(), engine()
    first.save(request("a", 1), TABLE, 70)
    assert second.matched(request("b", 1)) == 64
    weights.write_bytes(b"newer")
    assert engine().matched(request("c", 1)) == 0  # started again
    assert second.matched(request("d", 1)) == 0  # and what this one computes is of neither
    second.save(request("e", 1), OTHER, 70)
    assert second.errors.counts.pop("a request") == 2
    assert engine().matched(request("f", 1)) == 0
    second.save(request("g", 2), OTHER, 70)  # vLLM has loaded the new ones
    assert engine().matched(request("h", 1)) == 64


def test_an_adapter_that_is_replaced_before_it_is_computed_with_is_not_saved(engine, tmp_path):
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"old")
    first = engine()
    request = Request("a", TOKENS, lora_request=LoRA("adapter", str(tmp_path), 1))
    assert first.matched(request) == 0
    weights.rename(tmp_path.with_name("old"))
    weights.write_bytes(b"new")  # vLLM loads these with the first step
    first.save(request, TABLE, 70)
    assert first.errors.counts.pop("a request") == 1
    for files in (weights, tmp_path.with_name("old")):
        files.rename(weights)
        again = Request("b", TOKENS, lora_request=LoRA("adapter", str(tmp_path), 1))
        assert engine().matched(again) == 0


def test_images_under_one_name_are_told_apart(engine):
    def request(name, pixels, at=20):
        data = {"pixels": SimpleNamespace(data=pixels)}
        image = SimpleNamespace(
            modality="image", identifier="uuid", data=data, mm_position=SimpleNamespace(offset=at)
        )
        return Request(name, TOKENS, mm_features=[image])

    first, second = engine(), engine()
    first.save(request("a", [1, 2]), TABLE, 70)
    assert engine().matched(request("b", [1, 3])) == 16  # the text before it
    assert second.matched(request("c", [1, 2])) == 64
    # vLLM may compute with what it has made of the first image: nothing of either is found or stored here.
    assert second.matched(request("d", [1, 3])) == 0
    second.save(request("e", [1, 3]), OTHER, 70)
    assert second.matched(request("f", [1, 2])) == 0
    assert second.errors.counts.pop("a request") == 3
    assert engine().matched(request("g", [1, 3])) == 16
    first.save(Request("h", TOKENS), TABLE, 70)
    assert engine().matched(Request("i", TOKENS)) == 64


def test_another_engine_loads_what_was_saved(engine):
    first, second = engine(), engine()
    first.save(Request("a", TOKENS), TABLE, 70)
    results = load(second, Request("b", TOKENS), OTHER)
    assert (results.finished, results.failed, results.blocks) == ({"b"}, set(), set())
    assert equal_blocks(first, second, zip(TABLE[0][:8], OTHER[0][:8], strict=True))
    assert second.memory[0][5][0, 0, 0] == 0.0  # nobody asked for these
    assert not second.memory[0][OTHER[0][8]].any()  # the tail is vLLM's to compute
    counts = second.counters.take()
    assert counts["loaded_tokens"] == counts["promised_tokens"] == 64


def test_blocks_that_vllm_has_itself_are_left_alone(engine):
    first, second = engine(), engine()
    first.save(Request("a", TOKENS), TABLE, 70)
    second.memory[0][20:23] = -1.0
    load(second, Request("b", TOKENS), OTHER, local=24)  # in the middle of a chunk
    assert (second.memory[0][20:23] == -1.0).all()
    assert equal_blocks(first, second, zip(TABLE[0][3:8], OTHER[0][3:8], strict=True))


def test_one_token_is_left_to_compute(engine):
    first = engine()
    first.save(Request("a", TOKENS[:64]), TABLE, 64)
    assert engine().matched(Request("b", TOKENS[:64])) == 48
    assert engine().matched(Request("c", TOKENS[:65])) == 64


def test_equal_tokens_of_another_salt_are_another_page(engine, tmp_path):
    first, second = engine(), engine()
    first.save(Request("a", TOKENS, cache_salt="one"), TABLE, 70, value=1.0)
    for salt in (None, "two"):
        assert second.matched(Request(f"b {salt}", TOKENS, cache_salt=salt)) == 0
    first.save(Request("c", TOKENS, cache_salt="two"), OTHER, 70, value=50.0)
    load(second, Request("d", TOKENS, cache_salt="two"), TABLE)
    assert second.memory[0][5][0, 0, 0] == 50.0
    # An adapter that vLLM's hashes did not know of would still be told apart.
    lora = LoRA("adapter", str(tmp_path), 1)
    assert second.matched(Request("e", TOKENS, cache_salt="two", lora_request=lora)) == 0


def test_chunks_are_saved_as_they_become_complete(engine):
    first, second = engine(), engine()
    request = Request("a", TOKENS[:20])
    assert first.matched(request) == 0
    first.scheduler.allocated(request, TABLE, 0)
    first.fill(TABLE, 1.0)
    tables = {"a": TABLE}
    first.run(step(new=[("a", 0, TABLE)], scheduled={"a": 15}, tables=tables))
    first.settle()
    assert second.matched(Request("b", TOKENS)) == 0
    first.run(step(cached=[("a", 15, None)], scheduled={"a": 5}, tables=tables))
    request.all_token_ids = TOKENS[:33]
    request.hash_blocks()
    first.run(step(cached=[("a", 20, None)], scheduled={"a": 29}, tables=tables))  # 16 are drafts
    first.settle()
    assert second.matched(Request("c", TOKENS)) == 32


def test_a_window_needs_its_last_blocks_only(engine):
    first, second = engine(windowed=(False, True)), engine(windowed=(False, True))
    table = (TABLE[0], [30, 31, 32, 33, 34, 35, 36, 37, 38])
    first.save(Request("a", TOKENS), table, 70)
    outside = ([*OTHER[0]], [0, 0, 0, 0, 0, 45, 46, 47, 48])  # vLLM has nothing there
    results = load(second, Request("b", TOKENS), outside)
    assert results.finished == {"b"}
    assert not results.failed
    assert equal_blocks(first, second, zip(TABLE[0][:8], OTHER[0][:8], strict=True))
    assert equal_blocks(first, second, [(35, 45), (36, 46), (37, 47)], group=1)
    assert not second.memory[1][:45].any()


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_pipeline_stage_may_lack_a_group(engine, lacking):
    options = {"windowed": (False, True), "lacking": (lacking,)}
    first, second = engine(**options), engine(**options)
    first.save(Request("a", TOKENS), TABLE * 2, 70)
    results = load(second, Request("b", TOKENS), OTHER * 2)
    assert (results.finished, results.failed, results.blocks) == ({"b"}, set(), set())
    assert equal_blocks(first, second, zip(TABLE[0][:8], OTHER[0][:8], strict=True), group=1 - lacking)
    assert not second.memory[lacking].any()


def test_a_group_that_lacks_a_chunk_ends_the_hit(engine):
    first, second = engine(windowed=(False, True)), engine(windowed=(False, True))
    request = Request("a", TOKENS)
    table = (TABLE[0], [30, 31, 32, 33, 34, 35, 36, 37, 38])
    first.save(Request("short", TOKENS[:40]), table, 40)
    first.matched(request)
    first.scheduler.allocated(request, table, 0)
    missing = (TABLE[0], [0, 0, 0, 0, 0, 0, 36, 37, 38])
    first.run(step(new=[("a", 40, table)], scheduled={"a": 30}, tables={"a": missing}))
    first.settle()
    assert second.matched(Request("b", TOKENS)) == 32


def test_a_window_whose_front_was_never_saved_is_found(engine):
    first, second = engine(windowed=(False, True)), engine(windowed=(False, True))
    table = (TABLE[0], [0, 0, 0, 0, 34, 35, 36, 37, 38])  # vLLM has dropped what is outside of the window
    first.save(Request("a", TOKENS), table, 70)
    results = load(second, Request("b", TOKENS), (OTHER[0], [0, 0, 0, 0, 0, 45, 46, 47, 48]))
    assert (results.finished, results.failed) == ({"b"}, set())
    assert equal_blocks(first, second, [(35, 45), (36, 46), (37, 47)], group=1)


def test_where_an_attention_chunk_begins_nothing_of_it_is_needed(engine):
    first, second = (engine(rules=(GroupRule.all(), GroupRule.chunked(2 * CHUNK))) for _ in range(2))
    table = (TABLE[0], [30, 31, 32, 33, 34, 35, 36, 37, 38])
    request = Request("a", TOKENS)
    first.matched(request)
    first.scheduler.allocated(request, table, 0)
    # vLLM has dropped all but the last block of these when the step ends: none is saved.
    gone = (TABLE[0], [0, 0, 0, 0, 0, 0, 0, 37, 38])
    output = step(new=[("a", 0, table)], scheduled={"a": 70}, tables={"a": gone})
    first.run(output, between=lambda: first.fill(table, 1.0))
    first.settle()
    results = load(second, Request("b", TOKENS), (OTHER[0], [0] * 8 + [48]))
    assert (results.finished, results.failed) == ({"b"}, set())
    assert equal_blocks(first, second, zip(TABLE[0][:8], OTHER[0][:8], strict=True))
    assert not second.memory[1].any()
    # Further in it there is something that it needs.
    longer = Request("c", [*TOKENS, *range(12)])
    assert second.matched(longer) == 64
    assert second.matched(Request("d", TOKENS[:60])) == 32


def test_a_step_that_writes_to_blocks_ends_the_saves_that_read_them(engine, shared_daemon, stopped):
    """The daemon answers nothing, so the save cannot end by itself."""
    first, second = engine(fence_s=0.0), engine()
    first.save(Request("warm", list(range(200, 240))), TABLE, 40)
    request = Request("a", TOKENS)
    first.matched(request)
    first.scheduler.allocated(request, TABLE, 0)
    stopped(shared_daemon)
    first.fill(TABLE, 1.0)
    first.run(step(new=[("a", 0, TABLE)], scheduled={"a": 70}, tables={"a": TABLE}))
    first.run(step(cached=[("z", 0, ([5, 6],))]), between=lambda: first.fill(TABLE, 99.0))
    shared_daemon.signal(18)
    first.settle()
    assert second.matched(Request("b", TOKENS)) in (0, CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK)
    found = second.scheduler.requests["b"].held
    if found:
        second.scheduler.allocated(Request("b", TOKENS), OTHER, found)
        second.until_loaded()
        assert all(second.memory[0][20 + at][0, 0, 0] == 1.0 + at for at in range(found // BLOCK))


def test_a_save_lets_vllm_go_on_first_unless_a_step_waits_for_it(engine, monkeypatch):
    monkeypatch.setattr(transfers, "_SETTLE_S", 600.0)
    first, second = engine(fence_s=30.0), engine()
    request = Request("a", TOKENS)
    first.matched(request)
    first.scheduler.allocated(request, TABLE, 0)
    first.fill(TABLE, 1.0)
    first.run(step(new=[("a", 0, TABLE)], scheduled={"a": 70}, tables={"a": TABLE}))
    first.run(step(cached=[("z", 0, ([40],))]))  # not one of its blocks
    assert first.worker.busy == 1
    assert second.matched(Request("b", TOKENS)) == 0
    first.run(step(cached=[("z", 1, ([5],))]), between=lambda: first.fill(TABLE, 99.0))
    assert first.worker.busy == 0
    assert not first.counters.take().get("fenced_saves")
    load(second, Request("c", TOKENS), OTHER)
    assert [second.memory[0][block][0, 0, 0] for block in OTHER[0][:8]] == [1.0 + at for at in range(8)]


def test_blocks_that_cannot_be_read_are_not_stored_and_nobody_waits_for_them(engine, monkeypatch):
    """A driver's error ends no thread, holds up no later step, and is never a page."""
    first, second = engine(), engine()
    gather = HostBlocks.gather

    def fail(self, pages):
        if any(9 in chunk for chunk, _ in pages):
            raise RuntimeError("the driver says no")
        gather(self, pages)

    monkeypatch.setattr(HostBlocks, "gather", fail)
    first.save(Request("a", TOKENS), TABLE, 70)  # waits for the save's end
    monkeypatch.undo()
    assert len(first.worker._saves) == 0
    assert first.errors.counts.pop("copying from KV blocks") == 1
    assert first.counters.take()["not_saved_tokens"] == 4 * CHUNK  # they are copied in one go
    assert second.matched(Request("b", TOKENS)) == 0
    first.save(Request("c", TOKENS), OTHER, 70)
    load(second, Request("d", TOKENS), OTHER)
    assert equal_blocks(first, second, zip(OTHER[0][:8], OTHER[0][:8], strict=True))


def test_a_load_that_cannot_be_had_is_reported_once_and_not_promised_again(engine):
    first, second = engine(), engine()
    first.save(Request("a", TOKENS), TABLE, 70)
    request = Request("b", TOKENS)
    assert second.matched(request) == 64
    second.scheduler.allocated(request, OTHER, 64)
    order = second.scheduler._loads[0]
    broken = tuple(dataclasses.replace(each, chunks=((999, 999), *each.chunks[1:])) for each in order.groups)
    second.scheduler._loads[0] = dataclasses.replace(order, groups=broken)
    results = second.until_loaded()
    assert results.finished == {"b"}
    assert results.blocks == {999, *OTHER[0][2:8]}
    assert second.run(step()).finished == set()
    assert second.matched(request) == 0
    assert second.matched(Request("c", TOKENS)) == 0  # nor to anybody else, for a while
    request.num_preemptions = 1  # vLLM has thrown its blocks away, and asks again
    second.scheduler.refused.clear()
    second.run(step(preempted=["b"]))
    assert second.matched(request) == 64


def test_what_was_promised_and_not_ordered_is_refused(engine):
    first, second = engine(), engine(windowed=(False,))
    first.save(Request("a", TOKENS), TABLE, 70)
    request = Request("b", TOKENS)
    assert second.matched(request) == 64
    second.scheduler.lose("b")  # vLLM's call with the blocks has failed
    results = second.run(step())
    assert (results.finished, results.failed) == ({"b"}, {"b"})
    assert second.matched(request) == 0


def test_after_an_error_in_a_step_the_workers_start_afresh(engine):
    first, second = engine(), engine()
    first.save(Request("a", TOKENS), TABLE, 70)
    request = Request("b", TOKENS)
    assert second.matched(request) == 64
    second.scheduler.allocated(request, OTHER, 64)
    work = second.scheduler.no_work()
    assert work.refused == ["b"]
    second.worker.fence(work)
    second.worker.load(work)
    second.worker.save(work)
    assert second.results(work).failed == {"b"}


def test_a_worker_that_missed_an_order_saves_nothing_wrong(engine):
    first = engine()
    request = Request("a", TOKENS)
    first.matched(request)
    first.scheduler.allocated(request, TABLE, 0)
    first.scheduler.work(step(new=[("a", 0, TABLE)], scheduled={"a": 40}, tables={"a": TABLE}))  # lost
    first.run(step(cached=[("a", 40, None)], scheduled={"a": 30}, tables={"a": TABLE}))
    first.settle()
    assert first.errors.counts.pop("orders") == 1
    assert engine().matched(Request("b", TOKENS)) == 0


def test_forgetting_everything_makes_pages_unreachable(engine):
    first = engine()
    first.save(Request("a", TOKENS), TABLE, 70)
    first.forget_everything("1")
    assert first.matched(Request("b", TOKENS)) == 0
    first.save(Request("c", TOKENS), OTHER, 70)
    assert first.matched(Request("d", TOKENS)) == 64
    assert engine().matched(Request("e", TOKENS)) == 64  # of the first epoch


def test_what_was_computed_before_everything_was_forgotten_is_not_saved_after_it(engine):
    first = engine()
    kept, begun_anew = Request("a", TOKENS), Request("b", [7, *TOKENS])
    for request, table in ((kept, TABLE), (begun_anew, OTHER)):
        first.matched(request)
        first.scheduler.allocated(request, table, 0)
        request.num_computed_tokens = 20
    first.forget_everything("1")
    first.run(step(preempted=["b"]))
    both = {"scheduled": {"a": 50, "b": 70}, "tables": {"a": TABLE, "b": OTHER}}
    first.run(step(cached=[("a", 20, None), ("b", 0, OTHER)], **both))
    first.settle()
    assert first.matched(Request("c", TOKENS)) == 0
    assert first.matched(Request("d", [7, *TOKENS])) == 64


def test_each_epoch_has_sessions_of_its_own(engine):
    first = engine(windowed=(False, True))
    for epoch in range(8):
        first.forget_everything(str(epoch))
        first.save(Request(f"a{epoch}", TOKENS), (TABLE[0], TABLE[0]), 70)
        assert first.matched(Request(f"b{epoch}", TOKENS)) == 64
        stores = [*first.worker._stores._stores.values(), first.scheduler.lookups.store]
        assert all(len(store.backend.connection.link.identities) <= 3 for store in stores)


def test_pins_wait_for_the_saves(engine):
    first = engine()
    request = Request("a", TOKENS, kv_transfer_params={"tierstore": {"pin": True}})
    first.matched(request)
    first.scheduler.allocated(request, TABLE, 0)
    first.run(step(new=[("a", 0, TABLE)], scheduled={"a": 70}, tables={"a": TABLE}))
    first.scheduler.finished("a")
    first.run(step())
    first.worker._saver.submit(lambda: None).result(30)
    store = next(iter(first.worker._stores._stores.values()))
    tracked = Request("b", TOKENS)
    first.matched(tracked)
    prompt = first.worker._prompts  # forgotten with the request
    assert prompt == {}
    assert store.unpin(_prompt_of(first, tracked)) == 64
    assert store.unpin(_prompt_of(first, tracked)) == 0


def _prompt_of(engine, request):
    keys = engine.scheduler.requests[request.request_id].keys
    identity = engine.worker.shard.groups[0].identity
    tokens = encode_tokens(request.all_token_ids[: len(keys) * CHUNK])
    return Prompt.with_keys(identity, tokens, keys, chunk_tokens=CHUNK)


def test_without_a_daemon_everything_is_a_miss_at_once(engine, tmp_path):
    alone = engine(url=f"ipc://{tmp_path}/nobody")
    alone.save(Request("a", TOKENS), TABLE, 70)
    assert alone.scheduler.matched(Request("b", TOKENS), 0) == 0  # in the first call
    assert alone.counters.take()["not_saved_tokens"] == 64


def test_requests_leave_nothing_behind(engine, shared_daemon):
    first = engine()
    for name in "abc":
        first.save(Request(name, TOKENS), TABLE, 70)
    second = engine()
    load(second, Request("d", TOKENS), OTHER)
    assert second.matched(Request("e", TOKENS)) == 64
    for each in (first, second):
        for name in "abcde":
            each.scheduler.finished(name)
        each.run(step())
        assert not each.scheduler.requests
        assert not each.worker._prompts
        assert each.worker.busy == 0


@pytest.fixture
def stopped(shared_daemon):
    yield lambda daemon: daemon.signal(19)
    shared_daemon.signal(18)


def test_what_the_halves_tell_each_other_can_be_carried_between_processes(engine):
    import pickle

    work = StepWork(3, "e", fresh={1, 2}, refused=["a"])
    rules = (GroupRule.state(), GroupRule.window(20), GroupRule.chunked(32), GroupRule.all())
    shard = engine(rules=rules).worker.shard
    assert pickle.loads(pickle.dumps((work, shard))) == (work, shard)
    assert [pages.rule for pages in shard.groups] == list(rules)
