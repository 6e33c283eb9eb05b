"""SGLang's configurations over a real daemon: what was saved comes back, equal to the bit."""

from __future__ import annotations

import pytest

from tests.sglang.conftest import MISSING

if MISSING:
    pytest.skip("SGLang is not installed; make test-sglang", allow_module_level=True)

import random
import threading
from array import array

from sglang.srt import runtime_context
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey

from tests.sglang.caches import CONFIGS, CacheConfig, CacheRequestHandle, Caches, Watched, kit, match_prefix


class OverDaemon(Caches):
    @pytest.fixture(autouse=True)
    def _over(self, shared_daemon):
        self.url = shared_daemon.url


class RoundTrip(OverDaemon):
    def test_round_trip(self):
        if self.cfg.has_mamba and self.layout == "layer_first":
            self.skipTest("SGLang has no such pools")
        window = (self.cfg.sliding_window_size or 0) // self.cfg.page_size
        directory, tokens = self._make_storage_dir(), self.prompt(4 + window)
        self.consume(directory, tokens, self.produce(directory, tokens))

    def test_host_memory_that_is_staging_only(self):
        if self.cfg.has_mamba:
            self.skipTest("SGLang's fixtures have no states there")
        directory, tokens = self._make_storage_dir(), self._buffer_swa_seq(4)
        if len(tokens) > self.cfg.kv_size // 2:
            self.skipTest("longer than the pool of this configuration")
        self._produce_buffer_l3(directory, tokens, marker=9)
        cache, _, _ = self._build_buffer_hicache_fixture(directory)
        handle = CacheRequestHandle("b", 0)
        cache.prefetch_from_storage(handle, cache.root_node_handle(), array("q", tokens), None, None)
        self._run_prefetch_to_completion(cache, handle)
        assert match_prefix(cache, tokens).device_prefix_len == len(tokens)


for _number, _config in enumerate(each for each in CONFIGS if not each.is_eagle):
    for _layout in ("page_first_direct", "layer_first"):
        _name = f"Test{_number}{_config.label}_{_layout}"
        globals()[_name] = type(_name, (RoundTrip,), {"cfg": _config, "layout": _layout, "__test__": True})


class TestWhatElse(OverDaemon):
    __test__ = True
    cfg = CacheConfig(page_size=16, num_layers=2, kv_size=512)

    def test_a_longer_prompt_gets_the_prefix_another_one_nothing(self):
        directory, tokens = self._make_storage_dir(), self.prompt(4)
        self.produce(directory, tokens)
        cache, _, _ = self._l3_consumer(directory)
        assert self.fetch(cache, tokens + self._make_seq(7000, 3)) == len(tokens)
        assert self.fetch(cache, self._make_seq(9000, 4), "other") == 0

    def test_another_namespace_gets_nothing(self):
        tokens = self.prompt(4)
        self.produce(self._make_storage_dir(), tokens)
        cache, _, _ = self._l3_consumer(self._make_storage_dir())
        assert self.fetch(cache, tokens) == 0

    def test_pages_that_leave_between_the_query_and_the_read_are_saved_again(self):
        for came in (0, 2):
            with self.subTest(came=came):
                directory, tokens = self._make_storage_dir(), self.prompt(4, start=1 + 1000 * came)
                self._produce_buffer_l3(directory, tokens, marker=9)
                cache, allocator, requests = self._build_buffer_hicache_fixture(directory)
                storage, names = Watched.made[-1], self.names(tokens)

                def leave(storage=storage, came=came):
                    storage.clear()  # nothing of before is found any more
                    return [at < came for at in range(4)]

                Watched.faults["batch_get_v1"] = leave
                handle = CacheRequestHandle(f"leaving {came}", 0)
                cache.prefetch_from_storage(handle, cache.root_node_handle(), array("q", tokens), None, None)
                self._run_prefetch_to_completion(cache, handle)
                assert not Watched.faults, "the pages were read"
                if cache.buffer_pipeline.has_staged(handle):
                    cache.buffer_pipeline.release_staged_hold(handle, reason="test")
                assert storage.batch_exists(names) == 0
                self._insert(cache, allocator, requests, tokens)  # computed instead
                leaf = cache.match_prefix(
                    MatchPrefixParams(key=RadixKey(array("q", tokens)))
                ).last_device_node
                kit.write_backup(cache, leaf)
                self._drain_buffer_writes(cache)
                assert storage.batch_exists(names[came:]) == 4 - came

    def test_missed_pages_are_explained(self):
        directory, tokens = self._make_storage_dir(), self.prompt(4)
        self.produce(directory, tokens)
        cache = self.explaining(directory)
        with self.assertLogs("sglang.tierstore", "INFO") as log:
            assert self.fetch(cache, tokens + self._make_seq(7000, 3)) == len(tokens)
            counted = self.explained()
        assert counted == {"missed_tokens:never_saved": 48}
        [line] = [line for line in log.output if "missed" in line]
        assert "112 tokens, 64 reused; missed: 48 from token 64 on: never saved" in line

    def test_pages_that_only_one_pool_lacks_are_explained(self):
        cache = self.explaining(self._make_storage_dir())
        storage, pool = Watched.made[-1], cache.cache_controller.mem_pool_host.anchor_entry.host_pool
        names = [f"{page:064x}" for page in range(5)]
        slots = pool.alloc(4 * self.cfg.page_size)
        for name, pages in ((PoolName.KV, 4), (PoolName.SWA, 2)):
            storage.register_mem_host_pool_v2(pool, name)
            there = slots[: pages * self.cfg.page_size]
            storage.batch_set_v2([PoolTransfer(name, there, keys=names[:pages])])
        window = PoolTransfer(PoolName.SWA, keys=["?"] * 2, hit_policy=PoolHitPolicy.TRAILING_PAGES)
        with self.assertLogs("sglang.tierstore", "INFO") as log:
            assert storage.batch_exists_v2(names, [window]).kv_hit_pages == 2
            counted = self.explained()
        assert counted == {"missed_tokens:group": 32, "missed_tokens:never_saved": 16}
        assert "pool swa lacks the pages that a longer hit needs" in "".join(log.output)
        pool.free(slots)

    def explaining(self, directory):
        """A cache over a storage with the setting ``explain``."""
        cache, _, _ = kit.build_fixture(self.cfg)
        options = {"storage_backend": "file", "storage_dir": directory, "prefetch_threshold": 1}
        self._init_hicache(cache, **options, storage_extra={"explain": True})
        return cache

    def explained(self):
        """Wait for the reasons of all queries, and return how they were counted."""
        storage = Watched.made[-1]
        storage._misses._thread.shutdown(wait=True)
        return storage.counters.take()

    def test_a_get_that_no_query_came_before(self):
        directory, tokens = self._make_storage_dir(), self.prompt(4)
        self.produce(directory, tokens)
        cache, _, _ = self._l3_consumer(directory)
        pool = cache.cache_controller.mem_pool_host
        slots, names = pool.alloc(len(tokens)), self.names(tokens)
        assert Watched.made[-1].batch_get_v1(names, slots) == [True] * 4
        assert Watched.made[-1].batch_get_v1(["00" * 32, *names[1:]], slots) == [False, True, True, True]
        pool.free(slots)

    def test_hits_of_several_pools_are_those_of_sglangs_own_storage(self):
        """Full attention, a window, states and an indexer, of each of which some pages are there."""
        directory, pages = self._make_storage_dir(), 12
        cache, _, _ = self._l3_consumer(directory)
        storage, pool = Watched.made[-1], cache.cache_controller.mem_pool_host.anchor_entry.host_pool
        files = HiCacheFile(storage._config, self._make_storage_dir())
        policies = {
            PoolName.SWA: PoolHitPolicy.TRAILING_PAGES,
            PoolName.MAMBA: PoolHitPolicy.TRAILING_PAGES,
            PoolName.INDEXER: PoolHitPolicy.ALL_PAGES,
        }
        for each in (storage, files):
            each.register_mem_pool_host(pool)
            for name in (PoolName.KV, *policies):
                each.register_mem_host_pool_v2(pool, name)
        draw = random.Random(1)
        slots = pool.alloc(pages * self.cfg.page_size)
        restorable = 0
        for turn in range(60):
            names = [f"{turn:08x}{page:08x}{0:048x}" for page in range(pages)]
            left_out = {
                name: draw.sample(range(pages), draw.randrange(4)) for name in (PoolName.KV, *policies)
            }
            for name, missing in left_out.items():
                kept = [each for at, each in enumerate(names) if at not in missing]
                there = slots[: len(kept) * self.cfg.page_size]
                for each in (storage, files):
                    saved = each.batch_set_v2([PoolTransfer(name, there, keys=kept)])
                    assert all(saved[name])
            asked = [
                PoolTransfer(name, keys=["?"] * draw.randrange(1, 5), hit_policy=policy)
                for name, policy in draw.sample(sorted(policies.items()), draw.randrange(4))
            ]
            found = storage.batch_exists_v2(names, asked)
            assert found == files.batch_exists_v2(names, asked), (left_out, asked)
            restorable += len(found.restorable_prefix_pages)
        assert restorable > 60
        pool.free(slots)

    def test_after_clear_nothing_of_before_is_served(self):
        directory, tokens = self._make_storage_dir(), self.prompt(4)
        self.produce(directory, tokens)
        self._l3_consumer(directory)
        storage, names = Watched.made[-1], self.names(tokens)
        assert storage.batch_exists(names) == 4
        storage.clear()
        assert storage.batch_exists(names) == 0

    def test_after_an_update_that_names_a_version_nothing_of_before_is_served(self):
        directory, tokens = self._make_storage_dir(), self.prompt(4)
        self.produce(directory, tokens)
        cache, _, _ = self._l3_consumer(directory)
        storage, names = Watched.made[-1], self.names(tokens)
        slots = cache.cache_controller.mem_pool_host.alloc(len(tokens))
        assert storage.batch_exists(names) == 4
        version = runtime_context.get_serving().weight_version
        context = runtime_context.get_context()
        context.override("test", weight_version="another")
        try:
            assert storage.batch_exists(names) == 0
            assert storage.batch_get_v1(names, slots) == [False] * 4
            # This thread was there before: its pages may be of the old weights. SGLang's flush begins others.
            assert storage.batch_set_v1(names, slots) == [False] * 4
            saved = []
            thread = threading.Thread(target=lambda: saved.extend(storage.batch_set_v1(names, slots)))
            thread.start()
            thread.join()
            assert saved == [True] * 4
            assert storage.batch_exists(names) == 4
        finally:
            context.override("test", weight_version=version)

    def test_three_threads_ask_read_and_write(self):
        directory, tokens = self._make_storage_dir(), self.prompt(4)
        self.produce(directory, tokens)
        cache, _, _ = self._l3_consumer(directory)
        storage, names = Watched.made[-1], self.names(tokens)
        pool = cache.cache_controller.mem_pool_host
        read, written = pool.alloc(len(tokens)), pool.alloc(len(tokens))
        wrong = []

        def often(call, expected):
            wrong.extend(got for number in range(50) if (got := call(number)) != expected)

        calls = [
            (lambda _: storage.batch_exists(names), 4),
            (lambda _: storage.batch_get_v1(names, read), [True] * 4),
            (lambda n: storage.batch_set_v1([f"{n:08x}{p:056x}" for p in range(4)], written), [True] * 4),
        ]
        threads = [threading.Thread(target=often, args=each) for each in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


class TestWithoutDaemon(Caches):
    __test__ = True
    cfg = CacheConfig(page_size=16, num_layers=2, kv_size=256)

    @pytest.fixture(autouse=True)
    def _over(self, daemon):
        self.url = daemon.url
        self.daemon = daemon

    def test_a_daemon_that_goes_is_a_miss(self):
        directory, tokens = self._make_storage_dir(), self.prompt(4)
        self.produce(directory, tokens)
        cache, _, _ = self._l3_consumer(directory)
        storage, names = Watched.made[-1], self.names(tokens)
        pool = cache.cache_controller.mem_pool_host
        slots = pool.alloc(len(tokens))
        self.daemon.kill()
        assert storage.batch_exists(names) == 0
        assert storage.batch_get_v1(names, slots) == [False] * 4
        assert storage.batch_set_v1(names, slots) == [False] * 4
        assert dict(storage.errors.counts) == {}
        pool.free(slots)


def _raises():
    raise OSError("the disk has gone")


class TestFaults(OverDaemon):
    """A call that fails costs one operation; SGLang's threads live on."""

    __test__ = True
    cfg = CacheConfig(page_size=16, num_layers=2, kv_size=256)

    def fails(self, method, fault):
        directory, tokens = self._make_storage_dir(), self.prompt(4)
        if method == "batch_set_v1":
            Watched.faults[method] = fault
            self.produce(directory, tokens)
        self.produce(directory, tokens)
        cache, _, _ = self._l3_consumer(directory)
        if method != "batch_set_v1":
            Watched.faults[method] = fault
            assert self.fetch(cache, tokens, "first") == 0
        assert self.fetch(cache, tokens, "second") == len(tokens)
        controller = cache.cache_controller
        for thread in (
            controller.prefetch_thread,
            controller.prefetch_io_aux_thread,
            controller.backup_thread,
        ):
            assert thread.is_alive()

    def test_a_query_raises(self):
        self.fails("batch_exists", _raises)

    def test_a_get_raises(self):
        self.fails("batch_get_v1", _raises)

    def test_a_set_raises(self):
        self.fails("batch_set_v1", _raises)
