"""The conformance suite for stores: any :class:`~tierstore.Store` that passes it can serve an engine.

Subclass :class:`StoreTests` and override its fixture ``open_store``. pytest runs the inherited tests::

    class TestMine(StoreTests):
        @pytest.fixture
        def open_store(self):
            opened = []

            def open_(layout, **options):
                opened.append(MyStore(layout.spec, **options))
                return opened[-1]

            yield open_
            for store in opened:
                store.close()

The tests use only public methods of a store. The suite needs pytest and hypothesis.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tierstore import (
    Hint,
    Identity,
    KVSpec,
    Loaded,
    PagePool,
    Promise,
    Prompt,
    Store,
    StoreClosedError,
    Transfer,
    TransferState,
    UsageError,
)
from tierstore.testing import pages
from tierstore.testing.clock import wait_until
from tierstore.testing.layouts import LAYOUTS, ByGroup, Layout
from tierstore.testing.store_machine import StoreMachine

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=16)
"""A model whose pages have 8 KiB for 16 tokens."""

CHUNK = SPEC.chunk_tokens
TOKENS = list(range(100, 170))  # four full chunks and six tokens
_WAIT_S = 30.0
_names = itertools.count()


class OpenStore(Protocol):
    """Opens an empty store for the layer groups of ``layout``, and closes it after the test.

    No other store has used ``identity``. The host tier has room for the pages of exactly ``host_chunks``
    chunks in all groups. With ``disk``, the store also has a disk tier with room for at least 256 chunks. A
    lookup leases its pages for ``lease_s`` seconds. The host tier may be one that earlier stores have used,
    if no page in it is leased or pinned.
    """

    def __call__(
        self,
        layout: Layout,
        *,
        identity: Identity,
        pools: Sequence[PagePool] | None = None,
        host_chunks: int = 256,
        disk: bool = True,
        lease_s: float = 60.0,
    ) -> Store: ...


def new_identity(spec: KVSpec = SPEC, **fields: str) -> Identity:
    """Return an identity that no test has used."""
    return Identity.of(spec, model=f"conformance {next(_names)}", **fields)


def pages_of(tokens: Sequence[int]) -> list[bytes]:
    return pages.pages_of(tokens, SPEC)


class StoreFixtures:
    """Fixtures that open the stores under test."""

    has_disk = True
    """Whether stores can be opened with a disk tier."""

    @pytest.fixture
    def open_store(self) -> Iterator[OpenStore]:
        """Override this fixture: see :class:`OpenStore`."""
        raise NotImplementedError("override the fixture open_store, which opens a store")

    @pytest.fixture(params=LAYOUTS, ids=str)
    def layout(self, request: pytest.FixtureRequest) -> Layout:
        layout: Layout = request.param
        return layout

    @pytest.fixture
    def store(self, open_store: OpenStore, layout: Layout) -> Store:
        return open_store(layout, identity=new_identity(layout.spec))

    @pytest.fixture
    def pooled(self, open_store: OpenStore, layout: Layout) -> Store:
        """A store with room for 16 HBM pages of each group."""
        return open_store(layout, identity=new_identity(layout.spec), pools=layout.pools(16))


class VerbTests(StoreFixtures):
    """Tests of lookups, loads and saves, with their counters and errors."""

    # -- finding and loading -------------------------------------------------------------------------

    def test_saved_pages_come_back_byte_for_byte(self, store: Store, layout: Layout) -> None:
        assert layout.save(store, TOKENS) == len(TOKENS)
        hit = store.lookup(TOKENS)
        assert hit.tokens == hit.branch == len(TOKENS)
        assert hit.num_pages == 5
        assert [hit.chunks(group.number) for group in layout.groups] == layout.chunks(len(TOKENS))
        assert sum(hit.by_tier.values()) == len(TOKENS)
        assert layout.load(store, hit) == (len(TOKENS), layout.right(TOKENS, len(TOKENS)))

    def test_an_empty_store_misses(self, store: Store, layout: Layout) -> None:
        with store.lookup(TOKENS) as hit:
            assert (hit.tokens, hit.num_pages, dict(hit.by_tier)) == (0, 0, {})
            assert hit.prefetch().wait(_WAIT_S) == 0
        assert layout.load(store, store.lookup(TOKENS)) == (0, layout.right(TOKENS, 0))

    @pytest.mark.parametrize("same", [0, 1, 15, 16, 17, 63, 64, 65, 69])
    def test_the_match_ends_at_the_first_other_token(self, store: Store, layout: Layout, same: int) -> None:
        layout.save(store, TOKENS)
        hit = store.lookup([*TOKENS[:same], 7, 7, 7])
        expected = layout.hit_of(same, len(TOKENS))
        assert (hit.tokens, hit.branch) == (expected, same)
        assert layout.load(store, hit) == (expected, layout.right(TOKENS, expected))

    @pytest.mark.parametrize("limit", [0, 1, 16, 37, 69, 1000])
    def test_max_tokens_cuts_the_hit(self, store: Store, layout: Layout, limit: int) -> None:
        layout.save(store, TOKENS)
        hit = store.lookup(TOKENS, max_tokens=limit)
        assert hit.tokens == layout.hit_of(min(limit, len(TOKENS)), len(TOKENS))
        assert layout.load(store, hit) == (hit.tokens, layout.right(TOKENS, hit.tokens))

    def test_a_group_that_lacks_pages_shortens_the_hit(self, store: Store, layout: Layout) -> None:
        layout.save(store, TOKENS[:32])
        store.save(TOKENS, layout.pages_of(TOKENS)).wait(_WAIT_S)
        hit = store.lookup(TOKENS)
        assert (hit.tokens, hit.branch) == (len(TOKENS) if layout.single else 32, len(TOKENS))
        assert layout.load(store, hit) == (hit.tokens, layout.right(TOKENS, hit.tokens))

    def test_nothing_is_found_under_another_identity(self, store: Store, layout: Layout) -> None:
        layout.save(store, TOKENS)
        model, spec = store.identity.model, layout.spec
        others = [
            Identity.of(spec, model=f"{model} other"),
            Identity.of(spec, model=model, tenant="b"),
            Identity.of(spec, model=model, revision="2"),
            Identity.of(spec, model=model, adapter="lora"),
        ]
        for identity in others:
            with store.lookup(Prompt(identity, TOKENS, chunk_tokens=CHUNK)) as hit:
                assert hit.tokens == 0

    def test_prompts_of_several_identities_live_side_by_side(self, store: Store, layout: Layout) -> None:
        other, content = Prompt(new_identity(layout.spec), TOKENS, chunk_tokens=CHUNK), range(900, 970)
        assert layout.save_prompt(store, other, content) == len(TOKENS)
        layout.save(store, TOKENS)
        assert layout.load(store, store.lookup(other))[1] == layout.right(content, len(TOKENS))
        assert layout.load(store, store.lookup(TOKENS))[1] == layout.right(TOKENS, len(TOKENS))

    def test_a_prompt_may_grow(self, store: Store, layout: Layout) -> None:
        prompt = store.prompt(TOKENS[:40])
        assert layout.save_prompt(store, prompt, TOKENS[:40]) == 40
        prompt.extend(TOKENS[40:])
        assert store.lookup(prompt).tokens == 40
        assert layout.save_prompt(store, prompt, TOKENS, first=2) == len(TOKENS) - 32
        assert layout.load(store, store.lookup(prompt)) == (len(TOKENS), layout.right(TOKENS, len(TOKENS)))

    def test_a_lookup_may_be_repeated_and_released_twice(self, store: Store, layout: Layout) -> None:
        layout.save(store, TOKENS)
        hits = [store.lookup(TOKENS) for _ in range(3)]
        for hit in (*hits, *hits):
            hit.release()
        with store.lookup(TOKENS) as hit:
            assert hit.tokens == len(TOKENS)

    def test_a_load_ends_at_its_deadline_with_what_has_come(self, store: Store, layout: Layout) -> None:
        tokens = list(range(CHUNK * 100))
        layout.save(store, tokens)
        for deadline_s in (0.0, 0.0005, 0.002):
            count, content = layout.load(store, store.lookup(tokens), deadline_s=deadline_s)
            assert count <= len(tokens)
            assert content == layout.right(tokens, count)
        assert layout.load(store, store.lookup(tokens), deadline_s=_WAIT_S)[0] == len(tokens)

    def test_cancelled_loads_give_everything_back(self, open_store: OpenStore, layout: Layout) -> None:
        store = open_store(layout, identity=new_identity(layout.spec), pools=layout.pools(100))
        room, tokens = layout.room(store), list(range(CHUNK * 100))
        layout.save(store, tokens)
        for _ in range(20):
            transfer = store.load(store.lookup(tokens))
            cancelled = transfer.cancel()
            loaded = transfer.wait(_WAIT_S)
            assert not cancelled or loaded.tokens == 0
            layout.release_loaded(store, loaded)
        wait_until(lambda: layout.room(store) == room)
        wait_until(lambda: store.stats().open_hits == 0)  # a running copy keeps its lease until it ends
        assert layout.load(store, store.lookup(tokens))[0] == len(tokens)

    def test_progress_counts_pages(self, store: Store, layout: Layout) -> None:
        assert layout.save(store, TOKENS) == len(TOKENS)
        hit = store.lookup(TOKENS)
        transfer = layout.start_load(store, hit, layout.buffers(hit))
        transfer.wait(_WAIT_S)
        assert transfer.done
        assert transfer.progress.pages_done == transfer.progress.pages == layout.num_pages(len(TOKENS))

    def test_all_of_it_can_be_awaited(self, store: Store, layout: Layout) -> None:
        async def run() -> tuple[int, ByGroup]:
            content = [layout.pages_of(TOKENS, group.number) for group in layout.groups]
            for save in layout.start_save(store, TOKENS, content):
                await save
            hit = await store.lookup_async(TOKENS)
            buffers = layout.buffers(hit)
            loaded = await layout.start_load(store, hit, buffers)
            return loaded.tokens, layout.came(hit.tokens, loaded.tokens, buffers)

        assert asyncio.run(run()) == (len(TOKENS), layout.right(TOKENS, len(TOKENS)))

    # -- saving --------------------------------------------------------------------------------------

    def test_a_second_save_keeps_one_copy(self, store: Store, layout: Layout) -> None:
        layout.save(store, TOKENS)
        used = store.stats().tiers["host"].used_bytes
        assert layout.save(store, TOKENS) == len(TOKENS)
        assert store.stats().tiers["host"].used_bytes == used

    def test_branches_share_their_prefix(self, store: Store, layout: Layout) -> None:
        other = [*TOKENS[:32], *range(500, 538)]
        assert store.flush(_WAIT_S)
        store.evict("host")
        layout.save(store, TOKENS)
        layout.save(store, other)
        assert store.stats().tiers["host"].used_bytes == (5 + 3) * layout.chunk_bytes
        for tokens in (TOKENS, other):
            assert layout.load(store, store.lookup(tokens)) == (70, layout.right(tokens, 70))

    def test_saving_from_the_middle_needs_the_pages_before(self, store: Store, layout: Layout) -> None:
        assert layout.save_prompt(store, TOKENS, TOKENS, first=2) == 0
        assert layout.save_prompt(store, TOKENS, TOKENS, stop=2) == 32
        assert layout.save_prompt(store, TOKENS, TOKENS, first=2) == 38
        assert layout.load(store, store.lookup(TOKENS)) == (70, layout.right(TOKENS, 70))

    def test_a_cancelled_save_leaves_its_buffers_alone(self, store: Store, layout: Layout) -> None:
        """After ``cancel()`` the caller may overwrite its buffers, and the new content is never served."""
        for n in range(10):
            tokens = list(range(1000 * n, 1000 * n + CHUNK * 40))
            content = [
                [bytearray(page) for page in layout.pages_of(tokens, group.number)] for group in layout.groups
            ]
            for transfer in layout.start_save(store, tokens, content):
                transfer.cancel()
                transfer.wait(_WAIT_S)
            for each in content:
                for page in each:
                    page[:] = bytes(len(page))
            count, got = layout.load(store, store.lookup(tokens))
            assert got == layout.right(tokens, count)

    def test_a_save_of_no_pages_stores_nothing(self, store: Store, layout: Layout) -> None:
        layout.save(store, TOKENS)
        for group in layout.groups:
            hint = Hint(reuse="likely")
            saved = store.save(TOKENS, [], group=group.number, hint=hint, session="a")
            assert saved.wait(_WAIT_S) == 0
        assert store.lookup(TOKENS).tokens == len(TOKENS)

    def test_many_threads_save_and_load_the_same(self, store: Store, layout: Layout) -> None:
        prompts = [[*range(64), *range(1000 * n, 1000 * n + 40)] for n in range(4)]
        wrong: list[object] = []

        def work(n: int) -> None:
            try:
                for turn in range(10):
                    tokens = prompts[(n + turn) % len(prompts)]
                    layout.save(store, tokens, session=str(n))
                    count, got = layout.load(store, store.lookup(tokens))
                    if got != layout.right(tokens, count):  # shorter while another thread saves the rest
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

    # -- sessions, forgetting and promises -----------------------------------------------------------

    def test_a_finished_session_counts_its_own_pages(self, store: Store, layout: Layout) -> None:
        shared = TOKENS[:32]
        layout.save(store, shared, session="first")
        layout.save(store, [*shared, *range(500, 532)], session="second", hint=Hint(reuse="likely", ttl_s=60))
        assert store.finish("second") == 2 * len(layout.groups)
        assert store.finish("second") == 0
        assert store.finish("nobody") == 0
        assert store.lookup([*shared, *range(500, 532)]).tokens == 64

    def test_a_forgotten_model_is_a_miss_in_every_tier(self, open_store: OpenStore, layout: Layout) -> None:
        identity, other = new_identity(layout.spec), new_identity(layout.spec)
        store = open_store(layout, identity=identity)
        layout.save(store, TOKENS)
        prompt = Prompt(other, TOKENS, chunk_tokens=CHUNK)
        layout.save_prompt(store, prompt, TOKENS)
        assert store.flush(_WAIT_S)
        assert store.lookup(TOKENS).tokens > 0  # a forget also removes leased pages
        receipt = store.forget(model=identity.model)
        assert receipt is not None
        assert receipt.identities >= 1
        assert receipt.took_s >= 0
        assert store.lookup(TOKENS).tokens == 0
        with store.lookup(prompt) as hit:
            assert hit.tokens > 0
        store.check()
        layout.save(store, TOKENS)
        assert store.flush(_WAIT_S)
        assert store.lookup(TOKENS).tokens == layout.hit_of(len(TOKENS), len(TOKENS))
        store.check()

    def test_a_forgotten_session_takes_only_its_own_pages(self, store: Store, layout: Layout) -> None:
        shared = TOKENS[:32]
        layout.save(store, shared, session="first")
        layout.save(store, [*shared, *range(500, 532)], session="second")
        assert store.flush(_WAIT_S)
        assert store.forget(session="second") is not None
        assert store.lookup([*shared, *range(500, 532)]).tokens <= 32
        assert store.lookup(shared).tokens == 32
        assert store.finish("second") == 0
        store.check()

    def test_what_to_forget_must_be_said(self, store: Store) -> None:
        for wrong in ({}, {"session": ""}, {"session": "a", "model": "b"}):
            with pytest.raises(UsageError):
                store.forget(**wrong)

    def test_promised_pages_are_waited_for(self, store: Store, layout: Layout) -> None:
        layout.save(store, TOKENS[:32])
        there = store.expect(TOKENS, Promise(32, 10.0))
        there.wait(_WAIT_S)
        assert there.state is TransferState.DONE
        store.expect(TOKENS, Promise(64, 0.05)).wait(_WAIT_S)
        assert store.lookup(TOKENS).tokens == 32

    # -- wrong arguments, statistics, closing --------------------------------------------------------

    def test_bad_arguments_are_said_and_lose_nothing(self, store: Store, layout: Layout) -> None:
        layout.save(store, TOKENS)
        last = layout.groups[-1].number
        content = layout.pages_of(TOKENS, last)
        with pytest.raises(UsageError, match="page buffer 0 must have"):
            store.save(TOKENS, [b"abc"], group=last)
        with pytest.raises(UsageError, match="must lie within"):
            store.save(TOKENS, content, first=1, group=last)
        with pytest.raises(UsageError, match=f"layer groups, got {last + 1}"):
            store.save(TOKENS, content, group=last + 1)
        with pytest.raises(UsageError, match="not 1$" if layout.single else "buffers for 1"):
            store.load(store.lookup(TOKENS), [bytearray(layout.groups[0].page_bytes)])
        with pytest.raises(UsageError, match="no page pool"):
            store.load(store.lookup(TOKENS))
        with pytest.raises(UsageError, match="another page layout"):
            store.lookup(Prompt(Identity("test", "float16 or so"), TOKENS, chunk_tokens=CHUNK))
        with pytest.raises(UsageError, match="session"):
            store.save(TOKENS, content, group=last, session="")
        assert store.lookup(TOKENS).tokens == len(TOKENS)

    def test_stats_count_what_happened(self, store: Store, layout: Layout) -> None:
        layout.save(store, TOKENS)
        layout.load(store, store.lookup([*TOKENS, 1, 2]))
        stats = store.stats()
        assert stats.counters["lookups"] == 1
        assert stats.counters["lookup_tokens"] == 72
        assert stats.counters["hit_tokens"]["host"] == 70  # type: ignore[index]
        assert stats.counters["saved_pages"] == 5 * len(layout.groups)
        assert stats.counters["loaded_pages"] == layout.num_pages(70)
        assert stats.failed_tasks == 0
        store.check()

    def test_it_can_be_waited_for(self, store: Store, layout: Layout) -> None:
        store.wait_ready()
        assert layout.save(store, TOKENS) == len(TOKENS)

    def test_a_closed_store_says_so(self, store: Store, layout: Layout) -> None:
        before = store.closed
        store.close()
        store.close()
        assert (before, store.closed) == (False, True)
        with pytest.raises(StoreClosedError):
            store.lookup(TOKENS)
        with pytest.raises(StoreClosedError):
            layout.save(store, TOKENS)

    def test_closing_in_the_middle_ends_every_transfer(self, open_store: OpenStore, layout: Layout) -> None:
        store = open_store(layout, identity=new_identity(layout.spec), pools=layout.pools(64))
        tokens = list(range(CHUNK * 40))
        layout.save(store, tokens)
        hit = store.lookup(tokens)
        buffers = layout.buffers(hit)
        others = range(5000, 5000 + CHUNK * 40)
        loading = layout.start_load(store, hit, buffers)
        transfers: list[Transfer[Any]] = [
            store.load(store.lookup(tokens)),
            store.lookup(tokens).prefetch(),
            *layout.start_save(store, others, [layout.pages_of(others, at) for at in range(len(buffers))]),
        ]
        store.close()
        for transfer in transfers:
            transfer.wait(_WAIT_S)
        loaded = loading.wait(_WAIT_S)
        assert isinstance(loaded, Loaded)
        assert layout.came(hit.tokens, loaded.tokens, buffers) == layout.right(tokens, loaded.tokens)


class TierTests(StoreFixtures):
    """Tests of the tiers: capacity, leases, pins, eviction, and loads from colder tiers."""

    # -- capacity, leases, pins ----------------------------------------------------------------------

    def test_capacity_holds_and_the_oldest_prompts_leave(self, open_store: OpenStore, layout: Layout) -> None:
        store = open_store(layout, identity=new_identity(layout.spec), host_chunks=8, disk=False)
        prompts = [list(range(1000 * n, 1000 * n + 64)) for n in range(10)]
        for tokens in prompts:
            assert layout.save(store, tokens) == 64
            host = store.stats().tiers["host"]
            assert host.used_bytes <= host.capacity_bytes
        assert [store.lookup(tokens).tokens for tokens in prompts] == [0] * 8 + [64] * 2

    def test_leased_pages_stay_and_nobody_waits_for_them(self, open_store: OpenStore, layout: Layout) -> None:
        store = open_store(layout, identity=new_identity(layout.spec), host_chunks=4, disk=False)

        def saved() -> bool:
            layout.save(store, range(64))
            with store.lookup(range(64)) as found:
                return found.tokens == 64

        # The leases of an earlier test's client may still fill the memory: a daemon notices the end of a
        # client with a delay.
        wait_until(saved)
        hit = store.lookup(range(64))
        assert hit.tokens == 64
        layout.save(store, range(1000, 1064))
        # One group may have stored its pages, and they may have been evicted for pages of another group.
        with store.lookup(range(1000, 1064)) as other:
            assert other.tokens < 64
        assert layout.load(store, hit) == (64, layout.right(range(64), 64))
        wait_until(lambda: layout.save(store, range(1000, 1064)) == 64)

    def test_a_lease_ends_by_itself_and_a_load_brings_what_is_still_there(
        self, open_store: OpenStore, layout: Layout
    ) -> None:
        store = open_store(layout, identity=new_identity(layout.spec), host_chunks=4, disk=False, lease_s=0.1)
        layout.save(store, range(64))
        hit = store.lookup(range(64))
        others = range(1000, 1048)
        wait_until(lambda: layout.save(store, others) == store.lookup(others).tokens == 48)
        count, got = layout.load(store, hit)
        assert count < 64
        assert got == layout.right(range(64), count)
        hit.release()

    def test_pins_outlast_pressure(self, open_store: OpenStore, layout: Layout) -> None:
        store = open_store(layout, identity=new_identity(layout.spec), host_chunks=6, disk=False)
        layout.save(store, TOKENS[:40])
        assert store.pin(TOKENS) == 32
        for n in range(1, 5):
            layout.save(store, range(1000 * n, 1000 * n + 64))
        with store.lookup(TOKENS) as hit:
            assert hit.tokens == 32
            assert layout.load(store, hit) == (32, layout.right(TOKENS, 32))
        assert store.unpin(TOKENS) == 32
        assert store.unpin(TOKENS) == 0

        def gone() -> bool:
            store.evict("host")
            with store.lookup(TOKENS) as hit:
                return hit.tokens == 0

        wait_until(gone)

    def test_pages_leave_a_tier_by_hand(self, open_store: OpenStore, layout: Layout) -> None:
        store = open_store(layout, identity=new_identity(layout.spec), disk=False)
        store.evict("host")
        layout.save(store, TOKENS)
        assert store.evict("host", 2) == 2
        left = store.lookup(TOKENS)
        assert layout.load(store, left) == (left.tokens, layout.right(TOKENS, left.tokens))
        if layout.single:
            assert left.tokens == 48
        evicted = [2]  # then the others, as soon as the load's leases have been released

        def all_evicted() -> bool:
            evicted.append(store.evict("host"))
            return sum(evicted) == 5 * len(layout.groups)

        wait_until(all_evicted)
        with pytest.raises(UsageError, match="unknown tier"):
            store.evict("tape")

    # -- the disk tier -------------------------------------------------------------------------------

    def test_flushed_pages_outlive_the_host_tier(self, store: Store, layout: Layout) -> None:
        self._needs_disk()
        layout.save(store, TOKENS)
        assert store.flush(_WAIT_S)
        store.evict("host")
        hit = store.lookup(TOKENS)
        assert hit.by_tier == {"disk": len(TOKENS)}
        assert layout.load(store, hit) == (len(TOKENS), layout.right(TOKENS, len(TOKENS)))

    def test_a_prefetch_brings_pages_up_from_disk(self, store: Store, layout: Layout) -> None:
        self._needs_disk()
        layout.save(store, TOKENS)
        assert store.flush(_WAIT_S)
        store.evict("host")
        with store.lookup(TOKENS) as hit:
            assert hit.prefetch().wait(_WAIT_S) == len(TOKENS)
            with store.lookup(TOKENS) as again:
                assert again.by_tier == {"host": len(TOKENS)}
            assert layout.load(store, hit) == (len(TOKENS), layout.right(TOKENS, len(TOKENS)))

    def test_a_hit_on_disk_may_be_larger_than_the_host_tier_is_free(
        self, open_store: OpenStore, layout: Layout
    ) -> None:
        self._needs_disk()
        store = open_store(layout, identity=new_identity(layout.spec), host_chunks=8)
        tokens = self._save_more_than_the_host_tier_holds(store, layout)
        hit = store.lookup(tokens)
        assert hit.tokens == len(tokens)
        count, got = layout.load(store, hit)
        assert count >= 4 * CHUNK or not layout.single  # one group without room shortens the hit to 0
        assert got == layout.right(tokens, count)

    def test_a_hit_whose_own_end_fills_the_host_tier_loads_from_its_beginning(
        self, open_store: OpenStore, layout: Layout
    ) -> None:
        self._needs_disk()
        store = open_store(layout, identity=new_identity(layout.spec), pools=layout.pools(40), host_chunks=8)
        tokens = self._save_more_than_the_host_tier_holds(store, layout)
        end = store.load_part(store.lookup(tokens), 24, 32, deadline_s=None, last=True).wait(_WAIT_S)
        layout.release_loaded(store, end)
        store.evict("hbm")
        hit = store.lookup(tokens)
        assert hit.tokens == len(tokens)
        count, got = layout.load(store, hit)
        assert count >= 4 * CHUNK or not layout.single
        assert got == layout.right(tokens, count)

    def _save_more_than_the_host_tier_holds(self, store: Store, layout: Layout) -> list[int]:
        tokens = list(range(CHUNK * 32))
        for first in range(0, 32, 4):
            prompt = tokens[: (first + 4) * CHUNK]
            for group in layout.groups:  # a page that is not on disk yet is not evicted, so flush each time
                content = layout.pages_of(prompt, group.number)[first:]
                saved = store.save(prompt, content, first=first, group=group.number)
                assert saved.wait(_WAIT_S) == 4 * CHUNK
                assert store.flush(_WAIT_S)
        store.evict("host")
        return tokens

    def _needs_disk(self) -> None:
        if not self.has_disk:
            pytest.skip("this store has no disk tier")

    # -- HBM -----------------------------------------------------------------------------------------

    def test_a_page_in_hbm_is_found_where_it_is(self, pooled: Store, layout: Layout) -> None:
        owned, stored = layout.compute(pooled, TOKENS)
        assert stored == len(TOKENS)
        layout.release(pooled, owned)
        hit = pooled.lookup(TOKENS, max_tokens=64)
        assert hit.by_tier == {"hbm": 64}
        loaded = pooled.load(hit).wait(_WAIT_S)
        for group, chunks in enumerate(layout.chunks(64)):
            assert loaded.groups[group].first == chunks.start
            assert loaded.groups[group].pages == tuple(owned[group][chunks.start : chunks.stop])
        assert loaded.pages == loaded.groups[0].pages
        assert loaded.moved_bytes == 0
        layout.release_loaded(pooled, loaded)

    def test_a_hit_that_ends_inside_a_page_gives_a_private_copy(self, pooled: Store, layout: Layout) -> None:
        room = layout.room(pooled)
        owned, _ = layout.compute(pooled, TOKENS)
        limit = 40 if layout.single else len(TOKENS)
        loaded = pooled.load(pooled.lookup(TOKENS, max_tokens=limit)).wait(_WAIT_S)
        assert loaded.tokens == limit
        *whole, last = loaded.pages
        assert whole == owned[0][: len(whole)]
        assert last not in owned[0]
        assert layout.read_hbm(pooled, loaded) == layout.right(TOKENS, limit)
        layout.write_hbm(pooled, 0, [last], [bytes(layout.groups[0].page_bytes)])  # the engine writes
        layout.release_loaded(pooled, loaded)
        layout.release(pooled, owned)
        assert layout.load(pooled, pooled.lookup(TOKENS)) == (70, layout.right(TOKENS, 70))
        wait_until(lambda: layout.room(pooled) == room)

    def test_pages_evicted_from_hbm_come_back(self, pooled: Store, layout: Layout) -> None:
        room = layout.room(pooled)
        owned, _ = layout.compute(pooled, TOKENS)
        layout.release(pooled, owned)
        for group in layout.groups:
            evicted = 0

            def five(number: int = group.number) -> bool:
                nonlocal evicted
                evicted += pooled.evict("hbm", group=number)
                return evicted == 5

            wait_until(five)
        hit = pooled.lookup(TOKENS)
        assert hit.by_tier == {"host": len(TOKENS)}
        loaded = pooled.load(hit).wait(_WAIT_S)
        assert loaded.tokens == len(TOKENS)
        assert loaded.moved_bytes == sum(
            len(chunks) * group.page_bytes
            for group, chunks in zip(layout.groups, layout.chunks(len(TOKENS)), strict=True)
        )
        assert layout.read_hbm(pooled, loaded) == layout.right(TOKENS, len(TOKENS))
        layout.release_loaded(pooled, loaded)
        if layout.single:
            with pooled.lookup(TOKENS, max_tokens=64) as again:
                assert again.by_tier == {"hbm": 64}
        assert layout.room(pooled) == room

    def test_pages_in_hbm_load_into_buffers_too(self, pooled: Store, layout: Layout) -> None:
        owned, _ = layout.compute(pooled, TOKENS)
        assert layout.load(pooled, pooled.lookup(TOKENS)) == (70, layout.right(TOKENS, 70))
        layout.release(pooled, owned)

    def test_a_full_pool_gives_none_and_loads_come_short(self, pooled: Store, layout: Layout) -> None:
        room = layout.room(pooled)
        layout.save(pooled, TOKENS)
        held = pooled.allocate_hbm(room[0] - 3)
        assert held is not None
        assert pooled.allocate_hbm(4) is None
        loaded = pooled.load(pooled.lookup(TOKENS)).wait(_WAIT_S)
        assert loaded.tokens == 48 if layout.single else loaded.tokens <= 48
        assert layout.read_hbm(pooled, loaded) == layout.right(TOKENS, loaded.tokens)
        layout.release_loaded(pooled, loaded)
        pooled.release_hbm(held)
        assert layout.room(pooled) == room

    def test_two_sequences_that_compute_the_same_pages_keep_one_copy(
        self, pooled: Store, layout: Layout
    ) -> None:
        room = layout.room(pooled)
        first, stored = layout.compute(pooled, TOKENS)
        second, again = layout.compute(pooled, TOKENS)
        assert stored == again == len(TOKENS)
        layout.release(pooled, second)
        assert pooled.stats().tiers["hbm"].pages == 5 * len(layout.groups)
        layout.release(pooled, first)
        wait_until(lambda: layout.room(pooled) == room)
        assert layout.load(pooled, pooled.lookup(TOKENS))[1] == layout.right(TOKENS, 70)

    def test_allocating_evicts_what_nobody_holds(self, pooled: Store, layout: Layout) -> None:
        room = layout.room(pooled)
        owned, _ = layout.compute(pooled, TOKENS)
        layout.release(pooled, owned)
        wait_until(lambda: layout.room(pooled) == room)
        for group in layout.groups:
            everything = pooled.allocate_hbm(room[group.number], group=group.number)
            assert everything is not None
            assert layout.room(pooled) == [0] * len(room)
            pooled.release_hbm(everything, group=group.number)


class StoreTests(VerbTests, TierTests):
    """The requirements for every store, for models with one layer group and with several. See the module's
    docstring for an example."""

    @pytest.fixture
    def sequences(self) -> int:
        """How many random sequences of calls are tried. Override this fixture to change the number."""
        return 25

    def test_any_sequence_of_verbs_agrees_with_a_dictionary(
        self, open_store: OpenStore, layout: Layout, sequences: int
    ) -> None:
        def machine() -> StoreMachine:
            store = open_store(layout, identity=new_identity(layout.spec), pools=layout.pools(24))
            return StoreMachine(store, layout)

        run_state_machine_as_test(
            machine,  # type: ignore[arg-type]  # any callable will do
            settings=settings(
                max_examples=sequences,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
