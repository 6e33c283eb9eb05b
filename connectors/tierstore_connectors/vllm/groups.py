"""The KV cache groups of a model, as vLLM describes them, and which of them can be kept.

A model whose layers are all alike has one group. Models with sliding windows have several; they share the
pool of blocks, and a block belongs to one group at a time. Types are told by their names: they have moved
between modules from version to version, and this has to work without vLLM for the tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tierstore_connectors.vllm.layout import UnknownLayoutError

_MIN_CHUNK_TOKENS = 64
_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_WINDOWED = frozenset({"SlidingWindowSpec", "ChunkedLocalAttentionSpec"})
_MIXED = "UniformTypeKVCacheSpecs"  # layers of one kind with different sizes


@dataclass(frozen=True, slots=True)
class Group:
    """``number`` is its place in vLLM's block tables."""

    number: int
    layers: tuple[str, ...]
    block_tokens: int
    windowed: bool


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a model: ``len(tables)`` of a block table is ``count``. ``hash_tokens`` is how many
    tokens each of vLLM's block hashes covers, ``chunk_tokens`` a whole number of blocks of every group."""

    groups: tuple[Group, ...]
    count: int
    hash_tokens: int
    chunk_tokens: int

    def blocks_per_chunk(self, group: Group) -> int:
        return self.chunk_tokens // group.block_tokens


def read_groups(kv_cache_config: Any, cache_config: Any, chunk_tokens: int) -> Groups:
    """Both are vLLM's. Raises :class:`UnknownLayoutError` for groups that cannot be kept."""
    described = kv_cache_config.kv_cache_groups
    groups = [_group(number, each) for number, each in enumerate(described)]
    if not groups:
        raise UnknownLayoutError("the model has no KV cache")
    hash_tokens = _hash_tokens(kv_cache_config, cache_config, groups)
    unit = math.lcm(hash_tokens, *_sizes(groups))
    if chunk_tokens % unit:
        raise UnknownLayoutError(f"chunk_tokens is {chunk_tokens}: it has to be a multiple of {unit}")
    chunk = chunk_tokens or -(-_MIN_CHUNK_TOKENS // unit) * unit
    return Groups(tuple(groups), len(groups), hash_tokens, chunk)


def _hash_tokens(kv_cache_config: Any, cache_config: Any, groups: Sequence[Group]) -> int:
    """How many tokens a block hash covers. Before 0.32 vLLM does not say; this is how it decides there."""
    told = vars(kv_cache_config).get("hash_block_size")
    if told:
        return int(told)
    if len(groups) == 1:
        return int(cache_config.block_size)
    return int(vars(cache_config).get("prefix_match_unit") or math.gcd(*_sizes(groups)))


def _sizes(groups: Sequence[Group]) -> list[int]:
    return [group.block_tokens for group in groups]


def _group(number: int, described: Any) -> Group:
    spec = described.kv_cache_spec
    fields = vars(described)
    kind = type(spec).__name__
    if not fields.get("enable_kv_transfer", True) or fields.get("host_resident", False):
        raise UnknownLayoutError(f"KV cache group {number} is one that vLLM keeps from connectors")
    kinds = {kind}
    if kind == _MIXED:
        kinds = {type(each).__name__ for each in spec.kv_cache_specs.values()}
    if not (kinds <= _FULL or kinds <= _WINDOWED):
        kept = ", ".join(sorted(kinds))
        raise UnknownLayoutError(
            f"KV cache group {number} keeps {kept}: only attention over blocks can be kept"
        )
    return Group(number, tuple(described.layer_names), int(spec.block_size), kinds <= _WINDOWED)
