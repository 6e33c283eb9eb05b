"""A forked child has none of a store's threads, and perhaps its locks held: every verb says so at once."""

from __future__ import annotations

import os
import select
import signal
import warnings

import pytest

from tests.tierstore.api.conftest import SPEC, load_bytes, pages_of
from tierstore import StoreClosedError, Transfer

TOKENS = list(range(4000, 4070))


def fork(child):
    """Run ``child`` in a forked process and return its exit status; one that hangs is killed."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads is the point
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child()
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    ended, _, _ = select.select([read], [], [], 60)  # readable when the child has ended, however it did
    os.close(read)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("locked", [False, True], ids=["idle", "locked"])
def test_a_forked_child_is_told_so_by_every_verb(open_store, locked):
    store = open_store(hbm_pages=8)
    pages = pages_of(TOKENS)
    assert store.save(TOKENS, pages).wait(30) == len(TOKENS)
    prompt, hit = store.prompt(TOKENS), store.lookup(TOKENS)
    buffers = [bytearray(SPEC.page_bytes) for _ in pages]
    verbs = [
        lambda: store.lookup(prompt),
        lambda: store.load(hit),
        lambda: store.load(hit, buffers),
        lambda: store.save(prompt, pages),
        lambda: store.save_hbm(prompt, [0, 1, 2, 3, 4]),
        lambda: store.finish("session"),
        lambda: store.flush(1),
        lambda: store.allocate_hbm(1),
        lambda: store.release_hbm([0]),
        store.available_hbm,
        lambda: store.evict("host"),
        lambda: store.pin(prompt),
        lambda: store.unpin(prompt),
        store.stats,
        store.check,
        store.wait_ready,
        hit.prefetch,
    ]

    def child():
        for verb in verbs:
            with pytest.raises(StoreClosedError, match="after fork"):
                verb()
        repr(store)
        hit.release()
        store.close()

    if locked:  # as by a thread that the child does not have
        with store._hbm.lock:
            assert fork(child) == 0
    else:
        assert fork(child) == 0
    assert load_bytes(store, hit) == (len(TOKENS), pages)


def test_a_transfer_of_another_process_is_not_waited_for():
    running = Transfer(lambda _: 0, pages=1, nbytes=1)
    ended = Transfer.completed(3)

    def child():
        with pytest.raises(StoreClosedError, match="another process"):
            running.wait()
        assert ended.wait() == 3

    assert fork(child) == 0
