"""Hints and sessions in a live store: what leaves first, and that nothing else changes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.small_store import SPEC, load_bytes, pages_of
from tierstore import Hint, UsageError
from tierstore.index import sessions
from tierstore.keys import Identity
from tierstore.testing.clock import ManualClock
from tierstore.testing.opening import open_store as open_testing_store

CHUNK = SPEC.chunk_tokens
LIKELY = Hint(reuse="likely")
UNLIKELY = Hint(reuse="unlikely")
DONE = Hint(reuse="done")
TIERS = ("hbm", "host", "disk")


def prompt_of(number, pages=1):
    return [1000 * number + at for at in range(pages * CHUNK)]


def save(store, tokens, **kwargs):
    assert store.save(tokens, pages_of(tokens), **kwargs).wait(10) == len(tokens)


def held(store, *prompts):
    """Tokens of each prompt that are held, without using them."""
    state = store.backend.core.state
    found = []
    with state.lock:
        for tokens in prompts:
            prompt = store.prompt(tokens)
            root = state.root(prompt.identity, SPEC.page_bytes)
            found.append(state.index.tree.match(root, prompt, len(prompt)).tokens)
    return found


@pytest.fixture
def store(open_store):
    return open_store(None, policy="default")


A, B, C = (prompt_of(number) for number in (1, 2, 3))


def test_what_is_done_leaves_first_and_what_is_likely_last(store):
    save(store, A, hint=LIKELY)
    save(store, B)
    save(store, C, hint=UNLIKELY)
    D = prompt_of(4)
    save(store, D, hint=DONE)
    gone = []
    for _ in range(4):
        assert store.evict("host", 1) == 1
        gone.append(held(store, A, B, C, D).count(0))
        if gone[-1] == 1:
            assert held(store, A, B, C, D) == [16, 16, 16, 0]
        if gone[-1] == 2:
            assert held(store, A, B, C, D) == [16, 16, 0, 0]
        if gone[-1] == 3:
            assert held(store, A, B, C, D) == [16, 0, 0, 0]
    assert gone == [1, 2, 3, 4]


def test_priorities_order_what_is_equal(store):
    save(store, A, hint=Hint(priority=5))
    save(store, B, hint=Hint(priority=-5))
    save(store, C)
    store.evict("host", 1)
    assert held(store, A, B, C) == [16, 0, 16]
    store.evict("host", 1)
    assert held(store, A, B, C) == [16, 0, 0]


def test_lru_does_not_listen(open_store):
    store = open_store(None, policy="lru")
    save(store, A, hint=LIKELY)
    save(store, B, hint=DONE)
    store.evict("host", 1)
    assert held(store, A, B) == [0, 16]


def test_a_hint_is_used_up_by_the_next_use(store):
    save(store, A, hint=DONE)
    save(store, B)
    store.lookup(A).release()
    store.evict("host", 1)
    assert held(store, A, B) == [16, 0]


def test_after_its_time_a_page_is_as_good_as_done(open_store):
    clock = ManualClock()
    store = open_store(None, policy="default", clock=clock)
    save(store, A, hint=Hint(reuse="likely", ttl_s=10))
    save(store, B)
    clock.advance(9)
    store.evict("host", 0)
    assert held(store, A, B) == [16, 16]
    clock.advance(2)
    store.evict("host", 1)
    assert held(store, A, B) == [0, 16]


def test_hints_reach_the_disk_and_outlive_the_host_copy(open_store):
    store = open_store(policy="default")
    save(store, A, hint=LIKELY)
    save(store, B)
    save(store, C, hint=DONE)
    assert store.flush(10)
    store.evict("host")
    store.evict("disk", 1)
    assert held(store, A, B, C) == [16, 16, 0]
    store.evict("disk", 1)
    assert held(store, A, B, C) == [16, 0, 0]


def test_a_hint_for_pages_that_are_on_disk_already(open_store):
    store = open_store(policy="default")
    save(store, A)
    save(store, B)
    assert store.flush(10)
    store.evict("host")
    save(store, B, hint=LIKELY)
    save(store, A, hint=LIKELY, session="a")
    assert store.flush(10)
    store.evict("host")
    # Neither is done: it was there before, and belongs to nobody.
    assert store.finish("a") == 0
    assert held(store, A, B) == [16, 16]


# -- sessions -------------------------------------------------------------------------------------------

SYSTEM = prompt_of(9, pages=2)


def test_a_finished_session_takes_its_own_pages_and_no_others(store):
    one, two = SYSTEM + prompt_of(1, 2), SYSTEM + prompt_of(2, 2)
    save(store, one, session="one")
    save(store, two, session="two")
    save(store, C)
    assert store.finish("one") == 2
    assert store.evict("host", 2) == 2
    assert held(store, one, two, C) == [32, 64, 16]
    assert store.finish("two") == 2
    assert store.evict("host", 2) == 2
    assert held(store, one, two, C) == [32, 32, 16]
    assert store.evict("host", 1) == 1  # as without any session: the oldest
    assert held(store, SYSTEM, C) == [16, 16]


def test_what_somebody_without_a_session_goes_on_from_stays(store):
    save(store, SYSTEM, session="one")
    save(store, SYSTEM + A)
    assert store.finish("one") == 0


def test_pages_that_another_session_only_goes_on_from_are_shared(store):
    save(store, SYSTEM, session="one")
    longer = SYSTEM + B
    assert store.save(longer, pages_of(longer)[2:], first=2, session="two").wait(10) == CHUNK
    assert store.finish("one") == 0
    assert store.finish("two") == 1


def test_a_session_that_grows_is_one_and_that_parts_has_two_ends(store):
    save(store, prompt_of(1, 2), session="s")
    longer = prompt_of(1, 4)
    pages = pages_of(longer)
    assert store.save(longer, pages[2:], first=2, session="s").wait(10) == 2 * CHUNK
    other = prompt_of(1, 1) + prompt_of(5, 2)
    save(store, other, session="s")
    assert store.finish("s") == 6
    assert store.finish("s") == 0


def test_an_unknown_session_has_no_pages(store):
    assert store.finish("never heard of") == 0
    with pytest.raises(UsageError):
        store.finish("")
    with pytest.raises(UsageError):
        store.save(A, pages_of(A), session="")


def test_likely_is_about_all_of_a_session_and_done_about_what_is_saved_now(store):
    prompt = prompt_of(1, 3)
    pages = pages_of(prompt)
    save(store, prompt[: 2 * CHUNK], session="s")
    save(store, B)
    store.save(prompt, pages[2:], first=2, session="s", hint=LIKELY).wait(10)
    store.evict("host", 1)
    assert held(store, prompt, B) == [48, 0]
    save(store, C)
    longer = prompt + prompt_of(7)
    store.save(longer, pages_of(longer)[3:], first=3, session="s", hint=DONE).wait(10)
    store.evict("host", 1)
    assert held(store, longer, C) == [48, 16]
    store.evict("host", 1)
    assert held(store, longer, C) == [48, 0]  # what comes before is likely as ever


def test_no_pages_may_carry_a_hint(store):
    save(store, A, session="s")
    save(store, B)
    assert store.save(A, [], first=1, hint=LIKELY, session="s").wait(10) == 0
    store.evict("host", 1)
    assert held(store, A, B) == [16, 0]


def test_done_is_not_about_pages_that_were_there_before(store):
    save(store, SYSTEM)
    save(store, SYSTEM + A, hint=DONE)
    save(store, B)
    store.evict("host", 1)
    assert held(store, SYSTEM + A, B) == [32, 16]
    store.evict("host", 1)
    assert held(store, SYSTEM + A, B) == [16, 16]  # as ever: the oldest first


def test_sessions_are_bounded_and_forgotten(open_store, monkeypatch):
    clock = ManualClock()
    store = open_store(None, policy="default", clock=clock)
    save(store, A, session="old")
    clock.advance(4000)
    save(store, B, session="new")
    assert len(store.backend.core.state.sessions) == 1
    assert store.finish("old") == 0
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 3)
    for name in "abcd":
        save(store, C, session=name)
    assert len(store.backend.core.state.sessions) == 3


# -- and nothing else -----------------------------------------------------------------------------------

hints = st.one_of(
    st.none(),
    st.builds(
        Hint,
        ttl_s=st.one_of(st.none(), st.floats(0, 100)),
        reuse=st.sampled_from([None, "likely", "unlikely", "done"]),
        priority=st.integers(-100, 100),
    ),
)
names = st.sampled_from([None, "a", "b", "c"])
STEMS = [list(range(70)), [*range(40), *range(500, 540)], list(range(900, 980))]
prompts = st.tuples(st.sampled_from(STEMS), st.integers(1, 70)).map(lambda each: each[0][: each[1]])
saves = st.tuples(st.just("save"), prompts, hints, names)
others = st.one_of(
    st.tuples(st.just("finish"), names.filter(bool)),
    st.tuples(st.just("evict"), st.sampled_from(["host", "disk"]), st.integers(1, 4)),
    st.tuples(st.just("wait"), st.floats(0, 60)),
    st.tuples(st.just("load"), prompts),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(saves, others), max_size=25),
    st.sampled_from(["lru", "default"]),
    st.booleans(),
)
def test_whatever_is_hinted_every_loaded_byte_is_right(tmp_path_factory, actions, policy, on_disk):
    clock = ManualClock()
    where = tmp_path_factory.mktemp("hints") / "disk" if on_disk else None
    store = open_testing_store(
        where,
        SPEC,
        identity=Identity.of(SPEC, model="test"),
        host_bytes=10 * SPEC.page_bytes,
        disk_bytes=16 * SPEC.page_bytes + (4 << 20),
        policy=policy,
        clock=clock,
        stall_s=1e9,  # the clock jumps while the disk is at work
    )
    with store:
        for action in actions:
            match action:
                case ("save", tokens, hint, name):
                    assert store.save(tokens, pages_of(tokens), hint=hint, session=name).wait(10) <= len(
                        tokens
                    )
                case ("finish", name):
                    store.finish(name)
                case ("evict", tier, pages):
                    if tier == "host" or on_disk:
                        store.evict(tier, pages)
                case ("wait", seconds):
                    clock.advance(seconds)
                case ("load", tokens):
                    hit = store.lookup(tokens)
                    count, pages = load_bytes(store, hit)
                    assert count == hit.tokens
                    whole = count // CHUNK
                    assert pages[:whole] == pages_of(tokens)[:whole]
        assert store.flush(10)
        store.check()


def test_all_batches_of_a_long_save_have_its_hint(open_store):
    """A save reserves 256 pages at a time. A later batch uses the pages before it, which ends other hints."""
    store = open_store(None, policy="default", pages=512)
    long = prompt_of(1, pages=300)
    save(store, B)
    save(store, long, hint=DONE)
    assert store.evict("host", 300) == 300
    assert held(store, long, B) == [0, len(B)]
