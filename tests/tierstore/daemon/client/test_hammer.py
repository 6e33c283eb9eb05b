"""Many threads of two clients hammer one daemon under a tight capacity; every byte that comes back is
compared."""

from __future__ import annotations

import pytest

from tests.daemons import in_threads
from tests.small_store import SPEC
from tests.tierstore.store.test_hammer import Hammer
from tierstore.testing.clock import wait_until

SECONDS = 1.2


class ClientHammer(Hammer):
    def load(self, rng, which):
        hit = self.store.lookup(self.prompts[which])
        buffers = [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]
        transfer = self.store.load(hit, buffers, deadline_s=rng.choice([None, None, 0.0005, 5]))
        if rng.random() < 0.2:
            transfer.cancel()
        self._compare(which, transfer.wait(30), map(bytes, buffers))


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.timeout(120)
def test_no_wrong_byte_and_nothing_leaks(make_daemon, connect, disk):
    daemon = make_daemon("--lease-s=2", host_bytes=60 * SPEC.page_bytes, disk=disk)
    stores = [connect(daemon.url), connect(daemon.url, hbm_pages=50)]
    hammers = [ClientHammer(store, seed=f"{disk}") for store in stores]
    in_threads(*(lambda hammer=hammer: hammer.run(SECONDS) for hammer in hammers))
    for hammer in hammers:
        assert hammer.wrong == []
    for store in stores:
        assert store.flush(30) or not disk
        store._mover.drain(30)
        stats = store.stats()
        assert stats.failed_tasks == stats.open_hits == stats.pending_saves == 0
        assert all(tier.used_bytes <= tier.capacity_bytes for tier in stats.tiers.values())
    assert stores[1].available_hbm() == 50
    wait_until(lambda: stores[0].stats().tiers["host"].leased_pages == 0)
