"""Pages that are found by a name, on other hosts: windows and states beside chains, and by themselves."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from contextlib import suppress

import pytest

import tierstore
from tests.tierstore.cluster.hosts import SPEC, published
from tests.tierstore.store.grouped_model import CHUNK, GEMMA, HYBRID, Engine
from tierstore.keys import Identity, Prompt
from tierstore.spec import KVSpec
from tierstore.testing import embeddings
from tierstore.testing.fake_shared_store import set_faults
from tierstore.testing.pages import pages_of
from tierstore.transfer import TransferState
from tierstore.types import Hint, Promise

TOKENS = list(range(500, 700))  # 16-token chunks: 12 whole ones and 8 tokens
OPAQUE = KVSpec.opaque(SPEC.page_bytes, chunk_tokens=16)
NAMED = Identity.of(OPAQUE, model="named")
ELSEWHERE = Hint(elsewhere=True)
PAGES = pages_of(range(8 * 16), SPEC)


def grouped(host, spec=GEMMA):
    """An engine beside a host's daemon."""

    def connect(pools):
        identity = Identity.of(spec, model="played")
        return tierstore.connect(host.url, spec, identity=identity, pools=pools, lookup_s=10.0)

    engine = Engine(spec, store=connect)
    assert engine.store.wait_connected(30)
    return engine


def fetch_remote(engine, tokens, deadline_s=10.0):
    """(tokens that were held, tokens that other hosts seemed to have, tokens that are loaded after they have
    been brought): their bytes are compared."""
    with engine.lookup(tokens) as hit:
        held, remote = hit.tokens, hit.remote_tokens
        fetching = engine.store.fetch_remote(hit, deadline_s=deadline_s)
    if fetching is not None:
        fetching.wait(60)
    return held, remote, engine.load(engine.lookup(tokens))


@pytest.fixture(params=[GEMMA, HYBRID], ids=["windows", "states"])
def spec(request):
    return request.param


def needed(engine, tokens):
    """How many pages a hit of so many tokens needs."""
    return sum(len(rule.pages(tokens, CHUNK)) for rule in engine.rules)


def test_what_one_host_has_used_twice_another_one_goes_on_with(start, spec):
    one, other = start(), start()
    with grouped(one, spec) as first, grouped(other, spec) as second:
        for end in (96, 192):
            first.save_to(TOKENS[: end + 8], end)
        assert fetch_remote(second, TOKENS) == (0, 0, 0), "used once: nobody else's"
        assert first.load(first.lookup(TOKENS)) == 192  # from HBM: the daemon has not moved a byte
        published(one, needed(first, 192))
        while (came := fetch_remote(second, TOKENS)) == (0, 0, 0):  # for 2 s it is not asked for again
            time.sleep(0.05)
        assert came == (0, 192, 192)
        other.has_counted("fetched_pages", needed(second, 192))
        # What was brought is not published again, nor asked for.
        second.evict("hbm")
        assert fetch_remote(second, TOKENS) == (192, 0, 192)
        assert "published_pages" not in other.counts()
        second.store.check()


def test_what_the_longest_hit_needs_nobody_has(start, spec):
    """Then what a shorter one needs comes. And what is needed may lie in both places."""
    one, other = start("--cluster-publish=all"), start()
    with grouped(one, spec) as first, grouped(other, spec) as second:
        first.save_to(TOKENS[:192], 96)
        published(one, pages := 192 // CHUNK + len(first.rules[1].pages(96, CHUNK)))
        assert fetch_remote(second, TOKENS) == (0, 96, 96)
        other.has_counted("fetched_pages", needed(second, 96))
        parting = [*TOKENS[:150], *range(64)]
        assert fetch_remote(second, parting) == (96, 0, 96)
        chunks = first.rules[1].pages(144, CHUNK)
        first.save(1, TOKENS, chunks)
        published(one, pages + len(chunks))
        second.save(1, parting, chunks[1:])
        for group in second.chains:
            second.save(group, parting, range(6, 8))
        longer = [*parting, *range(16)]
        while (came := fetch_remote(second, longer)) == (96, 0, 96):  # for 2 s it is not asked for again
            time.sleep(0.05)
        assert came == (96, 48, 144)
        other.has_counted("fetched_pages", needed(second, 96) + 2)
        second.store.check()


def test_a_pool_that_lies_is_a_miss(start, pool):
    one, other = start("--cluster-publish=all"), start()
    pages = damaged = 0
    with grouped(one, HYBRID) as first, grouped(other, HYBRID) as second:
        for number, lie in enumerate(["flip", "tear", "short", "swap"]):
            set_faults(pool)
            tokens = [token + 1000 * number for token in TOKENS]
            first.save_to(tokens[:192], 192)
            published(one, pages := pages + needed(first, 192))
            set_faults(pool, **{lie: True})
            assert fetch_remote(second, tokens) == (0, 192, 0)
            stats = other.stats()
            before, damaged = damaged, stats.cluster.counts.get("damaged_pages", 0)
            assert (damaged > before) == (lie != "short")
            assert stats.service.reserved_bytes == 0


def test_named_pages_by_themselves_are_a_miss_where_the_pool_lies(start, pool):
    """Each is what its name says it is, or not kept: also where all of a size are exchanged."""
    one, other = start("--cluster-publish=all"), start()
    with named_store(one) as first, named_store(other) as second:
        for number, lie in enumerate(["flip", "short", "swap"]):
            set_faults(pool)
            two = [2 * number, 2 * number + 1]
            first.save(named(two), [PAGES[each] for each in two]).wait(10)
            published(one, 2 * number + 2)
            set_faults(pool, **{lie: True})
            assert ask(second, two) == two
            assert loaded(second, two) == []


def named_store(host, identity=NAMED):
    store = tierstore.connect(host.url, OPAQUE, identity=identity, lookup_s=10)
    assert store.wait_connected(30)
    return store


def named(numbers, identity=NAMED):
    return Prompt.named_pages(identity, [bytes([number + 1] * 32) for number in numbers], chunk_tokens=16)


def loaded(store, numbers, identity=NAMED):
    """Which of these are held; their bytes are compared."""
    hit = store.lookup(named(numbers, identity))
    buffers = [bytearray(OPAQUE.page_bytes) for _ in range(hit.num_pages)]
    found = [list(numbers)[at] for at in hit.positions]
    assert store.load(hit, buffers).wait(30).tokens == hit.tokens
    assert [bytes(buffer) for buffer in buffers] == [bytes(PAGES[number]) for number in found]
    return found


def ask(store, numbers, identity=NAMED, *, gain=4096):
    """Look pages up and have those come that other hosts seem to have. Which these are."""
    [hit] = tierstore.lookup_all([(store, named(numbers, identity))], gain=gain)
    others = [list(numbers)[at] for at in hit.remote_positions]
    hit.fetch_remote(10.0).wait(30)
    hit.release()
    return others


def test_any_of_them_by_themselves(start):
    one, other = start("--cluster-publish=all"), start("--cluster-min-tokens=1024")
    with named_store(one) as first, named_store(other) as second:
        for number in (1, 2, 5, 7):
            first.save(named([number]), [PAGES[number]]).wait(10)
        published(one, 4)
        second.save(named([2, 3]), [PAGES[2], PAGES[3]]).wait(10)
        assert ask(second, range(8), gain=1023) == [], "too little to be gained by it"
        assert ask(second, range(8), gain=0) == []
        assert ask(second, range(8)) == [1, 5, 7]
        assert loaded(second, range(8)) == [1, 2, 3, 5, 7]
        other.has_counted("fetched_pages", 3)
        assert ask(second, range(8)) == []


def test_embeddings_come_as_a_whole(start):
    one, other = start("--cluster-publish=all"), start("--cluster-min-tokens=16")
    own, digests = Identity.of(embeddings.SPEC, model="embeddings"), [embeddings.content(at) for at in (1, 2)]

    def connect(host):
        store = tierstore.connect(host.url, embeddings.SPEC, identity=own, lookup_s=10)
        assert store.wait_connected(30)
        return store

    with connect(one) as first, connect(other) as second:
        embeddings.save(first, digests[0])
        embeddings.save(first, digests[1], pages=slice(1, None))
        published(one, 9)
        for digest, remote in zip(digests, (80, 0), strict=True):
            image = second.embedding(digest, embeddings.ROWS)
            with second.lookup(image) as hit:
                assert (hit.tokens, hit.remote_tokens) == (0, remote)
                hit.fetch_remote(10.0).wait(60)
            found = embeddings.load(second, image)
            assert found == (embeddings.rows_of(digest, embeddings.ROWS) if remote else [])


def test_tenants_other_models_and_chains_find_nothing(start):
    one, other = start("--cluster-publish=all"), start()
    tenant = Identity.of(OPAQUE, model="named", tenant="t")
    stranger = Identity.of(OPAQUE, model="another")
    with named_store(one) as first, named_store(other) as second:
        first.save(named([0, 1]), PAGES[:2]).wait(10)
        first.save(named([2, 3], tenant), PAGES[2:4]).wait(10)
        published(one, 2)
        assert ask(second, [0, 1], stranger) == ask(second, [2, 3], tenant) == ask(second, [2, 3]) == []
        # A chain of the same keys and tokens is another page, in the shared store, too.
        pages = named([0, 1])
        chain = Prompt.with_keys(NAMED, pages.token_bytes, pages.keys, chunk_tokens=16)
        assert second.lookup(chain).remote_tokens == 0
        assert ask(second, [0, 1]) == [0, 1]
    one.has_counted("published_pages", 2)


def test_what_another_host_goes_on_with_is_published_at_once(start):
    """By default it would have to be used twice first. It may have been here before that was said."""
    one, other, reader = start(), start(), start("--cluster-publish=none")
    with named_store(one) as first, named_store(reader) as third:
        first.save(named([0, 1]), PAGES[:2]).wait(10)
        third.save(named([6]), [PAGES[6]], hint=ELSEWHERE).wait(10)
        first.save(named([2, 3]), PAGES[2:4], hint=ELSEWHERE).wait(10)
        published(one, 2)
        first.save(named([0, 3]), [PAGES[0], PAGES[3]], hint=ELSEWHERE).wait(10)
        published(one, 3)
    with named_store(other) as second:
        assert ask(second, range(8)) == [0, 2, 3]
        assert loaded(second, range(8)) == [0, 2, 3]
    one.has_counted("published_pages", 3)
    assert one.stats().service.refused == reader.stats().service.refused == {}
    assert "published_pages" not in reader.counts()


def test_promised_pages_come_as_they_are_published(start):
    one, other = start(), start()
    with named_store(one) as first, named_store(other) as second:
        second.save(named([3]), [PAGES[3]]).wait(10)
        expected = second.expect(named(range(6)), Promise(96, 10.0))
        other.wait_for(lambda stats: stats.service.promised_lookups == 1)
        first.save(named([0, 1]), PAGES[:2], hint=ELSEWHERE).wait(10)
        other.wait_for(lambda stats: stats.store.pages == 3)  # these need not wait for the rest
        assert not expected.done
        first.save(named([2, 4, 5]), [PAGES[2], PAGES[4], PAGES[5]], hint=ELSEWHERE).wait(10)
        expected.wait(30)
        assert expected.state is TransferState.DONE
        assert loaded(second, range(6)) == list(range(6))
    other.has_counted("fetched_pages", 5)
    assert other.stats().service.broken_promises == 0


def test_what_was_promised_of_every_group_is_handed_over(start, spec):
    one, other = start(), start()
    with grouped(one, spec) as first, grouped(other, spec) as second:
        expected = second.store.expect(second.store.prompt(TOKENS), Promise(192, 10.0))
        other.wait_for(lambda stats: stats.service.promised_lookups == len(spec.groups))
        prompt = first.store.prompt(TOKENS)
        for group, rule in enumerate(first.rules):
            chunks = rule.pages(192, CHUNK)
            pages = first.store.allocate_hbm(len(chunks), group=group)
            first.fill(group, TOKENS, pages, chunks)
            first.store.save_hbm(prompt, pages, first=chunks[0], group=group, hint=ELSEWHERE).wait(10)
        expected.wait(30)
        assert expected.state is TransferState.DONE
        assert second.load(second.lookup(TOKENS)) == 192
        second.store.check()
    assert other.stats().service.broken_promises == 0


@pytest.mark.parametrize("fault", ["flip", "hang"])
def test_promised_pages_that_cannot_be_had_cost_what_was_said(start, pool, fault):
    one, other = start("--cluster-publish=all"), start()
    with named_store(one) as first, named_store(other) as second:
        first.save(named([0, 1]), PAGES[:2]).wait(10)
        published(one, 2)
        set_faults(pool, **{fault: True})
        second.expect(named([0, 1]), Promise(32, 0.5)).wait(30)
        assert loaded(second, [0, 1]) == []
        other.wait_for(lambda stats: stats.service.broken_promises == 1)
        set_faults(pool)
        other.wait_for(lambda stats: stats.service.reserved_bytes == 0)


def test_agents_that_die_cost_pages_and_nothing_else(start):
    """Kills while pages are published and brought: what comes is right, what does not is a miss."""
    one, other = start("--cluster-publish=all"), start()
    stop = threading.Event()
    hosts = itertools.cycle((one, other))

    def kill():
        while not stop.wait(0.3):
            for pid in next(hosts).agents():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    with grouped(one) as first, grouped(other) as second:
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            for number in range(12):
                tokens = [token + 1000 * number for token in TOKENS]
                first.save_to(tokens, 192)
                began = time.monotonic()
                fetch_remote(second, tokens, deadline_s=0.3)
                assert time.monotonic() - began < 20
        finally:
            stop.set()
            killer.join()
        for host in (one, other):
            host.wait_for(lambda stats: stats.service.reserved_bytes == 0 and stats.service.reservations == 0)
        second.store.check()
