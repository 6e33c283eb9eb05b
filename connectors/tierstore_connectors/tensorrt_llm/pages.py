"""The pages of one engine, as the scheduler and the worker of one process see them."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from tensorrt_llm._utils import mpi_rank

import tierstore
from tierstore.keys import Identity, Prompt, TokenIds
from tierstore_connectors.common.stores import GuardedStore
from tierstore_connectors.tensorrt_llm.config import TensorrtLlmSettings, daemon_url
from tierstore_connectors.tensorrt_llm.identity import arguments_of, identities_of, require_supported

_log = logging.getLogger("tierstore_connectors.tensorrt_llm")
_CONNECT_S = 1.0  # at the engine's start; a daemon that starts later is used as well


class EnginePages:
    """The store of one engine's pages. It is open when the worker has registered the pool.

    Raises :class:`~tierstore.errors.UsageError` for settings or an engine that are not supported.
    """

    _of: ClassVar[weakref.WeakValueDictionary[int, EnginePages]] = weakref.WeakValueDictionary()
    _making: ClassVar = threading.Lock()

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args  # its id stays its own as long as it is here
        self.settings = TensorrtLlmSettings.load()
        self._arguments = arguments_of(llm_args)
        require_supported(self._arguments)
        self.block_tokens = int(self._arguments["kv_cache_config.tokens_per_block"])
        self.page_blocks = -(-self.settings.chunk_tokens // self.block_tokens)
        self.page_tokens = self.page_blocks * self.block_tokens
        self.rank = int(mpi_rank())
        self.identities: Sequence[Identity] = ()
        self.page_bytes = 0  # until the pool is registered
        self.store: GuardedStore | None = None
        """None until the pool is registered, and if there is to be no store."""

    @classmethod
    def of(cls, llm_args: Any) -> EnginePages:
        """Return the pages of the engine with these arguments. The scheduler and the worker of rank 0 are
        made with one object, by two threads, and share the pages."""
        with cls._making:
            found = cls._of.get(id(llm_args))
            if found is None:
                found = cls._of[id(llm_args)] = cls(llm_args)
            return found

    def open(self, pool: torch.Tensor) -> None:
        """Open the store for blocks of this pool, if there is one."""
        settings = self.settings
        url = daemon_url(_log)
        if url is None:
            return
        self.identities = identities_of(
            self._arguments,
            pool,
            self.page_tokens,
            namespace=settings.namespace,
            sampled=settings.hash_weights == "sample",
        )
        own = self.identities[self.rank]
        self.page_bytes = pool[0].numel() * pool.element_size() * self.page_blocks
        store = tierstore.connect(
            url,
            tierstore.KVSpec.opaque(self.page_bytes, chunk_tokens=self.page_tokens),
            identity=own,
            lookup_s=settings.lookup_s,
            keys=settings.keys,
            server_key=settings.server_key,
            model_name=str(self._arguments["model"]),
            wait_s=0,
            log=_log,
        )
        weakref.finalize(self, store.close)
        store.wait_connected(_CONNECT_S)
        if store.connected:
            for each in self.identities:
                store.register(each)
        self.store = GuardedStore(store, lookup_s=settings.lookup_s, load_s=settings.load_s, errors=_log)

    def prompt(self, tokens: TokenIds, rank: int) -> Prompt:
        """Return the keys of a prompt's pages on one rank."""
        return Prompt(self.identities[rank], tokens, chunk_tokens=self.page_tokens)
