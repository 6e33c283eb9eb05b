"""A pool on a device over a daemon's arena: the driver is told of the mapping, and copies go on beside."""

from __future__ import annotations

import logging
import threading

import pytest

from tests.daemons import SPEC, TOKENS, close_all, pages_of, right_bytes
from tests.engine.device import SCHEDULES, FakeDevice, missing
from tests.tierstore.daemon.client.test_mapping import arenas_mapped
from tests.tierstore.daemon.client.test_processes import fork
from tierstore.keys import Identity
from tierstore.store import load as client_load
from tierstore.store.load import _Copying as Copying
from tierstore.testing.clock import ManualClock, wait_until
from tierstore.testing.opening import connect_store
from tierstore.tiers.device import DeviceError
from tierstore.tiers.device_pool import DevicePool

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no device to test with: {missing()}")

ARENA_PAGES = (4 << 20) // SPEC.page_bytes


@pytest.fixture
def attach(request):
    """Connects stores with pools on ``device``, and checks at the end that the driver was always told the
    truth."""
    stores, devices = [], []

    def attach_(url, device, *, pages=16, identity=None, **kwargs):
        store = connect_store(
            url,
            SPEC,
            identity=identity or Identity.of(SPEC, model=request.node.nodeid),
            pools=DevicePool(SPEC, pages, device, layered_bytes=0),
            **{"lookup_s": 5.0, **kwargs},
        )
        stores.append(store)
        devices.append(device)
        assert store.wait_connected(30)
        return store

    yield attach_
    close_all(stores)
    for device in devices:
        wait_until(lambda device=device: device.registered == 0)
        assert device.strays == 0


@pytest.fixture
def held_copies(monkeypatch):
    """Copies of which nobody is told that they have ended, before the event is set."""
    go_on = threading.Event()
    original = Copying.wait

    def wait(self):
        assert go_on.wait(30)
        return original(self)

    monkeypatch.setattr(Copying, "wait", wait)
    yield go_on
    go_on.set()


def content(store, pages):
    """What the pages have when all that is under way has ended."""
    for filling in store.pool._under_way(pages):
        filling.wait()
    return [store.pool.array[page].tobytes() for page in pages]


def load(store, tokens=TOKENS):
    hit = store.lookup(tokens)
    return hit, store.load(hit).wait(30)


def unpinned(store):
    return store.stats().counters["connection"]["unpinned_arenas"]


def fill_arena(store, number):
    """Make everything in the daemon's memory leave that may."""
    store.evict("host")
    tokens = [number] * (ARENA_PAGES * SPEC.chunk_tokens)
    store.save(tokens, [b"\xee" * SPEC.page_bytes] * ARENA_PAGES).wait(30)


def assert_loaded(store, loaded, tokens=TOKENS):
    assert loaded.tokens == len(tokens)
    assert right_bytes(tokens, loaded.tokens, content(store, loaded.pages))
    store.release_hbm(loaded.pages)


def test_one_registration_for_all_pools_until_the_mapping_goes(make_daemon, attach):
    before = arenas_mapped()
    daemon, device = make_daemon(), FakeDevice(1)
    first, second = (attach(daemon.url, device) for _ in range(2))
    for store in (first, second):
        store.wait_ready()
    assert (device.registered, device.registrations) == (1, 1)
    assert first.save(TOKENS, pages_of(TOKENS)).wait(10) == len(TOKENS)
    first.close()
    assert device.registered == 1
    third = attach(daemon.url, device)
    for store in (second, third):
        store.wait_ready()
        assert_loaded(store, load(store)[1])
    assert (device.registrations, device.copies) == (1, 0)  # it is in reach of all of them
    assert all(unpinned(store) == 0 for store in (second, third))
    second.close()
    third.close()
    wait_until(lambda: device.registered == 0)
    wait_until(lambda: arenas_mapped() == before)


@pytest.mark.parametrize("seed", SCHEDULES[:4])
def test_from_the_host_tier_layer_by_layer(seed, shared_daemon, attach, request):
    device = FakeDevice(seed)
    store = attach(shared_daemon.url, device, identity=Identity.of(SPEC, model=f"{request.node.nodeid}"))
    store.wait_ready()
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    hit, loaded = load(store)
    assert hit.by_tier == {"host": len(TOKENS)}
    arrivals, seen = store.pool.arrivals(loaded.pages), {}

    def forward():
        for layer in range(SPEC.num_layers):
            arrivals.wait(layer)
            span = SPEC.layer(layer)
            for page in loaded.pages:
                seen.setdefault(page, b"")
                seen[page] += store.pool.array[page, span.start : span.stop].tobytes()

    device.launch(store.pool.compute, forward)
    device.finish(store.pool.compute)
    assert right_bytes(TOKENS, len(TOKENS), list(seen.values()))
    assert (device.batches, device.copies) == (SPEC.num_layers, 0)  # all pages of a layer in one call
    store.release_hbm(loaded.pages)


def test_the_engine_has_pages_before_their_bytes(shared_daemon, attach, held_copies):
    device = FakeDevice(0)  # lazy: nothing arrives that nobody waits for
    store = attach(shared_daemon.url, device)
    store.wait_ready()
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    _, loaded = load(store)
    assert store.pool.arrivals(loaded.pages).pending
    again = store.lookup(TOKENS[:64])
    assert again.by_tier == {"hbm": 64}  # and others may share them meanwhile
    again.release()
    held_copies.set()
    assert_loaded(store, loaded)


def test_the_daemon_keeps_what_is_being_copied(make_daemon, attach, held_copies):
    """Its slots are not given to others, however much those want them."""
    store = attach(make_daemon(disk=False).url, FakeDevice(0))
    store.wait_ready()
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    hit, loaded = load(store)
    hit.release()
    for number in range(3):
        fill_arena(store, number)
    assert_loaded(store, loaded)
    assert store.stats().tiers["host"].leased_pages > 0
    held_copies.set()
    wait_until(lambda: store.stats().tiers["host"].leased_pages == 0)


def test_a_store_that_is_closed_while_its_last_load_is_copied(make_daemon, attach, connect, held_copies):
    daemon = make_daemon(disk=False)
    store, other = attach(daemon.url, FakeDevice(0)), connect(daemon.url)
    store.wait_ready()
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    _, loaded = load(store)
    closing = threading.Thread(target=store.close)
    closing.start()
    wait_until(lambda: store.closed)
    for number in range(3):
        fill_arena(other, number)
    assert right_bytes(TOKENS, loaded.tokens, content(store, loaded.pages))
    held_copies.set()
    closing.join(30)
    assert not closing.is_alive()


@pytest.mark.parametrize("seed", [1, 4])
def test_from_disk(seed, make_daemon, attach):
    device = FakeDevice(seed)
    store = attach(make_daemon().url, device)
    store.wait_ready()
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    assert store.flush(30)
    store.evict("host")
    hit, loaded = load(store)
    assert hit.by_tier == {"disk": len(TOKENS)}
    assert_loaded(store, loaded)
    assert device.batches > 0


@pytest.mark.parametrize("seed", SCHEDULES[:4])
def test_what_was_computed_is_saved(seed, shared_daemon, attach, connect, request):
    device = FakeDevice(seed)
    identity = Identity.of(SPEC, model=request.node.nodeid)
    store = attach(shared_daemon.url, device, identity=identity)
    store.wait_ready()
    pages = store.allocate_hbm(5)

    def compute():
        for page, expected in zip(pages, pages_of(TOKENS), strict=True):
            store.pool.array[page] = list(expected)

    device.launch(store.pool.compute, compute)
    assert store.save_hbm(store.prompt(TOKENS), pages).wait(30) == len(TOKENS)
    store.release_hbm(pages)
    store.evict("hbm", 16)
    hit, loaded = load(store)
    assert hit.by_tier == {"host": len(TOKENS)}
    assert_loaded(store, loaded)


def test_a_restarted_daemons_arena_takes_the_place_of_the_old_one(make_daemon, attach, held_copies):
    """Also when copies from the old one are under way: it stays until they have ended."""
    before = arenas_mapped()
    daemon, device = make_daemon(disk=False), FakeDevice(0)
    store = attach(daemon.url, device)
    store.wait_ready()
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    _, loaded = load(store)
    daemon.kill()
    daemon.start()
    wait_until(lambda: device.registrations == 2)
    assert device.registered == 2
    assert_loaded(store, loaded)
    held_copies.set()
    wait_until(lambda: device.registered == 1)
    wait_until(lambda: arenas_mapped() == before + 1)
    store.evict("hbm", 16)
    store.wait_ready()
    batches = device.batches
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    assert_loaded(store, load(store)[1])
    assert device.batches == batches + SPEC.num_layers


def test_a_driver_that_refuses_costs_speed_only(make_daemon, attach, caplog):
    daemon, device = make_daemon(), FakeDevice(2)
    device.refuse_registrations()
    with caplog.at_level(logging.WARNING, "tierstore.client.mapping"):
        stores = [attach(daemon.url, device) for _ in range(2)]
        for store in stores:
            store.wait_ready()
    stores[0].save(TOKENS, pages_of(TOKENS)).wait(10)
    for store in stores:
        assert_loaded(store, load(store)[1])
    assert (device.batches, device.registrations) == (0, 0)
    assert device.copies == 2 * 5  # whole pages: more calls would only cost
    assert sum(unpinned(store) for store in stores) == 1
    assert len(caplog.records) == 1
    assert "4 MiB" in caplog.text


def test_nobody_waits_for_the_registration(make_daemon, attach):
    device, go_on = FakeDevice(2), threading.Event()
    original = device.register

    def slow(address, nbytes):
        assert go_on.wait(30)
        original(address, nbytes)

    device.register = slow
    store = attach(make_daemon().url, device)
    try:
        assert store.save(TOKENS, pages_of(TOKENS)).wait(10) == len(TOKENS)
        assert_loaded(store, load(store)[1])
        assert (device.batches, device.registrations) == (0, 0)
    finally:
        go_on.set()
    store.wait_ready()
    store.evict("hbm", 16)
    assert_loaded(store, load(store)[1])
    assert device.batches == SPEC.num_layers


def test_a_store_that_is_closed_while_the_driver_takes_its_time(make_daemon, attach):
    before = arenas_mapped()
    device, begun, go_on = FakeDevice(1), threading.Event(), threading.Event()
    original = device.register

    def slow(address, nbytes):
        begun.set()
        assert go_on.wait(30)
        original(address, nbytes)

    device.register = slow
    attach(make_daemon().url, device).close()
    if begun.wait(0.2):  # else it was never asked
        assert arenas_mapped() == before + 1
    go_on.set()
    wait_until(lambda: arenas_mapped() == before)
    assert device.registered == 0


def test_leases_are_renewed_while_copies_are_under_way(make_daemon, attach, held_copies, monkeypatch):
    monkeypatch.setattr(client_load, "LEAST_S", 0.1)
    store = attach(make_daemon("--lease-s=1").url, FakeDevice(0))
    store.wait_ready()
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    hit = store.lookup(TOKENS)
    lease = hit.parts[0]._lease
    loaded = store.load(hit).wait(30)
    given = {lease.number}

    def renewed():
        given.add(lease.number)
        return len(given) == 4

    wait_until(renewed)  # longer than the first lease would have lasted
    assert_loaded(store, loaded)
    held_copies.set()
    store._mover.drain()
    assert store.stats().counters["expired_leases"] == 0
    assert not store.pool.arrivals(loaded.pages).pending


def test_a_lease_that_ended_during_copies_stops_the_engine(make_daemon, attach, held_copies):
    """Its pages may have been others' by then, and somebody may have computed with them."""
    clock = ManualClock()
    daemon = make_daemon()
    store = attach(daemon.url, FakeDevice(0), clock=clock)
    store.wait_ready()
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    _, loaded = load(store)
    clock.advance(1000)
    held_copies.set()
    store._mover.drain()
    with pytest.raises(DeviceError, match="the lease ended during the copy of 5 pages"):
        store.pool.arrivals(loaded.pages)
    assert store.stats().counters["expired_leases"] == 1
    store.release_hbm(loaded.pages)


def test_a_lease_with_little_left_is_waited_for(make_daemon, attach, held_copies):
    clock = ManualClock()
    device = FakeDevice(0)
    store = attach(make_daemon("--lease-s=60").url, device, clock=clock)
    store.wait_ready()
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    hit = store.lookup(TOKENS)
    clock.advance(58)
    loaded = store.load(hit).wait(30)
    assert not store.pool.arrivals(loaded.pages).pending
    assert_loaded(store, loaded)


def test_a_forked_child_leaves_the_driver_alone(make_daemon, attach):
    device = FakeDevice(1)
    store = attach(make_daemon().url, device)
    store.wait_ready()

    def child():
        arenas_mapped()  # collects what the child does not need
        for thread in threading.enumerate():
            if thread.name == "tierstore-unpin":
                thread.join()
        assert (device.registered, device.strays) == (1, 0)

    assert fork(child) == 0
    assert device.registered == 1
