"""Hints, sessions and the curve through a daemon: they arrive, and change nothing else."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierstore
from tests.daemons import SPEC, daemon_stats, load_bytes, pages_of, right_bytes
from tests.tierstore.daemon.server.running import RunningDaemon
from tierstore import Hint, UsageError
from tierstore.client.state import prompt_part
from tierstore.daemon.settings import Settings
from tierstore.keys import Identity, encode_tokens
from tierstore.store.prompts import PromptCache
from tierstore.tiers.hbm import PagePool

CHUNK = SPEC.chunk_tokens
SYSTEM, A, B, C = ([1000 * number + at for at in range(CHUNK)] for number in range(4))


def start(directory, **options):
    values = {
        "listen": (f"ipc://{directory}/s",),
        "host_bytes": 16 * SPEC.page_bytes,
        "reserve_bytes": 16 * SPEC.page_bytes,
        "page_bytes": SPEC.page_bytes,
        "policy": "default",
    }
    return RunningDaemon(Settings(**(values | options)))


@pytest.fixture
def running(tmp_path):
    daemon = start(tmp_path)
    yield daemon
    daemon.stop()


@pytest.fixture
def store(running):
    with tierstore.connect(running.url, SPEC, identity=Identity.of(SPEC, model="m"), lookup_s=10.0) as store:
        assert store.wait_connected(30)
        yield store


def save(store, tokens, **kwargs):
    assert store.save(tokens, pages_of(tokens), **kwargs).wait(10) == len(tokens)


def held(running, store, *prompts):
    """Tokens of each prompt that the daemon holds, without using them."""
    state = running.daemon.core.state
    found = []
    with state.lock:
        for tokens in prompts:
            prompt = store.prompt(tokens)
            root = state.root(prompt.identity, SPEC.page_bytes)
            found.append(state.index.tree.match(root, prompt, len(prompt)).tokens)
    return found


def test_a_hint_reaches_the_daemons_policy(running, store):
    save(store, A, hint=Hint(reuse="likely"))
    save(store, B)
    save(store, C, hint=Hint(reuse="done", ttl_s=5.0, priority=3))
    store.evict("host", 1)
    assert held(running, store, A, B, C) == [16, 16, 0]
    assert store.save(B, [], first=1, hint=Hint(reuse="likely"), session="b").wait(10) == 0
    store.evict("host", 1)
    assert held(running, store, A, B) == [16, 0]  # B was saved without a session: nobody's alone


def test_no_pages_may_carry_a_hint(running, store):
    save(store, A, session="a")
    save(store, B)
    store.save(A, [], first=1, hint=Hint(reuse="likely"), session="a").wait(10)
    store.flush(10)  # asked after it
    store.evict("host", 1)
    assert held(running, store, A, B) == [16, 0]


def test_the_end_of_a_session_is_about_its_own_pages(running, store):
    save(store, SYSTEM + A, session="a")
    save(store, SYSTEM + B, session="b")
    save(store, C)
    assert store.finish("a") == 1
    store.evict("host", 1)
    assert held(running, store, SYSTEM + A, SYSTEM + B, C) == [16, 32, 16]
    assert store.finish("a") == 0
    with pytest.raises(UsageError):
        store.finish("")


def test_pages_in_hbm_hear_of_it_too(running):
    pool = PagePool(SPEC, 4)
    with tierstore.connect(running.url, SPEC, pools=pool, lookup_s=10.0) as store:
        assert store.wait_connected(30)
        for tokens, session in ((A, "a"), (B, None), (C, "c")):
            pages = store.allocate_hbm(1)
            store.save_hbm(store.prompt(tokens), pages, session=session).wait(10)
            store.release_hbm(pages)
        assert store.finish("c") == 1
        own = [page for page in store._hbm.index.tree.walk() if page.hint.reuse < 0]
        assert [page.tokens for page in own] == [store.prompt(C).chunk(0)]


def test_while_the_daemon_is_away_nothing_is_said(running, store):
    save(store, A, session="a")
    running.stop()
    assert store.finish("a") == 0
    assert store.save(A, [], hint=Hint(reuse="done")).wait(10) == 0


def test_what_makes_no_sense_is_refused(running, store):
    from tierstore.wire import messages as p

    session = store.backend.connection.link
    request = PromptCache(SPEC.chunk_tokens).request_of(store.identity, SPEC.page_bytes, encode_tokens(A))
    part = prompt_part(session, request, None)
    for hint, name in ((p.HintPart(-1.0), ""), (p.HintPart(None, "maybe"), ""), (None, "x" * 1000)):
        message = p.Reserve(0, part, 0, 1, hint, name)
        assert store.backend.connection.ask(message, p.Reserved) is None
    assert store.backend.connection.ask(p.Finish(0, ""), p.Finished) is None
    refused = daemon_stats(store)["service"]["refused"]
    assert refused == {"usage": 4}
    assert held(running, store, A) == [0]


def test_the_daemons_curve_sees_every_lookup(running, store):
    prompt = [*SYSTEM, *A, *B]
    save(store, prompt)
    for _ in range(7):
        store.lookup(prompt).release()
    store.lookup([*C, 1, 2]).release()
    store.flush(10)  # answered after what the lookups left to be done
    curve = store.stats().curve
    assert curve.asked_tokens == 7 * 48 + 18
    # Each time the whole prompt, from the second on as a path that the daemon remembers.
    assert curve.ceiling == pytest.approx(7 * 48 / (7 * 48 + 18), abs=0.001)
    assert curve.measured_hit_rate == pytest.approx(curve.ceiling, abs=0.01)
    assert curve.tiers["host"].hit_rate == pytest.approx(curve.ceiling, abs=0.01)


hints = st.one_of(
    st.none(),
    st.builds(Hint, reuse=st.sampled_from([None, "likely", "unlikely", "done"]), ttl_s=st.floats(0, 9)),
)
names = st.sampled_from([None, "a", "b"])
STEMS = [list(range(70)), [*range(40), *range(500, 540)], list(range(900, 980))]
prompts = st.tuples(st.sampled_from(STEMS), st.integers(1, 70)).map(lambda each: each[0][: each[1]])
actions = st.one_of(
    st.tuples(st.just("save"), prompts, hints, names),
    st.tuples(st.just("finish"), st.sampled_from("ab")),
    st.tuples(st.just("load"), prompts),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(actions, max_size=20))
def test_whatever_is_hinted_every_loaded_byte_is_right(running, store, actions):
    for action in actions:
        match action:
            case ("save", tokens, hint, name):
                store.save(tokens, pages_of(tokens), hint=hint, session=name).wait(10)
            case ("finish", name):
                store.finish(name)
            case ("load", tokens):
                count, pages = load_bytes(store, store.lookup(tokens))
                assert right_bytes(tokens, count, pages)
    running.wait_for(lambda stats: not stats.service.leases)  # clients give them back a few at a time
    running.check()
