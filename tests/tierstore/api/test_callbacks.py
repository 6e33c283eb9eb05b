"""What is called at the end of a transfer runs on a thread of the store, and must not take it along."""

from __future__ import annotations

import pytest

from tests.tierstore.api.conftest import load_bytes, pages_of

TOKENS = list(range(5000, 5070))


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, RuntimeError])
def test_a_callback_that_raises_leaves_the_store_as_it_was(open_store, error):
    open_store.tasks_fail = True
    store = open_store()
    called = []

    def raise_it():
        called.append(True)
        raise error

    transfers = []
    for at in range(20):  # more than there are threads
        tokens = [at, *TOKENS]
        transfer = store.save(tokens, pages_of(tokens))
        try:
            transfer.on_end(raise_it)
        except error:
            continue  # it had ended: then it is called at once, by whoever asks
        transfer.on_end(lambda: called.append(False))
        transfers.append(transfer)
    assert [transfer.wait(30) for transfer in transfers] == [len(TOKENS) + 1] * len(transfers)
    assert True in called
    assert store.save(TOKENS, pages_of(TOKENS)).wait(30) == len(TOKENS)
    assert load_bytes(store, store.lookup(TOKENS)) == (len(TOKENS), pages_of(TOKENS))
    assert store.flush(30)
