"""The KV cache groups of a model, the blocks that a request has in them, and those that an order is about.

A model whose layers are all alike has one group. Models with sliding windows or recurrent states have
several; they share the pool of blocks, and a block belongs to one group at a time. Types are recognized by
their names: they have moved between modules from version to version, and this has to work without vLLM for
the tests.

**States.** A block of a recurrent group holds one state. vLLM writes it in place while it computes, and goes
on in another block where a step ends between two blocks: the one before then keeps the state *at* that
boundary (``mamba_cache_mode: align``). Which blocks those are vLLM says itself, once for each, in the step
that computes up to there (``boundary_state_offloads``): after that step the block may be read. Where in a
block table it lies says nothing of when. The one exception is a request that goes on from a boundary: the
last block before it is that boundary's state, which vLLM reads in the request's first step.

A load puts the state of the hit's end into the last block before that end, and vLLM reads it there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    """``number`` is its place in vLLM's block tables, ``rule`` what a hit needs of it. ``meaning``: what the
    bytes of a block are, as far as neither its tensors nor the model's configuration say."""

    number: int
    layers: tuple[str, ...]
    block_tokens: int
    rule: GroupRule
    meaning: str = ""

    @property
    def windowed(self) -> bool:
        """Whether vLLM drops blocks that no later token attends."""
        return self.rule.past in (Past.WINDOW, Past.CHUNK)


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a model: ``len(tables)`` of a block table is ``count``. ``hash_tokens`` is how many
    tokens each of vLLM's block hashes covers, ``chunk_tokens`` a whole number of blocks of every group."""

    groups: tuple[CacheGroup, ...]
    count: int
    hash_tokens: int
    chunk_tokens: int

    @property
    def with_states(self) -> bool:
        """Whether a hit has to end where there are states."""
        return any(group.rule.past is Past.STATE for group in self.groups)

    @property
    def with_names(self) -> bool:
        """Whether what was found serves a hit of that length only: a shorter one may need other pages."""
        return any(kept_by_name(group.rule) for group in self.groups)

    def blocks_per_page(self, group: CacheGroup) -> int:
        """A page is the blocks of a chunk, or the state at its end, which is one block."""
        return 1 if group.rule.past is Past.STATE else self.chunk_tokens // group.block_tokens

    def label(self, group: CacheGroup) -> str:
        """What the identities of its pages call it. Followers of the daemon's events hear of ``group…``, of
        all of which every hit needs every page."""
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
    """Both are vLLM's. ``offers_states``: this vLLM says which blocks hold states (see the module). Raises
    :class:`UnsupportedError` for groups that cannot be kept."""
    described = kv_cache_config.kv_cache_groups
    groups = [_group(number, each) for number, each in enumerate(described)]
    if not groups:
        raise UnsupportedError("the model has no KV cache")
    if any(group.rule.past is Past.STATE for group in groups):
        _check_states(cache_config, offers_states)
    hash_tokens = _hash_tokens(kv_cache_config, cache_config, groups)
    unit = math.lcm(hash_tokens, *_sizes(groups))
    if chunk_tokens % unit:
        raise UnsupportedError(f"chunk_tokens is {chunk_tokens}: it has to be a multiple of {unit}")
    # States are where vLLM ends a step, at any block's end: there a chunk has to end, too.
    states = any(group.rule.past is Past.STATE for group in groups)
    least = LEAST_NAMED_TOKENS if states else _MIN_CHUNK_TOKENS
    chunk = chunk_tokens or -(-least // unit) * unit
    read = Groups(tuple(groups), len(groups), hash_tokens, chunk)
    if chunk < LEAST_NAMED_TOKENS and read.with_names:
        raise UnsupportedError(
            f"chunk_tokens is {chunk}: a model with windows or states needs {LEAST_NAMED_TOKENS} or more"
        )
    return read


def _check_states(cache_config: Any, offers_states: bool) -> None:
    """Raise :class:`UnsupportedError` where blocks hold no states that could be kept, or not when vLLM says
    so."""
    mode = vars(cache_config).get("mamba_cache_mode")
    if mode != "align":
        raise UnsupportedError(
            f"recurrent states are kept with mamba_cache_mode 'align' only (this is {mode!r}): switch prefix "
            "caching on"
        )
    if not offers_states:
        raise UnsupportedError("recurrent states need vLLM 0.32 or later")
    if vars(cache_config).get("use_replayssm", False):
        raise UnsupportedError("with use_replayssm blocks do not hold whole states")


def _hash_tokens(kv_cache_config: Any, cache_config: Any, groups: Sequence[CacheGroup]) -> int:
    """How many tokens a block hash covers. Before 0.32 vLLM does not say; this is how it decides there."""
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
        raise UnsupportedError(f"KV cache group {number} is one that vLLM keeps from connectors")
    specs = list(spec.kv_cache_specs.values()) if kind == _MIXED else [spec]
    layers, tokens = tuple(described.layer_names), int(spec.block_size)
    kinds = {type(each).__name__ for each in specs}
    if kinds <= _FULL:
        return CacheGroup(number, layers, tokens, GroupRule.all())
    if kinds == {_WINDOW}:
        # Each token attends ``sliding_window`` of them, itself included.
        return CacheGroup(
            number, layers, tokens, GroupRule.window(max(_size(specs, "sliding_window") - 1, 0))
        )
    if kinds == {_CHUNKED}:
        return CacheGroup(number, layers, tokens, GroupRule.chunked(_size(specs, "attention_chunk_size")))
    if kinds == {_STATE}:
        if _size(specs, "num_speculative_blocks"):
            # The state at a boundary is put right when the drafts behind it have been rejected, which is
            # after the step in which vLLM says that it is there.
            raise UnsupportedError("recurrent states are not kept with speculative decoding")
        meaning = sorted({f"{each.mamba_type} {each.shapes} {each.dtypes}" for each in specs})
        return CacheGroup(number, layers, tokens, GroupRule.state(), "; ".join(meaning))
    kept = ", ".join(sorted(kinds))
    raise UnsupportedError(
        f"KV cache group {number} keeps {kept}: only attention over blocks and recurrent states can be kept"
    )


def _size(specs: Sequence[Any], name: str) -> int:
    """What all layers of a group have in common."""
    sizes = {int(vars(spec)[name]) for spec in specs}
    if len(sizes) > 1:
        raise UnsupportedError(f"a KV cache group has layers of different {name}: {sorted(sizes)}")
    return sizes.pop()


class BlockTables:
    """The blocks of the requests in a step. vLLM's scheduler answers for a request (from 0.30 on), or it has
    said step by step (in 0.29 the whole tables of requests that have got blocks, up to 0.28 the blocks that
    they have got). Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        self._ask: Callable[[str], BlockTable | None] | None = None
        self._so_far: dict[str, Sequence[list[int]]] = {}
        self._states: Mapping[str, Sequence[tuple[int, int, int]]] = {}

    def take(self, output: Any) -> None:
        """``output`` is vLLM's ``SchedulerOutput`` of the step that begins."""
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
        """Of a request that is scheduled in this step."""
        table = self._ask(request) if self._ask is not None else self._so_far.get(request)
        assert table is not None, "a request that is scheduled has blocks"
        return table

    def states(self, request: str) -> Sequence[tuple[int, int, int]]:
        """Blocks that hold a state after this step: (group, block, the tokens that it is the state of)."""
        return self._states.get(request, ())

    def forget(self, request: str) -> None:
        """It has finished."""
        self._so_far.pop(request, None)


def blocks_to_load(
    groups: Groups, group: CacheGroup, table: Sequence[int], start: int, end: int
) -> GroupBlocks:
    """The blocks of tokens ``start … end``: of a state, the one at ``end``. Leading chunks without any
    (outside of a window) are left out."""
    if group.rule.past is Past.STATE:
        return state_blocks(groups, group.number, table[end // group.block_tokens - 1], end)
    per_chunk = groups.blocks_per_page(group)
    first, last = start // group.block_tokens, -(-end // group.block_tokens)
    last_chunk = -(-end // groups.chunk_tokens)
    chunks: list[tuple[int, ...]] = []
    for chunk in range(start // groups.chunk_tokens, last_chunk):
        numbers = range(chunk * per_chunk, (chunk + 1) * per_chunk)
        blocks = tuple(table[at] if first <= at < last else NULL_BLOCK for at in numbers)
        if chunks or any(blocks):
            chunks.append(blocks)
    return GroupBlocks(group.number, last_chunk - len(chunks), tuple(chunks))


def state_blocks(groups: Groups, group: int, block: int, tokens: int) -> GroupBlocks:
    """The block of the state at ``tokens``, a multiple of the chunk."""
    assert block != NULL_BLOCK, "vLLM has a block for each state"
    return GroupBlocks(group, tokens // groups.chunk_tokens - 1, ((block,),))


def blocks_to_save(
    groups: Groups, group: CacheGroup, table: Sequence[int], first: int, end: int
) -> GroupBlocks:
    """The blocks of chunks ``first … end``, from where on none is missing (outside of a window)."""
    per_chunk = groups.blocks_per_page(group)
    chunks: list[tuple[int, ...]] = []
    for chunk in range(end - 1, first - 1, -1):
        blocks = tuple(table[chunk * per_chunk : (chunk + 1) * per_chunk])
        if len(blocks) < per_chunk or NULL_BLOCK in blocks:
            break
        chunks.append(blocks)
    return GroupBlocks(group.number, end - len(chunks), tuple(reversed(chunks)))


def writable_blocks(groups: Groups, output: Any) -> set[int]:
    """Blocks that a step may write to, and that another request may have had before. ``output`` is vLLM's
    ``SchedulerOutput``."""
    found: set[int] = set()
    for new in output.scheduled_new_reqs:
        for group in groups.groups:
            found.update(new.block_ids[group.number][new.num_computed_tokens // group.block_tokens :])
    for tables in output.scheduled_cached_reqs.new_block_ids:
        for table in tables or ():
            found.update(table)
    more = vars(output)  # what not every version has
    found.update(more.get("new_block_ids_to_zero") or ())
    found.update(each.dst_block_id for each in more.get("kv_cache_block_copies") or ())
    found.discard(NULL_BLOCK)
    return found
