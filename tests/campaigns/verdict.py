"""The judge: opens a store directory as a user would, asks for everything, and compares every byte."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaigns.prompts import WAIT_S, Held, Life, load, page_count, prompt_tokens, save
from tests.campaigns.recording import allocated_bytes
from tierstore.errors import TierStoreError
from tierstore.spec import KVSpec
from tierstore.store import Store

_NEW_PROMPT = 1 << 9  # not used by any script
_NEW_PAGES = 3


@dataclass(slots=True)
class Verdict:
    """What a store did after a fault. Only ``recovery_s`` may be anything but zero or empty."""

    wrong_pages: int = 0  # served, and not what was saved
    lost_pages: int = 0  # acknowledged as durable, and not served
    over_capacity: int = 0  # moments at which the directory took more than its cap
    recovery_s: float = 0.0  # from open to the answer to the first lookup, the longest
    problems: list[str] = field(default_factory=list)  # everything else that must not be

    @property
    def good(self) -> bool:
        return not (self.wrong_pages or self.lost_pages or self.over_capacity or self.problems)

    def add(self, other: Verdict) -> None:
        """Take in the verdict of another run."""
        self.wrong_pages += other.wrong_pages
        self.lost_pages += other.lost_pages
        self.over_capacity += other.over_capacity
        self.recovery_s = max(self.recovery_s, other.recovery_s)
        self.problems += other.problems


def judge(
    directory: Path,
    lives: Sequence[Life],
    prompts: Held,
    must_have: Held,
    *,
    undamaged: bool = True,
    write_on: bool = True,
    capacity_bytes: int | None = None,
) -> Verdict:
    """Open ``directory`` once for each book whose pages were saved in it, as ``lives[book]``, and ask for all
    ``prompts``; with ``write_on`` save some more, and ask again.

    ``must_have`` are the prompts' leading tokens that must be there. With ``undamaged``, what a lookup
    promises must also come, and the store's own check must pass: a crash is no excuse for a record without
    its page. ``capacity_bytes`` caps the directory as it is found, when that was not the first life's cap.
    """
    verdict = Verdict()
    found_capacity = lives[0].disk_bytes if capacity_bytes is None else capacity_bytes
    verdict.over_capacity += allocated_bytes(directory) > found_capacity
    for number in sorted({life for life, _ in prompts} or {0}):
        mine = {prompt: tokens for (life, prompt), tokens in prompts.items() if life == number}
        must = {prompt: tokens for (life, prompt), tokens in must_have.items() if life == number}
        _judge_book(directory, lives[number], mine, must, undamaged, write_on, verdict)
    return verdict


def _judge_book(
    directory: Path,
    life: Life,
    prompts: Mapping[int, int],
    must: Mapping[int, int],
    undamaged: bool,
    write_on: bool,
    verdict: Verdict,
) -> None:
    began = time.perf_counter()
    try:
        store = life.open(directory)
    except TierStoreError as error:
        verdict.problems.append(f"the store does not open: {error}")
        verdict.lost_pages += sum(page_count(tokens, life.spec) for tokens in must.values())
        return
    try:
        store.lookup(prompt_tokens(0, life.spec.chunk_tokens, life.spec)).release()
        verdict.recovery_s = max(verdict.recovery_s, time.perf_counter() - began)
        _judge_pages(store, prompts, must, undamaged, verdict)
        if write_on:
            _write_on(store, verdict)
            store.evict("host")
            _judge_pages(store, prompts, must if _roomy(store) else {}, undamaged, verdict)
        if undamaged:
            check(store, verdict)
        verdict.over_capacity += allocated_bytes(directory) > life.disk_bytes
    finally:
        store.close()
    verdict.over_capacity += allocated_bytes(directory) > life.disk_bytes
    if failed := store.stats().failed_tasks:
        verdict.problems.append(f"{failed} tasks of the mover failed")


def _judge_pages(
    store: Store, prompts: Mapping[int, int], must: Mapping[int, int], undamaged: bool, verdict: Verdict
) -> None:
    for number, tokens in prompts.items():
        needed = must.get(number, 0)
        answers = [load(store, number, tokens)]
        if answers[0].served_tokens < needed:
            # A partial page may only be found by whoever asks for exactly its tokens.
            answers.append(load(store, number, needed))
        served = max(answer.served_tokens for answer in answers)
        verdict.wrong_pages += sum(answer.wrong_pages for answer in answers)
        verdict.lost_pages += lost_pages(needed, served, store.spec)
        if undamaged and any(answer.served_tokens < answer.promised_tokens for answer in answers):
            verdict.problems.append(f"prompt {number}: not all that was found could be loaded: {answers}")


def lost_pages(must: int, served: int, spec: KVSpec) -> int:
    """Pages of ``must`` tokens that are missing when only ``served`` came."""
    return max(page_count(must, spec) - page_count(served, spec), 0)


def check(store: Store, verdict: Verdict) -> None:
    """Let the store check itself, and take note of what it says."""
    try:
        store.check()
    except AssertionError as error:
        verdict.problems.append(f"check: {error}")


def _write_on(store: Store, verdict: Verdict) -> None:
    """Save new pages: they must find places that nobody else has."""
    tokens = _NEW_PAGES * store.spec.chunk_tokens
    save(store, _NEW_PROMPT, tokens)
    if not store.flush(WAIT_S):
        verdict.problems.append("the store does not flush")
    store.evict("host")
    answer = load(store, _NEW_PROMPT, tokens)
    verdict.wrong_pages += answer.wrong_pages
    if answer.served_tokens != tokens and not store.stats().counters["disk_dropped_pages"]:
        verdict.problems.append(f"of newly saved pages not all came back from disk: {answer}")


def _roomy(store: Store) -> bool:
    """Whether nothing had to be evicted from disk to make room."""
    evicted = store.stats().counters["evicted_pages"]
    return isinstance(evicted, Mapping) and not evicted["disk"]
