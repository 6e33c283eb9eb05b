"""Pages that SGLang shares with other engines (``share_engines``): their tokens, and the copies.

**Tokens.** SGLang names a page by a SHA-256 hash over the page's tokens and the name of the page before it.
SGLang passes only names to a storage, but the tokens are in SGLang's storage operations in the same process
(``StorageOperation`` in managers/cache_controller.py). :class:`PageTokens` computes the names of these
tokens, so that it can return the tokens of a name. With the tokens, pages get the same keys as those of other
engines. A name with unknown tokens is a miss. The names of requests with a ``cache_salt`` or an adapter start
with another hash, so their tokens are never known.

SGLang's names are not trusted: each entry has a SHA-256 name that was computed in this module. A wrong
storage operation can only add an entry that no request looks up.

**Copies.** A host pool has K and V of all layers of the model. SGLang keeps all tokens in window layers too,
and may shorten a loaded prefix to any length. So a page of SGLang is saved as one page of each layer group,
and is found only if the pages of all groups are stored.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tierstore import copying
from tierstore.groups import GroupRule
from tierstore.keys import TOKEN_BYTES, TOKEN_DTYPE, Identity, Prompt
from tierstore.spec import KVSpec
from tierstore_connectors.common.facts import words
from tierstore_connectors.common.guard import ErrorLog
from tierstore_connectors.common.shared_pages import (
    BlockConverter,
    EngineBlocks,
    PartSource,
    Vectors,
    part_of_rank,
)
from tierstore_connectors.common.sharing import refusal, shared_chunks, shared_identity
from tierstore_connectors.sglang.config import PREFIX_KEYS, SglangSettings

_MOST_PAGES = 1 << 18  # 140 MB with pages of 64 tokens

# Arguments of the server that must have one of these values, or be absent. Other values could change KV or
# are untested.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "load_format": ("auto", "safetensors"),
    "model_loader_extra_config": ("{}",),
    "model_impl": ("auto", "sglang"),
    "json_model_override_args": ("{}",),
    "kv_cache_dtype": ("auto",),
    "disaggregation_mode": ("null",),
    "weight_cache_mode": ("off",),
    **dict.fromkeys(("pp_size", "dcp_size", "attn_cp_size"), (1,)),
    **dict.fromkeys(
        words("""
            quantization modelopt_quant speculative_algorithm enable_lora uno_lora_path is_embedding
            enable_multimodal quantization_param_path quantize_and_serve rl_quant_profile forward_hooks
            modelopt_checkpoint_restore_path custom_weight_loader decrypted_config_file dllm_algorithm
            enable_hisparse enable_dp_attention enable_kv_cache_sharding kt_weight_path
            debug_tensor_dump_input_file enable_deterministic_inference prefill_only_disable_kv_cache
            enable_unified_memory
        """),
        (None, False, "", []),
    ),
}

# The dimensions of a pool's K and V, by the pool's layout. A slot holds one token.
_DIMENSIONS = {
    "layer_first": ("layer", "slot", "head", "item"),
    "page_first": ("slot", "layer", "head", "item"),
    "page_first_direct": ("page", "layer", "token", "head", "item"),
    "page_head": ("page", "head", "token", "layer", "item"),
}


def require_plain(arguments: Mapping[str, Any], *, at_start: bool) -> None:
    """Raise :class:`~tierstore.errors.UsageError` if SGLang's arguments may change the arithmetic of the
    model in its files, or if the storage was attached to a running server."""
    changes = [
        f"--{name.replace('_', '-')}"
        for name, allowed in sorted(_ONLY.items())
        if arguments.get(name, allowed[0]) not in allowed
    ]
    if changes:
        raise refusal(f"{', '.join(changes)} may change KV")
    extra = str(arguments.get("hicache_storage_backend_extra_config") or "")
    if extra.startswith("{") and json.loads(extra).get(PREFIX_KEYS) is not True:
        raise refusal(f'"{PREFIX_KEYS}": true is missing in hicache-storage-backend-extra-config')
    if not at_start:
        raise refusal("the storage must be given at SGLang's start, because weights may have changed since")


class PageTokens:
    """The tokens of pages, by SGLang's names of the pages. Thread-safe.

    >>> known = PageTokens(page_tokens=1)
    >>> known.record(None, [1, 2])
    >>> one = hashlib.sha256(b"\\1\\0\\0\\0")
    >>> known.tokens_to([one.hexdigest()])
    b'\\x01\\x00\\x00\\x00'
    """

    def __init__(self, page_tokens: int, most: int = _MOST_PAGES) -> None:
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._most = most
        self._lock = threading.Lock()
        # By page name: the name of the page before it (empty for the first page) and the page's tokens. The
        # last entry is the most recently used.
        self._pages: dict[bytes, tuple[bytes, bytes]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def record(self, before: str | None, tokens: Sequence[int]) -> None:
        """Record the pages of ``tokens``, which follow the page named ``before`` (None: they begin a prompt).
        Tokens from the first one that does not fit 32 bits on are left out."""
        ids = np.asarray(tokens, np.int64)
        wrong = np.flatnonzero((ids < 0) | (ids > 0xFFFFFFFF))
        encoded = ids[: wrong[0] if len(wrong) else None].astype(TOKEN_DTYPE).tobytes()
        name = bytes.fromhex(before) if before else b""
        width = self._page_bytes
        with self._lock:
            for start in range(0, len(encoded) - width + 1, width):
                page = encoded[start : start + width]
                parent, name = name, hashlib.sha256(name + page).digest()
                self._pages.pop(name, None)
                self._pages[name] = parent, page
            for oldest in list(islice(self._pages, max(len(self._pages) - self._most, 0))):
                del self._pages[oldest]

    def tokens_to(self, keys: Sequence[str]) -> bytes | None:
        """Return all tokens of a prompt up to the end of its consecutive pages ``keys``, as little-endian
        uint32. Return None if a name in ``keys`` is unknown, or if the pages are not consecutive."""
        wanted = [_name(key) for key in keys]
        names, pages = [], []
        name = wanted[-1]
        with self._lock:
            while name:
                entry = self._pages.pop(name, None)
                if entry is None:
                    return None
                self._pages[name] = entry
                names.append(name)
                name, page = entry
                pages.append(page)
        return b"".join(reversed(pages)) if names[: len(wanted)] == wanted[::-1] else None

    def watch(self, errors: ErrorLog) -> None:
        """Wrap SGLang's storage operations so that they record their tokens in this object from now on. Raise
        :class:`~tierstore.errors.UsageError` for an SGLang version with other storage operations."""
        from sglang.srt.managers.cache_controller import StorageOperation

        make = inspect.unwrap(StorageOperation.__init__)
        needed = {"token_ids", "last_hash", "prefix_keys"}
        if lacking := needed - inspect.signature(make).parameters.keys():
            raise refusal(f"storage operations of this SGLang have no {', '.join(sorted(lacking))}")

        @functools.wraps(make)
        def making(operation: Any, *arguments: Any, **options: Any) -> None:
            make(operation, *arguments, **options)
            try:
                before = operation.last_hash or (operation.prefix_keys or [None])[-1]
                tokens = operation.token_ids
                raw = getattr(tokens, "raw_token_ids", None)  # a RadixKey also has other data
                self.record(before, tokens if raw is None else raw())
            except Exception as error:  # noqa: BLE001  # SGLang's operation must not fail
                errors.caught("reading the tokens of a storage operation", error)

        StorageOperation.__init__ = making


def _name(key: str) -> bytes:
    """Return SGLang's hexadecimal name as bytes. For other names, return bytes that are never recorded."""
    try:
        return bytes.fromhex(key) or b"?"
    except ValueError:
        return b"?"


@dataclass(frozen=True, eq=False)
class SharedPages:
    """The pages of one layer group in a host pool, in the layout that all engines share. ``model`` is the
    identity of the whole model, and ``identity`` the identity of the pages."""

    name: str
    pool: Any
    model: Identity
    identity: Identity
    named: bool
    converter: BlockConverter
    tokens: PageTokens

    @property
    def layout(self) -> str:
        return self.identity.layout

    @property
    def spec(self) -> KVSpec:
        return KVSpec.parse(self.identity.layout)

    @property
    def chunk_tokens(self) -> int:
        return self.spec.chunk_tokens

    @property
    def page_bytes(self) -> int:
        return self.spec.page_bytes

    def prompt(self, identity: Identity, keys: Sequence[str], before: int) -> tuple[Prompt, int] | None:
        """Return a prompt that finds the pages ``keys``, and the index of the first of them in the prompt.
        Return None if the pages' tokens are unknown. ``before`` is not used, because the tokens determine
        it."""
        tokens = self.tokens.tokens_to(keys)
        if tokens is None:
            return None
        pages = len(tokens) // (self.chunk_tokens * TOKEN_BYTES)
        chunks = range(pages - len(keys), pages)
        return shared_chunks(self.model, identity, tokens, chunks, self.chunk_tokens, named=self.named)

    def runs(self, indices: Any, pages: int) -> list[int]:
        """Return the numbers of the pool's pages at ``indices``. Raise :class:`ValueError` unless ``indices``
        has exactly ``pages`` pages of the pool."""
        slots = np.asarray(indices, np.int64)[:: self.chunk_tokens]
        numbers: list[int] = (slots // self.chunk_tokens).tolist()
        if len(numbers) != pages or any(not 0 <= each < self.pool.page_num for each in numbers):
            raise ValueError(f"{len(numbers)} indices are not those of {pages} pages of the {self.name} pool")
        return numbers

    def gather(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """Copy pages of the pool to their addresses, and return the checksums. ``places`` has pairs (address,
        page number)."""
        self.converter.gather([([number], address) for address, number in places])
        return list(copying.hash_all([address for address, _ in places], self.page_bytes))

    def scatter(self, places: Sequence[tuple[int, int]]) -> None:
        """Copy pages from their addresses to the pool. ``places`` has pairs (address, page number)."""
        self.converter.scatter([([number], address) for address, number in places])


def shared_pool(
    name: str,
    pool: Any,
    tokens: PageTokens,
    *,
    folder: Path,
    settings: SglangSettings,
    rank: int,
    ranks: int,
) -> tuple[SharedPages, ...]:
    """Return the shared pages of a host pool, for each layer group. Hash the weight files, unless their
    digests are cached. Raise :class:`~tierstore.errors.UsageError` if the pool's pages cannot be shared."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    if type(pool) is not MHATokenToKVPoolHost:
        raise refusal(f"pages of the pool {name!r} ({type(pool).__name__}) have an SGLang-specific layout")
    model = shared_identity(
        folder,
        dtype=str(pool.dtype).removeprefix("torch."),
        chunk_tokens=int(pool.page_size),
        namespace=settings.namespace,
        sampled=settings.hash_weights == "sample",
    )
    groups = [KVSpec.parse(each.layout).groups[0] for each in model.groups]
    layers = sorted(layer for group in groups for layer in group.layers)
    if pool.layer_num != len(layers):
        raise refusal(f"the pool {name!r} has {pool.layer_num} layers, and the model {len(layers)}")
    blocks = pool_blocks(pool, layers)
    found = []
    for whole, group in zip(model.groups, groups, strict=True):
        part = part_of_rank(rank, ranks, kv_heads=group.kv_heads, layers=group.layers)
        heads = len(part.heads(group.kv_heads))
        if (heads, group.head_dim, group.head_dim) != (pool.head_num, pool.head_dim, pool.v_head_dim):
            raise refusal(
                f"the pool {name!r} has {pool.head_num} KV heads of {pool.head_dim} and {pool.v_head_dim}, "
                f"not {heads} of {group.head_dim}"
            )
        identity = part.identity(whole)
        converter = BlockConverter(identity.layout, blocks, PartSource(part, range(heads), range(heads)))
        named = not GroupRule.of(group).chained
        found.append(SharedPages(name, pool, model, identity, named, converter, tokens))
    return tuple(found)


def pool_blocks(pool: Any, layers: Sequence[int]) -> EngineBlocks:
    """Return the addresses and strides of K and V in a host pool. ``layers`` are the model's layer numbers in
    the pool's order. Raise :class:`~tierstore.errors.UsageError` for an unknown layout."""
    dimensions = _DIMENSIONS.get(str(pool.layout))
    if dimensions is None or pool.head_group_num != 1:
        known = ", ".join(_DIMENSIONS)
        raise refusal(f"--hicache-mem-layout must be one of {known}, got {pool.layout}")
    planes = pool.kv_buffer
    if planes.dim() != len(dimensions) + 1 or planes.shape[0] != 2:
        raise refusal(f"the host pool has shape {tuple(planes.shape)}, not (2, {', '.join(dimensions)})")
    item, page = planes.element_size(), int(pool.page_size)
    stride = dict(zip(("plane", *dimensions), (each * item for each in planes.stride()), strict=True))
    token = stride.get("token", stride.get("slot", 0))
    block = stride.get("page", token * page)

    def place(layer: int, plane: int) -> Vectors:
        address = planes.data_ptr() + plane * stride["plane"] + layer * stride["layer"]
        return Vectors(address, block, stride["head"], token, stride["item"])

    return EngineBlocks(
        {number: (place(at, 0), place(at, 1)) for at, number in enumerate(layers)}, page, item
    )
