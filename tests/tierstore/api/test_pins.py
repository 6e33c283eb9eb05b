"""Pins of people, beside what the code itself holds for a moment."""

from __future__ import annotations

import threading

from tests.tierstore.api.conftest import SPEC, pages_of

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
