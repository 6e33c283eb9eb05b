"""The KV cache groups of a model, the block tables of requests, and the blocks of a load or save.

A model whose layers are all alike has one KV cache group. Models with sliding windows or recurrent states
have several groups. The groups share the pool of blocks, and a block belongs to one group at a time. The
types of vLLM are recognized by name, because vLLM has moved them between modules, and tests run without vLLM.

**States.** A block of a group of recurrent layers holds one state, which vLLM updates in place. If a step
ends at a block boundary, vLLM continues in another block. The earlier block then keeps the state *at* that
boundary (``mamba_cache_mode: align``). vLLM reports this block once, in the step that computes up to the
boundary (``boundary_state_offloads``). The state may be saved after that step.

The position in a block table does not show whether a block's state is complete, with one exception. If a
request continues from a boundary, the last block before the boundary holds the complete state, which vLLM
reads in the request's first step.

A load writes the state at the hit's end into the last block before this end, where vLLM reads the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierstore.groups import GroupRule, Past
from tierstore.keys import LEAST_NAMED_TOKENS
from tierstore_connectors.vllm.layout import UnsupportedError
from tierstore_connectors.vllm.orders import NULL_BLOCK, GroupBlocks

BlockTable = Sequence[Sequence[int]]  # block numbers, by KV cache group

_MIN_CHUNK_TOKENS = 64
_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_WINDOW, _CHUNKED, _STATE = "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec"
_MIXED = "UniformTypeKVCacheSpecs"  # a group whose layers have the same type but different sizes


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One KV cache group. ``number`` is the group's index in vLLM's block tables. ``rule`` says which pages a
    hit needs. ``meaning`` describes properties of a block's bytes that follow neither from the tensors nor
    from the model's configuration. ``members`` are the groups of vLLM that :func:`joined` has united."""

    number: int
    layers: tuple[str, ...]
    block_tokens: int
    rule: GroupRule
    meaning: str = ""
    members: tuple[CacheGroup, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the indices of the group's block tables."""
        return tuple(each.number for each in self.members) or (self.number,)

    @property
    def windowed(self) -> bool:
        """Return whether vLLM frees blocks that no later token attends to."""
        return self.rule.past in (Past.WINDOW, Past.CHUNK)


@dataclass(frozen=True, slots=True)
class Groups:
    """All KV cache groups of a model. A request's block table has ``count`` lists of blocks.

    A block hash of vLLM covers ``hash_tokens`` tokens. ``chunk_tokens`` is a multiple of every group's
    block size.
    """

    groups: tuple[CacheGroup, ...]
    count: int
    hash_tokens: int
    chunk_tokens: int

    @property
    def with_states(self) -> bool:
        """Return whether a hit needs a recurrent state at its end."""
        return any(group.rule.past is Past.STATE for group in self.groups)

    @property
    def with_names(self) -> bool:
        """Return whether a group's pages are found by name. If so, a shortened hit may need other pages."""
        return any(not group.rule.chained for group in self.groups)

    def blocks_per_page(self, group: CacheGroup) -> int:
        """Return the number of blocks in a page: the blocks of a chunk in each block table, or one block for
        the recurrent state at the chunk's end."""
        if group.rule.past is Past.STATE:
            return 1
        return self.chunk_tokens // group.block_tokens * len(group.numbers)

    def label(self, group: CacheGroup) -> str:
        """Return the group's label in its pages' identities.

        The label begins with ``group`` if every hit needs all pages of the group up to the hit's end. The
        daemon's KV events contain only groups whose label begins with ``group``.
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
    """Read the groups from vLLM's configurations. ``offers_states`` says whether this vLLM reports which
    blocks hold states (see the module). Raise :class:`UnsupportedError` for groups that cannot be stored."""
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
    # vLLM may end a step, and keep a state, at the end of any block. So models with states have small chunks.
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
    """Return the groups of pages that engines share: vLLM's groups with equal rule and block size become one
    group. (vLLM divides layers of one kind into several groups, so that all blocks have one size.)"""
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
    """Raise :class:`UnsupportedError` if blocks hold no complete states, or if vLLM does not report which
    blocks hold them."""
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
    """Return how many tokens a block hash covers. vLLM before 0.32 does not report this number, so it is
    computed by vLLM's rule."""
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
        # Each token attends to ``sliding_window`` tokens, including itself.
        return CacheGroup(
            number, layers, tokens, GroupRule.window(max(_size(specs, "sliding_window") - 1, 0))
        )
    if kinds == {_CHUNKED}:
        return CacheGroup(number, layers, tokens, GroupRule.chunked(_size(specs, "attention_chunk_size")))
    if kinds == {_STATE}:
        if _size(specs, "num_speculative_blocks"):
            # vLLM corrects the state at a boundary after it has rejected draft tokens. That is later than
            # vLLM reports the block.
            raise UnsupportedError("recurrent states are not kept with speculative decoding")
        meaning = sorted({f"{each.mamba_type} {each.shapes} {each.dtypes}" for each in specs})
        return CacheGroup(number, layers, tokens, GroupRule.state(), "; ".join(meaning))
    kept = ", ".join(sorted(kinds))
    raise UnsupportedError(
        f"KV cache group {number} keeps {kept}: only attention over blocks and recurrent states can be stored"
    )


def _size(specs: Sequence[Any], name: str) -> int:
    """Return a size that must be equal in all layers of a group."""
    sizes = {int(vars(spec)[name]) for spec in specs}
    if len(sizes) > 1:
        raise UnsupportedError(f"a KV cache group has layers of different {name}: {sorted(sizes)}")
    return sizes.pop()


class BlockTables:
    """The block tables of the requests in a step. Only the scheduler's thread uses it.

    From vLLM 0.30 on, a function of the step's output returns the table of a request. The output of vLLM 0.29
    has the whole tables of requests with new blocks; the output of earlier versions has only the new blocks.
    """

    def __init__(self) -> None:
        self._ask: Callable[[str], BlockTable | None] | None = None
        self._so_far: dict[str, Sequence[list[int]]] = {}
        self._states: Mapping[str, Sequence[tuple[int, int, int]]] = {}

    def take(self, output: Any) -> None:
        """Read the tables from ``output``, the ``SchedulerOutput`` of the step that begins."""
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
        assert table is not None, "vLLM gives blocks to every scheduled request"
        return table

    def states(self, request: str) -> Sequence[tuple[int, int, int]]:
        """Return the blocks that hold a complete state after this step, each as (group, block, number of
        tokens that the state covers)."""
        return self._states.get(request, ())

    def forget(self, request: str) -> None:
        """Drop the block table of a finished request."""
        self._so_far.pop(request, None)


def blocks_to_load(
    groups: Groups, group: CacheGroup, tables: BlockTable, start: int, end: int
) -> GroupBlocks:
    """Return the blocks of tokens ``start … end``; in a group of states, the block of the state at ``end``.
    Leading chunks outside the window, which have no blocks, are left out."""
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
    """Return ``block`` as the block of the state after ``tokens`` tokens, a multiple of ``chunk_tokens``."""
    assert block != NULL_BLOCK, "vLLM has a block for every state"
    return GroupBlocks(group, tokens // groups.chunk_tokens - 1, ((block,),))


def blocks_to_save(
    groups: Groups, group: CacheGroup, tables: BlockTable, first: int, end: int
) -> GroupBlocks:
    """Return the blocks of chunks ``first … end``, without leading chunks that have lost blocks because they
    are outside the window."""
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
    """Return the blocks that a step may write and that other requests may have used before. ``output`` is
    vLLM's ``SchedulerOutput``."""
    found: set[int] = set()
    for new in output.scheduled_new_reqs:
        for group in groups.groups:
            first = new.num_computed_tokens // group.block_tokens
            for number in group.numbers:
                found.update(new.block_ids[number][first:])
    for tables in output.scheduled_cached_reqs.new_block_ids:
        for table in tables or ():
            found.update(table)
    more = vars(output)  # new_block_ids_to_zero and kv_cache_block_copies: some vLLM versions lack them
    found.update(more.get("new_block_ids_to_zero") or ())
    found.update(each.dst_block_id for each in more.get("kv_cache_block_copies") or ())
    found.discard(NULL_BLOCK)
    return found
