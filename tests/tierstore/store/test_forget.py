"""Forgotten tenants, models and sessions: what is left of them in memory, on disk, and in earlier copies."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tests.portions import portion
from tests.small_store import SPEC, load_bytes, pages_of
from tierstore import Identity, KVSpec, Prompt, UsageError
from tierstore.client.handshake import Handshake
from tierstore.core.backend import LocalBackend
from tierstore.core.clients import Client
from tierstore.core.forgetting import ForgetLog
from tierstore.errors import StoreUnavailableError
from tierstore.keys import nested_tenant
from tierstore.store.store import Store
from tierstore.testing.clock import wait_until
from tierstore.testing.processes import DaemonProcess, free_port
from tierstore.tiers.disk.index_db import IndexDB
from tierstore.tiers.disk.io import FileIO
from tierstore.types import Forgettable
from tierstore.units import KIB, MIB

pytest.importorskip("cryptography")

from tierstore.tiers.disk.keyring import Keyring, Scope, make_master_key, read_master_key

TENANTS = ("acme", "globex")
MODEL = "a model"
CHUNK = SPEC.chunk_tokens
WAIT_S = 60.0


class Place:
    """A directory for a store, and its keys."""

    def __init__(self, root: Path, *, encrypted: bool, inline: bool) -> None:
        self.root = root
        self.encrypted = encrypted
        self.inline = inline
        self.disk = root / "disk"
        if encrypted:
            make_master_key(root / "key")

    def open(self, path: Path | None = None, **options) -> tierstore.Store:
        if self.encrypted:
            options["disk_key"] = str(self.root / "key")
        return tierstore.open(
            path or self.disk,
            SPEC,
            host_bytes=2 * MIB,
            disk_bytes=8 * MIB,
            inline_bytes=16 * KIB if self.inline else 0,
            **options,
        )

    def keyring(self) -> Keyring:
        return Keyring.open(self.root / "key.ring", read_master_key(str(self.root / "key")))


@pytest.fixture(params=[(True, False), (True, True), (False, False), (False, True)], ids=str)
def place(request, tmp_path):
    encrypted, inline = request.param
    return Place(tmp_path, encrypted=encrypted, inline=inline)


@pytest.fixture
def encrypted(tmp_path):
    return Place(tmp_path, encrypted=True, inline=False)


def tokens_of(tenant, number=0, count=70):
    return [1_000_000 * (1 + TENANTS.index(tenant)) + 1000 * number + at for at in range(count)]


def prompt_of(tenant, number=0, model=MODEL):
    identity = Identity.of(SPEC, model=model, tenant=tenant)
    return Prompt(identity, tokens_of(tenant, number), chunk_tokens=CHUNK)


def save(store, tenant, number=0, **options):
    prompt = prompt_of(tenant, number)
    return store.save(prompt, pages_of(tokens_of(tenant, number)), **options)


def fill(store):
    for tenant in TENANTS:
        for number in range(4):
            assert save(store, tenant, number).wait(WAIT_S) == 70
    assert store.flush(WAIT_S)


def held(store, tenant):
    """How many tokens of the tenant's prompts can be loaded, each byte of them right."""
    total = 0
    for number in range(4):
        with store.lookup(prompt_of(tenant, number)) as hit:
            tokens, pages = load_bytes(store, hit)
        assert pages[: tokens // CHUNK] == pages_of(tokens_of(tenant, number))[: tokens // CHUNK]
        total += tokens
    return total


def kv_of(tenant):
    """Bytes of each whole page of a tenant."""
    for number in range(4):
        for page in pages_of(tokens_of(tenant, number, 64)):
            yield page[:256]
            yield page[-256:]


def tokens_in(tenant):
    """Bytes of each chunk's tokens."""
    for number in range(4):
        for chunk in prompt_of(tenant, number).chunks():
            yield chunk
            yield chunk[16:48]


def raw(*paths):
    return b"".join(file.read_bytes() for path in paths for file in sorted(path.rglob("*")) if file.is_file())


def test_nothing_of_a_forgotten_tenant_is_left(place):
    """In memory at once, on disk when the call has returned, and in the files when the clean-up has ended."""
    with place.open() as store:
        fill(store)
        data = raw(place.disk)
        for secrets in (kv_of("acme"), tokens_in("acme")):
            assert any(secret in data for secret in secrets) == (not place.encrypted)
        receipt = store.forget(tenant="acme")
        assert (receipt.tenant, receipt.model, receipt.session) == ("acme", None, None)
        assert (receipt.identities, receipt.host_pages) == (1, 20)
        assert receipt.encrypted == place.encrypted
        assert receipt.keys == place.encrypted
        assert held(store, "acme") == 0
        assert held(store, "globex") == 280
        assert store.backend.core.forgetting.wait(WAIT_S)
        store.check()
        assert store.stats().tiers["disk"].pages == 20
        assert save(store, "acme").wait(WAIT_S) == 70  # saved anew
        store.evict("host")
        assert held(store, "acme") == 70
        assert store.forget(tenant="acme").host_pages >= 5
        assert store.backend.core.forgetting.wait(WAIT_S)
    data = raw(place.disk)
    if place.encrypted:
        assert not any(secret in data for secret in tokens_in("acme"))
    if place.encrypted or not place.inline:  # LMDB leaves pieces of what was in the index
        assert not any(secret in data for secret in kv_of("acme"))
    with place.open() as store:
        store.evict("host")
        assert held(store, "acme") == 0
        assert held(store, "globex") == 280
        store.check()


def test_a_copy_made_before_cannot_be_read_with_todays_keyring(encrypted):
    with encrypted.open() as store:
        fill(store)
    copy = encrypted.disk.with_name("copy")
    shutil.copytree(encrypted.disk, copy)
    with encrypted.open(copy) as store:
        assert held(store, "acme") == 280, "the copy is good as long as there are keys"
    with encrypted.open() as store:
        assert store.forget(tenant="acme").keys == 1
    with encrypted.open(copy) as store:
        assert held(store, "acme") == 0
        assert held(store, "globex") == 280
        store.check()


def test_old_pages_do_not_come_back_with_the_tenants_new_key(encrypted):
    """A tenant is forgotten and saves again. Then someone puts the directory from before in its place."""
    with encrypted.open() as store:
        fill(store)
    copy = encrypted.disk.with_name("copy")
    shutil.copytree(encrypted.disk, copy)
    with encrypted.open() as store:
        store.forget(tenant="acme")
        assert save(store, "acme", 1).wait(WAIT_S) == 70
        assert store.flush(WAIT_S)
    copy_over(copy, encrypted.disk)
    with encrypted.open() as store:
        assert held(store, "acme") == 0
        assert held(store, "globex") == 280
        assert save(store, "acme", 2).wait(WAIT_S) == 70
        assert held(store, "acme") == 70
        store.check()


@pytest.mark.parametrize("wanted", [{"model": MODEL}, {"tenant": "acme", "model": MODEL}], ids=str)
def test_a_model_is_forgotten_of_all_tenants_or_of_one(encrypted, wanted):
    with encrypted.open() as store:
        fill(store)
        other = prompt_of("acme", 9, model="another model")
        store.save(other, pages_of(tokens_of("acme", 9))).wait(WAIT_S)
        receipt = store.forget(**wanted)
        assert receipt.keys == receipt.identities == (1 if "tenant" in wanted else 2)
        assert held(store, "acme") == 0
        assert held(store, "globex") == (280 if "tenant" in wanted else 0)
        assert store.lookup(other).tokens == 70


def test_pins_do_not_keep_what_is_forgotten(place):
    with place.open() as store:
        fill(store)
        assert store.pin(prompt_of("acme")) == store.pin(prompt_of("globex")) == 64
        store.forget(tenant="acme")
        assert store.backend.core.forgetting.wait(WAIT_S)
        tree = store.backend.core.state.index.tree
        assert {page.identity for page in tree.walk()} == {prompt_of("globex").identity.digest}
        store.check()
        assert (store.unpin(prompt_of("acme")), store.unpin(prompt_of("globex"))) == (0, 64)


def test_a_client_with_a_tenant_forgets_only_its_own(encrypted):
    with encrypted.open() as store:
        core = store.backend.core
        for outer in TENANTS:
            for inner in ("one", "two"):
                identity = Identity.of(SPEC, model=MODEL, tenant=nested_tenant(outer, inner))
                prompt = Prompt(identity, tokens_of(outer), chunk_tokens=CHUNK)
                assert store.save(prompt, pages_of(tokens_of(outer))).wait(WAIT_S) == 70
        assert store.flush(WAIT_S)
        client = LocalBackend(core, client=Client("client", True, "acme"))
        assert client.forget(tenant="one").keys == 1
        assert client.forget(tenant="globex").keys == 0
        assert client.forget(model=MODEL).keys == 1
        assert len(core.disk.keyring) == 2
        client.end()
        assert store.forget(tenant="globex").keys == 2


def test_a_forget_does_not_wait_for_the_pages_on_disk(encrypted, monkeypatch):
    """However many there are: it returns, and nothing is found, while none of their records was read."""
    go_on = threading.Event()
    with encrypted.open() as store:
        fill(store)
        disk = store.backend.core.disk
        look = disk.stored_from

        def wait_and_look(serial, count):
            assert go_on.wait(WAIT_S)
            return look(serial, count)

        monkeypatch.setattr(disk, "stored_from", wait_and_look)
        assert store.forget(tenant="acme").keys == 1
        assert disk.pages == 40 or store.stats().tiers["disk"].pages >= 20
        assert held(store, "acme") == 0
        go_on.set()
        assert store.backend.core.forgetting.wait(WAIT_S)
        assert disk.pages == 20


def test_pages_in_use_leave_with_their_last_holder(place):
    with place.open() as store:
        fill(store)
        hit = store.lookup(prompt_of("acme"))
        assert hit.tokens == 70
        store.forget(tenant="acme")
        assert load_bytes(store, hit)[0] == 0
        hit.release()
        assert store.lookup(prompt_of("acme")).tokens == 0
        store.check()  # waits until the others have left
        assert store.stats().tiers["host"].pages == 20


@pytest.mark.parametrize("step", ["take", "write", "commit"])
def test_a_forget_while_the_tenants_pages_are_written(place, monkeypatch, step):
    """At each step of the writer: nothing of them can be found, or decrypted, afterwards."""
    reached, go_on = threading.Event(), threading.Event()

    def pausing(work: Callable) -> Callable:
        def paused(*args, **kwargs):
            if not reached.is_set():
                reached.set()
                assert go_on.wait(WAIT_S)
            return work(*args, **kwargs)

        return paused

    with place.open() as store:
        core = store.backend.core
        assert save(store, "globex").wait(WAIT_S) == 70
        assert store.flush(WAIT_S)
        where, name = {
            "take": (core.write_behind, "_encode"),
            "write": (core.disk, "write"),
            "commit": (core.disk, "commit"),
        }[step]
        monkeypatch.setattr(where, name, pausing(getattr(where, name)))
        for number in range(4):
            assert save(store, "acme", number).wait(WAIT_S) == 70
        assert reached.wait(WAIT_S)
        if step == "commit":  # which holds the lock that a forget needs at its end
            core.disk._commit_lock = threading.Lock()
        store.forget(tenant="acme")
        go_on.set()
        assert store.flush(WAIT_S)
        assert held(store, "acme") == 0
        assert core.forgetting.wait(WAIT_S)
        store.forget(tenant="nobody")  # its clean-up comes after the last commit
        assert core.forgetting.wait(WAIT_S)
        store.check()
    if place.encrypted:
        ring = place.keyring()
        assert ring.find(Scope("acme", MODEL)) is None
        ring.close()
    with place.open() as store:
        assert held(store, "acme") == 0


@pytest.mark.parametrize("step", ["before", "after"])
def test_a_forget_while_the_tenants_pages_are_read(place, monkeypatch, step):
    """Neither the load that reads them nor a later lookup gets them."""
    reached, go_on = threading.Event(), threading.Event()
    with place.open() as store:
        fill(store)
        store.evict("host")
        disk = store.backend.core.disk
        read = disk.read

        def paused(*args, **kwargs):
            result = read(*args, **kwargs) if step == "after" else None
            reached.set()
            assert go_on.wait(WAIT_S)
            return result or read(*args, **kwargs)

        hit = store.lookup(prompt_of("acme"))
        with monkeypatch.context() as patch:
            patch.setattr(disk, "read", paused)
            loading = store.load(hit, [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)])
            assert reached.wait(WAIT_S)
            store.forget(tenant="acme")
            go_on.set()
            assert loading.wait(WAIT_S).tokens == 0
        hit.release()
        assert held(store, "acme") == 0
        assert held(store, "globex") == 280
        assert store.backend.core.forgetting.wait(WAIT_S)
        store.check()


# -- pages of an engine's pool -----------------------------------------------------------------------------


@pytest.fixture
def pooled():
    with tierstore.open(None, SPEC, host_bytes=2 * MIB, pools=tierstore.PagePool(SPEC, 32)) as store:
        yield store


def test_a_load_that_ends_during_a_forget_leaves_nothing_in_the_pool(pooled, monkeypatch):
    save(pooled, "acme").wait(WAIT_S)
    forget = pooled.backend.forget

    def loads_meanwhile(**what):
        loaded = pooled.load(pooled.lookup(prompt_of("acme"))).wait(WAIT_S)
        assert loaded.tokens == 70
        pooled.release_hbm(loaded.pages)
        return forget(**what)

    monkeypatch.setattr(pooled.backend, "forget", loads_meanwhile)
    assert pooled.forget(tenant="acme").hbm_pages == 4
    assert pooled.lookup(prompt_of("acme")).tokens == 0
    pooled.check()


def test_a_load_that_ends_after_a_forget_leaves_nothing_in_the_pool(pooled, monkeypatch):
    save(pooled, "acme").wait(WAIT_S)
    [pool] = pooled.pools
    write = pool.start_writing
    reached, go_on = threading.Event(), threading.Event()

    def paused(copies):
        reached.set()
        assert go_on.wait(WAIT_S)
        return write(copies)

    monkeypatch.setattr(pool, "start_writing", paused)
    loading = pooled.load(pooled.lookup(prompt_of("acme")))
    assert reached.wait(WAIT_S)
    pooled.forget(tenant="acme")
    go_on.set()
    loaded = loading.wait(WAIT_S)
    expected = pages_of(tokens_of("acme"))[: len(loaded.pages)]
    assert [pool.array[page].tobytes() for page in loaded.pages] == expected  # they are the caller's
    pooled.release_hbm(loaded.pages)
    assert pooled.lookup(prompt_of("acme")).tokens == 0
    assert pool.free_pages == 32
    pooled.check()


def test_forgotten_pages_that_are_held_are_not_handed_out_again(pooled):
    """The prompt is saved anew and loaded while an engine still uses the forgotten pages."""
    save(pooled, "acme").wait(WAIT_S)
    first = pooled.load(pooled.lookup(prompt_of("acme"))).wait(WAIT_S)
    pooled.forget(tenant="acme")
    save(pooled, "acme").wait(WAIT_S)
    second = pooled.load(pooled.lookup(prompt_of("acme"))).wait(WAIT_S)
    assert second.tokens == 70
    [pool] = pooled.pools
    others = pooled.allocate_hbm(pool.free_pages)
    assert len({*first.pages, *second.pages, *others}) == 32
    for pages in (others, first.pages, second.pages):
        pooled.release_hbm(pages)
    assert pool.free_pages == 32
    pooled.check()


def test_pages_whose_content_is_lost_are_not_saved_while_they_are_held(pooled):
    """An engine that computes the prompt again has the right bytes in other pages."""
    [pool] = pooled.pools

    def compute():
        pages = pooled.allocate_hbm(4)
        for page, data in zip(pages, pages_of(tokens_of("acme")), strict=False):
            pool.array[page] = np.frombuffer(data, np.uint8)
        pooled.save_hbm(prompt_of("acme"), pages).wait(WAIT_S)
        return pages

    lost = compute()
    pooled.evict("host")
    pooled.lose_hbm(lost)
    for page in lost:
        pool.array[page] = 0
    pooled.release_hbm(compute())
    assert held(pooled, "acme") == 0
    pooled.release_hbm(lost)
    pooled.release_hbm(compute())
    assert held(pooled, "acme") == 64
    assert pool.free_pages == 28
    pooled.check()


def test_a_forgotten_session_leaves_the_pool_although_it_was_loaded_again(pooled):
    save(pooled, "acme", session="private").wait(WAIT_S)
    pooled.release_hbm(pooled.load(pooled.lookup(prompt_of("acme"))).wait(WAIT_S).pages)
    assert pooled.forget(session="private").hbm_pages == 4
    assert pooled.lookup(prompt_of("acme")).tokens == 0
    pooled.check()


@pytest.fixture
def daemon(tmp_path):
    process = DaemonProcess(str(tmp_path), listen=[f"tcp://127.0.0.1:{free_port()}"], host_bytes=2 * MIB)
    process.start()
    yield process
    process.kill()


def engine_at(daemon, tcp):
    """An engine at the daemon whose pool has a prompt of each tenant."""
    url = next(option for option in daemon.options if option.startswith("tcp://")) if tcp else daemon.url
    pool = tierstore.PagePool(SPEC, 32)
    store = tierstore.connect(url, SPEC, pools=pool, lookup_s=10.0)
    for tenant in TENANTS:
        pages = store.allocate_hbm(5)
        for page, data in zip(pages, pages_of(tokens_of(tenant)), strict=True):
            pool.array[page] = np.frombuffer(data, np.uint8)
        store.save_hbm(prompt_of(tenant), pages).wait(WAIT_S)
        store.release_hbm(pages)
    assert store.flush(WAIT_S)
    return store


def in_pool(store, tenant):
    with store.lookup(prompt_of(tenant)) as hit:
        return hit.by_tier.get("hbm", 0)


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("what", [{"tenant": "acme"}, {"tenant": "acme", "model": MODEL}], ids=str)
def test_a_forget_reaches_the_pools_of_other_engines(daemon, tcp, what):
    with engine_at(daemon, tcp) as engine, tierstore.connect(daemon.url, SPEC) as operator:
        assert in_pool(engine, "acme") == in_pool(engine, "globex") == 70
        operator.forget(**what)
        wait_until(lambda: engine.stats().tiers["hbm"].pages == 5)
        assert engine.lookup(prompt_of("acme")).tokens == 0
        assert in_pool(engine, "globex") == 70
        engine.check()


def test_a_session_leaves_the_pools_of_other_engines(daemon):
    with engine_at(daemon, False) as engine, tierstore.connect(daemon.url, SPEC, lookup_s=10.0) as operator:
        assert save(operator, "acme", 1, session="private").wait(WAIT_S) == 70
        engine.release_hbm(engine.load(engine.lookup(prompt_of("acme", 1))).wait(WAIT_S).pages)
        assert engine.stats().tiers["hbm"].pages == 14  # the partial page is the caller's
        operator.forget(session="private")
        wait_until(lambda: engine.stats().tiers["hbm"].pages == 10)
        assert engine.lookup(prompt_of("acme", 1)).tokens == 0
        assert in_pool(engine, "acme") == 70


def test_an_engine_that_was_away_forgets_when_it_comes_back(daemon, tmp_path):
    with engine_at(daemon, False) as engine:
        daemon.kill()
        wait_until(lambda: not engine.connected)
        assert in_pool(engine, "acme") == 70
        daemon.start()  # a restart alone takes nothing from the pool
        wait_until(lambda: engine.connected)
        assert in_pool(engine, "acme") == in_pool(engine, "globex") == 70
        daemon.kill()
        wait_until(lambda: not engine.connected)
        with tierstore.open(tmp_path / "disk", SPEC, host_bytes=2 * MIB, disk_bytes=256 * MIB) as store:
            store.forget(tenant="acme")
        daemon.start()
        wait_until(lambda: engine.connected)
        assert engine.lookup(prompt_of("acme")).tokens == 0
        assert in_pool(engine, "globex") == 70
        assert engine.stats().tiers["hbm"].pages == 5


def test_an_engine_does_not_take_one_list_of_forgets_for_another(tmp_path, monkeypatch):
    """A daemon without a disk begins a new one, which soon has the same numbers."""
    daemon, come_back = DaemonProcess(tmp_path, host_bytes=2 * MIB, disk=False).start(), threading.Event()
    greet = Handshake.open

    def late(handshake, registrations):
        if threading.current_thread() is engine.backend.connection._thread:
            assert come_back.wait(WAIT_S)
        return greet(handshake, registrations)

    try:
        with engine_at(daemon, False) as engine:
            with tierstore.connect(daemon.url, SPEC) as operator:
                operator.forget(tenant="acme")
            wait_until(lambda: engine.stats().tiers["hbm"].pages == 5)
            monkeypatch.setattr(Handshake, "open", late)
            daemon.kill()
            daemon.start()
            with tierstore.connect(daemon.url, SPEC) as operator:
                operator.forget(tenant="globex")
            come_back.set()
            wait_until(lambda: engine.connected)
            assert in_pool(engine, "globex") == 0
    finally:
        daemon.kill()


@given(forgets=st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.sampled_from([None, "m", "n"]))))
def test_the_log_of_forgets_has_the_last_one_that_covers_an_identity(forgets):
    log = ForgetLog()
    for forget in forgets:
        log.add(*forget)
    again = ForgetLog(log.dump())
    for tenant, model in itertools.product("ab", "mn"):
        covering = [
            number
            for number, (one, other) in enumerate(forgets, 1)
            if one in (None, tenant) and other in (None, model)
        ]
        expected = max(covering, default=0)
        assert log.latest(tenant, model) == again.latest(tenant, model) == expected
        assert log.latest(nested_tenant(tenant, "user"), "x", model) == expected


def test_pools_know_up_to_which_forget_they_were_told(pooled, monkeypatch):
    """Also when a later forget ends first: after a break, an engine finds out the earlier one."""
    forgetting = pooled.backend.core.forgetting
    marking, go_on, told = threading.Event(), threading.Event(), []
    forgetting.followers.append(lambda forgotten: told.append(forgotten.told))
    mark = forgetting._mark

    def slow(pages, *, erased):
        if threading.current_thread() is first:
            marking.set()
            assert go_on.wait(WAIT_S)
        return mark(pages, erased=erased)

    monkeypatch.setattr(forgetting, "_mark", slow)
    first = threading.Thread(target=forgetting.forget, args=[Forgettable("acme")])
    first.start()
    assert marking.wait(WAIT_S)
    forgetting.forget(Forgettable("globex"))
    assert (told, forgetting.told) == ([0], 0)
    go_on.set()
    first.join()
    assert (told, forgetting.told) == ([0, 2], 2)


def test_a_closed_store_follows_a_shared_core_no_more(pooled):
    core = pooled.backend.core
    pool = tierstore.PagePool(SPEC, 2)
    other = Store(LocalBackend(core), SPEC, pools=[pool], lookup_s=10.0)
    assert len(core.forgetting.followers) == 2
    other.close()
    assert len(core.forgetting.followers) == 1


def test_a_forget_that_has_left_the_log_counts_for_everyone():
    log = ForgetLog()
    for number in range(1000):
        log.add(f"tenant {number}", None)
    assert log.latest("tenant 999", "m") == log.last == 1000
    assert 0 < log.latest("tenant 0", "m") == log.latest("nobody", "m") < 1000
    assert len(log.dump()) < 16 * KIB
    assert b"tenant" not in log.dump()


def test_a_long_prompt_leaves_with_the_lease_on_its_end(tmp_path):
    """More pages than Python may have calls within each other."""
    pages = 1200
    tokens = list(range(pages * 16))
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=8, dtype="float32", chunk_tokens=16)  # 1 KiB pages
    with tierstore.open(None, spec, host_bytes=8 * MIB) as store:
        assert store.save(tokens, [bytes(spec.page_bytes)] * pages).wait(WAIT_S) == len(tokens)
        hit = store.lookup(tokens)
        assert hit.tokens == len(tokens)
        assert store.forget(model="default").host_pages == pages
        assert store.lookup(tokens).tokens == 0
        assert store.backend.core.forgetting.wait(WAIT_S)
        assert store.stats().tiers["host"].pages == pages
        hit.release()
        assert store.stats().tiers["host"].pages == 0
        store.check()


def test_a_session_is_overwritten_also_in_an_encrypted_store(place):
    with place.open() as store:
        shared = tokens_of("acme", 0, 32)
        own = [*shared, *tokens_of("acme", 1, 32)]
        identity = Identity.of(SPEC, model=MODEL, tenant="acme")

        def prompt(tokens):
            return Prompt(identity, tokens, chunk_tokens=CHUNK)

        store.save(prompt(shared), pages_of(shared)).wait(WAIT_S)
        store.save(prompt(own), pages_of(own), session="private").wait(WAIT_S)
        assert store.flush(WAIT_S)
        disk = store.backend.core.disk
        serials = [record.serial for _, record in disk.scan() if record is not None]
        payloads = [_payload(disk, serial) for serial in serials[2:]]
        assert len(payloads) == 2
        receipt = store.forget(session="private")
        assert (receipt.host_pages, receipt.keys) == (2, 0)
        assert store.backend.core.forgetting.wait(WAIT_S)
        assert store.lookup(prompt(own)).tokens == 32
        store.check()
    data = raw(place.disk / "extents")
    for payload in payloads:
        assert payload[:512] not in data


def test_a_forgotten_session_is_gone_after_a_crash(place, monkeypatch):
    """Although the background has removed nothing. Without a crash, pages that are saved again stay."""
    crashed, reached, go_on = place.disk.with_name("crashed"), threading.Event(), threading.Event()
    shared, own = tokens_of("acme", 0, 32), [*tokens_of("acme", 0, 32), *tokens_of("acme", 1, 32)]
    identity = Identity.of(SPEC, model=MODEL, tenant="acme")

    def prompt(tokens):
        return Prompt(identity, tokens, chunk_tokens=CHUNK)

    with place.open() as store:
        store.save(prompt(shared), pages_of(shared)).wait(WAIT_S)
        store.save(prompt(own), pages_of(own), session="private").wait(WAIT_S)
        assert store.flush(WAIT_S)
        core = store.backend.core
        payloads = [_payload(core.disk, serial) for serial, _ in list(core.disk.scan())[2:]]
        drop = core.forgetting._drop

        def pausing(*args):
            reached.set()
            assert go_on.wait(WAIT_S)
            drop(*args)

        monkeypatch.setattr(core.forgetting, "_drop", pausing)
        assert store.forget(session="private").host_pages == 2
        assert reached.wait(WAIT_S)
        copy_over(place.disk, crashed)
        go_on.set()
        assert core.forgetting.wait(WAIT_S)
        store.save(prompt(own), pages_of(own)).wait(WAIT_S)
        assert store.flush(WAIT_S)
        store.check()
    with place.open() as store:
        assert store.lookup(prompt(own)).tokens == 64
    with place.open(crashed) as store:
        assert store.lookup(prompt(own)).tokens == 32
        store.check()
    data = raw(crashed / "extents")
    for payload in payloads:
        assert payload[:512] not in data


def test_a_forget_is_finished_on_a_file_system_without_holes(place, monkeypatch):
    def refused(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(FileIO, "free", refused)
    crashed = place.disk.with_name("crashed")
    with place.open() as store:
        save(store, "acme", session="private").wait(WAIT_S)
        assert store.flush(WAIT_S)
        monkeypatch.setattr(store.backend.core.forgetting, "_clean_up", lambda *_, **__: None)
        store.forget(session="private")
        copy_over(place.disk, crashed)
    for _ in range(2):
        with place.open(crashed) as store:
            assert found(store, [0]) == {}


def test_a_session_is_forgotten_with_all_branches_and_unloaded_pages(place):
    """A session may go in more directions than are remembered, and old pages are on disk only."""
    with place.open() as store:
        state = store.backend.core.state
        for number in range(10):
            save(store, "acme", number, session="private").wait(WAIT_S)
        save(store, "acme", 3, session="another").wait(WAIT_S)
        assert store.flush(WAIT_S)
        store.evict("host", 100)
        part = prompt_of("acme", 9).part(range(2))
        with store.lookup(part), state.lock:  # these two pages stay in the tree, and not those behind them
            state._loaded_pages_most = 0
            while state.unload_idle():
                pass
            state._loaded_pages_most = 1 << 15
            assert state.index.tree.pages == 2
        disk = store.backend.core.disk
        payloads = [_payload(disk, serial) for serial, _ in disk.scan()]
        store.forget(session="private")
        assert found(store, range(10)) == {3: 70}
        assert store.backend.core.forgetting.wait(WAIT_S)
        assert store.save(part, pages_of(part.tokens)).wait(WAIT_S) == 32
        assert store.flush(WAIT_S)
        assert found(store, range(10)) == {3: 70, 9: 32}
        store.check()
    with place.open() as store:
        assert found(store, range(10)) == {3: 70, 9: 32}
    data = raw(place.disk / "extents")
    assert sum(payload[:512] in data for payload in payloads) <= 5 + 2


def found(store, numbers):
    """The tokens that are found of these prompts of a tenant, without those of which none is found."""
    hits = {number: store.lookup(prompt_of("acme", number)) for number in numbers}
    for hit in hits.values():
        hit.release()
    return {number: hit.tokens for number, hit in hits.items() if hit.tokens}


def _payload(disk, serial):
    [record] = disk.stored_records([serial])
    view = memoryview(bytearray(record.nbytes))
    assert disk.read([(record, view)], stored=True).all_good
    return bytes(view)


# -- killed at every write point ---------------------------------------------------------------------------


class KilledAt:
    """Kills this process at its ``last`` write point, before it or after it."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.points = 0

    def point(self) -> None:
        self.points += 1
        if self.points == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner, name: str) -> None:
        work = getattr(owner, name)

        def around(*args, **kwargs):
            self.point()
            result = work(*args, **kwargs)
            self.point()
            return result

        setattr(owner, name, around)


def forget_and_die(place: Place, last: int, told: int, what: dict[str, str]) -> None:
    """In a forked process: forget a tenant, or a session that it saves first. Be killed at write point
    ``last``."""
    store = place.open()
    store.backend.core.disk.wait_scanned()
    if "session" in what:
        save(store, "acme", 9, **what).wait(WAIT_S)
        assert store.flush(WAIT_S)
    killed = KilledAt(last)
    for name in ("pwrite", "pwritev", "fdatasync", "fsync"):
        killed.around(os, name)
    for name in ("forget_roots", "apply", "put_extra", "_commit_twice"):
        killed.around(IndexDB, name)
    store.forget(**what)
    os.write(told, b"returned")
    store.backend.core.forgetting.wait()
    store.close()


def run_killed(place, last, **what):
    """Return whether the forget had returned, and whether the process was killed."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            forget_and_die(place, last, there, what)
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as told:
        returned = told.read() == b"returned"
    _, status = os.waitpid(child, 0)
    return returned, os.WIFSIGNALED(status)


@pytest.mark.parametrize("step", portion(7, 1))
@pytest.mark.timeout(1800)
def test_a_forgotten_tenant_is_gone_after_kill_9_at_any_write_point(tmp_path, step):
    encrypted = Place(tmp_path, encrypted=True, inline=False)
    with encrypted.open() as store:
        fill(store)
    names = ("disk", "key.ring")
    for name in names:
        copy_over(tmp_path / name, tmp_path / f"before {name}")
    last, outcomes = 1, set()
    while True:
        for name in names:
            copy_over(tmp_path / f"before {name}", tmp_path / name)
        returned, killed = run_killed(encrypted, last, tenant="acme")
        outcomes.add(returned)
        ring = encrypted.keyring()
        key = ring.find(Scope("acme", MODEL))
        ring.close()
        if returned:
            assert key is None, f"killed at {last}: the key is there"
        with encrypted.open() as store:
            there = held(store, "acme")
            assert there in ((0,) if returned or key is None else (0, 280)), f"killed at {last}"
            assert held(store, "globex") == 280
            if not returned:  # a forget that did not return is done again
                store.forget(tenant="acme")
                assert held(store, "acme") == 0
            store.check()
        copy_over(
            tmp_path / "before disk", tmp_path / "disk"
        )  # a copy from before, with the keyring of today
        with encrypted.open() as store:
            assert held(store, "acme") == 0, f"killed at {last}: an old copy can be read"
            assert held(store, "globex") == 280
        if not killed:
            break
        last += step
    assert last > 10, "there were fewer write points than thought"
    assert outcomes == {False, True}


@pytest.mark.parametrize("step", portion(9, 1))
@pytest.mark.timeout(1800)
def test_a_forgotten_session_is_gone_after_kill_9_at_any_write_point(tmp_path, step):
    place = Place(tmp_path, encrypted=False, inline=False)
    with place.open() as store:
        fill(store)
    copy_over(place.disk, tmp_path / "before")
    last, outcomes, killed = 1, set(), True
    while killed:
        copy_over(tmp_path / "before", place.disk)
        returned, killed = run_killed(place, last, session="private")
        outcomes.add(returned)
        with place.open() as store:
            there = store.lookup(prompt_of("acme", 9)).tokens
            assert there in ((0,) if returned else (0, 70)), f"killed at {last}"
            assert held(store, "acme") == held(store, "globex") == 280
            store.check()
        data = raw(place.disk / "extents")
        own = pages_of(tokens_of("acme", 9))
        assert not returned or not any(page[:256] in data for page in own), f"killed at {last}"
        last += step
    assert outcomes == {False, True}


def copy_over(path, to):
    if path.is_dir():
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(path, to)
    else:
        shutil.copy(path, to)


# -- what to forget ----------------------------------------------------------------------------------------


def test_a_clients_tenant_covers_those_that_it_distinguishes():
    inner = nested_tenant("acme", "user 1")
    assert Forgettable(tenant="acme").covers(inner, "m")
    assert Forgettable(tenant=inner).covers(inner, "m")
    assert not Forgettable(tenant=inner).covers(nested_tenant("acme", "user 2"), "m")
    assert not Forgettable(tenant="user 1").covers(inner, "m")
    assert not Forgettable(tenant="acme").covers('["acme"]', "m")
    assert not Forgettable(tenant="").covers(inner, "m")
    assert Forgettable(model="m").covers(inner, "n", "m")
    for wrong in ({}, {"session": "a", "model": "b"}, {"tenant": 5}, {"session": ""}):
        with pytest.raises(UsageError):
            Forgettable(**wrong)


def test_a_tenant_of_a_long_name_is_forgotten_in_copies_too(encrypted):
    """Also when nothing but the keyring knows it."""
    identity = Identity.of(SPEC, model=MODEL, tenant="long" * 200)
    prompt = Prompt(identity, tokens_of("acme"), chunk_tokens=CHUNK)
    with encrypted.open() as store:
        store.save(prompt, pages_of(tokens_of("acme"))).wait(WAIT_S)
        assert store.flush(WAIT_S)
    copy = encrypted.disk.rename(encrypted.root / "copy")
    with encrypted.open() as store:
        assert store.forget(tenant=identity.tenant).keys == 1
    with encrypted.open(copy) as store:
        assert store.lookup(prompt).tokens == 0


def test_a_forget_with_a_wrong_key_is_refused(encrypted):
    """The keyring would keep the tenant's key."""
    with encrypted.open() as store:
        fill(store)
    key = encrypted.root / "key"
    key.rename(encrypted.root / "right key")
    make_master_key(key)
    with encrypted.open() as store, pytest.raises(StoreUnavailableError, match="does not open the keyring"):
        store.forget(tenant="acme")
    (encrypted.root / "right key").rename(key)
    with encrypted.open() as store:
        assert store.forget(tenant="acme").keys == 1


def test_a_forget_in_a_keyring_that_was_replaced_is_reported(encrypted):
    ring = encrypted.root / "key.ring"
    with encrypted.open() as store:
        fill(store)
        shutil.copy(ring, encrypted.root / "another")
        (encrypted.root / "another").rename(ring)
        with pytest.raises(StoreUnavailableError, match="was replaced by another file"):
            store.forget(tenant="acme")
        assert held(store, "acme") == 0
    with encrypted.open() as store:
        assert store.forget(tenant="acme").keys == 1


def test_a_keyring_that_cannot_be_written_is_reported(encrypted, monkeypatch):
    with encrypted.open() as store:
        fill(store)

        def fails(fd):
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fails)
            with pytest.raises(StoreUnavailableError, match="not everything is forgotten: Input"):
                store.forget(tenant="acme")
        assert held(store, "acme") == 0
        receipt = store.forget(tenant="acme")
        assert asdict(receipt)["keys"] == 1
        assert held(store, "acme") == 0
