"""Prompts that can be named by a number, and what the pages of each must hold.

Prompt ``2n`` and prompt ``2n + 1`` begin with the same chunk and then differ, so that stores of them have
branches. A prompt's tokens do not depend on how many of them are used: 40 tokens of prompt 3 are a prefix of
70 tokens of prompt 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.store import Store
from tierstore.testing.pages import leading_tokens, page_of
from tierstore.tiers.disk import FileIO
from tierstore.units import KIB, MIB

_SPREAD = 1 << 20  # token ids that one prompt has to itself


@dataclass(frozen=True)
class Life:
    """How one life of a store is opened: its pages' layout and its capacities."""

    spec: KVSpec
    disk_bytes: int = 2 * MIB
    inline_bytes: int = 0  # 0: every page goes to the extents
    host_bytes: int = 1 * MIB
    model: str = "faults"
    mover_threads: int = 1  # copies in the order in which they were asked for

    def open(self, directory: Path, io: FileIO | None = None) -> Store:
        return Store.open(
            directory,
            self.spec,
            identity=Identity.of(self.spec, model=self.model),
            host_bytes=self.host_bytes,
            disk_bytes=self.disk_bytes,
            inline_bytes=self.inline_bytes,
            mover_threads=self.mover_threads,
            io=io,
        )


def small_pages(layers: int = 2, head_dim: int = 32) -> KVSpec:
    """16 tokens a page; ``layers * head_dim * 128`` bytes of it: 8 KiB as it stands."""
    return KVSpec.uniform(layers=layers, kv_heads=1, head_dim=head_dim, dtype="float32", chunk_tokens=16)


def prompt_tokens(number: int, count: int, spec: KVSpec) -> list[int]:
    """The first ``count`` tokens of prompt ``number``."""
    shared = [number // 2 * 2 * _SPREAD + at for at in range(spec.chunk_tokens)]
    own = [number * _SPREAD + at for at in range(_SPREAD // 2, _SPREAD // 2 + count)]
    return (shared + own)[:count]


def pages(number: int, count: int, spec: KVSpec) -> list[bytes]:
    """The pages of the first ``count`` tokens, the last of them in part if ``count`` ends inside it."""
    ends = [*range(spec.chunk_tokens, count, spec.chunk_tokens), count] if count else []
    return [_page(number, end, spec) for end in ends]


def matches(page: bytes, number: int, end: int, spec: KVSpec) -> bool:
    """Whether ``page`` is the one that ends with the prompt's token ``end``. What lies behind that token
    is another prompt's, and not looked at."""
    wanted = _page(number, end, spec)
    within = (end - 1) % spec.chunk_tokens + 1
    if within == spec.chunk_tokens:
        return page == wanted
    return leading_tokens(page, within, spec) == leading_tokens(wanted, within, spec)


@lru_cache(maxsize=20_000)
def _page(number: int, end: int, spec: KVSpec) -> bytes:
    return page_of(prompt_tokens(number, end, spec), spec)


def page_count(tokens: int, spec: KVSpec) -> int:
    """How many pages hold ``tokens`` tokens."""
    return -(-tokens // spec.chunk_tokens)


def inline_life() -> Life:
    """8 KiB pages that live in the index."""
    return Life(small_pages(), disk_bytes=1 * MIB, inline_bytes=16 * KIB)


def odd_life() -> Life:
    """21 KiB pages that do not end on a block's border."""
    return Life(small_pages(layers=41, head_dim=4), disk_bytes=2 * MIB)
