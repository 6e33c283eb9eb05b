"""The KV cache groups of a model, the blocks of requests in them, and the blocks of an order.

A model whose layers are all alike has one group. Models with sliding windows or recurrent states have
several. The groups share the pool of blocks, and a block belongs to one group at a time. Types are recognized
by name, because they have moved between modules from version to version, and because the tests run without
vLLM.

**States.** A block of a recurrent group holds one state. vLLM updates it in place while it computes. If a
step ends at a block boundary, vLLM continues in another block. The earlier block then keeps the state *at*
that boundary (``mamba_cache_mode: align``). vLLM names this block once, in the step that computes up to the
boundary (``boundary_state_offloads``). The block may be read after that step.

The place in a block table does not tell when a state is complete, with one exception. If a request continues
from a boundary, the last block before the boundary holds its state. vLLM reads that block in the request's
first step.

A load puts the state at the hit's end into the last block before that end, where vLLM reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierstore.groups import GroupRule, Past
from tierstore.keys import LEAST_NAMED_TOKENS
from tierstore_connectors.vllm.layout import UnsupportedError
from tierstore_connectors.vllm.orders import NULL_BLOCK, GroupBlocks, kept_by_name

BlockTable = Sequence[Sequence[int]]  # block numbers, by KV cache group

_MIN_CHUNK_TOKENS = 64
_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_WINDOW, _CHUNKED, _STATE = "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec"
_MIXED = "UniformTypeKVCacheSpecs"  # layers of one kind with different sizes


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One KV cache group. ``number`` is its index in vLLM's block tables. ``rule`` says which pages a hit
    needs. ``meaning`` describes the bytes of a block as far as neither its tensors nor the model's
    configuration do. ``members`` are vLLM's groups, if several are one group here (:func:`joined`)."""

    number: int
    layers: tuple[str, ...]
    block_tokens: int
    rule: GroupRule
    meaning: str = ""
    members: tuple[CacheGroup, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the indices of its block tables."""
        return tuple(each.number for each in self.members) or (self.number,)

    @property
    def windowed(self) -> bool:
        """Return whether vLLM drops blocks that no later token attends."""
        return self.rule.past in (Past.WINDOW, Past.CHUNK)


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a model: a block table has ``count`` lists of blocks.

    Each of vLLM's block hashes covers ``hash_tokens`` tokens. ``chunk_tokens`` is a multiple of every group's
    block size.
    """

    groups: tuple[CacheGroup, ...]
    count: int
    hash_tokens: int
    chunk_tokens: int

    @property
    def with_states(self) -> bool:
        """Return whether a hit must end where there are states."""
        return any(group.rule.past is Past.STATE for group in self.groups)

    @property
    def with_names(self) -> bool:
        """Return whether some group has named pages. A shorter hit may then need other pages."""
        return any(kept_by_name(group.rule) for group in self.groups)

    def blocks_per_page(self, group: CacheGroup) -> int:
        """Return the blocks of a page: those of a chunk in each block table, or one for the state at its
        end."""
        if group.rule.past is Past.STATE:
            return 1
        return self.chunk_tokens // group.block_tokens * len(group.numbers)

    def label(self, group: CacheGroup) -> str:
        """Return the group's label in its pages' identities.

        Followers of the daemon's events get the groups ``group…``: every hit needs all pages of these.
        """
        if group.rule.past is Past.STATE:
            return f"state{group.number}"
        if group.windowed:
            return f"window{group.number}"
        if self.count == 1:
            return "group0"
        full = [each.number for each in self.groups if each.rule.past is Past.ALL]
        return f"group{full.index(group.number)}/{len(full)}"


def read_groups(
    kv_cache_config: Any, cache_config: Any, chunk_tokens: int, *, offers_states: bool = True
) -> Groups:
    """Read the groups from vLLM's configurations. ``offers_states``: this vLLM says which blocks hold states
    (see the module). Raises :class:`UnsupportedError` for groups that cannot be stored."""
    described = kv_cache_config.kv_cache_groups
    groups = [_group(number, each) for number, each in enumerate(described)]
    if not groups:
        raise UnsupportedError("the model has no KV cache")
    if any(group.rule.past is Past.STATE for group in groups):
        _check_states(cache_config, offers_states)
    hash_tokens = _hash_tokens(kv_cache_config, cache_config, groups)
    unit = math.lcm(hash_tokens, *_sizes(groups))
    if chunk_tokens % unit:
        raise UnsupportedError(f"chunk_tokens must be a multiple of {unit}, got {chunk_tokens}")
    # vLLM may end a step at any block's end and leave a state there. A chunk must end there, too.
    states = any(group.rule.past is Past.STATE for group in groups)
    least = LEAST_NAMED_TOKENS if states else _MIN_CHUNK_TOKENS
    chunk = chunk_tokens or -(-least // unit) * unit
    read = Groups(tuple(groups), len(groups), hash_tokens, chunk)
    if chunk < LEAST_NAMED_TOKENS and read.with_names:
        raise UnsupportedError(
            f"chunk_tokens must be at least {LEAST_NAMED_TOKENS} for a model with windows or states, "
            f"got {chunk}"
        )
    return read


def joined(groups: Groups) -> Groups:
    """Return groups in which all layers that remember alike are one group, as in the pages that engines
    share. vLLM has several groups of one kind, so that all of its blocks have one size."""
    alike: dict[tuple[GroupRule, int], list[CacheGroup]] = {}
    for group in groups.groups:
        alike.setdefault((group.rule, group.block_tokens), []).append(group)
    found = tuple(
        replace(
            members[0],
            layers=tuple(layer for each in members for layer in each.layers),
            members=tuple(members),
        )
        if len(members) > 1
        else members[0]
        for members in alike.values()
    )
    return replace(groups, groups=found)


def _check_states(cache_config: Any, offers_states: bool) -> None:
    """Raise :class:`UnsupportedError` if blocks hold no states that can be stored, or if vLLM does not say
    when."""
    mode = vars(cache_config).get("mamba_cache_mode")
    if mode != "align":
        raise UnsupportedError(
            f"recurrent states are stored with mamba_cache_mode 'align' only, got {mode!r}: enable prefix "
            "caching"
        )
    if not offers_states:
        raise UnsupportedError("recurrent states need vLLM 0.32 or later")
    if vars(cache_config).get("use_replayssm", False):
        raise UnsupportedError(
            "recurrent states are not stored with use_replayssm: its blocks hold incomplete states"
        )


def _hash_tokens(kv_cache_config: Any, cache_config: Any, groups: Sequence[CacheGroup]) -> int:
    """Return how many tokens a block hash covers. Before 0.32 vLLM does not say; this repeats its rule."""
    size = vars(kv_cache_config).get("hash_block_size")
    if size:
        return int(size)
    if len(groups) == 1:
        return int(cache_config.block_size)
    return int(vars(cache_config).get("prefix_match_unit") or math.gcd(*_sizes(groups)))


def _sizes(groups: Sequence[CacheGroup]) -> list[int]:
    return [group.block_tokens for group in groups]


def _group(number: int, described: Any) -> CacheGroup:
    spec = described.kv_cache_spec
    fields = vars(described)
    kind = type(spec).__name__
    if not fields.get("enable_kv_transfer", True) or fields.get("host_resident", False):
        raise UnsupportedError(f"KV cache group {number} is not available to connectors in vLLM")
    specs = list(spec.kv_cache_specs.values()) if kind == _MIXED else [spec]
    layers, tokens = tuple(described.layer_names), int(spec.block_size)
    kinds = {type(each).__name__ for each in specs}
    if kinds <= _FULL:
        return CacheGroup(number, layers, tokens, GroupRule.all())
    if kinds == {_WINDOW}:
        # Each token attends ``sliding_window`` tokens, itself included.
        return CacheGroup(
            number, layers, tokens, GroupRule.window(max(_size(specs, "sliding_window") - 1, 0))
        )
    if kinds == {_CHUNKED}:
        return CacheGroup(number, layers, tokens, GroupRule.chunked(_size(specs, "attention_chunk_size")))
    if kinds == {_STATE}:
        if _size(specs, "num_speculative_blocks"):
            # vLLM corrects the state at a boundary after it has rejected drafts, which is later than it names
            # the block.
            raise UnsupportedError("recurrent states are not kept with speculative decoding")
        meaning = sorted({f"{each.mamba_type} {each.shapes} {each.dtypes}" for each in specs})
        return CacheGroup(number, layers, tokens, GroupRule.state(), "; ".join(meaning))
    kept = ", ".join(sorted(kinds))
    raise UnsupportedError(
        f"KV cache group {number} keeps {kept}: only attention over blocks and recurrent states can be stored"
    )


def _size(specs: Sequence[Any], name: str) -> int:
    """Return a size that all layers of a group have in common."""
    sizes = {int(vars(spec)[name]) for spec in specs}
    if len(sizes) > 1:
        raise UnsupportedError(f"a KV cache group has layers of different {name}: {sorted(sizes)}")
    return sizes.pop()


class BlockTables:
    """The block tables of the requests in a step. Belongs to the scheduler's thread.

    From 0.30 on vLLM's scheduler answers for a request. 0.29 gives the whole tables of requests with new
    blocks in each step. Earlier versions give only the new blocks.
    """

    def __init__(self) -> None:
        self._ask: Callable[[str], BlockTable | None] | None = None
        self._so_far: dict[str, Sequence[list[int]]] = {}
        self._states: Mapping[str, Sequence[tuple[int, int, int]]] = {}

    def take(self, output: Any) -> None:
        """Take in ``output``, vLLM's ``SchedulerOutput`` of the step that begins."""
        state = vars(output).get("kv_connector_block_state")
        self._states = vars(state).get("boundary_state_offloads") or {} if state is not None else {}
        if state is not None:
            tables = vars(state).get("block_ids")
            if tables is None:
                self._ask = state.get_block_ids
            else:
                self._so_far.update(tables)
            return
        for new in output.scheduled_new_reqs:
            self._so_far[new.req_id] = [list(blocks) for blocks in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request, tables in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if tables is None:
                continue
            if request in cached.resumed_req_ids or request not in self._so_far:
                self._so_far[request] = [list(blocks) for blocks in tables]
            else:
                for known, more in zip(self._so_far[request], tables, strict=True):
                    known.extend(more)

    def of(self, request: str) -> BlockTable:
        """Return the block table of a request that is scheduled in this step."""
        table = self._ask(request) if self._ask is not None else self._so_far.get(request)
        assert table is not None, "a request that is scheduled has blocks"
        return table

    def states(self, request: str) -> Sequence[tuple[int, int, int]]:
        """Return the blocks that hold a state after this step, each as (group, block, tokens up to the
        state)."""
        return self._states.get(request, ())

    def forget(self, request: str) -> None:
        """Drop the block table of a finished request."""
        self._so_far.pop(request, None)


def blocks_to_load(
    groups: Groups, group: CacheGroup, tables: BlockTable, start: int, end: int
) -> GroupBlocks:
    """Return the blocks of tokens ``start … end``; for states, the block of the state at ``end``. Leading
    chunks without blocks (outside a window) are left out."""
    if group.rule.past is Past.STATE:
        block = tables[group.number][end // group.block_tokens - 1]
        return state_blocks(groups, group.number, block, end)
    own = [tables[number] for number in group.numbers]
    per_chunk = groups.chunk_tokens // group.block_tokens
    first, last = start // group.block_tokens, -(-end // group.block_tokens)
    last_chunk = -(-end // groups.chunk_tokens)
    chunks: list[tuple[int, ...]] = []
    for chunk in range(start // groups.chunk_tokens, last_chunk):
        numbers = range(chunk * per_chunk, (chunk + 1) * per_chunk)
        blocks = tuple(table[at] if first <= at < last else NULL_BLOCK for table in own for at in numbers)
        if chunks or any(blocks):
            chunks.append(blocks)
    return GroupBlocks(group.number, last_chunk - len(chunks), tuple(chunks))


def state_blocks(groups: Groups, group: int, block: int, tokens: int) -> GroupBlocks:
    """Return the block of the state at ``tokens``, a multiple of the chunk."""
    assert block != NULL_BLOCK, "every state has a block in vLLM"
    return GroupBlocks(group, tokens // groups.chunk_tokens - 1, ((block,),))


def blocks_to_save(
    groups: Groups, group: CacheGroup, tables: BlockTable, first: int, end: int
) -> GroupBlocks:
    """Return the blocks of chunks ``first … end``. They begin after the last missing block, which is outside
    a window."""
    own = [tables[number] for number in group.numbers]
    per_chunk = groups.chunk_tokens // group.block_tokens
    chunks: list[tuple[int, ...]] = []
    for chunk in range(end - 1, first - 1, -1):
        numbers = slice(chunk * per_chunk, (chunk + 1) * per_chunk)
        blocks = tuple(block for table in own for block in table[numbers])
        if len(blocks) < per_chunk * len(own) or NULL_BLOCK in blocks:
            break
        chunks.append(blocks)
    return GroupBlocks(group.number, end - len(chunks), tuple(reversed(chunks)))


def writable_blocks(groups: Groups, output: Any) -> set[int]:
    """Return blocks that a step may write and that other requests may have used before. ``output`` is vLLM's
    ``SchedulerOutput``."""
    found: set[int] = set()
    for new in output.scheduled_new_reqs:
        for group in groups.groups:
            first = new.num_computed_tokens // group.block_tokens
            for number in group.numbers:
                found.update(new.block_ids[number][first:])
    for tables in output.scheduled_cached_reqs.new_block_ids:
        for table in tables or ():
            found.update(table)
    more = vars(output)  # fields that only some versions have
    found.update(more.get("new_block_ids_to_zero") or ())
    found.update(each.dst_block_id for each in more.get("kv_cache_block_copies") or ())
    found.discard(NULL_BLOCK)
    return found
