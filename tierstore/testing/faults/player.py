"""Plays scripts on a store, and keeps book of what is durable.

After every step the store is flushed, its host tier is emptied, and every prompt is looked up. What is then
found can only be on disk: it has been *acknowledged as durable*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.store import Store
from tierstore.testing.faults.prompts import Life, matches, page_count, pages, prompt_tokens
from tierstore.testing.faults.script import Evict, Held, Load, Reopen, Save, Step, book_of
from tierstore.tiers.disk import FileIO

WAIT_S = 60.0  # for what takes milliseconds, before it counts as hanging


class Player:
    """Plays steps on a store and keeps book of what is durable."""

    def __init__(self, directory: Path, lives: Sequence[Life], io: FileIO, *, checks: bool = False) -> None:
        """Opens the store as ``lives[0]``; with ``checks`` it has to pass its own check whenever it has been
        opened again (which also waits until it knows what it has). Raises what :meth:`Store.open` raises."""
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
        pages_before = self.store.stats().tiers["disk"].pages
        evicted_before = self._evicted()
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
        evicted = self._evicted() - evicted_before
        self.evicted_pages += evicted
        dropped = isinstance(step, Reopen) and self.store.stats().tiers["disk"].pages < pages_before
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

    def _evicted(self) -> int:
        pages = self.store.stats().counters["evicted_pages"]
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
