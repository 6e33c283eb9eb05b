"""SGLang's own fixtures of its hierarchical cache, with our storage behind it."""

from __future__ import annotations

import json
import sys
import types
import unittest
from array import array
from typing import ClassVar

_stand_in = types.ModuleType("sglang.test.test_utils")  # the real one imports data sets
_stand_in.CustomTestCase = unittest.TestCase
sys.modules.setdefault("sglang.test.test_utils", _stand_in)

import sglang.test.kits.unified_radix_cache.fixtures as kit  # noqa: E402
import torch  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CONFIGS, CacheConfig  # noqa: E402
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures  # noqa: E402

from tierstore_connectors.sglang.backend import TierStoreHiCache  # noqa: E402

__all__ = ["CONFIGS", "CacheConfig", "CacheRequestHandle", "Caches", "Watched", "kit", "match_prefix"]

kit.get_device = lambda *_: "cpu"
match_prefix = kit.match_prefix


class Watched(TierStoreHiCache):
    """Remembers the storages that SGLang has made, and fails once where a test says so."""

    made: ClassVar[list[Watched]] = []
    faults: ClassVar[dict] = {}

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.made.append(self)

    def _fault(self, method):
        return self.faults.pop(method, lambda: None)()

    def batch_exists(self, keys, extra_info=None):
        return self._once("batch_exists", keys, extra_info)

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        return self._once("batch_get_v1", keys, host_indices, extra_info)

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        return self._once("batch_set_v1", keys, host_indices, extra_info)

    def _once(self, method, *arguments):
        fault = self.faults.pop(method, None)
        return fault() if fault is not None else getattr(super(), method)(*arguments)


class Caches(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """``cfg`` is one of SGLang's configurations; ``url`` is set by a fixture of pytest's. Pages of one test
    are in a namespace of its own: the folder that SGLang's fixtures give a storage."""

    __test__ = False
    layout = "page_first_direct"
    url = ""

    def setUp(self):
        super().setUp()
        Watched.made.clear()
        Watched.faults.clear()

    def _init_hicache(self, cache, **options):
        """In the place of SGLang's, which knows its own storages only."""
        whose = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        whose.__enter__()
        self.addCleanup(whose.__exit__, None, None, None)
        with_storage = bool(options.get("storage_backend"))
        settings = {
            "backend_name": "tierstore",
            "module_path": __name__,
            "class_name": "Watched",
            "interface_v1": 1,
            "store": self.url,
            "namespace": str(options.get("storage_dir")),
            **(options.get("storage_extra") or {}),
        }
        if options.get("prefetch_threshold") is not None:
            settings["prefetch_threshold"] = options["prefetch_threshold"]
        arguments = ServerArgs(
            model_path="dummy",
            page_size=self.cfg.page_size,
            context_length=options.get("context_length"),
            hicache_io_backend="direct",
            hicache_mem_layout=self.layout,
            hicache_write_policy=options.get("write_policy", "write_through"),
            hicache_storage_backend="dynamic" if with_storage else None,
            hicache_storage_backend_extra_config=json.dumps(settings) if with_storage else None,
            hicache_storage_prefetch_policy=options.get("prefetch_policy", "wait_complete"),
            hicache_host_memory_mode=options.get("host_memory_mode", "cache"),
        )
        arguments._mamba_cache_chunk_size = max(64, self.cfg.page_size)
        set_global_server_args_for_scheduler(arguments)
        cache.init_hicache(arguments, cache.cache_init_params)
        self.addCleanup(kit.drop_hicache_atexit_pin, cache)
        self.addCleanup(cache.release_host_resources)
        cache.write_through_threshold, cache.load_back_threshold = 1 << 30, 0
        if with_storage:
            controller = cache.cache_controller
            controller.prefetch_capacity_limit = max(
                controller.prefetch_capacity_limit, controller.mem_pool_host.size
            )
            self.addCleanup(controller._stop_storage_threads)

    # -- what tests do ---------------------------------------------------------------------------------

    def prompt(self, pages, start=1):
        tokens = self._make_seq(start, pages)
        if len(tokens) > self.cfg.kv_size // 2:
            self.skipTest("longer than the pool of this configuration")
        return tokens

    def produce(self, directory, tokens):
        """Compute a prompt in one cache, and have it saved. What its KV is."""
        return self._l3_produce(directory, tokens, marker=5)

    def fetch(self, cache, tokens, request="r"):
        """Ask the storage, as SGLang's scheduler does. How many tokens are in host memory then."""
        handle = CacheRequestHandle(request, 0)
        cache.prefetch_from_storage(handle, cache.root_node_handle(), array("q", tokens), None, None)
        self._run_prefetch_to_completion(cache, handle)
        return match_prefix(cache, tokens).host_hit_length

    def consume(self, directory, tokens, computed):
        """Have all of a prompt come back in another cache, and compare its bits."""
        cache, allocator, requests = self._l3_consumer(directory)
        assert self.fetch(cache, tokens) == len(tokens)
        self._load_back_through_admission(cache, requests, tokens)
        self._finish_pending_loads(cache)
        match = match_prefix(cache, tokens)
        assert match.device_prefix_len == len(tokens)
        got = self._snapshot_full_kv(allocator, cache.path_device_indices(match.last_device_node))
        for one, other in zip(computed, got, strict=True):
            assert torch.equal(one, other)

    def names(self, tokens):
        """SGLang's names of a prompt's pages."""
        return get_storage_hash_str(RadixKey(array("q", tokens)), None, page_size=self.cfg.page_size)
