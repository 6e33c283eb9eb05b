"""Data keys of sessions: what a forget of a session leaves in memory, on disk, and in earlier copies."""

from __future__ import annotations

import shutil
import threading
from functools import partial

import pytest

import tierstore
from tests.portions import portion
from tests.small_store import SPEC, load_bytes, pages_of
from tests.tierstore.store.test_forget import (
    CHUNK,
    MODEL,
    WAIT_S,
    Place,
    copy_over,
    prompt_of,
    raw,
    run_killed,
    tokens_of,
)
from tierstore import Identity, Prompt, UsageError
from tierstore.daemon.settings import Settings
from tierstore.testing.clock import wait_until
from tierstore.testing.layouts import LAYOUTS
from tierstore.testing.processes import DaemonProcess
from tierstore.units import KIB, MIB

pytest.importorskip("cryptography")

from tierstore.tiers.disk import keyring as keyrings
from tierstore.tiers.disk.keyring import Scope, make_master_key, read_master_key, session_hash

SHARED = 32  # tokens that all prompts of these tests begin with


class SessionPlace(Place):
    def open(self, path=None, **options):
        return super().open(path, **{"session_keys": True, **options})


@pytest.fixture(params=[False, True], ids=["extents", "inline"])
def place(request, tmp_path):
    return SessionPlace(tmp_path, encrypted=True, inline=request.param)


@pytest.fixture
def simple(tmp_path):
    return SessionPlace(tmp_path, encrypted=True, inline=False)


def tokens(number):
    return [*tokens_of("acme", 0, SHARED), *tokens_of("acme", 1 + number, 38)]


def prompt(number):
    return Prompt(Identity.of(SPEC, model=MODEL, tenant="acme"), tokens(number), chunk_tokens=CHUNK)


def save(store, number, session=None):
    assert store.save(prompt(number), pages_of(tokens(number)), session=session).wait(WAIT_S) == 70


def fill(store):
    """Session "a" saves the shared prefix and goes on, "b" continues behind it, and so does no session."""
    for number, session in enumerate(("a", "b", None)):
        save(store, number, session)
    assert store.flush(WAIT_S)


def found(store):
    """How many tokens of each prompt are found, each byte of them right."""
    counts = []
    for number in range(3):
        with store.lookup(prompt(number)) as hit:
            count, pages = load_bytes(store, hit)
        whole = count // CHUNK
        assert pages[:whole] == pages_of(tokens(number))[:whole]
        counts.append(count)
    return counts


def read_from_disk(store):
    store.evict("host")
    return found(store)


def test_a_page_has_the_key_of_the_session_that_saves_it_first(place):
    with place.open() as store:
        fill(store)
        keyring = store.backend.core.disk.keyring
        scopes = {key.scope for key in keyring._by_scope.values()}
        whole = Scope("acme", MODEL)
        assert scopes == {whole, *(whole._replace(session=session_hash("", name)) for name in "ab")}
        assert read_from_disk(store) == [70, 70, 70]
        store.check()
    with place.open() as store:
        assert read_from_disk(store) == [70, 70, 70]


@pytest.mark.parametrize("restart", [False, True])
def test_a_forget_drops_the_sessions_key(place, restart):
    """Also after a restart. Other sessions lose what they share with it, and save it again."""
    copy = place.disk.with_name("copy")
    with place.open() as store:
        fill(store)
        if not restart:
            check_forget(store)
    shutil.copytree(place.disk, copy)
    if restart:
        with place.open() as store:
            check_forget(store)
    with place.open(copy if restart else None) as store:
        assert found(store) == ([0, 0, 0] if restart else [32, 70, 32])
        store.check()


def check_forget(store):
    disk = store.backend.core.disk
    payloads = [stored_payload(disk, serial) for serial, _ in disk.scan()]
    assert len(payloads) == 5 + 3 + 3
    receipt = store.forget(session="a")
    assert receipt.keys == 1
    assert found(store) == [0, 0, 0]
    assert store.backend.core.forgetting.wait(WAIT_S)
    assert disk.pages == 0  # pages behind those of the session left with them
    data = raw(store.backend.core.disk._directory.path / "extents")
    assert not any(payload[:512] in data for payload in payloads if payload)
    assert store.backend.core.state.counters.damaged_pages == 0
    save(store, 1, "b")
    assert store.flush(WAIT_S)
    assert read_from_disk(store) == [32, 70, 32]
    assert store.forget(session="a").keys == 0  # "b" has saved the prefix first this time
    assert read_from_disk(store) == [32, 70, 32]
    store.check()


def stored_payload(disk, serial):
    [record] = disk.stored_records([serial])
    if record.place < 0:
        return b""
    view = memoryview(bytearray(record.nbytes))
    assert disk.read([(record, view)], stored=True).all_good
    return bytes(view)


def test_a_copy_from_before_cannot_be_read_for_the_session(place):
    copy = place.disk.with_name("copy")
    with place.open() as store:
        fill(store)
        save(store, 5)
        assert store.flush(WAIT_S)
    shutil.copytree(place.disk, copy)
    with place.open(copy) as store:
        assert found(store) == [70, 70, 70]
    with place.open() as store:
        save(store, 6, "c")
        assert store.forget(session="b").keys == 1
    with place.open(copy) as store:
        assert found(store) == [70, 32, 70]
        sealing = store.backend.core.disk._sealing
        closed = [
            record for _, record in store.backend.core.disk._index_db.scan() if not sealing.opened(record)
        ]
        assert len(closed) == 3
        store.check()
    data = raw(copy)
    for chunk in prompt(1).chunks():
        assert chunk not in data
    for name in (b"session", b"acme"):
        assert name not in (place.root / "key.ring").read_bytes()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_kind_of_page_is_forgotten_after_a_restart(tmp_path, layout):
    make_master_key(tmp_path / "key")
    identity = Identity.of(layout.spec, model=MODEL)
    before, own = list(range(100, 132)), [*range(100, 132), *range(500, 532)]

    def open_store():
        return tierstore.open(
            tmp_path / "disk",
            layout.spec,
            identity=identity,
            host_bytes=64 * layout.chunk_bytes,
            disk_bytes=16 * MIB,
            disk_key=str(tmp_path / "key"),
            session_keys=True,
        )

    with open_store() as store:
        layout.save(store, before)
        layout.save(store, own, session="private")
    with open_store() as store:
        keyring = store.backend.core.disk.keyring
        keys = len(keyring.of_session(session_hash("", "private")))
        assert keys >= 1
        assert store.lookup(own).tokens == 64
        assert store.forget(session="private").keys == keys
        assert store.lookup(own).tokens == 32
        assert store.backend.core.forgetting.wait(WAIT_S)
        store.check()
    with open_store() as store:
        assert store.lookup(own).tokens == store.lookup(before).tokens == 32


def test_pages_that_left_the_tree_are_forgotten_with_those_behind_them(simple):
    with simple.open() as store:
        state = store.backend.core.state
        fill(store)
        store.evict("host")
        with state.lock:
            state._loaded_pages_most = 0
            while state.unload_idle():
                pass
            state._loaded_pages_most = 1 << 15
            assert state.index.tree.pages == 0
        assert store.forget(session="a").keys == 1
        assert store.backend.core.forgetting.wait(WAIT_S)
        assert store.backend.core.disk.pages == 0
        assert found(store) == [0, 0, 0]
        store.check()


def test_a_forgotten_tenant_loses_all_keys_of_its_sessions(simple):
    with simple.open() as store:
        fill(store)
        other = prompt_of("globex")
        store.save(other, pages_of(other.tokens), session="a").wait(WAIT_S)
        assert store.flush(WAIT_S)
        assert store.forget(tenant="acme").keys == 3
        store.evict("host")
        assert found(store) == [0, 0, 0]
        assert store.lookup(other).tokens == 70
        assert store.forget(session="a").keys == 1
        assert store.lookup(other).tokens == 0


def test_pages_of_earlier_starts_without_session_keys_stay_readable(simple):
    with simple.open(session_keys=False) as store:
        save(store, 0, "a")
    with simple.open() as store:
        save(store, 1, "b")
        assert store.flush(WAIT_S)
        assert store.forget(session="a").keys == 0
        assert read_from_disk(store)[:2] == [70, 70]
    with simple.open(session_keys=False) as store:  # the key is dropped without the setting, too
        assert read_from_disk(store)[:2] == [70, 70]
        assert store.forget(session="b").keys == 1
        assert found(store)[:2] == [70, 32]


def test_another_master_key_opens_the_keys_of_sessions(simple):
    with simple.open() as store:
        fill(store)
    key = simple.root / "key"
    make_master_key(simple.root / "newer")
    keyring = simple.keyring()
    keyring.rotate(read_master_key(str(simple.root / "newer")))
    (simple.root / "newer").rename(key)
    with simple.open() as store:
        assert read_from_disk(store) == [70, 70, 70]
        assert store.forget(session="b").keys == 1
        assert found(store) == [70, 32, 70]


@pytest.mark.parametrize("step", ["write", "commit"])
def test_a_forget_while_the_sessions_pages_are_written(place, monkeypatch, step):
    reached, go_on = threading.Event(), threading.Event()
    with place.open() as store:
        core = store.backend.core
        save(store, 2)
        assert store.flush(WAIT_S)
        work = getattr(core.disk, step)

        def paused(pages, *args, **kwargs):
            if pages and not reached.is_set():
                reached.set()
                assert go_on.wait(WAIT_S)
            return work(pages, *args, **kwargs)

        monkeypatch.setattr(core.disk, step, paused)
        save(store, 0, "a")
        assert reached.wait(WAIT_S)
        assert store.forget(session="a").keys == (step == "commit")
        go_on.set()
        assert store.flush(WAIT_S)
        assert core.forgetting.wait(WAIT_S)
        assert found(store) == [32, 32, 70]
        assert core.disk.keyring.of_session(session_hash("", "a")) == []
        store.check()
    with place.open() as store:
        assert found(store) == [32, 32, 70]
        assert store.backend.core.state.counters.damaged_pages == 0


def test_a_forget_while_the_sessions_pages_are_read_is_no_damage(simple, monkeypatch):
    reached, go_on = threading.Event(), threading.Event()
    with simple.open() as store:
        fill(store)
        store.evict("host")
        disk = store.backend.core.disk
        read = disk.read

        def paused(*args, **kwargs):
            reached.set()
            assert go_on.wait(WAIT_S)
            return read(*args, **kwargs)

        hit = store.lookup(prompt(0))
        with monkeypatch.context() as patch:
            patch.setattr(disk, "read", paused)
            loading = store.load(hit, [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)])
            assert reached.wait(WAIT_S)
            store.forget(session="a")
            go_on.set()
            assert loading.wait(WAIT_S).tokens == 0
        hit.release()
        assert found(store) == [0, 0, 0]
        assert store.backend.core.state.counters.damaged_pages == 0
        store.check()


# -- many sessions -----------------------------------------------------------------------------------------


def test_keys_of_sessions_without_pages_are_freed(simple, monkeypatch):
    """Their slots are used again, so the keyring stays small. Pages of other sessions stay."""
    monkeypatch.setattr(keyrings, "_LEAST_FREED", 8)
    with simple.open() as store:
        keyring = store.backend.core.disk.keyring
        for number in range(60):
            save(store, number, f"session {number}")
            assert store.flush(WAIT_S)
            if number % 10 == 9:
                assert read_one(store, number) == 70
                store.evict("disk", 40)
        save(store, 60, "last")
        assert store.flush(WAIT_S)
        wait_until(lambda: len(keyring) < 40)
        assert read_one(store, 60) == 70
        store.check()
    assert (simple.root / "key.ring").stat().st_size < 50 * KIB


def read_one(store, number):
    store.evict("host")
    with store.lookup(prompt(number)) as hit:
        return load_bytes(store, hit)[0]


def test_a_session_beyond_the_limit_stays_in_memory(simple, monkeypatch):
    monkeypatch.setattr(keyrings, "MOST_SESSION_KEYS", 2)
    with simple.open() as store:
        fill(store)
        save(store, 3, "c")
        assert store.flush(WAIT_S)
        with store.lookup(prompt(3)) as hit:
            assert hit.tokens == 70
        assert store.backend.core.state.counters.disk_dropped_pages == 3
        save(store, 4, "a")  # which has a key
        assert store.flush(WAIT_S)
        store.evict("host")
        assert (store.lookup(prompt(3)).tokens, store.lookup(prompt(4)).tokens) == (32, 70)
        store.check()


def test_new_keys_of_a_batch_are_synced_once(simple, monkeypatch):
    keyring, syncs = simple.keyring(), []
    fsync = keyrings.os.fsync
    monkeypatch.setattr(keyrings.os, "fsync", lambda fd: (syncs.append(fd), fsync(fd)))
    scopes = [Scope("t", "m", bytes([number]) * 16) for number in range(50)]
    keyring.make((scope, 0) for scope in scopes)
    assert (len(keyring), len(syncs)) == (50, 1)
    assert len({key.slot for key in keyring._by_scope.values()}) == 50
    keyring.free_sessions({keyring.find(scope).id for scope in scopes[:10]})
    keyring.make((scope, 0) for scope in scopes[:30])
    assert max(key.slot for key in keyring._by_scope.values()) <= 50
    before = {scope: keyring.find(scope).id for scope in scopes[:30]}
    keyring.close()
    keyring = simple.keyring()
    assert {key.scope: key.id for key in keyring._by_scope.values()} == before
    keyring.close()


def test_keys_whose_writing_failed_do_not_come_back(simple, monkeypatch):
    """They would stand beside later keys of the same sessions, and outlive a forget."""
    keyring, scopes = simple.keyring(), [Scope("t", "m", bytes([number]) * 16) for number in range(3)]
    make = partial(keyring.make, [(scope, 0) for scope in scopes])

    def fails(fd):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(keyrings.os, "fsync", fails)
        with pytest.raises(OSError, match="Input"):
            make()
    assert len(keyring) == 0
    used = keyring.key(scopes[2])  # in the slot of the first one; its own slot has another key
    keyring.close()
    keyring = simple.keyring()
    assert len(keyring) == 1
    assert keyring.find(scopes[2]).id == used.id
    keyring.close()


# -- killed at every write point ---------------------------------------------------------------------------


@pytest.mark.parametrize("step", portion(9, 1))
@pytest.mark.timeout(1800)
def test_a_forgotten_session_is_gone_after_kill_9_at_any_write_point(simple, step):
    names = ("disk", "key.ring")
    with simple.open() as store:
        fill(store)
    for name in names:
        copy_over(simple.root / name, simple.root / f"before {name}")
    last, outcomes, killed = 1, set(), True
    while killed:
        for name in names:
            copy_over(simple.root / f"before {name}", simple.root / name)
        returned, killed = run_killed(simple, last, session="a")
        outcomes.add(returned)
        with simple.open() as store:
            counts = found(store)
            assert counts in ([[0, 0, 0]] if returned else [[0, 0, 0], [70, 70, 70]]), f"killed at {last}"
            assert store.lookup(prompt_of("acme", 9)).tokens in ((0,) if returned else (0, 70))
            store.check()
        copy_over(simple.root / "before disk", simple.disk)  # a copy from before, with the keyring of today
        with simple.open() as store:
            assert not returned or found(store) == [0, 0, 0], f"killed at {last}: an old copy can be read"
        last += step
    assert outcomes == {False, True}


# -- settings ----------------------------------------------------------------------------------------------


def test_session_keys_need_a_disk_key_and_no_cluster(tmp_path):
    with pytest.raises(UsageError, match="session_keys needs disk_key"):
        SessionPlace(tmp_path, encrypted=False, inline=False).open()
    cluster = {"cluster": "s3://pages/x", "cluster_keys": "s3://keys/x", "disk_key": "k", "disk": tmp_path}
    with pytest.raises(UsageError, match="session_keys drops a session's keys on this host only"):
        Settings(**cluster, session_keys=True)


def test_a_daemon_forgets_a_session_after_a_restart(tmp_path):
    make_master_key(tmp_path / "key")
    options = ("--disk-key", str(tmp_path / "key"), "--session-keys", "true")
    daemon = DaemonProcess(tmp_path, *options, host_bytes=2 * MIB).start()
    try:
        with tierstore.connect(daemon.url, SPEC, lookup_s=10.0) as store:
            fill(store)
        daemon.kill()
        daemon.start()
        with tierstore.connect(daemon.url, SPEC, lookup_s=10.0) as store:
            assert found(store) == [70, 70, 70]
            assert store.forget(session="b").keys == 1
            assert found(store) == [70, 32, 70]
    finally:
        daemon.kill()
