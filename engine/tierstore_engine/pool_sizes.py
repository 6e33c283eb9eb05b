"""The sizes of an engine's page pools, before they are made.

A size is a number of pages of the first layer group. :func:`group_pages` returns the pages of the other
groups' pools.
"""

from __future__ import annotations

from bisect import bisect_right

from tierstore.errors import UsageError
from tierstore.machine import memory_bytes
from tierstore.spec import DEFAULT_CHUNK_TOKENS, KVSpec, LayerKind
from tierstore.tiers.device import Device
from tierstore.tiers.device_pool import pages_that_fit
from tierstore.tiers.group_pools import bytes_for
from tierstore.tiers.overflow import LEAST_STAGED
from tierstore.units import format_size
from tierstore_engine.config import ModelConfig
from tierstore_engine.options import EngineOptions
from tierstore_engine.settings import EngineSettings

_STATE_PAGES = 4  # a sequence takes a live state and a copy of it; hits may take as many again
_DEFAULT_POOL_TOKENS = 65_536  # on a CPU, where the pool shares memory with everything else


def group_pages(spec: KVSpec, pages: int, settings: EngineSettings) -> list[int]:
    """Return the pages of each layer group's pool, if the first pool has ``pages``. A window pool holds
    the windows of the concurrent sequences, plus a quarter of all tokens. A state pool has two states
    per sequence, and two more for hits. A pool of cross attention holds as many rows as the first pool holds
    tokens. If the model has only states, ``pages`` is the number of states."""
    tokens = pages * spec.chunk_tokens
    counts = [pages]
    for part in spec.split()[1:]:
        [group] = part.groups
        if group.kind is LayerKind.CROSS_ATTENTION:
            counts.append(pages)
        elif group.window is None:
            counts.append(_STATE_PAGES * min(pages, settings.max_sequences))
        else:
            most = min(tokens, group.window + settings.prefill_chunk + 2 * spec.chunk_tokens)
            counts.append(min(pages // 4 + 2 * pages_for_tokens(spec, most) + 2, 2 * pages + 2))
    return counts


def pool_pages_for(spec: KVSpec, tokens: int, *, sequences: int) -> int:
    """Return the pages of the first layer group's pool that hold ``tokens`` tokens in ``sequences``
    sequences."""
    [group] = spec.split()[0].groups
    if group.kind is LayerKind.RECURRENT_STATE:
        return _STATE_PAGES * sequences
    return pages_for_tokens(spec, tokens)


def pages_for_tokens(spec: KVSpec, tokens: int) -> int:
    """Return how many pages the KV of ``tokens`` tokens of one sequence needs."""
    return -(-tokens // spec.chunk_tokens)


def check_pool(spec: KVSpec, pool_pages: int, device: str, *, nbytes: int | None = None) -> None:
    """Raise :class:`UsageError` for a pool without a page, or larger than this machine's memory. A GPU's
    memory is checked when the pool is made."""
    if pool_pages < 1:
        raise UsageError(f"the page pool needs room for at least one page of {format_size(spec.page_bytes)}")
    wanted, memory = nbytes or pool_pages * spec.page_bytes, memory_bytes().total
    if device == "cpu" and wanted > memory:
        raise UsageError(
            f"a page pool of {format_size(wanted)} ({pool_pages} pages of {format_size(spec.page_bytes)}) "
            f"does not fit this machine's memory of {format_size(memory)}"
        )


def check_resident(spec: KVSpec, pages: int, settings: EngineSettings) -> None:
    """Raise :class:`UsageError` if one step may write more pages than the ``pages`` in memory, or read more
    pages at a time than the staging memory holds."""
    sequences = settings.max_sequences
    if sequences > LEAST_STAGED:
        raise UsageError(f"with an overflow file, max_sequences is at most {LEAST_STAGED}, got {sequences}")
    if sequences > resident_sequences(spec, pages, settings):
        most = _prompt_pages(spec, settings) + 2 * sequences
        raise UsageError(
            f"a step may write {most} pages, but the pool's memory holds {pages}: give it "
            f"{format_size(most * spec.split()[0].page_bytes)}, or lower max_sequences or prefill_chunk"
        )


def resident_sequences(spec: KVSpec, pages: int, settings: EngineSettings) -> int:
    """Return to the pages of how many sequences one step may write, if ``pages`` pages are in memory. May be
    negative."""
    return min((pages - _prompt_pages(spec, settings)) // 2, LEAST_STAGED)


def _prompt_pages(spec: KVSpec, settings: EngineSettings) -> int:
    return pages_for_tokens(spec, settings.prompt_tokens - 1)


def fitting_pages(spec: KVSpec, device: Device, settings: EngineSettings) -> int:
    """Return the pages of the first layer group's pool that fit the device's free memory (or the part of it
    that pools may take). See :func:`pages_within`."""
    first = spec.split()[0]
    return pages_within(spec, pages_that_fit(first, device) * first.page_bytes, settings)


def pages_wanted(options: EngineOptions, device: str, spec: KVSpec, settings: EngineSettings) -> int | None:
    """Return the number of pages of a pool for many sequences: as many as ``--hbm-bytes`` of each part holds.
    Without that option, return the pages for 65,536 tokens on a CPU, and None (all free memory) on a GPU.
    Raises the errors of :func:`check_pool`."""
    if options.hbm_bytes is None and device != "cpu":
        return None
    pages = pool_pages_for(spec, _DEFAULT_POOL_TOKENS, sequences=settings.max_sequences)
    if options.hbm_bytes is not None:
        pages = pages_within(spec, options.hbm_bytes * options.sequence_parallel, settings)
    check_pool(spec, pages, device, nbytes=pool_bytes(spec, pages, settings))
    return pages


def pages_within(spec: KVSpec, nbytes: int, settings: EngineSettings) -> int:
    """Return the most pages of the first layer group's pool with which the pools of all groups
    (:func:`group_pages`) take at most ``nbytes``. Return 0 if not even one page fits."""
    most = nbytes // spec.split()[0].page_bytes
    return max(bisect_right(range(most + 1), nbytes, key=lambda n: pool_bytes(spec, n, settings)) - 1, 0)


def pool_bytes(spec: KVSpec, pages: int, settings: EngineSettings) -> int:
    """Return the memory of all groups' pools, if the first pool has ``pages``."""
    return bytes_for(spec.split(), group_pages(spec, pages, settings))


def draft_pages(draft: ModelConfig, model: ModelConfig, pages: int, settings: EngineSettings) -> int:
    """Return the pages of a draft model's pool: it holds as many tokens as ``pages`` pages of ``model``. If
    ``model`` has only states, the pool holds 65,536 tokens."""
    tokens = pages * DEFAULT_CHUNK_TOKENS if model.attends else _DEFAULT_POOL_TOKENS
    return pool_pages_for(draft.kv_spec(), tokens, sequences=settings.max_sequences)
