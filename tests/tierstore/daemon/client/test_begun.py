"""Lookups whose answer is left for later: it comes whether somebody waits for it or not, and once."""

from __future__ import annotations

import signal
import threading

import pytest

from tests.tierstore.daemon.client.conftest import SPEC, TOKENS, daemon_stats, pages_of, wait_until
from tierstore.daemon.connected import begin_lookup
from tierstore.keys import Identity, Prompt


@pytest.fixture
def store(shared_daemon, connect):
    return connect(shared_daemon.url)


@pytest.fixture
def prompt(request, store):
    """Stored, and of an identity that the daemon knows."""
    identity = Identity.of(SPEC, model=request.node.nodeid)
    prompt = Prompt(identity, TOKENS, chunk_tokens=SPEC.chunk_tokens)
    store.save(prompt, pages_of(TOKENS)).wait(10)
    return prompt


def leases(store):
    return daemon_stats(store)["service"]["leases"]


def begun(store, prompt):
    """A search, an event that is set by its answer, and the threads that it came on."""
    search = begin_lookup(store, prompt)
    answered, threads = threading.Event(), []
    search.on_answer(lambda: (threads.append(threading.current_thread()), answered.set()))
    return search, answered, threads


def test_an_answer_that_nobody_waits_for_comes(store, prompt):
    search, answered, threads = begun(store, prompt)
    assert answered.wait(10)
    assert [thread.name for thread in threads] == ["tierstore-connection"]
    with search.hit() as hit:
        assert hit.tokens == 70


def test_who_waits_hears_it_and_who_cannot_wait_leaves_it_to_the_connection(
    store, prompt, shared_daemon, stopped
):
    stopped(shared_daemon)
    search, answered, _ = begun(store, prompt)
    for timeout in (0.0, 0.05):
        search.wait(timeout)
        assert not answered.is_set()
    shared_daemon.signal(signal.SIGCONT)
    assert answered.wait(10)
    with search.hit() as hit:
        assert hit.tokens == 70
    again, answered, _ = begun(store, prompt)
    again.wait(10)
    assert answered.is_set()
    again.hit().release()
    wait_until(lambda: leases(store) == 0)


def test_what_is_given_up_holds_nothing(store, prompt, shared_daemon, stopped):
    stopped(shared_daemon)
    begun(store, prompt)[0].give_up()
    shared_daemon.signal(signal.SIGCONT)
    search, answered, _ = begun(store, prompt)
    assert answered.wait(10)
    search.give_up()
    wait_until(lambda: leases(store) == 0)


def test_a_daemon_that_dies_is_an_answer(make_daemon, connect):
    daemon = make_daemon()
    store = connect(daemon.url)
    prompt = Prompt(Identity.of(SPEC, model="m"), TOKENS, chunk_tokens=SPEC.chunk_tokens)
    store.lookup(prompt).release()
    daemon.signal(signal.SIGSTOP)
    search, answered, _ = begun(store, prompt)
    daemon.signal(signal.SIGKILL)
    search.wait(10)
    assert answered.wait(10)
    assert search.hit().tokens == 0


def test_a_prompt_of_an_identity_that_the_daemon_does_not_know_cannot_be_asked_at_once(store):
    unknown = Prompt(Identity.of(SPEC, model="nobody's"), TOKENS, chunk_tokens=SPEC.chunk_tokens)
    assert begin_lookup(store, unknown) is None
    store.lookup(unknown).release()
    assert begin_lookup(store, unknown).hit().tokens == 0
