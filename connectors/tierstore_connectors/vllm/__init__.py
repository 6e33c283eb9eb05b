"""The connector for vLLM: it keeps KV blocks of vLLM engines in a tierstore daemon, which all engines on the
host share.

    --kv-transfer-config '{"kv_connector": "TierStoreConnector",
                           "kv_connector_module_path": "tierstore_connectors.vllm", "kv_role": "kv_both"}'

vLLM creates one connector object in its scheduler's process, which uses the scheduler half, and one in each
worker process, which uses the worker half. The halves communicate only by messages that vLLM carries between
its processes once per step:

* The scheduler half (``scheduler.py``) handles no bytes. The half looks up arriving prompts in the daemon
  (``lookup.py``), has pages read from disk into memory, and tells vLLM how many tokens can be loaded. Then
  the scheduler half orders the workers to load and save (``orders.py``).
* The worker half (``worker.py``) decides nothing. The half copies whole KV blocks between vLLM's tensors and
the
  daemon's arena, on its own threads (``transfers.py``).

A *page* holds the blocks of one chunk: all layers of one KV cache group on one worker, in the tensors' order
(``layout.py``). A block is copied as a whole, because only the attention backend knows where a token lies in
the block. A chunk's key is made from vLLM's hash of the chunk's last block, which covers all tokens up to
this block's end, images, adapter and salt. Everything else that changes KV (model, weights, KV dtype, layout,
rank) is in the page's identity. ``identity.py`` makes keys and identities.

With ``share_engines`` a page has the layout of :mod:`tierstore_connectors.common.shared_pages` instead. The
keys of shared pages are made from tokens only, so that other engines find the pages (``sharing.py``).

**Embeddings** of images and other media have a separate connector class, because vLLM has a separate
interface for them. The embedding connector also has two halves (``embeddings.py``, ``encoder.py``), and uses
the settings, identities, error handling and counters of the KV connector:

    --ec-transfer-config '{"ec_connector": "TierStoreECConnector",
                           "ec_connector_module_path": "tierstore_connectors.vllm", "ec_role": "ec_both"}'

Three rules keep the cache from harming the engine:

* **No exception reaches vLLM**, because it would end the engine for all users. ``connector.py`` wraps every
  method: an error is counted, logged once per kind, and becomes a miss. A failed load is reported to vLLM,
  which then computes its tokens.
* **Every wait for the daemon has a deadline.** After two unanswered requests the connector sends no request
  for a while (``common/guard.py``).
* **No block is held back from vLLM.** A save reads blocks that vLLM may reuse at any time. The scheduler half
  lists the blocks that each step may write. Before the step runs, the worker half ends the saves that read
  these blocks.

vLLM imports this package in every process, so the package imports vLLM and torch only when a connector class
is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore_connectors.vllm.connector import TierStoreConnector
    from tierstore_connectors.vllm.encoder import TierStoreECConnector

__all__ = ["TierStoreConnector", "TierStoreECConnector"]


def __getattr__(name: str) -> Any:
    if name == "TierStoreConnector":
        from tierstore_connectors.vllm.connector import TierStoreConnector

        return TierStoreConnector
    if name == "TierStoreECConnector":
        from tierstore_connectors.vllm.encoder import TierStoreECConnector

        return TierStoreECConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
