"""The base classes of TensorRT-LLM's connectors, which are in different modules in different versions."""

from __future__ import annotations

try:
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )
except ModuleNotFoundError:
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )

__all__ = ["KvCacheConnectorScheduler", "KvCacheConnectorWorker"]
