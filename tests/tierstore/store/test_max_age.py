"""The maximum age of pages: none is served beyond it, from any tier, and the disk keeps none for long."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

import tierstore
from tests.small_store import SPEC, load_bytes, pages_of
from tierstore import Identity, Prompt
from tierstore.core.backend import LocalBackend, open_core
from tierstore.core.forgetting import expiry_s
from tierstore.store.store import Store
from tierstore.testing.clock import ManualClock, wait_until
from tierstore.testing.processes import DaemonProcess
from tierstore.units import KIB, MIB

pytest.importorskip("cryptography")

from tierstore.tiers.disk.keyring import make_master_key

DAY = 86400.0
WAIT_S = 60.0
IDENTITY = Identity.of(SPEC, model="a model", tenant="acme")


def tokens_of(number, count=70):
    return [1000 * number + at for at in range(count)]


def prompt_of(number, count=70):
    return Prompt(IDENTITY, tokens_of(number, count), chunk_tokens=SPEC.chunk_tokens)


class Place:
    """A directory, its keys, and a clock that a test sets."""

    def __init__(self, root, *, encrypted, inline):
        self.root = root
        self.wall = ManualClock(1e9)
        self.encrypted = encrypted
        self.inline = inline
        if encrypted:
            make_master_key(root / "key")

    def open(self, *, pools=(), days=10.0, disk="disk"):
        core = open_core(
            self.root / disk if disk else None,
            SPEC.page_bytes,
            host_bytes=2 * MIB,
            disk_bytes=8 * MIB,
            inline_bytes=16 * KIB if self.inline else 0,
            disk_key=str(self.root / "key") if self.encrypted and disk else "",
            max_age_days=days,
            pools=pools,
            wall=self.wall,
        )
        backend = LocalBackend(core, owns_core=True)
        return Store(backend, SPEC, pools=pools or None, lookup_s=10.0, clock=self.wall)


@pytest.fixture(params=[(True, False), (False, False), (False, True)], ids=str)
def place(request, tmp_path):
    encrypted, inline = request.param
    return Place(tmp_path, encrypted=encrypted, inline=inline)


def save(store, number, count=70, first=0):
    pages = pages_of(tokens_of(number, count))[first:]
    assert store.save(prompt_of(number, count), pages, first=first).wait(WAIT_S)
    assert store.flush(WAIT_S)


def held(store, number, count=70):
    with store.lookup(prompt_of(number, count)) as hit:
        tokens, pages = load_bytes(store, hit)
    assert pages == pages_of(tokens_of(number, count))[: len(pages)]
    return tokens


def on_disk(store):
    return store.stats().tiers["disk"].pages


def test_no_tier_serves_a_page_beyond_its_age(place):
    with place.open() as store:
        save(store, 1)
        place.wall.advance(9 * DAY)
        save(store, 2)
        store.evict("host")
        assert (held(store, 1), held(store, 2)) == (70, 70)  # from disk, and now in host memory
        place.wall.advance(DAY)
        assert (held(store, 1), held(store, 2)) == (0, 70)
        wait_until(lambda: on_disk(store) == 5)  # the lookup has found the others: they leave at once
        store.check()
        place.wall.advance(9 * DAY)
        store.evict("host")
        assert held(store, 2) == 0  # on disk only
        store.backend.core.forgetting.expire()
        assert on_disk(store) == 0
        save(store, 2)
        store.evict("host")
        assert held(store, 2) == 70  # saved anew
        store.check()


def test_pages_leave_the_disk_although_no_lookup_asks_for_them(place):
    with place.open() as store:
        save(store, 1)
        data = pages_of(tokens_of(1))[0][:512]
        place.wall.advance(5 * DAY)
        save(store, 2)
        longer = tokens_of(1, 128)
        assert store.save(prompt_of(1, 128), pages_of(longer)[4:], first=4).wait(WAIT_S)
        assert store.pin(prompt_of(1)) == 64  # a pin is no reason to keep what is too old
        assert store.flush(WAIT_S)
        assert on_disk(store) == 14
        place.wall.advance(5 * DAY)
        store.backend.core.forgetting.expire()
        assert on_disk(store) == 5  # the young pages behind them have left, too
        assert held(store, 2) == 70
        store.check()
    files = [file.read_bytes() for file in (place.root / "disk").rglob("*") if file.is_file()]
    if not place.inline:
        assert not any(data in each for each in files)


def test_the_age_goes_on_while_the_store_is_killed(place):
    child = os.fork()
    if child == 0:
        store = place.open()
        save(store, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    with place.open() as store:
        assert held(store, 1) == 70
    shutil.copytree(place.root / "disk", place.root / "copy")
    place.wall.advance(10 * DAY)
    for disk in ("disk", "copy"):
        with place.open(disk=disk) as store:
            assert held(store, 1) == 0
            wait_until(lambda: on_disk(store) == 0)
            store.check()
    with place.open(days=0.0, disk="copy") as store:
        assert held(store, 1) == 0


def test_a_pool_serves_no_page_beyond_its_age(place):
    pool = tierstore.PagePool(SPEC, 32)
    with place.open(pools=(pool,), disk=None) as store:
        assert store.save(prompt_of(1), pages_of(tokens_of(1))).wait(WAIT_S) == 70
        place.wall.advance(6 * DAY)
        store.release_hbm(store.load(store.lookup(prompt_of(1))).wait(WAIT_S).pages)
        assert store.stats().tiers["hbm"].pages == 4
        place.wall.advance(4 * DAY)  # the copy in host memory is too old: the pool is told
        store.backend.core.forgetting.expire()
        assert store.lookup(prompt_of(1)).tokens == 0
        assert store.stats().tiers["hbm"].pages == 0
        pages = store.allocate_hbm(5)
        store.save_hbm(prompt_of(2), pages).wait(WAIT_S)
        store.release_hbm(pages)
        store.evict("host")
        place.wall.advance(10 * DAY)  # the pool's own age, without the backend
        assert store.lookup(prompt_of(2)).tokens == 0
        assert pool.free_pages == 32
        store.check()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_daemon_keeps_the_age_after_kill_9(tmp_path, encrypted):
    """Its clock is the machine's: so the directory is from another time."""
    place = Place(tmp_path, encrypted=encrypted, inline=False)
    with place.open(days=0.0) as store:
        save(store, 1)
    options = ["--max-age-days=30", *([f"--disk-key={tmp_path / 'key'}"] if encrypted else [])]
    daemon = DaemonProcess(str(tmp_path), *options, host_bytes=2 * MIB).start()
    pool = tierstore.PagePool(SPEC, 32)
    try:
        with tierstore.connect(daemon.url, SPEC, pools=pool, lookup_s=10.0) as store:
            assert store.lookup(prompt_of(1)).tokens == 0
            save(store, 1)
            assert held(store, 1) == 70
            assert store._hbm.forgetting.ages.most_s == 30 * DAY
            daemon.kill()
            daemon.start()
            wait_until(lambda: store.connected)
            wait_until(lambda: held(store, 1) == 70)
            wait_until(lambda: on_disk(store) == 5)
    finally:
        daemon.kill()


def test_ages_out_of_range_are_one_line(tmp_path):
    for days in (-1, float("nan"), 1e9, "10"):
        with pytest.raises(tierstore.UsageError, match="max_age_days is"):
            tierstore.open(tmp_path / "disk", SPEC, max_age_days=days)
    assert not list(tmp_path.iterdir())
    assert expiry_s(1.0) == 60.0
