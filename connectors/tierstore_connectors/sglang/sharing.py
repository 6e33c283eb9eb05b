"""Pages that SGLang shares with other engines (``share_engines``): their tokens, and the copies.

**Tokens.** SGLang names a page by SHA-256 over its tokens and the name of the page before it. It passes names
to a storage, without tokens. But the tokens are in each of SGLang's storage operations, in the same process
(``StorageOperation`` in managers/cache_controller.py). :class:`PageTokens` computes the same names from them,
and so knows which tokens a name stands for. Then the pages get the keys of all other engines. A name whose
tokens are not known is a miss. The names of requests with a ``cache_salt`` or an adapter begin with another
hash, so they are never known.

SGLang's names are not trusted: each entry is kept under a SHA-256 that was computed here. A wrong operation
can only make an entry that no request asks for.

**Copies.** A host pool has K and V of all layers of the model. SGLang keeps all tokens in window layers too,
and may cut a loaded prefix anywhere. So a page of SGLang is saved as one page of each layer group, and is
found only if all of them are there.
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
from tierstore_connectors.sglang.config import PREFIX_KEYS, SAMPLE, SglangSettings

_MOST_PAGES = 1 << 18  # 140 MB with pages of 64 tokens

# Arguments of the server that must have one of these values, or be absent. Others could change KV, or are not
# tested.
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

# The dimensions of a pool's K and V, by its layout. A slot is the place of one token.
_DIMENSIONS = {
    "layer_first": ("layer", "slot", "head", "item"),
    "page_first": ("slot", "layer", "head", "item"),
    "page_first_direct": ("page", "layer", "token", "head", "item"),
    "page_head": ("page", "head", "token", "layer", "item"),
}


def require_plain(arguments: Mapping[str, Any], *, at_start: bool) -> None:
    """Raise :class:`~tierstore.errors.UsageError` if SGLang's arguments change the model that its files
    describe, or if the storage was attached to a running server."""
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
    """The tokens of SGLang's pages, by SGLang's names. Thread-safe.

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
        # For each name, the name before it (empty at the start) and the page's tokens; the latest use last.
        self._pages: dict[bytes, tuple[bytes, bytes]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def record(self, before: str | None, tokens: Sequence[int]) -> None:
        """Record the pages of ``tokens``, which follow the page ``before`` (None: they begin a prompt).
        Tokens are left out from the first one on that does not fit 32 bits."""
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
        uint32. Return None if one of SGLang's names ``keys`` is not known, or they do not follow one
        another."""
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
        """Have SGLang's storage operations record their tokens here from now on, in this process. Raises
        :class:`~tierstore.errors.UsageError` for an SGLang whose operations are not known."""
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
                raw = getattr(tokens, "raw_token_ids", None)  # a RadixKey has more than tokens
                self.record(before, tokens if raw is None else raw())
            except Exception as error:  # noqa: BLE001  # SGLang's operation must not fail
                errors.caught("reading the tokens of a storage operation", error)

        StorageOperation.__init__ = making


def _name(key: str) -> bytes:
    """Return the bytes of SGLang's name. A name of another form gives bytes that are never recorded."""
    try:
        return bytes.fromhex(key) or b"?"
    except ValueError:
        return b"?"


@dataclass(frozen=True, eq=False)
class SharedPages:
    """The pages of one layer group in a host pool, in the form of all engines. ``model`` is the whole model's
    identity, ``identity`` that of the pages."""

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
        """Return a prompt that finds the pages ``keys``, and the place of the first in it. Return None if
        their tokens are not known. ``before`` is not used, because the tokens determine it."""
        tokens = self.tokens.tokens_to(keys)
        if tokens is None:
            return None
        pages = len(tokens) // (self.chunk_tokens * TOKEN_BYTES)
        chunks = range(pages - len(keys), pages)
        return shared_chunks(self.model, identity, tokens, chunks, self.chunk_tokens, named=self.named)

    def runs(self, indices: Any, pages: int) -> list[int]:
        """Return the numbers of the pool's pages at ``indices``. Raises :class:`ValueError` if they are not
        those of ``pages`` pages of the pool: a wrong number must not become a wrong address."""
        slots = np.asarray(indices, np.int64)[:: self.chunk_tokens]
        numbers: list[int] = (slots // self.chunk_tokens).tolist()
        if len(numbers) != pages or any(not 0 <= each < self.pool.page_num for each in numbers):
            raise ValueError(f"{len(numbers)} indices are not those of {pages} pages of the {self.name} pool")
        return numbers

    def gather(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """Copy pages of the pool to these addresses, and return the checksums."""
        self.converter.gather([([number], address) for address, number in places])
        return list(copying.hash_all([address for address, _ in places], self.page_bytes))

    def scatter(self, places: Sequence[tuple[int, int]]) -> None:
        """Copy pages from these addresses to the pool."""
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
    """Return the shared pages of a host pool: those of each layer group. Raises
    :class:`~tierstore.errors.UsageError` if the pool's pages cannot be shared. Reads the weights, unless
    their digest is remembered."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    if type(pool) is not MHATokenToKVPoolHost:
        raise refusal(f"pages of the pool {name!r} ({type(pool).__name__}) have a form of SGLang's own")
    model = shared_identity(
        folder,
        dtype=str(pool.dtype).removeprefix("torch."),
        chunk_tokens=int(pool.page_size),
        namespace=settings.namespace,
        sampled=settings.hash_weights == SAMPLE,
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
    """Return the places of K and V in a host pool. ``layers`` are the numbers of its layers in the model.
    Raises :class:`~tierstore.errors.UsageError` for a layout that is not known."""
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
