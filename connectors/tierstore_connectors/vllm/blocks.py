"""Which of a request's blocks an order is about. Pure: block tables in, block numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierstore_connectors.vllm.groups import Group, Groups
from tierstore_connectors.vllm.work import NULL_BLOCK, GroupBlocks


def to_load(groups: Groups, group: Group, table: Sequence[int], start: int, end: int) -> GroupBlocks:
    """The blocks of tokens ``start … end``. Leading chunks without any (outside of a window) are left out."""
    per_chunk = groups.blocks_per_chunk(group)
    first, last = start // group.block_tokens, -(-end // group.block_tokens)
    last_chunk = -(-end // groups.chunk_tokens)
    chunks: list[tuple[int, ...]] = []
    for chunk in range(start // groups.chunk_tokens, last_chunk):
        numbers = range(chunk * per_chunk, (chunk + 1) * per_chunk)
        blocks = tuple(table[at] if first <= at < last else NULL_BLOCK for at in numbers)
        if chunks or any(blocks):
            chunks.append(blocks)
    return GroupBlocks(group.number, last_chunk - len(chunks), tuple(chunks))


def to_save(groups: Groups, group: Group, table: Sequence[int], first: int, end: int) -> GroupBlocks:
    """The blocks of chunks ``first … end``, from where on none is missing (outside of a window)."""
    per_chunk = groups.blocks_per_chunk(group)
    chunks: list[tuple[int, ...]] = []
    for chunk in range(end - 1, first - 1, -1):
        blocks = tuple(table[chunk * per_chunk : (chunk + 1) * per_chunk])
        if len(blocks) < per_chunk or NULL_BLOCK in blocks:
            break
        chunks.append(blocks)
    return GroupBlocks(group.number, end - len(chunks), tuple(reversed(chunks)))


def fresh(groups: Groups, output: Any) -> set[int]:
    """Blocks that a step may write to, and that may have been somebody else's before. ``output`` is vLLM's
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
