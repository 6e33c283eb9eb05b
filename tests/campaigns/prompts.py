"""Prompts that can be named by a number, and what the pages of each must hold.

Prompt ``2n`` and prompt ``2n + 1`` begin with the same chunk and then differ, so that stores of them have
branches. A prompt's tokens do not depend on how many of them are used: 40 tokens of prompt 3 are a prefix of
70 tokens of prompt 3.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np

from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.stats import StoreStats
from tierstore.store import Store
from tierstore.testing.opening import open_store
from tierstore.testing.pages import leading_tokens, page_of
from tierstore.tiers.disk import FileIO
from tierstore.tiers.disk.keyring import make_master_key
from tierstore.units import KIB, MIB

KEY = "disk.key"
KEY_FILES = (KEY, f"{KEY}.ring")
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
    disk_codec: str = "none"
    encrypted: bool = False

    def open(self, directory: Path, io: FileIO | None = None) -> Store:
        """Open a store in ``directory``. The keys of an encrypted one are beside it."""
        key = directory.parent / KEY
        if self.encrypted and not key.exists():
            own = key.with_name(f"{KEY} {os.getpid()}")  # whoever makes it may be killed meanwhile
            make_master_key(own)
            own.rename(key)
        return open_store(
            directory,
            self.spec,
            identity=Identity.of(self.spec, model=self.model),
            host_bytes=self.host_bytes,
            disk_bytes=self.disk_bytes,
            inline_bytes=self.inline_bytes,
            mover_threads=self.mover_threads,
            disk_codec=self.disk_codec,
            disk_key=str(key) if self.encrypted else "",
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
    """Numbers of like size, as KV is: a codec makes something of them."""
    page = np.frombuffer(page_of(prompt_tokens(number, end, spec), spec), "<u4")
    return bytes(page & np.uint32(0x80FFFFFF) | np.uint32(0x3E000000))


def page_count(tokens: int, spec: KVSpec) -> int:
    """How many pages hold ``tokens`` tokens."""
    return -(-tokens // spec.chunk_tokens)


def inline_life() -> Life:
    """8 KiB pages that live in the index."""
    return Life(small_pages(), disk_bytes=1 * MIB, inline_bytes=16 * KIB)


def odd_life() -> Life:
    """21 KiB pages that do not end on a block's border."""
    return Life(small_pages(layers=41, head_dim=4), disk_bytes=2 * MIB)


def encoded_life() -> Life:
    """64 KiB pages that a codec makes 52 KiB of."""
    return Life(small_pages(layers=8, head_dim=64), disk_bytes=2 * MIB, disk_codec="lossless")


def sealed_life() -> Life:
    """Encrypted pages in the extents, which a codec has made smaller."""
    return replace(encoded_life(), encrypted=True)


def sealed_inline_life() -> Life:
    """Encrypted pages in the index."""
    return replace(inline_life(), encrypted=True)


# -- script --------------------------------------------------------------------------------------------
#
# What a script is made of, and how its prompts are entered.


@dataclass(frozen=True, slots=True)
class Save:
    prompt: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Let ``pages`` pages leave the disk."""

    pages: int


@dataclass(frozen=True, slots=True)
class Reopen:
    """Close the store and open it as ``lives[life]``."""

    life: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Load what there is of a prompt, and compare every byte."""

    prompt: int


Step: TypeAlias = Save | Evict | Reopen | Load

Held: TypeAlias = dict[tuple[int, int], int]
"""(book, prompt) → leading tokens that are on disk. A book is the number of the first life with that spec
and model."""


def book_of(lives: Sequence[Life], life: int) -> int:
    """Where the pages of a life are entered: under the first life that can look them up."""
    return next(
        number
        for number, each in enumerate(lives)
        if (each.spec, each.model) == (lives[life].spec, lives[life].model)
    )


# -- player --------------------------------------------------------------------------------------------
#
# Plays scripts on a store, and keeps book of what is durable.
#
# After every step the store is flushed, its host tier is emptied, and every prompt is looked up. What is
# then found can only be on disk: it has been *acknowledged as durable*.


WAIT_S = 60.0  # for what takes milliseconds, before it counts as hanging


class Player:
    """Plays steps on a store and keeps book of what is durable."""

    def __init__(self, directory: Path, lives: Sequence[Life], io: FileIO, *, checks: bool = False) -> None:
        """Opens the store as ``lives[0]``; with ``checks`` it has to pass its own check whenever it has been
        opened again (which also waits until it knows what it has). Raises what :func:`tierstore.open`
        raises."""
        self.lives = lives
        self.held: Held = {}
        self.prompts: Held = {}
        self.wrong_pages = 0
        self.problems: list[str] = []  # what the store's own check had to say
        self.evicted_pages = 0  # from disk, over all lives
        self._lengths: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # that were saved
        self._directory = directory
        self._io = io
        self._checks = checks
        self._life = 0
        self.store: Store = lives[0].open(directory, io)

    def play(self, step: Step) -> None:
        """Do one step and flush. Then :attr:`held` says what is durable."""
        book = book_of(self.lives, self._life)
        before = self.store.stats()
        evicted_before = _evicted(before)
        if isinstance(step, Save):
            save(self.store, step.prompt, step.tokens)
            self._lengths[book, step.prompt].add(step.tokens)
            self.prompts[book, step.prompt] = max(self.prompts.get((book, step.prompt), 0), step.tokens)
        elif isinstance(step, Load):
            tokens = self.prompts.get((book, step.prompt), 0)
            self.wrong_pages += load(self.store, step.prompt, tokens).wrong_pages
        elif isinstance(step, Evict):
            self.store.evict("disk", step.pages)
        else:
            self.store.close()
            self._life = step.life
            self.store = self.lives[step.life].open(self._directory, self._io)
            evicted_before = 0
            if self._checks:
                self._check()
        if not self.store.flush(WAIT_S):
            raise TimeoutError(f"the store did not flush within {WAIT_S:.0f} s after {step}")
        after = self.store.stats()
        evicted = _evicted(after) - evicted_before
        self.evicted_pages += evicted
        dropped = isinstance(step, Reopen) and after.tiers["disk"].pages < before.tiers["disk"].pages
        self._look(forget_others=bool(evicted or dropped))

    def _check(self) -> None:
        try:
            self.store.check()
        except AssertionError as error:
            self.problems.append(f"check: {error}")

    def _look(self, *, forget_others: bool) -> None:
        """Find out what is on disk. Pages of other books cannot be looked up: what they have is sure only
        as long as nothing had to go."""
        self.store.evict("host")
        book = book_of(self.lives, self._life)
        here = {name: self._found(name) for name in self.prompts if name[0] == book}
        others = {name: tokens for name, tokens in self.held.items() if name[0] != book}
        held = here if forget_others else {**others, **here}
        self.held = {name: tokens for name, tokens in held.items() if tokens}

    def _found(self, name: tuple[int, int]) -> int:
        book, number = name
        chunk = self.lives[book].spec.chunk_tokens
        with self.store.lookup(prompt_tokens(number, self.prompts[name], self.lives[book].spec)) as hit:
            tokens = hit.by_tier.get("disk", 0)
        # A tail may have been found in a page that goes on beyond it, which need not be found again.
        alone = self._lengths[name] == {tokens} and tokens > chunk
        return tokens if alone else tokens // chunk * chunk


def _evicted(stats: StoreStats) -> int:
    pages = stats.counters["evicted_pages"]
    return pages["disk"] if isinstance(pages, Mapping) else 0


def save(store: Store, number: int, tokens: int) -> int:
    """Save the first ``tokens`` tokens of a prompt. Returns how many are stored."""
    return store.save(prompt_tokens(number, tokens, store.spec), pages(number, tokens, store.spec)).wait(
        WAIT_S
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """What a store had of a prompt."""

    promised_tokens: int  # by the lookup
    served_tokens: int  # by the load
    wrong_pages: int  # of the served ones


def load(store: Store, number: int, tokens: int, *, deadline_s: float | None = None) -> Answer:
    """Look up, load and compare the first ``tokens`` tokens of a prompt."""
    spec = store.spec
    hit = store.lookup(prompt_tokens(number, tokens, spec))
    promised = hit.tokens
    buffers = [bytearray(b"\xaa" * spec.page_bytes) for _ in range(hit.num_pages)]
    served = store.load(hit, buffers, deadline_s=deadline_s).wait(WAIT_S).tokens
    ends = [min((at + 1) * spec.chunk_tokens, served) for at in range(page_count(served, spec))]
    wrong = [not matches(bytes(page), number, end, spec) for page, end in zip(buffers, ends, strict=False)]
    return Answer(promised, served, sum(wrong))
