"""A second way into vLLM (0.32): its own OffloadingConnector, with a tierstore daemon behind it.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TierStoreOffloadingSpec",
                                    "spec_module_path": "tierstore_connectors.vllm_offloading"}}'

vLLM decides here what is looked up, loaded and saved, for every kind of KV cache it has; this module only
keeps blocks. So it is the oracle for ``tierstore_connectors.vllm``, which decides for itself. It is slow: a
page is one block of one group, with a question of its own.

Two things make it no replacement. A load may not fail: vLLM 0.32 ends the engine if one does (an assertion in
``OffloadingConnectorWorker.get_finished``). So the scheduler's process has the bytes before it says "hit",
and sends them to the workers with the step. And of the model vLLM tells a spec only the name and the KV
dtype: the files of a local directory are looked at, but what other flags change needs a ``namespace``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import vllm
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.config import OffloadingConfig

from tierstore.daemon.settings import default_listen
from tierstore.keys import Identity, TokenIds
from tierstore.spec import KVSpec
from tierstore.store import Store

_KEY_BYTES = 36  # of the longest: SHA-256 and the group
_WAIT_S = 2.0
_THREADS = 8
_MOST_STAGED_BYTES = 1 << 30


@dataclass
class Pages(base.LoadStoreSpec):
    """``keys`` of blocks in the order of their block ids; for a load, ``contents[i]`` are the bytes of block
    ``i`` on each rank."""

    keys: list[base.OffloadKey]
    contents: list[list[bytes]]


class TierStoreOffloadingSpec(base.OffloadingSpec):
    """``kv_connector_extra_config``: ``store`` (the daemon's address), ``namespace``, ``wait_s`` (the longest
    that a request waits for an answer about a block, and for the block). Raises ValueError for more than one
    block per chunk."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if self.blocks_per_chunk != 1:
            raise ValueError("TierStoreOffloadingSpec keeps single blocks: leave blocks_per_chunk at 1")
        self._wait_s = float(self.extra_config.get("wait_s", _WAIT_S))
        self._spec = KVSpec.opaque(config.worker_kv_bytes_per_block, chunk_tokens=_KEY_BYTES // 4)
        self._model = f"{config.model.name} {_digest(Path(config.model.name))} {vllm.__version__}"

    def open_store(self, rank: int) -> Store:
        """The store with the pages of one worker."""
        config, parallel = self.config, self.config.parallel
        identity = Identity.of(
            self._spec,
            model=self._model,
            revision=str(self.extra_config.get("namespace", "")),
            codec=f"vllm {config.model.dtype} {config.kv_cache_layout} {config.cache} {config.groups}",
            shard=f"{rank} of tp{parallel.tp_size} pp{parallel.pp_size} dcp{parallel.dcp_size}",
        )
        url = str(self.extra_config.get("store") or default_listen())
        return Store.connect(url, self._spec, identity=identity, lookup_s=self._wait_s)

    def get_manager(self) -> base.OffloadingManager:
        stores = [self.open_store(rank) for rank in range(self.config.parallel.world_size)]
        return _Manager(stores, self._wait_s)

    def get_worker(self, kv_caches: base.CanonicalKVCaches) -> base.OffloadingWorker:
        rank = self.config.parallel.rank
        return _Worker(self.open_store(rank), rank, kv_caches)


class _Manager(base.OffloadingManager):
    """In the scheduler's process. What a request has asked for stays here until it has finished."""

    def __init__(self, stores: list[Store], wait_s: float) -> None:
        self._stores = stores
        self._wait_s = wait_s
        self._threads = ThreadPoolExecutor(_THREADS, "tierstore-offloading")
        self._staged: dict[base.OffloadKey, Future[list[bytes] | None]] = {}
        self._asked: dict[str, set[base.OffloadKey]] = {}
        self._askers: Counter[base.OffloadKey] = Counter()
        self._room = _MOST_STAGED_BYTES // (len(stores) * stores[0].spec.page_bytes)
        self._reset = False

    def lookup(self, key: base.OffloadKey, req_context: base.ReqContext) -> base.LookupResult:
        asked = self._asked.setdefault(req_context.req_id, set())
        if key not in asked:
            asked.add(key)
            self._askers[key] += 1
        if key not in self._staged:
            if self._reset or len(self._staged) >= self._room:
                return base.LookupResult.MISS
            self._staged[key] = self._threads.submit(self._fetch, key)
        found = self._staged[key]
        if not found.done():
            return base.LookupResult.RETRY
        return (
            base.LookupResult.HIT if found.exception() is None and found.result() else base.LookupResult.MISS
        )

    def _fetch(self, key: base.OffloadKey) -> list[bytes] | None:
        """The block on every rank, or None."""
        contents = []
        for store in self._stores:
            hit = store.lookup(_tokens(key))
            page = bytearray(store.spec.page_bytes)
            if not hit.num_pages or not store.load(hit, [page], deadline_s=self._wait_s).wait().tokens:
                return None
            contents.append(bytes(page))
        return contents

    def prepare_load(
        self, keys: Collection[base.OffloadKey], req_context: base.ReqContext
    ) -> base.LoadStoreSpec:
        return Pages(list(keys), [self._staged[key].result() or [] for key in keys])

    def prepare_store(
        self, keys: Collection[base.OffloadKey], req_context: base.ReqContext
    ) -> base.PrepareStoreOutput | None:
        return None if self._reset else base.PrepareStoreOutput(list(keys), Pages(list(keys), []), [])

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        return base.RequestOffloadingContext()

    def on_request_finished(self, req_context: base.ReqContext) -> None:
        for key in self._asked.pop(req_context.req_id, ()):
            self._askers[key] -= 1
            if not self._askers[key]:
                del self._askers[key]
                self._staged.pop(key, None)

    def reset_cache(self) -> None:
        """The weights may have changed, and the workers cannot be told: nothing is kept or found any more."""
        self._reset = True

    def shutdown(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for store in self._stores:
            store.close()


class _Worker(base.OffloadingWorker):
    """In the process of one rank. Copies in the call: what is submitted is finished."""

    def __init__(self, store: Store, rank: int, kv_caches: base.CanonicalKVCaches) -> None:
        self._store = store
        self._rank = rank
        self._groups = [
            [(kv_caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self._finished: list[base.TransferResult] = []

    def submit_store(self, job_id: int, src_spec: base.GPULoadStoreSpec, dst_spec: Pages) -> bool:
        for key, rows in zip(dst_spec.keys, self._rows(src_spec), strict=True):
            page = b"".join(row.cpu().numpy().tobytes() for row in rows)
            self._store.save(_tokens(key), [page.ljust(self._store.spec.page_bytes, b"\0")])
        return self._finish(job_id)

    def submit_load(self, job_id: int, src_spec: Pages, dst_spec: base.GPULoadStoreSpec) -> bool:
        for contents, rows in zip(src_spec.contents, self._rows(dst_spec), strict=True):
            page = torch.frombuffer(bytearray(contents[self._rank]), dtype=torch.int8)
            at = 0
            for row in rows:
                row.copy_(page[at : at + len(row)])
                at += len(row)
        return self._finish(job_id)

    def _rows(self, spec: base.GPULoadStoreSpec) -> Iterator[list[torch.Tensor]]:
        """For each block of ``spec`` in turn: where its layers' bytes are."""
        groups = [
            group for group, size in zip(self._groups, spec.group_sizes, strict=True) for _ in range(size)
        ]
        for block, group in zip(spec.block_ids, groups, strict=True):
            yield [tensor[block, :nbytes] for tensor, nbytes in group]

    def _finish(self, job_id: int) -> bool:
        self._finished.append(base.TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[base.TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        self._store.close()


def _tokens(key: base.OffloadKey) -> TokenIds:
    """The key itself in the place of token ids: as those are compared, all of vLLM's hash is."""
    return np.frombuffer(key.ljust(_KEY_BYTES, b"\0"), np.dtype("<u4"))


def _digest(directory: Path) -> str:
    """Of the configuration and of the names, sizes and times of the files in a local model's directory."""
    files = sorted(directory.iterdir()) if directory.is_dir() else []
    facts = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files if each.is_file()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
