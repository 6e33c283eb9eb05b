"""A cache for llama.cpp's Python binding: ``llama_cpp.Llama.set_cache(TierStoreLlamaCache(llama))``.

The binding looks up each prompt in its cache before computing it, and gives the cache the whole context after
each completion. This cache stores only new pages of the context in a daemon, and restores the longest stored
prefix, also in another process. After any error the prompt is computed, and the error is logged once.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama import Llama, LlamaState
from llama_cpp.llama_cache import BaseLlamaCache

from tierstore.daemon.settings import default_listen
from tierstore.errors import UsageError
from tierstore_connectors.common.facts import digest, host_device
from tierstore_connectors.common.guard import ErrorLog
from tierstore_connectors.llamacpp.blocks import BlockSettings, LlamaBlocks, ModelFacts
from tierstore_connectors.llamacpp.server import libraries, split_files, weights_digest
from tierstore_connectors.llamacpp.state import (
    Bytes,
    LlamaSequence,
    LlamaStateError,
    read_context,
    read_sequence,
    write_context,
)

_log = logging.getLogger("llama_cpp.tierstore")

# Fields of llama.cpp's context parameters that are known not to change KV.
_HARMLESS = frozenset(
    (
        *("n_threads", "n_threads_batch", "n_outputs_max", "embeddings", "no_perf", "samplers", "n_samplers"),
        *("abort_callback", "abort_callback_data", "cb_eval", "cb_eval_user_data"),
    )
)


class TierStoreLlamaCache(BaseLlamaCache):
    """A cache for a ``llama_cpp.Llama``, in a daemon that other processes share.

    ``store`` is the daemon's address (None: this user's daemon). Caches with different ``namespace`` share no
    pages. ``options`` are the other fields of :class:`~tierstore_connectors.llamacpp.blocks.BlockSettings`.
    The constructor hashes the model's file, unless the digest is cached, and computes one token. So make the
    cache before the first prompt. Raise :class:`UsageError` for a model that is not supported.

    >>> llm = Llama("model.gguf", n_ctx=4096)                               # doctest: +SKIP
    >>> llm.set_cache(TierStoreLlamaCache(llm, "ipc:///run/tierstore/s"))   # doctest: +SKIP
    """

    def __init__(
        self, llama: Llama, store: str | None = None, *, namespace: str = "", **options: Any
    ) -> None:
        super().__init__(capacity_bytes=0)
        self.errors = ErrorLog(_log)
        self._llama = llama
        _require_supported(llama)
        settings = BlockSettings(store or default_listen(), namespace=namespace, **options)
        self._architecture = str(llama.metadata.get("general.architecture", ""))
        layout = _probed(llama).layout
        if len(layout.caches) > 1 or llama_cpp.llama_model_n_swa(llama._model.model) > 0:
            raise UsageError(
                "llama_cpp.Llama cuts prompts without regard to sliding windows, so a model with sliding "
                "windows is not supported here; `tierstore llama` supports it"
            )
        facts = ModelFacts(_weights(llama), _engine(llama), name=Path(llama.model_path).name)
        self._blocks = LlamaBlocks(settings, layout, facts, _log)

    @property
    def cache_size(self) -> int:
        """Return 0, because the daemon limits the size of its tiers itself."""
        return 0

    def wait_connected(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the daemon's answer. Return whether it has answered."""
        return self._blocks.wait_connected(seconds)

    def close(self) -> None:
        """Close the connection to the daemon. Later lookups find nothing."""
        self._blocks.close()

    def __contains__(self, key: Sequence[int]) -> bool:
        try:
            self[key]
        except KeyError:
            return False
        return True

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """Return the state of the longest stored prefix of ``key``. Raise :class:`KeyError` if no stored
        prefix is long enough to be worth loading."""
        tokens = np.asarray(key, np.uint32)
        try:
            known = Llama.longest_token_prefix(
                self._llama.input_ids[: self._llama.n_tokens].tolist(), list(key)
            )
            found = self._blocks.find(tokens, known=known)
            if found.state is not None:
                return self._state(found.state)
        except Exception as error:  # noqa: BLE001  # the prompt is computed
            self.errors.caught("loading a prompt", error)
        raise KeyError("no prefix of the prompt is stored")

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Store a context's state, and wait until its pages are in the daemon's memory."""
        try:
            data = np.frombuffer(value.llama_state, np.uint8)
            tokens = value.input_ids[: value.n_tokens].astype(np.uint32)
            state = read_context(data, tokens, self._architecture)
            if state is not None:
                self._blocks.save(state)
        except Exception as error:  # noqa: BLE001  # the state is not stored
            self.errors.caught("saving a context", error)

    def _state(self, state: LlamaSequence) -> LlamaState:
        data = write_context(state, self._architecture).tobytes()
        ids = np.full(self._llama.n_ctx(), -1, np.intc)
        ids[: len(state.tokens)] = state.tokens
        return LlamaState(
            input_ids=ids,
            scores=np.zeros((1, self._llama.n_vocab()), np.single),  # the binding does not read them
            n_tokens=len(state.tokens),
            llama_state=data,
            llama_state_size=len(data),
            seed=self._llama._seed,
        )


def _require_supported(llama: Llama) -> None:
    if llama.lora_path:
        raise UsageError("lora_path is not supported: merge the adapter into the model")
    if llama._logits_all:
        raise UsageError("logits_all=True is not supported: a restored prompt has no logits")
    if llama.draft_model is not None:
        raise UsageError("draft_model is not supported: it needs the logits of the whole prompt")


def _probed(llama: Llama) -> LlamaSequence:
    """Return the state of a sequence of one token, and leave the context empty."""
    llama.reset()
    tokens = [max(llama.token_bos(), 0)]
    llama.eval(tokens)
    size = llama_cpp.llama_state_seq_get_size(llama.ctx, 0)
    memory = (ctypes.c_uint8 * size)()
    written = llama_cpp.llama_state_seq_get_data(llama.ctx, memory, size, 0)
    data: Bytes = np.frombuffer(memory, np.uint8)[:written]
    try:
        state = read_sequence(data, np.asarray(tokens, np.uint32))
    except LlamaStateError as error:
        raise UsageError(f"the state of this model or llama.cpp version is not supported: {error}") from error
    llama.reset()
    llama._ctx.kv_cache_clear()
    if state is None:
        raise UsageError("llama.cpp writes no state for this model, so it is not supported")
    return state


def _weights(llama: Llama) -> str:
    try:
        return weights_digest(split_files(Path(llama.model_path)))
    except OSError as error:
        raise UsageError(f"the model's file cannot be read: {error}") from error


def _engine(llama: Llama) -> str:
    """Return a digest of everything except the weights that changes KV: the context's parameters, the
    overrides of the model's metadata, the llama.cpp libraries, and the processor."""
    parameters = llama.context_params
    fields = [(name, getattr(parameters, name)) for name, *_ in parameters._fields_ if name not in _HARMLESS]
    counted = [(name, value) for name, value in fields if isinstance(value, (bool, int, float, str))]
    overrides = sorted((llama.kv_overrides or {}).items())
    offloaded = llama.model_params.n_gpu_layers
    return digest([libraries(os.getpid()), host_device(), counted, overrides, offloaded])
