"""The KV cache connector for TensorRT-LLM: it keeps KV blocks of engines in a tierstore daemon. **It has not
run on TensorRT-LLM**, which needs a GPU. The code follows the source of
TensorRT-LLM's interface, and tests use a stand-in for TensorRT-LLM.

    kv_connector_config:
      connector_module: tierstore_connectors.tensorrt_llm
      connector_scheduler_class: TierStoreScheduler
      connector_worker_class: TierStoreWorker

TensorRT-LLM creates a connector scheduler on rank 0, and a connector worker on every rank. The scheduler
sends only the return value of ``build_connector_meta`` to the workers, which TensorRT-LLM broadcasts for each
forward pass.

**The interface cannot report a failed load.** After ``get_num_new_matched_tokens`` has returned a number of
tokens, the engine computes only the tokens after them. An exception in a later call ends all requests. So all
steps of a load that may fail come before this return:

1. ``get_num_new_matched_tokens`` looks the prompt up for every rank, loads the pages, and copies them to
   memory of this process. The method returns the number of loaded tokens. If the store is unavailable or
   slow, this number is smaller or 0. Later steps need neither the daemon nor a lease.
2. ``update_state_after_alloc`` gets the numbers of the blocks, and ``build_connector_meta`` returns the
   loaded bytes.
3. ``start_load_kv`` copies the bytes to the blocks, and returns when the copy has ended.

Steps 2 and 3 raise if there are no blocks for loaded tokens, because wrong KV is worse than an engine that
stops. All other methods catch their errors and act as an empty cache (:func:`guarded`).

**Saves.** A page is saved in the forward pass that completes it: ``wait_for_save`` copies the page's blocks
to host memory after the pass, while their request still owns them. The copies are saved to the store in the
background. No block is held back, and ``request_finished`` never delays freeing blocks.

**Order on the device.** Blocks are read and written only while the whole device is idle
(``torch.cuda.synchronize``), so the engine may use any streams. The engine pauses in passes that load or
complete pages.

**Blocks.** ``register_kv_caches`` passes one contiguous tensor whose first dimension counts blocks. A page
has the blocks of ``chunk_tokens`` tokens, and is found by tokens. Each rank has separate pages. The engine's
own cached blocks are shared with other requests and never written: a load begins after them.

Unsupported engines are refused at their start, and unsupported requests are computed without the store
(``identity.py``).
"""

from __future__ import annotations

from tierstore_connectors.tensorrt_llm.scheduler import TierStoreScheduler
from tierstore_connectors.tensorrt_llm.worker import TierStoreWorker

__all__ = ["TierStoreScheduler", "TierStoreWorker"]
