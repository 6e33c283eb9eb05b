"""The settings of an engine, and the store of its pages.

TensorRT-LLM passes no settings to a connector, so they are in two environment variables: ``TIERSTORE``, as
for other engines, and ``TENSORRT_LLM_TIERSTORE`` with a JSON object. (Variables that begin with
``TIERSTORE_`` are the daemon's settings.)
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tensorrt_llm._utils import mpi_rank

import tierstore
from tierstore.arguments import json_object
from tierstore.daemon.background import OFF, VARIABLE, chosen_store
from tierstore.daemon.settings import default_listen
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.keys import Identity, Prompt, TokenIds
from tierstore.spec import DEFAULT_CHUNK_TOKENS
from tierstore_connectors.common.options import checked_options
from tierstore_connectors.common.stores import GuardedStore
from tierstore_connectors.tensorrt_llm.identity import arguments_of, identities_of, require_supported

_log = logging.getLogger("tierstore_connectors.tensorrt_llm")
_CONNECT_S = 1.0  # the engine's start waits this long; a daemon that starts later is used as well
SETTINGS_VARIABLE = "TENSORRT_LLM_TIERSTORE"


@dataclass(frozen=True, slots=True)
class TensorrtLlmSettings:
    """The settings of an engine's connector.

    - ``namespace``: engines with different namespaces share no pages.
    - ``chunk_tokens``: tokens per page, rounded up to whole blocks.
    - ``lookup_s``, ``load_s``: the most seconds that the engine waits for a lookup and for a load. The engine
      computes nothing during this wait.
    - ``keys``, ``server_key``: key files for ``tcp://``.
    - ``hash_weights``: "whole" hashes weight files completely, "sample" only samples of them.
    """

    namespace: str = ""
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    lookup_s: float = 0.25
    load_s: float = 2.0
    keys: str | None = None
    server_key: str | None = None
    hash_weights: str = "whole"

    @classmethod
    def load(cls) -> TensorrtLlmSettings:
        """Return the settings in the environment. Raise :class:`UsageError` for an unknown key or an invalid
        value."""
        given = json_object(SETTINGS_VARIABLE, os.environ.get(SETTINGS_VARIABLE, "") or "{}")
        found = cls(**checked_options(SETTINGS_VARIABLE, cls, given))
        if found.chunk_tokens < 1:
            raise UsageError(f"{SETTINGS_VARIABLE}: chunk_tokens must be at least 1")
        return found


def daemon_url(log: logging.Logger) -> str | None:
    """Return the daemon's address, and start the daemon for ``TIERSTORE=auto``. Return None for ``off``, and
    if the daemon cannot be started. Raise :class:`UsageError` for an invalid value."""
    value = os.environ.get(VARIABLE)
    if value is None:
        return default_listen()
    if value in ("", OFF):
        return None
    try:
        return chosen_store(value).url
    except StoreUnavailableError as error:
        log.warning("tierstore: the engine runs without the cache: %s", error)
        return None


class EnginePages:
    """The store of one engine's pages, which is opened when the worker has registered the pool.

    Raises :class:`~tierstore.errors.UsageError` for settings or an engine that are not supported.
    """

    _of: ClassVar[weakref.WeakValueDictionary[int, EnginePages]] = weakref.WeakValueDictionary()
    _making: ClassVar = threading.Lock()

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args  # while this reference exists, no other object has the same id()
        self.settings = TensorrtLlmSettings.load()
        self._arguments = arguments_of(llm_args)
        require_supported(self._arguments)
        self.block_tokens = int(self._arguments["kv_cache_config.tokens_per_block"])
        self.page_blocks = -(-self.settings.chunk_tokens // self.block_tokens)
        self.page_tokens = self.page_blocks * self.block_tokens
        self.rank = int(mpi_rank())
        self.identities: Sequence[Identity] = ()
        self.page_bytes = 0  # 0 until the pool is registered
        self.store: GuardedStore | None = None
        """None until the pool is registered, and for ``TIERSTORE=off``."""

    @classmethod
    def of(cls, llm_args: Any) -> EnginePages:
        """Return the pages of the engine with these arguments. On rank 0, two threads create the scheduler
        and the worker with the same ``llm_args`` object, and they share one :class:`EnginePages`."""
        with cls._making:
            found = cls._of.get(id(llm_args))
            if found is None:
                found = cls._of[id(llm_args)] = cls(llm_args)
            return found

    def open(self, pool: torch.Tensor) -> None:
        """Open the store for blocks of ``pool``, unless :func:`daemon_url` returns None."""
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
        """Return the prompt that finds the pages of ``tokens`` on ``rank``."""
        return Prompt(self.identities[rank], tokens, chunk_tokens=self.page_tokens)
