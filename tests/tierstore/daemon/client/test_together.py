"""Many questions at once: the same hits as one after the other, one deadline, and no lease left behind."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tests.daemons import SPEC, TOKENS, daemon_stats, in_threads, load_bytes, pages_of
from tests.tierstore.daemon.client.fake_daemon import hit_found, slowly
from tierstore import lookup_all
from tierstore.errors import StoreClosedError, UsageError
from tierstore.keys import Identity, Prompt
from tierstore.testing.clock import wait_until
from tierstore.wire import messages as p

MANY = 70  # more than are on their way at a time


@pytest.fixture
def prompts(request):
    """The same tokens under many identities, which nobody else has."""
    return [prompt_of(f"{request.node.nodeid} {at}") for at in range(MANY)]


def prompt_of(model):
    return Prompt(Identity.of(SPEC, model=model), TOKENS, chunk_tokens=SPEC.chunk_tokens)


def save_some(store, prompts):
    """Of each prompt another number of tokens; the numbers."""
    contents = pages_of(TOKENS)
    transfers = [store.save(prompt, contents[: at % 6]) for at, prompt in enumerate(prompts)]
    return [transfer.wait(30) for transfer in transfers]


def in_one(store, prompts, **kwargs):
    return lookup_all(((store, prompt) for prompt in prompts), **kwargs)


def leases(store):
    return daemon_stats(store)["service"]["leases"]


def release(hits):
    for hit in hits:
        hit.release()


def test_the_hits_are_those_of_one_after_the_other(shared_daemon, connect, prompts):
    writer, alone, together = (connect(shared_daemon.url) for _ in range(3))
    saved = save_some(writer, prompts)
    assert set(saved) == {0, 16, 32, 48, 64, 70}
    for limit in (None, 40):
        one_by_one = [alone.lookup(prompt, max_tokens=limit) for prompt in prompts]
        hits = in_one(together, prompts, max_tokens=limit)
        assert [hit.tokens for hit in hits] == [min(tokens, limit or 70) for tokens in saved]
        assert [(hit.tokens, hit.by_tier) for hit in hits] == [
            (hit.tokens, hit.by_tier) for hit in one_by_one
        ]
        assert leases(writer) == 2 * sum(tokens > 0 for tokens in saved)
        assert load_bytes(together, hits[5]) == (hits[5].tokens, pages_of(TOKENS)[: hits[5].num_pages])
        release([*one_by_one, *hits])
        wait_until(lambda: leases(writer) == 0)
    assert alone.stats().counters["hit_tokens"] == together.stats().counters["hit_tokens"]


def test_of_several_stores_in_the_order_of_the_questions(shared_daemon, connect, prompts):
    one, other = connect(shared_daemon.url), connect(shared_daemon.url, hbm_pages=8)
    saved = save_some(one, prompts)
    pages = other.allocate_hbm(5)
    assert other.save_hbm(prompts[0], pages).wait(10) == 70
    requests = other.backend.connection.counters.requests
    hits = lookup_all((other if at % 2 == 0 else one, prompt) for at, prompt in enumerate(prompts))
    assert [hit.tokens for hit in hits] == [70, *saved[1:]]
    assert hits[0].by_tier == {"hbm": 70}  # the daemon need not be asked
    registered = asked = MANY // 2 - 1
    assert other.backend.connection.counters.requests - requests == registered + asked
    release(hits)
    other.release_hbm(pages)
    assert lookup_all([]) == []


def test_one_that_raises_leaves_no_lease(shared_daemon, connect, prompts):
    store, watching = connect(shared_daemon.url), connect(shared_daemon.url)
    held = sum(tokens > 0 for tokens in save_some(store, prompts[:20]))
    release(in_one(store, prompts[:20]))  # all identities are known

    def wanted(answered):
        """All questions, and then one that cannot be asked: before any answer is taken, or after all."""
        yield from ((store, prompt) for prompt in prompts[:20])
        if answered:
            wait_until(lambda: leases(watching) == held)
        yield store, Prompt(Identity("test", "float16 or so"), TOKENS, chunk_tokens=SPEC.chunk_tokens)

    for answered in (False, True):
        with pytest.raises(UsageError, match="another page layout"):
            lookup_all(wanted(answered))
        wait_until(lambda: leases(watching) == 0)
    closed = connect(shared_daemon.url)
    closed.close()
    with pytest.raises(StoreClosedError):
        lookup_all([*((store, prompt) for prompt in prompts[:20]), (closed, prompts[0])])
    wait_until(lambda: leases(watching) == 0)
    assert [hit.tokens > 0 for hit in in_one(store, prompts[:6])] == [False, True, True, True, True, True]


def test_one_whose_answer_cannot_be_taken_leaves_no_lease(shared_daemon, connect, prompts, monkeypatch):
    store, failing = connect(shared_daemon.url), connect(shared_daemon.url)
    save_some(store, prompts[:20])
    use, uses = failing._hbm.use, itertools.count()

    def use_some(*args):  # each lookup does, when its answer has come
        if next(uses) == 2:
            raise RuntimeError("the third answer cannot be taken")
        return use(*args)

    monkeypatch.setattr(failing._hbm, "use", use_some)
    with pytest.raises(RuntimeError, match="third answer"):
        lookup_all((failing if at > 10 else store, prompt) for at, prompt in enumerate(prompts[:20]))
    wait_until(lambda: leases(store) == 0)


def test_a_hung_daemon_costs_one_deadline_for_all(make_daemon, connect, prompts, stopped):
    daemon = make_daemon()
    store, watching = connect(daemon.url, lookup_s=0.4), connect(daemon.url)
    save_some(watching, prompts)
    release(in_one(store, prompts))
    stopped(daemon)
    hits = in_one(store, prompts)
    assert [hit.tokens for hit in hits] == [0] * MANY
    assert 1 <= store.backend.connection.counters.late_requests <= 32
    daemon.signal(18)  # SIGCONT
    wait_until(lambda: store.wait_connected(0))
    wait_until(lambda: leases(watching) == 0)  # those of the answers that came too late


def test_a_daemon_that_dies_or_is_away_is_not_waited_for(make_daemon, connect, prompts, stopped):
    daemon = make_daemon()
    store = connect(daemon.url, lookup_s=600.0)  # more than a test may take
    release(in_one(store, prompts))
    stopped(daemon)
    sent = store.backend.connection.counters.requests + 32  # as many as are on their way

    def kill():
        wait_until(lambda: store.backend.connection.counters.requests >= sent)
        daemon.kill()

    hits = []
    in_threads(kill, lambda: hits.extend(in_one(store, prompts)))
    hits.extend(in_one(store, prompts))
    assert [hit.tokens for hit in hits] == [0] * 2 * MANY


def test_a_slow_daemon_has_one_deadline_for_all_and_late_leases_go_back(fake, connect, prompts):
    granted = []

    def found(message):
        granted.append(1000 + len(granted))
        return hit_found(message, 70, [("host", 5)], granted[-1])

    # All together take 0.7 s. None of the 32 that are on their way waits for half a second by itself.
    daemon = fake()
    daemon.answers[p.FindHit] = slowly(0.01, found)
    store = connect(daemon.url, lookup_s=0.5)
    hits = in_one(store, prompts)
    in_time = sum(hit.tokens == 70 for hit in hits)
    assert in_time < MANY
    assert sum(hit.tokens == 0 for hit in hits) == MANY - in_time
    release(hits)

    def given_back():
        released = [lease for message in daemon.of(p.Release) for lease in message.leases]
        released += [lease for message in daemon.of(p.FindHit) for lease in message.released]
        return sorted(released)

    wait_until(lambda: len(granted) == len(daemon.of(p.FindHit)) and given_back() == granted)


def test_not_too_many_are_on_their_way(fake, connect, prompts):
    daemon = fake()
    daemon.answers[p.FindHit] = lambda message: None
    store = connect(daemon.url, lookup_s=0.3)
    assert [hit.tokens for hit in in_one(store, prompts)] == [0] * MANY
    assert len(daemon.of(p.FindHit)) == 32


def test_from_several_threads(shared_daemon, connect, prompts):
    store = connect(shared_daemon.url)
    saved = save_some(store, prompts)

    def ask():
        for _ in range(5):
            hits = in_one(store, prompts)
            assert [hit.tokens for hit in hits] == saved
            release(hits)

    in_threads(ask, ask, ask)
    wait_until(lambda: leases(store) == 0)


def test_a_task_that_is_cancelled_leaves_no_lease(shared_daemon, connect, stopped):
    store, watching = connect(shared_daemon.url), connect(shared_daemon.url)
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    lookups = daemon_stats(watching)["service"]["requests"].get("FindHit", 0)
    stopped(shared_daemon)

    async def cancelled():
        task = asyncio.create_task(store.lookup_async(TOKENS))
        sent = store.backend.connection.counters.requests
        while store.backend.connection.counters.requests == sent:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    shared_daemon.signal(18)  # SIGCONT
    wait_until(lambda: daemon_stats(watching)["service"]["requests"].get("FindHit", 0) == lookups + 1)
    wait_until(lambda: leases(watching) == 0)
