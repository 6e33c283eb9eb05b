"""vLLM's connector: it keeps KV blocks of vLLM engines in a tierstore daemon that all engines on the host
share.

    --kv-transfer-config '{"kv_connector": "TierStoreConnector",
                           "kv_connector_module_path": "tierstore_connectors.vllm", "kv_role": "kv_both"}'

vLLM creates one connector object in its scheduler's process and one in each worker. The two kinds share only
the messages that vLLM carries between them once per step:

* The scheduler's half (``scheduler.py``) handles no bytes. It asks the daemon for the prompts that arrived
  (``lookup.py``), has pages read from disk into memory, and tells vLLM how many tokens can be loaded. Then it
  orders the workers to load and save (``orders.py``).
* The worker's half (``worker.py``) copies whole KV blocks between vLLM's tensors and the daemon's arena, on
  its own threads (``transfers.py``). It decides nothing.

A *page* holds the blocks of one chunk: all layers of one KV cache group on one worker, in the tensors' order
(``layout.py``). A block is opaque, because only the attention backend knows where a token lies in it; nothing
is cut inside a block. A chunk's key is made from vLLM's own hash of the chunk's last block, which covers all
tokens up to there, images, adapter and salt. Everything else that changes KV (model, weights, KV dtype,
layout, rank) is in the page's identity (``identity.py`` for both).

With ``share_engines`` a page has the layout of :mod:`tierstore_connectors.common.shared_pages` instead. Its
key is made from tokens only, so that other engines find it (``sharing.py``).

**Embeddings** of images and other media have a connector of their own, because vLLM has an interface of its
own for them. It has the same two halves (``embeddings.py``, ``encoder.py``), and shares settings, identity,
guards and counters:

    --ec-transfer-config '{"ec_connector": "TierStoreECConnector",
                           "ec_connector_module_path": "tierstore_connectors.vllm", "ec_role": "ec_both"}'

Three rules keep the cache from doing harm:

* **Nothing is raised into vLLM**, because that would end the engine for all users. ``connector.py`` wraps
  every method: an error is counted, logged once per kind, and becomes a miss. If vLLM waits for a failed
  load, a remaining part reports the failure, and vLLM computes instead.
* **Every wait for the daemon has a deadline.** After two unanswered questions the connector stops asking for
  a while (``common/guard.py``).
* **No block is held back.** A save reads blocks that vLLM may reuse at any time. The scheduler's half names
  the blocks that each step may write, and the worker's half ends the saves that read them before the step
  runs.

This package imports vLLM and torch only when the connector class is used, because vLLM imports it in every
process.
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
