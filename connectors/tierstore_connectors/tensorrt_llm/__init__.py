"""TensorRT-LLM's KV cache connector: KV blocks of TensorRT-LLM engines in a tierstore daemon. **Not run on
TensorRT-LLM**, which needs a GPU: it is written from the interface's sources and tested against a stand-in.

    kv_connector_config:
      connector_module: tierstore_connectors.tensorrt_llm
      connector_scheduler_class: TierStoreScheduler
      connector_worker_class: TierStoreWorker

TensorRT-LLM makes a scheduler on rank 0, and a worker on every rank. Their only link is the value that
``build_connector_meta`` returns for each forward pass, which TensorRT-LLM broadcasts to all ranks.

**The interface cannot report a failed load.** Once ``get_num_new_matched_tokens`` has answered, the engine
computes only what follows. An exception in a later call ends all requests. So nothing may be able to fail any
more when it answers:

1. ``get_num_new_matched_tokens`` looks the prompt up for every rank, loads the pages, and copies them to
   memory of this process. It answers with the tokens that are there. If the store is away, slow or killed at
   any time before, the answer is shorter or 0. Afterwards no daemon, lease or mapping is needed.
2. ``update_state_after_alloc`` learns the blocks. ``build_connector_meta`` passes the bytes themselves on.
3. ``start_load_kv`` copies them to the blocks, and returns when the copy has ended.

Steps 2 and 3 raise for what is impossible (no blocks for loaded tokens), because wrong KV is worse than an
engine that stops. All other methods catch their errors and act as an empty cache (:func:`guarded`).

**Saves** need no answer. A page is saved in the forward pass that completes it: ``wait_for_save`` copies its
blocks to host memory after the pass, while their request still owns them. The store takes the copies in the
background. No block is held back, and ``request_finished`` never asks for time.

**Order on the device.** Blocks are read and written only while the whole device is idle
(``torch.cuda.synchronize``). This costs a pause in passes that load or complete pages. It does not depend on
which streams the engine uses, which cannot be tried here.

**Blocks.** ``register_kv_caches`` passes one contiguous tensor whose first dimension is the block. A page is
the blocks of ``chunk_tokens`` tokens, opaque, found by tokens. Each rank has pages of its own. Blocks that
the engine reuses itself are shared with other requests and never written: a load begins behind them.

Everything that this does not cover is refused (``identity.py``): an engine at its start, or a request, which
is then computed without the store.
"""

from __future__ import annotations

from tierstore_connectors.tensorrt_llm.scheduler import TierStoreScheduler
from tierstore_connectors.tensorrt_llm.worker import TierStoreWorker

__all__ = ["TierStoreScheduler", "TierStoreWorker"]
