"""vLLM's connector: KV blocks of a vLLM engine kept in a tierstore daemon, shared by all engines on the host.

    --kv-transfer-config '{"kv_connector": "TierStoreConnector",
                           "kv_connector_module_path": "tierstore_connectors.vllm", "kv_role": "kv_both"}'

vLLM makes one connector object in the process of its scheduler and one in each worker. They share nothing but
what vLLM carries between them, once per step:

* the scheduler's half (``scheduler.py``) handles no bytes. It asks the daemon what it holds of the prompts
  that have come (``lookup.py``), has it brought from disk into memory, and tells vLLM how many tokens can be
  loaded. Then it tells the workers what to load and what to save (``orders.py``);
* the worker's half (``worker.py``) copies whole KV blocks between vLLM's tensors and the daemon's arena, on
  threads of its own (``transfers.py``). It decides nothing.

A *page* is the blocks of one chunk, of all layers of one KV cache group on one worker, in the order in which
the tensors hold them (``layout.py``). A block is opaque: only the attention backend knows where in it a token
lies, so nothing is ever cut inside one. A chunk is found by a key made from the hash that vLLM itself
computed for the chunk's last block: it covers all tokens up to there, images, adapter and salt. What it does
not cover (model, weights, KV dtype, layout, rank) is the page's identity (both in ``identity.py``).

Three rules make sure that the cache never hurts:

* **Nothing is raised into vLLM**, which would end the engine for all its users. ``connector.py`` wraps every
  method: an error is counted, logged once per kind, and becomes a miss. A load that vLLM waits for is
  reported as failed by the part that can still report it, and vLLM computes instead.
* **Nothing waits for the daemon without a deadline**, and a daemon that did not answer twice is left alone
  for a while (``common/guard.py``).
* **No block is held back.** A save reads blocks that vLLM may give to another request at any time. The
  scheduler's half names the blocks that each step may write, and before the step runs the worker's half ends
  the saves that still read them.

Nothing here imports vLLM or torch until the class is asked for: vLLM imports this module in every process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore_connectors.vllm.connector import TierStoreConnector

__all__ = ["TierStoreConnector"]


def __getattr__(name: str) -> Any:
    if name == "TierStoreConnector":
        from tierstore_connectors.vllm.connector import TierStoreConnector

        return TierStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
