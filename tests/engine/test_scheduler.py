"""The scheduler's promises on random requests, without a model: tokens come from a fixed row of logits."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.scheduling import IDENTITY, POOL_PAGES, SPEC, Bench
from tierstore.errors import UsageError
from tierstore_connectors.bundled import open_connector
from tierstore_engine.keeper import clip_tiers
from tierstore_engine.outputs import WaitReason
from tierstore_engine.sequence import SequenceState
from tierstore_engine.settings import SCHEDULES, EngineSettings

requests = st.lists(
    # Steps before it arrives, prompt tokens, new tokens: none larger than the pool by itself.
    st.tuples(st.integers(0, 6), st.integers(1, 60), st.integers(1, 36)),
    min_size=1,
    max_size=12,
)
settings = st.builds(
    EngineSettings,
    prefill_chunk=st.sampled_from([4, 8, 20]),
    max_sequences=st.integers(1, 5),
    max_batch_tokens=st.sampled_from([0, 30]),
    schedule=st.sampled_from(SCHEDULES),
    overtake_s=st.sampled_from([0.0, 0.5, 10.0]),
)


@given(requests, settings)
def test_everything_finishes_and_no_page_is_lost(
    requests: list[tuple[int, int, int]], settings: EngineSettings
) -> None:
    bench = Bench(settings)
    queue = list(requests)
    steps = 0
    while queue or bench.scheduler.has_work:
        while queue and (queue[0][0] <= 0 or not bench.scheduler.has_work):
            _, prompt, new = queue.pop(0)
            bench.add(prompt, new)
        if queue:
            queue[0] = (queue[0][0] - 1, *queue[0][1:])
        assert bench.step(), "nothing is loading, so there is always something to compute"
        steps += 1
        assert steps < 5000
    for sequence, (_, prompt, new) in zip(bench.sequences, requests, strict=True):
        assert sequence.state is SequenceState.FINISHED
        assert len(sequence.tokens) == prompt + new
    assert bench.connector.available() == POOL_PAGES


def test_the_oldest_is_never_preempted() -> None:
    bench = Bench(EngineSettings(prefill_chunk=8))
    sequences = [bench.add(30, 36) for _ in range(5)]
    while bench.scheduler.has_work:
        bench.step()
    assert sequences[0].tally.preemptions == 0
    assert sum(sequence.tally.preemptions for sequence in sequences) > 0


def test_decoding_goes_on_while_another_prefills() -> None:
    bench = Bench(EngineSettings(prefill_chunk=4))
    decoding = bench.add(1, 30)
    bench.step()
    long = bench.add(40, 1)
    while long.state is not SequenceState.FINISHED:
        assert decoding in [item.sequence for item in bench.step()]


def test_a_short_prompt_overtakes_a_long_one_that_is_under_way() -> None:
    bench = Bench(EngineSettings(prefill_chunk=4, max_sequences=3))
    long = bench.add(40, 1)
    bench.step()
    short = bench.add(3, 1)
    assert [item.sequence for item in bench.step()] == [short]
    assert 0 < long.computed < 40


def test_nobody_overtakes_for_longer_than_the_bound() -> None:
    bench = Bench(EngineSettings(prefill_chunk=4, max_sequences=3, overtake_s=10.0))
    long = bench.add(40, 1)
    bench.step()
    while len(bench.sequences) < 12:
        bench.add(4, 1)
        bench.step()
    assert bench.first_token_s[long.request_id] <= 40 + 10
    assert 0 < bench.scheduler.longest_overtaken_s <= 10


def test_a_prompt_without_room_stands_in_nobodys_way_for_a_while_and_then_gets_it() -> None:
    bench = Bench(EngineSettings(prefill_chunk=8, overtake_s=100.0))
    answering = bench.add(4, 72)
    bench.step()
    large = bench.add(4 * POOL_PAGES - 8, 1)
    small = bench.add(12, 30)
    while small.computed < 12:
        bench.step()
    assert not large.tables
    while not large.tables:
        bench.step()
    assert answering.state is SequenceState.FINISHED or not small.tables  # one of them gave its pages away
    assert bench.now_s < 250


def test_a_lower_priority_number_comes_first_and_is_never_preempted_for_others() -> None:
    for schedule in SCHEDULES:
        bench = Bench(EngineSettings(prefill_chunk=4, max_sequences=1, schedule=schedule))
        usual, urgent = bench.add(4, 1), bench.add(40, 1, priority=-1)
        assert [item.sequence for item in bench.step()] == [urgent]
        while bench.scheduler.has_work:
            bench.step()
        assert bench.first_token_s[urgent.request_id] < bench.first_token_s[usual.request_id]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_waiting_request_has_a_reason(schedule: str, tmp_path: Path) -> None:
    settings = EngineSettings(prefill_chunk=4, max_sequences=1, schedule=schedule)
    bench = Bench(settings)
    for _ in range(3):
        bench.add(8, 4)
    assert bench.scheduler.wait_reasons() == {WaitReason.TURN: 3}
    bench.step()
    reasons = bench.scheduler.wait_reasons()
    assert reasons[WaitReason.SLOT] >= 1
    assert reasons.total() == len(bench.scheduler.waiting) == 2

    bench = Bench(replace(settings, max_sequences=4))
    bench.add(40, 30)
    bench.step()
    bench.add(90, 1)
    bench.step()
    assert bench.scheduler.wait_reasons() == {WaitReason.ROOM: 1}

    bench = Bench(replace(settings, max_sequences=5))
    for _ in range(5):
        bench.add(8, 36)
    found = set()
    while bench.scheduler.has_work:
        bench.step()
        found.update(bench.scheduler.wait_reasons())
    assert WaitReason.PREEMPTED in found
    assert bench.scheduler.wait_reasons() == {}

    connector = open_connector(
        SPEC, IDENTITY, pool_pages=100, store=str(tmp_path), host_bytes=1 << 20, disk_bytes=1 << 26
    )
    with closing(connector):
        bench = Bench(replace(settings, max_sequences=4), connector=connector)
        bench.add(40, 1)
        bench.add(40, 1)
        bench.step()
        assert bench.scheduler.wait_reasons() == {WaitReason.PREFIX: 1}
        while bench.scheduler.has_work:
            bench.step()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_answers_that_take_all_slots_are_expected_to_end(schedule: str) -> None:
    bench = Bench(EngineSettings(prefill_chunk=8, max_sequences=2, schedule=schedule), pool_pages=1000)
    for answer in (100, 80):
        bench.add(8, answer)
    while len(bench.steps) < 40:
        bench.step()
    late = bench.add(8, 1)
    began, expected = bench.now_s, bench.scheduler.expect(late)
    while late.request_id not in bench.first_token_s:
        bench.step()
    assert expected is not None
    assert expected.seconds > 5 * expected.alone_s
    assert expected.seconds == pytest.approx(bench.first_token_s[late.request_id] - began, rel=0.2)


def test_nobody_gives_way_to_one_who_waits_for_somebody_elses_pages(tmp_path: Path) -> None:
    connector = open_connector(
        SPEC, IDENTITY, pool_pages=100, store=str(tmp_path), host_bytes=1 << 20, disk_bytes=1 << 26
    )
    with closing(connector):
        settings = EngineSettings(prefill_chunk=4, max_sequences=2, overtake_s=0.0)
        bench = Bench(settings, connector=connector)
        first, like_it, other = bench.add(40, 1), bench.add(40, 1), bench.add(20, 30, token=2)
        bench.step()
        assert bench.scheduler.admitted == [first, other], "the second has no use for a place yet"
        assert other.tally.preemptions == 0
        while bench.scheduler.has_work:
            bench.step()
        assert like_it.state is SequenceState.FINISHED


@pytest.mark.parametrize("seed", range(100_001, 100_009))  # half of them stood still once
def test_requests_that_begin_alike_all_end(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    connector = open_connector(
        SPEC,
        IDENTITY,
        pool_pages=chance.choice([15, 20, 30, 60, 100]),
        store=str(tmp_path),
        host_bytes=1 << 20,
        disk_bytes=1 << 26,
    )
    settings = EngineSettings(
        prefill_chunk=chance.choice([4, 8, 20]),
        max_sequences=chance.choice([1, 2, 3, 5]),
        overtake_s=chance.choice([0, 0.5, 10.0, 40.0]),
    )
    with closing(connector):
        bench = Bench(settings, connector=connector)
        while len(bench.sequences) < 25 or bench.scheduler.has_work:
            while len(bench.sequences) < 25 and (chance.random() < 0.4 or not bench.scheduler.has_work):
                token, prompt, answer = (chance.randint(*span) for span in ((1, 3), (4, 44), (1, 10)))
                bench.add(prompt, answer, priority=chance.choice([0, 0, 0, 1]), token=token)
            if not bench.step():
                bench.scheduler.wait()
        assert all(sequence.state is SequenceState.FINISHED for sequence in bench.sequences)


def test_settings_that_cannot_work() -> None:
    with pytest.raises(UsageError, match="at least 1055"):
        EngineSettings(max_batch_tokens=512)
    with pytest.raises(UsageError, match="must be positive"):
        EngineSettings(prefill_chunk=0)
    with pytest.raises(UsageError, match="multiple of the page's 64 tokens"):
        EngineSettings(prefill_chunk=100).check_chunk(64)


def test_tiers_are_clipped_in_prompt_order() -> None:
    held = {"hbm": 128, "host": 64, "disk": 64}
    assert clip_tiers(held, 256) == held
    assert clip_tiers(held, 150) == {"hbm": 128, "host": 22, "disk": 0}
