"""Pages that the caller has named: the hit is the leading held ones, and every other page has a reason."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import Hint, Identity, KVSpec
from tierstore.core.departures import Departures
from tierstore.core.state import StoreState
from tierstore.errors import UsageError
from tierstore.explanation import MissReason as R
from tierstore.keys import PageKey, Prompt
from tierstore.testing.opening import connect_store, open_store

CHUNK, PAGE_BYTES = 16, 4096
SPEC = KVSpec.opaque(PAGE_BYTES, chunk_tokens=CHUNK, hashed=True)
OWN = Identity.of(SPEC, model="m")


def pages(numbers, identity=OWN):
    names = [hashlib.sha256(b"%d" % number).digest() for number in numbers]
    return Prompt.named_pages(identity, names, chunk_tokens=CHUNK)


def save(store, numbers, identity=OWN, **options):
    prompt = pages(numbers, identity)
    assert store.save(prompt, [bytes(PAGE_BYTES)] * len(numbers), **options).wait(30) == len(prompt)


def spans(store, numbers, **options):
    """The pages of the hit, and the reasons of the others with their numbers of pages."""
    explanation = store.explain(pages(numbers), **options).check()
    return explanation.hit_tokens // CHUNK, [
        (miss.reason, miss.tokens // CHUNK) for miss in explanation.misses
    ]


@pytest.fixture(params=["embedded", "daemon"])
def make_store(request, tmp_path, make_daemon):
    opened = []

    def open_(host_pages=64, *, disk=False):
        host_bytes = host_pages * PAGE_BYTES
        if request.param == "embedded":
            path = tmp_path / "kv" if disk else None
            store = open_store(path, SPEC, identity=OWN, host_bytes=host_bytes, disk_bytes=8 << 20)
        else:
            daemon = make_daemon(host_bytes=host_bytes, disk=disk)
            store = connect_store(daemon.url, SPEC, identity=OWN, lookup_s=60.0)
            assert store.wait_connected(30)
        opened.append(store)
        return store

    yield open_
    for store in opened:
        store.close()


def test_held_and_never_saved_pages(make_store):
    store = make_store()
    save(store, [0, 1, 3])
    assert spans(store, [0, 1]) == (2, [])
    assert spans(store, [8, 9]) == (0, [(R.NEVER_SAVED, 2)])
    assert spans(store, [0, 1, 2, 3, 4]) == (2, [(R.NEVER_SAVED, 3)])
    assert spans(store, [0, 1], max_tokens=CHUNK + 3) == (1, [(R.TAIL, 1)])
    assert store.lookup(pages([0, 1, 2, 3, 4])).positions == [0, 1, 3]  # explaining has changed nothing


def test_evicted_pages_and_held_ones_behind_them(make_store):
    store = make_store()
    save(store, [1, 2])
    assert store.evict("host") == 2
    save(store, [0, 3])
    assert spans(store, [0, 1, 2, 3, 4]) == (1, [(R.EVICTED, 3), (R.NEVER_SAVED, 1)])
    [evicted, _] = store.explain(pages([0, 1, 2, 3, 4])).misses
    assert (evicted.tier, evicted.policy) == ("host", "request")
    assert spans(store, [5, 1, 6]) == (0, [(R.NEVER_SAVED, 1), (R.EVICTED, 1), (R.NEVER_SAVED, 1)])


def test_expired_pages(make_store):
    store = make_store()
    save(store, [0], hint=Hint(ttl_s=0.0))
    save(store, range(100, 164))  # fill the host tier: pages expire when room is needed
    assert spans(store, [0]) == (0, [(R.EXPIRED, 1)])


@pytest.mark.parametrize("disk", [False, True])
def test_pages_under_another_identity(make_store, disk):
    store = make_store(disk=disk)
    save(store, [0])
    save(store, [1, 2, 4], replace(OWN, revision="2"))
    save(store, [1], replace(OWN, revision="3", tenant="another"))
    if disk:
        assert store.flush(30)
        store.evict("host")
    assert spans(store, [0, 1, 2, 3, 4]) == (1, [(R.OTHER_IDENTITY, 2), (R.NEVER_SAVED, 2)])
    [other, _] = store.explain(pages([0, 1, 2, 3, 4])).misses
    assert other.fields == ("revision",)


def test_many_pages_are_examined_in_batches(monkeypatch):
    """One request must not keep other clients from the lock for seconds."""
    examined = [0]
    find, yield_lock = Departures.of, StoreState.yield_lock

    def counted(*args):
        examined[-1] += 1
        return find(*args)

    def yielded():
        examined.append(0)
        yield_lock()

    with open_store(None, SPEC, identity=OWN, host_bytes=1024 * PAGE_BYTES) as store:
        save(store, [0, 600, 1299])
        store.evict("host")
        save(store, range(1300, 1900), replace(OWN, revision="2"))
        monkeypatch.setattr(Departures, "of", counted)
        monkeypatch.setattr(StoreState, "yield_lock", staticmethod(yielded))
        evicted, new = (R.EVICTED, 1), R.NEVER_SAVED
        assert spans(store, range(1950)) == (
            0,
            [evicted, (new, 599), evicted, (new, 698), evicted, (R.OTHER_IDENTITY, 600), (new, 50)],
        )
    assert sum(examined) == 1950
    assert max(examined) <= 512


def test_pages_with_keys_that_are_no_names_are_refused(make_store):
    keys = [PageKey(bytes(16))]
    prompt = Prompt.with_names(OWN, bytes(range(64)), keys, chunk_tokens=CHUNK)
    with pytest.raises(UsageError, match="only pages that have names of 32 bytes are explained"):
        make_store().explain(prompt)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_random_pages_get_the_reasons_of_a_model(seed):
    """Each page behind the leading held ones has its own reason; a held one has that of the page before."""
    draw = random.Random(seed)
    fates = {number: draw.choice((None, R.NEVER_SAVED, R.EVICTED)) for number in range(24)}
    with open_store(None, SPEC, identity=OWN, host_bytes=64 * PAGE_BYTES) as store:
        for fate in (R.EVICTED, None):
            for number in [number for number, own in fates.items() if own is fate]:
                save(store, [number])
            if fate is R.EVICTED:
                store.evict("host")
        asked = draw.sample(range(24), draw.randint(1, 24))
        expected, hit, last = Counter(), 0, None
        for number in asked:
            last = fates[number] or last
            hit += last is None
            expected[last] += 1
        found, misses = spans(store, asked)
        assert found == hit
        got = Counter()
        for reason, count in misses:
            got[reason] += count
        del expected[None]
        assert got == expected
