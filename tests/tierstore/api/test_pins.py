"""Pins of people, beside what the code itself holds for a moment."""

from __future__ import annotations

import threading

import pytest

from tests.tierstore.api.conftest import SPEC, pages_of
from tierstore.testing.store import wait_until

TOKENS = list(range(1000, 1000 + 160 * SPEC.chunk_tokens))  # more pages than one step of a save


def test_unpin_beside_saves_of_the_same_prompt_strips_none_of_their_holds(store):
    """A save of many pages goes in steps and holds the last page between them."""
    pages = pages_of(TOKENS)
    assert store.save(TOKENS, pages).wait(60) == len(TOKENS)
    ended = threading.Event()
    unpinned = []

    def unpin():
        while not ended.is_set():
            unpinned.append(store.unpin(TOKENS))

    thread = threading.Thread(target=unpin)
    thread.start()
    try:
        saved = [store.save(TOKENS, pages).wait(60) for _ in range(30)]
    finally:
        ended.set()
        thread.join()
    assert saved == [len(TOKENS)] * 30
    assert len(unpinned) > 10
    assert not any(unpinned)  # nobody has pinned any


def test_each_unpin_undoes_one_pin(store):
    tokens = TOKENS[: 4 * SPEC.chunk_tokens]
    assert store.save(tokens, pages_of(tokens)).wait(30) == len(tokens)
    assert store.pin(tokens) == store.pin(tokens) == len(tokens)
    assert store.unpin(tokens) == store.unpin(tokens) == len(tokens)
    assert store.unpin(tokens) == 0


def test_an_unpin_leaves_what_other_prompts_have_pinned(store):
    tokens = TOKENS[: 8 * SPEC.chunk_tokens]
    shorter = tokens[: 6 * SPEC.chunk_tokens]
    beginning = tokens[: 3 * SPEC.chunk_tokens]
    assert store.save(beginning, pages_of(beginning)).wait(30) == len(beginning)
    assert store.pin(tokens) == len(beginning)
    assert store.save(tokens, pages_of(tokens)).wait(30) == len(tokens)
    assert store.pin(shorter) == len(shorter)
    assert store.unpin(tokens) == len(beginning)
    assert store.unpin(tokens) == 0
    wait_until(lambda: kept(store, shorter) == len(shorter))
    assert store.unpin(shorter) == len(shorter)
    wait_until(lambda: kept(store, shorter) == 0)


@pytest.mark.parametrize("other", ["shorter", "longer", "with a tail", "with another tail", "unknown"])
def test_unpinning_a_prompt_that_was_never_pinned_does_nothing(store, other):
    chunk = SPEC.chunk_tokens
    pinned = TOKENS[: 4 * chunk + 1]
    prompts = {
        "shorter": TOKENS[: 3 * chunk],
        "longer": TOKENS[: 6 * chunk],
        "with a tail": TOKENS[: 4 * chunk + 2],
        "with another tail": [*TOKENS[: 4 * chunk], 7],
        "unknown": TOKENS[chunk : 5 * chunk],
    }
    assert store.save(TOKENS[: 8 * chunk], pages_of(TOKENS[: 8 * chunk])).wait(30) == 8 * chunk
    assert store.pin(pinned) == 4 * chunk
    assert store.unpin(prompts[other]) == 0
    wait_until(lambda: kept(store, TOKENS) == 4 * chunk)
    assert store.unpin(pinned) == 4 * chunk


def test_a_prompt_pinned_again_when_more_of_it_is_held_needs_two_unpins(store):
    tokens = TOKENS[: 4 * SPEC.chunk_tokens]
    half = tokens[: 2 * SPEC.chunk_tokens]
    assert store.save(half, pages_of(half)).wait(30) == len(half)
    assert store.pin(tokens) == len(half)
    assert store.save(tokens, pages_of(tokens)).wait(30) == len(tokens)
    assert store.pin(tokens) == len(tokens)
    assert store.unpin(tokens) == len(tokens)
    wait_until(lambda: kept(store, tokens) == len(half))
    assert store.unpin(tokens) == len(half)


def kept(store, tokens):
    """How many tokens are left when everything that may leave has left."""
    store.flush(30)
    while sum(store.evict(tier) for tier in store.stats().tiers):
        pass
    with store.lookup(tokens) as hit:
        return hit.tokens
