"""Processes that write to a store until they are killed: :func:`main` is a program of its own.

It is imported once, and then forks a process for each request on its stdin, so that a life costs
milliseconds. A life says on stdout what it is about to do and what has been acknowledged, one fact a line::

    pid 4711            it has begun
    ? 3 64              prompt 3 may have 64 tokens from now on
    - 3                 prompt 3 may be evicted from now on
    + 3 64              64 tokens of prompt 3 are durable, and pinned
    ended 9             it was killed by signal 9 (said by the parent)

Only pinned pages are promised: those may not be evicted, so whatever else the capacity squeezes out, they
must be there in the next life.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tests.campaigns.prompts import (
    Life,
    inline_life,
    odd_life,
    page_count,
    prompt_tokens,
    save,
    small_pages,
)
from tierstore.store import Store
from tierstore.units import KIB

LIVES: Mapping[str, Life] = {
    "extents": Life(small_pages(), disk_bytes=640 * KIB),  # 41 pages
    "inline": inline_life(),
    "odd sizes": odd_life(),
    "encrypted": replace(odd_life(), encrypted=True),
}
_PINNED_PAGES = 16
_PROMPTS = 24
_MOST_PAGES = 6


def live(directory: Path, life: Life, seed: int, durable: Mapping[int, int]) -> None:
    """Save, let go, evict, for ever. ``durable`` is what earlier lives were promised: prompt → tokens."""
    chance = random.Random(seed)
    store = life.open(directory)
    spec = life.spec
    pinned = dict(durable)
    for number, tokens in pinned.items():
        store.pin(prompt_tokens(number, tokens, spec))
    while True:
        number = chance.randrange(_PROMPTS)
        tokens = chance.randint(1, _MOST_PAGES * spec.chunk_tokens)
        for each in _to_unpin(pinned, number, tokens, life, chance):
            _say(f"- {each}")
            store.unpin(prompt_tokens(each, pinned.pop(each), spec))
        if chance.random() < 0.2:
            store.evict("disk", chance.randint(1, 8))
        _say(f"? {number} {tokens}")
        save(store, number, tokens)
        if chance.random() < 0.3:
            continue  # the next one goes into the same flush, or the same batch
        store.flush()
        store.evict("host")
        held = _held(store, number, tokens)
        if held:
            store.pin(prompt_tokens(number, held, spec))
            pinned[number] = held
            _say(f"+ {number} {held}")


def _to_unpin(
    pinned: Mapping[int, int], number: int, tokens: int, life: Life, chance: random.Random
) -> list[int]:
    """The prompts to unpin before ``tokens`` tokens of ``number`` are saved."""
    gone = [number] if number in pinned else []
    kept = [each for each in pinned if each != number]
    chance.shuffle(kept)
    while kept and sum(page_count(pinned[each], life.spec) for each in kept) > _PINNED_PAGES:
        gone.append(kept.pop())
    return gone


def _held(store: Store, number: int, tokens: int) -> int:
    """How many leading tokens of the prompt are on disk, in whole pages: only those can be pinned."""
    with store.lookup(prompt_tokens(number, tokens, store.spec)) as hit:
        chunk = store.spec.chunk_tokens
        return hit.by_tier.get("disk", 0) // chunk * chunk


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main() -> None:
    """Fork one life per line of stdin: ``{"directory", "life", "seed", "durable"}``."""
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                _say(f"pid {os.getpid()}")
                durable = {int(number): tokens for number, tokens in request["durable"].items()}
                live(Path(request["directory"]), LIVES[request["life"]], request["seed"], durable)
            except BaseException:  # noqa: BLE001  # a fork must not go on as its parent
                _say(f"error {' | '.join(traceback.format_exc().splitlines())}")
            os._exit(1)
        _, status = os.waitpid(pid, 0)
        _say(f"ended {os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}")
