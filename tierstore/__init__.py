"""tierstore: a tiered KV-cache store for LLM inference.

>>> spec = KVSpec.uniform(layers=2, kv_heads=1, head_dim=64, dtype="float16")
>>> with Store.open(None, spec, host_bytes=1 << 20) as store:
...     stored = store.save(range(128), [bytes(spec.page_bytes)] * 2).wait()
...     hit = store.lookup([*range(100), 5, 6, 7])
>>> stored, hit.tokens
(128, 100)

See ``docs/architecture.md`` for how it is built.
"""

from tierstore.errors import SpecError, StoreClosedError, StoreUnavailableError, TierStoreError, UsageError
from tierstore.hints import Hint
from tierstore.keys import Identity, PageKey, Prompt
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.store import Hit, Loaded, Store
from tierstore.tiers.hbm import PagePool
from tierstore.transfer import Progress, Transfer, TransferState

__all__ = [
    "Hint",
    "Hit",
    "Identity",
    "KVSpec",
    "LayerGroup",
    "LayerKind",
    "Loaded",
    "PageKey",
    "PagePool",
    "Progress",
    "Prompt",
    "SpecError",
    "Store",
    "StoreClosedError",
    "StoreUnavailableError",
    "TierStoreError",
    "Transfer",
    "TransferState",
    "UsageError",
]
