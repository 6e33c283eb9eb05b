"""The conformance suite for stores: any :class:`~tierstore.Store` that passes it can stand behind an engine.

Subclass :class:`StoreTests` and say how a store is opened; pytest finds the tests that are inherited::

    class TestMine(StoreTests):
        @pytest.fixture
        def open_store(self):
            opened = []

            def open_(**options):
                opened.append(MyStore(**options))
                return opened[-1]

            yield open_
            for store in opened:
                store.close()

The tests know nothing of a store but its public verbs. They need pytest and hypothesis.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tierstore import (
    Hint,
    Hit,
    Identity,
    KVSpec,
    Loaded,
    PagePool,
    Prompt,
    Store,
    StoreClosedError,
    Transfer,
    UsageError,
)
from tierstore.testing import pages
from tierstore.testing.clock import wait_until

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=16)
"""Pages of 8 KiB for 16 tokens."""

CHUNK = SPEC.chunk_tokens
TOKENS = list(range(100, 170))  # four full chunks and six tokens
_WAIT_S = 30.0
_names = itertools.count()


class OpenStore(Protocol):
    """Opens an empty store of pages like :data:`SPEC`, and closes it after the test.

    ``identity`` is one that no other store has used. ``host_pages`` pages fit in the host tier, and no more.
    ``disk`` says whether there is a disk tier below it, with room for 256 pages at least. A lookup holds its
    pages for ``lease_s`` seconds. The host tier may be shared with stores opened before, which hold nothing.
    """

    def __call__(
        self,
        *,
        identity: Identity,
        pool: PagePool | None = None,
        host_pages: int = 256,
        disk: bool = True,
        lease_s: float = 60.0,
    ) -> Store: ...


def new_identity(**fields: str) -> Identity:
    """An identity that nothing has been saved under."""
    return Identity.of(SPEC, model=f"conformance {next(_names)}", **fields)


def pages_of(tokens: Sequence[int]) -> list[bytes]:
    return pages.pages_of(tokens, SPEC)


def matched(tokens: int, loaded: Sequence[bytes]) -> list[bytes]:
    """The bytes that a hit of ``tokens`` promises: not those behind the match in its last page."""
    counts = [min(tokens - at * CHUNK, CHUNK) for at in range(len(loaded))]
    return [pages.leading_tokens(page, count, SPEC) for page, count in zip(loaded, counts, strict=True)]


def load_bytes(store: Store, hit: Hit, **kwargs: Any) -> tuple[int, list[bytes]]:
    """Load a hit into fresh buffers: the tokens that came, and what came of them."""
    buffers = [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]
    loaded = store.load(hit, buffers, **kwargs).wait(_WAIT_S)
    full = -(-loaded.tokens // CHUNK)
    return loaded.tokens, matched(loaded.tokens, [bytes(buffer) for buffer in buffers[:full]])


def right_bytes(tokens: Sequence[int], count: int) -> list[bytes]:
    """What a load of the first ``count`` tokens has to bring."""
    return matched(count, pages_of(tokens)[: -(-count // CHUNK)])


def save(store: Store, tokens: Sequence[int], **kwargs: Any) -> int:
    return store.save(tokens, pages_of(tokens), **kwargs).wait(_WAIT_S)


def compute(store: Store, tokens: Sequence[int], *, first: int = 0) -> tuple[list[int], int]:
    """Play the engine: compute the chunks from ``first`` on in HBM pages and save them. The pages, which the
    caller owns, and the tokens that were stored."""
    assert store.pool is not None
    content = pages_of(tokens)[first:]
    hbm_pages = store.allocate_hbm(len(content))
    assert hbm_pages is not None, "the pool is full"
    write_hbm(store, hbm_pages, content)
    stored = store.save_hbm(store.prompt(tokens), hbm_pages, first=first).wait(_WAIT_S)
    return hbm_pages, stored


def write_hbm(store: Store, hbm_pages: Sequence[int], content: Sequence[bytes]) -> None:
    assert store.pool is not None
    for page, data in zip(hbm_pages, content, strict=True):
        store.pool.array[page] = np.frombuffer(data, np.uint8)


def read_hbm(store: Store, loaded: Loaded) -> list[bytes]:
    """What a load into HBM has brought."""
    assert store.pool is not None
    return matched(loaded.tokens, [store.pool.array[page].tobytes() for page in loaded.pages])


class StoreTests:
    """What every store promises. See the module's docstring for how to use it."""

    has_disk = True
    """Whether stores can be opened with a disk tier."""

    @pytest.fixture
    def open_store(self) -> Iterator[OpenStore]:
        """To be overridden: see :class:`OpenStore`."""
        raise NotImplementedError("say how a store is opened: override the fixture open_store")

    @pytest.fixture
    def store(self, open_store: OpenStore) -> Store:
        return open_store(identity=new_identity())

    @pytest.fixture
    def pooled(self, open_store: OpenStore) -> Store:
        """A store with 16 HBM pages."""
        return open_store(identity=new_identity(), pool=PagePool(SPEC, 16))

    # -- finding and loading -------------------------------------------------------------------------

    def test_saved_pages_come_back_byte_for_byte(self, store: Store) -> None:
        assert save(store, TOKENS) == len(TOKENS)
        hit = store.lookup(TOKENS)
        assert hit.tokens == len(TOKENS)
        assert hit.num_pages == 5
        assert sum(hit.by_tier.values()) == len(TOKENS)
        assert load_bytes(store, hit) == (len(TOKENS), right_bytes(TOKENS, len(TOKENS)))

    def test_an_empty_store_misses(self, store: Store) -> None:
        with store.lookup(TOKENS) as hit:
            assert (hit.tokens, hit.num_pages, dict(hit.by_tier)) == (0, 0, {})
            assert hit.prefetch().wait(_WAIT_S) == 0
        assert load_bytes(store, store.lookup(TOKENS)) == (0, [])

    @pytest.mark.parametrize("same", [0, 1, 15, 16, 17, 63, 64, 65, 69])
    def test_the_match_ends_at_the_first_other_token(self, store: Store, same: int) -> None:
        save(store, TOKENS)
        hit = store.lookup([*TOKENS[:same], 7, 7, 7])
        assert hit.tokens == same
        assert load_bytes(store, hit) == (same, right_bytes(TOKENS, same))

    @pytest.mark.parametrize("limit", [0, 1, 16, 37, 69, 1000])
    def test_max_tokens_cuts_the_hit(self, store: Store, limit: int) -> None:
        save(store, TOKENS)
        hit = store.lookup(TOKENS, max_tokens=limit)
        assert hit.tokens == min(limit, len(TOKENS))
        assert load_bytes(store, hit) == (hit.tokens, right_bytes(TOKENS, hit.tokens))

    def test_nothing_is_found_under_another_identity(self, store: Store) -> None:
        save(store, TOKENS)
        model = store.identity.model
        others = [
            Identity.of(SPEC, model=f"{model} other"),
            Identity.of(SPEC, model=model, tenant="b"),
            Identity.of(SPEC, model=model, revision="2"),
            Identity.of(SPEC, model=model, adapter="lora"),
        ]
        for identity in others:
            with store.lookup(Prompt(identity, TOKENS, chunk_tokens=CHUNK)) as hit:
                assert hit.tokens == 0

    def test_prompts_of_several_identities_live_side_by_side(self, store: Store) -> None:
        other = Prompt(new_identity(), TOKENS, chunk_tokens=CHUNK)
        content = pages_of(range(900, 970))
        assert store.save(other, content).wait(_WAIT_S) == len(TOKENS)
        save(store, TOKENS)
        assert load_bytes(store, store.lookup(other))[1] == matched(len(TOKENS), content)
        assert load_bytes(store, store.lookup(TOKENS))[1] == right_bytes(TOKENS, len(TOKENS))

    def test_a_prompt_may_grow(self, store: Store) -> None:
        prompt = store.prompt(TOKENS[:40])
        assert store.save(prompt, pages_of(TOKENS[:40])).wait(_WAIT_S) == 40
        prompt.extend(TOKENS[40:])
        assert store.lookup(prompt).tokens == 40
        assert store.save(prompt, pages_of(TOKENS)[2:], first=2).wait(_WAIT_S) == len(TOKENS) - 32
        assert load_bytes(store, store.lookup(prompt)) == (len(TOKENS), right_bytes(TOKENS, len(TOKENS)))

    def test_a_lookup_may_be_repeated_and_released_twice(self, store: Store) -> None:
        save(store, TOKENS)
        hits = [store.lookup(TOKENS) for _ in range(3)]
        for hit in (*hits, *hits):
            hit.release()
        with store.lookup(TOKENS) as hit:
            assert hit.tokens == len(TOKENS)

    def test_a_load_ends_at_its_deadline_with_what_has_come(self, store: Store) -> None:
        tokens = list(range(CHUNK * 100))
        save(store, tokens)
        for deadline_s in (0.0, 0.0005, 0.002):
            count, content = load_bytes(store, store.lookup(tokens), deadline_s=deadline_s)
            assert count <= len(tokens)
            assert content == right_bytes(tokens, count)
        assert load_bytes(store, store.lookup(tokens), deadline_s=_WAIT_S)[0] == len(tokens)

    def test_cancelled_loads_give_everything_back(self, open_store: OpenStore) -> None:
        store = open_store(identity=new_identity(), pool=PagePool(SPEC, 100))
        tokens = list(range(CHUNK * 100))
        save(store, tokens)
        for _ in range(20):
            transfer = store.load(store.lookup(tokens))
            cancelled = transfer.cancel()
            loaded = transfer.wait(_WAIT_S)
            assert not cancelled or loaded.tokens == 0
            store.release_hbm(loaded.pages)
        wait_until(lambda: store.available_hbm() == 100)
        wait_until(lambda: store.stats().open_hits == 0)  # a copy under way holds its source until it ends
        assert load_bytes(store, store.lookup(tokens))[0] == len(tokens)

    def test_progress_counts_pages(self, store: Store) -> None:
        assert store.save(TOKENS, pages_of(TOKENS)).wait(_WAIT_S) == len(TOKENS)
        transfer = store.load(store.lookup(TOKENS), [bytearray(SPEC.page_bytes) for _ in range(5)])
        transfer.wait(_WAIT_S)
        assert transfer.done
        assert transfer.progress.pages_done == transfer.progress.pages == 5

    def test_transfers_can_be_awaited(self, store: Store) -> None:
        async def run() -> tuple[int, list[bytes]]:
            await store.save(TOKENS, pages_of(TOKENS))
            buffers = [bytearray(SPEC.page_bytes) for _ in range(5)]
            loaded = await store.load(store.lookup(TOKENS), buffers)
            return loaded.tokens, [bytes(buffer) for buffer in buffers]

        assert asyncio.run(run()) == (len(TOKENS), pages_of(TOKENS))

    # -- saving --------------------------------------------------------------------------------------

    def test_a_second_save_keeps_one_copy(self, store: Store) -> None:
        save(store, TOKENS)
        used = store.stats().tiers["host"].used_bytes
        assert save(store, TOKENS) == len(TOKENS)
        assert store.stats().tiers["host"].used_bytes == used

    def test_branches_share_their_prefix(self, store: Store) -> None:
        other = [*TOKENS[:32], *range(500, 538)]
        assert store.flush(_WAIT_S)
        store.evict("host")
        save(store, TOKENS)
        save(store, other)
        assert store.stats().tiers["host"].used_bytes == (5 + 3) * SPEC.page_bytes
        for tokens in (TOKENS, other):
            assert load_bytes(store, store.lookup(tokens)) == (70, right_bytes(tokens, 70))

    def test_saving_from_the_middle_needs_the_pages_before(self, store: Store) -> None:
        content = pages_of(TOKENS)
        assert store.save(TOKENS, content[2:], first=2).wait(_WAIT_S) == 0
        assert store.save(TOKENS, content[:2]).wait(_WAIT_S) == 32
        assert store.save(TOKENS, content[2:], first=2).wait(_WAIT_S) == 38
        assert load_bytes(store, store.lookup(TOKENS)) == (70, right_bytes(TOKENS, 70))

    def test_a_cancelled_save_leaves_its_buffers_alone(self, store: Store) -> None:
        """After ``cancel()`` the caller may write over what he gave, and nobody is served that."""
        for n in range(10):
            tokens = list(range(1000 * n, 1000 * n + CHUNK * 40))
            content = [bytearray(page) for page in pages_of(tokens)]
            transfer = store.save(tokens, content)
            transfer.cancel()
            transfer.wait(_WAIT_S)
            for page in content:
                page[:] = bytes(SPEC.page_bytes)
            count, got = load_bytes(store, store.lookup(tokens))
            assert got == right_bytes(tokens, count)

    def test_a_save_of_no_pages_stores_nothing(self, store: Store) -> None:
        save(store, TOKENS)
        assert store.save(TOKENS, [], hint=Hint(reuse="likely"), session="a").wait(_WAIT_S) == 0
        assert store.lookup(TOKENS).tokens == len(TOKENS)

    def test_many_threads_save_and_load_the_same(self, store: Store) -> None:
        prompts = [[*range(64), *range(1000 * n, 1000 * n + 40)] for n in range(4)]
        wrong: list[object] = []

        def work(n: int) -> None:
            try:
                for turn in range(10):
                    tokens = prompts[(n + turn) % len(prompts)]
                    save(store, tokens, session=str(n))
                    count, got = load_bytes(store, store.lookup(tokens))
                    if got != right_bytes(tokens, count):  # fewer while another thread is saving the rest
                        wrong.append((n, turn, count))
            except BaseException as error:  # noqa: BLE001  # a thread's error must not be lost
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert [store.lookup(tokens).tokens for tokens in prompts] == [104] * 4

    # -- capacity, leases, pins ----------------------------------------------------------------------

    def test_capacity_holds_and_the_oldest_prompts_leave(self, open_store: OpenStore) -> None:
        store = open_store(identity=new_identity(), host_pages=8, disk=False)
        prompts = [list(range(1000 * n, 1000 * n + 64)) for n in range(10)]
        for tokens in prompts:
            assert save(store, tokens) == 64
            host = store.stats().tiers["host"]
            assert host.used_bytes <= host.capacity_bytes
        assert [store.lookup(tokens).tokens for tokens in prompts] == [0] * 8 + [64] * 2

    def test_leased_pages_stay_and_nobody_waits_for_them(self, open_store: OpenStore) -> None:
        store = open_store(identity=new_identity(), host_pages=4, disk=False)
        save(store, range(64))
        hit = store.lookup(range(64))
        assert save(store, range(1000, 1064)) == 0
        assert load_bytes(store, hit) == (64, right_bytes(range(64), 64))
        wait_until(lambda: save(store, range(1000, 1064)) == 64)

    def test_a_lease_ends_by_itself_and_a_load_brings_what_is_still_there(
        self, open_store: OpenStore
    ) -> None:
        store = open_store(identity=new_identity(), host_pages=4, disk=False, lease_s=0.1)
        save(store, range(64))
        hit = store.lookup(range(64))
        wait_until(lambda: save(store, range(1000, 1032)) == 32)
        count, got = load_bytes(store, hit)
        assert count <= 32
        assert got == right_bytes(range(64), count)
        hit.release()

    def test_pins_outlast_pressure(self, open_store: OpenStore) -> None:
        store = open_store(identity=new_identity(), host_pages=6, disk=False)
        save(store, TOKENS[:40])
        assert store.pin(TOKENS) == 32
        for n in range(1, 5):
            save(store, range(1000 * n, 1000 * n + 64))
        with store.lookup(TOKENS) as hit:
            assert hit.tokens == 32
        assert store.unpin(TOKENS) == 32
        assert store.unpin(TOKENS) == 0
        wait_until(lambda: store.evict("host") >= 2)
        assert store.lookup(TOKENS).tokens == 0

    def test_pages_leave_a_tier_by_hand(self, open_store: OpenStore) -> None:
        store = open_store(identity=new_identity(), disk=False)
        store.evict("host")
        save(store, TOKENS)
        assert store.evict("host", 2) == 2
        assert store.lookup(TOKENS).tokens == 48
        with pytest.raises(UsageError, match="unknown tier"):
            store.evict("tape")

    # -- the disk tier -------------------------------------------------------------------------------

    def test_flushed_pages_outlive_the_host_tier(self, store: Store) -> None:
        self._needs_disk()
        save(store, TOKENS)
        assert store.flush(_WAIT_S)
        store.evict("host")
        hit = store.lookup(TOKENS)
        assert hit.by_tier == {"disk": len(TOKENS)}
        assert load_bytes(store, hit) == (len(TOKENS), right_bytes(TOKENS, len(TOKENS)))

    def test_a_prefetch_brings_pages_up_from_disk(self, store: Store) -> None:
        self._needs_disk()
        save(store, TOKENS)
        assert store.flush(_WAIT_S)
        store.evict("host")
        with store.lookup(TOKENS) as hit:
            assert hit.prefetch().wait(_WAIT_S) == len(TOKENS)
            with store.lookup(TOKENS) as again:
                assert again.by_tier == {"host": len(TOKENS)}
            assert load_bytes(store, hit) == (len(TOKENS), right_bytes(TOKENS, len(TOKENS)))

    def test_a_hit_on_disk_may_be_larger_than_the_host_tier_is_free(self, open_store: OpenStore) -> None:
        self._needs_disk()
        store = open_store(identity=new_identity(), host_pages=8)
        tokens = list(range(CHUNK * 32))
        for first in range(0, 32, 4):
            content = pages_of(tokens[: (first + 4) * CHUNK])[first:]
            prompt = tokens[: (first + 4) * CHUNK]
            assert store.save(prompt, content, first=first).wait(_WAIT_S) == 4 * CHUNK
            assert store.flush(_WAIT_S)
        store.evict("host")
        hit = store.lookup(tokens)
        assert hit.tokens == len(tokens)
        count, got = load_bytes(store, hit)
        assert count >= 4 * CHUNK
        assert got == right_bytes(tokens, count)

    def test_a_hit_whose_own_end_fills_the_host_tier_loads_from_its_beginning(
        self, open_store: OpenStore
    ) -> None:
        self._needs_disk()
        store = open_store(identity=new_identity(), pool=PagePool(SPEC, 40), host_pages=8)
        tokens = list(range(CHUNK * 32))
        for first in range(0, 32, 4):
            content = pages_of(tokens[: (first + 4) * CHUNK])[first:]
            prompt = tokens[: (first + 4) * CHUNK]
            assert store.save(prompt, content, first=first).wait(_WAIT_S) == 4 * CHUNK
            assert store.flush(_WAIT_S)
        store.evict("host")
        end = store.load_part(store.lookup(tokens), 24, 32, deadline_s=None, last=True).wait(_WAIT_S)
        store.release_hbm(end.pages)
        store.evict("hbm")
        hit = store.lookup(tokens)
        assert hit.tokens == len(tokens)
        assert hit.by_tier["host"] >= 4 * CHUNK
        count, got = load_bytes(store, hit)
        assert count >= 4 * CHUNK
        assert got == right_bytes(tokens, count)

    def _needs_disk(self) -> None:
        if not self.has_disk:
            pytest.skip("this store has no disk tier")

    # -- HBM -----------------------------------------------------------------------------------------

    def test_a_page_in_hbm_is_found_where_it_is(self, pooled: Store) -> None:
        hbm_pages, stored = compute(pooled, TOKENS)
        assert stored == len(TOKENS)
        pooled.release_hbm(hbm_pages)
        hit = pooled.lookup(TOKENS, max_tokens=64)
        assert hit.by_tier == {"hbm": 64}
        loaded = pooled.load(hit).wait(_WAIT_S)
        assert loaded.pages == tuple(hbm_pages[:4])
        assert loaded.moved_bytes == 0
        pooled.release_hbm(loaded.pages)

    def test_a_hit_that_ends_inside_a_page_gives_a_private_copy(self, pooled: Store) -> None:
        hbm_pages, _ = compute(pooled, TOKENS)
        loaded = pooled.load(pooled.lookup(TOKENS, max_tokens=40)).wait(_WAIT_S)
        assert loaded.tokens == 40
        assert loaded.pages[:2] == tuple(hbm_pages[:2])
        assert loaded.pages[2] not in hbm_pages
        assert read_hbm(pooled, loaded) == right_bytes(TOKENS, 40)
        write_hbm(pooled, loaded.pages[2:], [bytes(SPEC.page_bytes)])  # the engine writes on
        pooled.release_hbm(loaded.pages)
        pooled.release_hbm(hbm_pages)
        assert load_bytes(pooled, pooled.lookup(TOKENS)) == (70, right_bytes(TOKENS, 70))
        wait_until(lambda: pooled.available_hbm() == 16)

    def test_pages_evicted_from_hbm_come_back(self, pooled: Store) -> None:
        hbm_pages, _ = compute(pooled, TOKENS)
        pooled.release_hbm(hbm_pages)
        wait_until(lambda: pooled.evict("hbm") == 5)
        hit = pooled.lookup(TOKENS)
        assert hit.by_tier == {"host": len(TOKENS)}
        loaded = pooled.load(hit).wait(_WAIT_S)
        assert loaded.tokens == len(TOKENS)
        assert loaded.moved_bytes == 5 * SPEC.page_bytes
        assert read_hbm(pooled, loaded) == right_bytes(TOKENS, len(TOKENS))
        pooled.release_hbm(loaded.pages)
        with pooled.lookup(TOKENS, max_tokens=64) as again:
            assert again.by_tier == {"hbm": 64}
        assert pooled.available_hbm() == 16

    def test_pages_in_hbm_load_into_buffers_too(self, pooled: Store) -> None:
        hbm_pages, _ = compute(pooled, TOKENS)
        assert load_bytes(pooled, pooled.lookup(TOKENS)) == (70, right_bytes(TOKENS, 70))
        pooled.release_hbm(hbm_pages)

    def test_a_full_pool_gives_none_and_loads_come_short(self, pooled: Store) -> None:
        save(pooled, TOKENS)
        held = pooled.allocate_hbm(13)
        assert held is not None
        assert pooled.allocate_hbm(4) is None
        loaded = pooled.load(pooled.lookup(TOKENS)).wait(_WAIT_S)
        assert loaded.tokens == 48
        assert read_hbm(pooled, loaded) == right_bytes(TOKENS, 48)
        pooled.release_hbm([*held, *loaded.pages])
        assert pooled.available_hbm() == 16

    def test_two_sequences_that_compute_the_same_pages_keep_one_copy(self, pooled: Store) -> None:
        first, stored = compute(pooled, TOKENS)
        second, again = compute(pooled, TOKENS)
        assert stored == again == len(TOKENS)
        pooled.release_hbm(second)
        assert pooled.stats().tiers["hbm"].pages == 5
        pooled.release_hbm(first)
        wait_until(lambda: pooled.available_hbm() == 16)
        assert load_bytes(pooled, pooled.lookup(TOKENS))[1] == right_bytes(TOKENS, 70)

    def test_allocating_evicts_what_nobody_holds(self, pooled: Store) -> None:
        hbm_pages, _ = compute(pooled, TOKENS)
        pooled.release_hbm(hbm_pages)
        everything: list[list[int] | None] = []
        wait_until(lambda: pooled.available_hbm() == 16)
        everything.append(pooled.allocate_hbm(16))
        assert everything[0] is not None
        assert pooled.available_hbm() == 0
        pooled.release_hbm(everything[0])

    # -- advice --------------------------------------------------------------------------------------

    def test_a_finished_session_counts_its_own_pages(self, store: Store) -> None:
        shared = TOKENS[:32]
        save(store, shared, session="first")
        save(store, [*shared, *range(500, 532)], session="second", hint=Hint(reuse="likely", ttl_s=60))
        assert store.finish("second") == 2
        assert store.finish("second") == 0
        assert store.finish("nobody") == 0
        assert store.lookup([*shared, *range(500, 532)]).tokens == 64

    # -- mistakes, seeing, ending --------------------------------------------------------------------

    def test_bad_arguments_are_said_and_lose_nothing(self, store: Store, open_store: OpenStore) -> None:
        save(store, TOKENS)
        with pytest.raises(UsageError, match="page buffer 0 has 3 bytes"):
            store.save(TOKENS, [b"abc"])
        with pytest.raises(UsageError, match="do not lie within"):
            store.save(TOKENS, pages_of(TOKENS), first=1)
        with pytest.raises(UsageError, match="5 pages, there are 1"):
            store.load(store.lookup(TOKENS), [bytearray(SPEC.page_bytes)])
        with pytest.raises(UsageError, match="no page pool"):
            store.load(store.lookup(TOKENS))
        with pytest.raises(UsageError, match="another page layout"):
            store.lookup(Prompt(Identity("test", "float16 or so"), TOKENS, chunk_tokens=CHUNK))
        with pytest.raises(UsageError, match="session"):
            store.save(TOKENS, pages_of(TOKENS), session="")
        assert store.lookup(TOKENS).tokens == len(TOKENS)

    def test_stats_count_what_happened(self, store: Store) -> None:
        save(store, TOKENS)
        load_bytes(store, store.lookup([*TOKENS, 1, 2]))
        stats = store.stats()
        assert stats.counters["lookups"] == 1
        assert stats.counters["lookup_tokens"] == 72
        assert stats.counters["hit_tokens"]["host"] == 70  # type: ignore[index]
        assert stats.counters["saved_pages"] == 5
        assert stats.counters["loaded_pages"] == 5
        assert stats.failed_tasks == 0
        store.check()

    def test_it_can_be_waited_for(self, store: Store) -> None:
        store.wait_ready()
        assert save(store, TOKENS) == len(TOKENS)

    def test_a_closed_store_says_so(self, store: Store) -> None:
        before = store.closed
        store.close()
        store.close()
        assert (before, store.closed) == (False, True)
        with pytest.raises(StoreClosedError):
            store.lookup(TOKENS)
        with pytest.raises(StoreClosedError):
            store.save(TOKENS, pages_of(TOKENS))

    def test_closing_in_the_middle_ends_every_transfer(self, open_store: OpenStore) -> None:
        store = open_store(identity=new_identity(), pool=PagePool(SPEC, 64))
        tokens = list(range(CHUNK * 40))
        save(store, tokens)
        buffers = [bytearray(SPEC.page_bytes) for _ in range(40)]
        transfers: list[Transfer[Any]] = [
            store.load(store.lookup(tokens)),
            store.load(store.lookup(tokens), buffers),
            store.lookup(tokens).prefetch(),
            store.save(range(5000, 5000 + CHUNK * 40), pages_of(range(5000, 5000 + CHUNK * 40))),
        ]
        store.close()
        for transfer in transfers:
            transfer.wait(_WAIT_S)
        loaded = transfers[1].wait(0)
        assert isinstance(loaded, Loaded)
        got = matched(loaded.tokens, [bytes(each) for each in buffers[: -(-loaded.tokens // CHUNK)]])
        assert got == right_bytes(tokens, loaded.tokens)

    # -- against a model -----------------------------------------------------------------------------

    def test_any_sequence_of_verbs_agrees_with_a_dictionary(self, open_store: OpenStore) -> None:
        run_state_machine_as_test(
            lambda: StoreMachine(open_store),  # type: ignore[arg-type]  # any callable will do
            settings=settings(
                max_examples=25,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


# Prompts that share whole chunks, and parts of one.
PROMPTS: list[list[int]] = [
    [*range(40)],
    [*range(70)],
    [*range(64)],
    [*range(37), *range(500, 540)],
    [*range(48), *range(900, 920)],
    [*range(2000, 2003)],
]
_prompts = st.sampled_from(range(len(PROMPTS)))


class StoreMachine(RuleBasedStateMachine):
    """A store beside a model of it: the prompts up to the end of each page that is held, and the pins."""

    def __init__(self, open_store: OpenStore) -> None:
        super().__init__()
        self.store = open_store(identity=new_identity(), pool=PagePool(SPEC, 24))
        self.held: set[tuple[int, ...]] = set()
        self.pinned: dict[int, list[int]] = {}  # by prompt: the tokens of each pin, newest last
        self.owned: list[Sequence[int]] = []  # HBM pages that the engine has not released
        self.hits: list[tuple[Hit, int]] = []

    # -- the model -----------------------------------------------------------------------------------

    def expected(self, tokens: Sequence[int]) -> int:
        """The leading tokens of a prompt that are held."""
        whole = 0
        while whole + CHUNK <= len(tokens) and tuple(tokens[: whole + CHUNK]) in self.held:
            whole += CHUNK
        rest = tokens[whole : whole + CHUNK]
        best = 0
        for page in self.held:
            if page[:whole] == tuple(tokens[:whole]) and whole < len(page) <= whole + CHUNK:
                pairs = zip(page[whole:], rest, strict=False)
                best = max(best, len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))))
        return whole + best

    def note_saved(self, tokens: Sequence[int], first: int, count: int) -> int:
        """Chunks ``first … first + count`` were saved. Returns the tokens that have to be stored."""
        if first and tuple(tokens[: first * CHUNK]) not in self.held:
            return 0
        ends = [min((at + 1) * CHUNK, len(tokens)) for at in range(first, first + count)]
        self.held.update(tuple(tokens[:end]) for end in ends)
        return ends[-1] - first * CHUNK if ends else 0

    # -- what an engine does -------------------------------------------------------------------------

    @rule(
        which=_prompts, first=st.integers(0, 4), count=st.integers(0, 5), session=st.sampled_from([None, "a"])
    )
    def save(self, which: int, first: int, count: int, session: str | None) -> None:
        tokens = PROMPTS[which]
        content = pages_of(tokens)[first : first + count]
        if first >= len(pages_of(tokens)):
            return
        stored = self.store.save(tokens, content, first=first, session=session).wait(_WAIT_S)
        assert stored == self.note_saved(tokens, first, len(content))

    @rule(which=_prompts, keep=st.booleans())
    def save_hbm(self, which: int, keep: bool) -> None:
        tokens = PROMPTS[which]
        content = pages_of(tokens)
        hbm_pages = self.store.allocate_hbm(len(content))
        if hbm_pages is None:
            return
        write_hbm(self.store, hbm_pages, content)
        stored = self.store.save_hbm(self.store.prompt(tokens), hbm_pages).wait(_WAIT_S)
        assert stored == self.note_saved(tokens, 0, len(content)) == len(tokens)
        self.own(hbm_pages, keep)

    def own(self, hbm_pages: Sequence[int], keep: bool) -> None:
        if keep:
            self.owned.append(hbm_pages)
        else:
            self.store.release_hbm(hbm_pages)

    @rule(which=_prompts, limit=st.integers(0, 80))
    def load(self, which: int, limit: int) -> None:
        tokens = PROMPTS[which]
        hit = self.store.lookup(tokens, max_tokens=limit)
        expected = self.expected(tokens[:limit])
        assert hit.tokens == sum(hit.by_tier.values()) == expected
        assert load_bytes(self.store, hit) == (expected, right_bytes(tokens, expected))

    @rule(which=_prompts, limit=st.integers(0, 80), keep=st.booleans(), cancel=st.booleans())
    def load_hbm(self, which: int, limit: int, keep: bool, cancel: bool) -> None:
        tokens = PROMPTS[which]
        hit = self.store.lookup(tokens, max_tokens=limit)
        expected = self.expected(tokens[:limit])
        assert hit.tokens == expected
        room = self.store.available_hbm()
        transfer = self.store.load(hit)
        cancelled = cancel and transfer.cancel()
        loaded = transfer.wait(_WAIT_S)
        if cancelled:
            assert loaded.tokens == 0
        else:
            assert loaded.tokens <= expected
            assert loaded.tokens == expected or room < hit.num_pages
        assert read_hbm(self.store, loaded) == right_bytes(tokens, loaded.tokens)
        self.own(loaded.pages, keep)

    @precondition(lambda self: self.owned)
    @rule()
    def release_hbm(self) -> None:
        self.store.release_hbm(self.owned.pop())

    @rule(which=_prompts)
    def hold(self, which: int) -> None:
        self.hits.append((self.store.lookup(PROMPTS[which]), which))

    @precondition(lambda self: self.hits)
    @rule(load=st.booleans())
    def let_go(self, load: bool) -> None:
        hit, which = self.hits.pop(0)
        if load:
            assert load_bytes(self.store, hit) == (hit.tokens, right_bytes(PROMPTS[which], hit.tokens))
        hit.release()

    @rule(which=_prompts)
    def prefetch(self, which: int) -> None:
        with self.store.lookup(PROMPTS[which]) as hit:
            assert hit.prefetch().wait(_WAIT_S) == hit.tokens

    @rule(which=_prompts)
    def pin(self, which: int) -> None:
        tokens = PROMPTS[which]
        whole = self.expected(tokens) // CHUNK * CHUNK
        assert self.store.pin(tokens) == whole
        if whole:
            self.pinned.setdefault(which, []).append(whole)

    @rule(which=_prompts)
    def unpin(self, which: int) -> None:
        pins = self.pinned.get(which)
        assert self.store.unpin(PROMPTS[which]) == (pins.pop() if pins else 0)

    @rule(count=st.integers(0, 30))
    def evict_hbm(self, count: int) -> None:
        assert 0 <= self.store.evict("hbm", count) <= count

    @rule(count=st.integers(0, 30))
    def evict_host(self, count: int) -> None:
        """Pages that are on disk may leave the host tier, and nobody notices."""
        if "disk" in self.store.stats().tiers:
            assert self.store.flush(_WAIT_S)
            assert 0 <= self.store.evict("host", count) <= count

    @rule()
    def finish(self) -> None:
        assert self.store.finish("a") >= 0
        assert self.store.finish("a") == 0

    @rule()
    def drop_everything(self) -> None:
        """Only what a person has pinned stays, and what that is behind."""
        for hit, _ in self.hits:
            hit.release()
        for hbm_pages in self.owned:
            self.store.release_hbm(hbm_pages)
        self.hits.clear()
        self.owned.clear()
        assert self.store.flush(_WAIT_S)
        while sum(self.store.evict(tier) for tier in self.store.stats().tiers):
            pass  # a page's last copy waits for the pages below it, which may be in another tier
        kept = [
            tuple(PROMPTS[which][:end])
            for which, pins in self.pinned.items()
            for whole in pins
            for end in range(CHUNK, whole + 1, CHUNK)
        ]
        self.held.intersection_update(kept)

    @invariant()
    def agrees_with_itself(self) -> None:
        self.store.check()

    def teardown(self) -> None:
        for which, pins in self.pinned.items():
            for _ in pins:
                self.store.unpin(PROMPTS[which])
        self.pinned.clear()
        self.drop_everything()
        assert self.store.available_hbm() == 24
        self.store.close()
