"""States cut into pages of a real daemon, and put together again."""

from __future__ import annotations

import logging
import shutil
import signal
import tempfile
import time

import numpy as np
import pytest

from tests.connectors.llamacpp.states import WINDOW, file_of, layout, rows, state
from tests.daemons import daemon_stats
from tierstore.errors import UsageError
from tierstore.testing.processes import DaemonProcess
from tierstore_connectors.llamacpp.blocks import BlockSettings, LlamaBlocks, ModelFacts, spec_of
from tierstore_connectors.llamacpp.state import LlamaSequence, StateLayout

CHUNK = 16


@pytest.fixture(scope="module")
def daemon():
    directory = tempfile.mkdtemp(prefix="ts")
    process = DaemonProcess(directory, host_bytes=32 << 20, disk=False).start()
    yield process
    process.kill()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def blocks(daemon, request):
    opened = []

    def connect(kind, *, url=None, **facts):
        settings = BlockSettings(
            url or daemon.url, request.node.name, chunk_tokens=CHUNK, least_tokens=8, lookup_s=5.0
        )
        facts = {"weights": "w", "engine": "e", "window": WINDOW, **facts}
        opened.append(LlamaBlocks(settings, kind, ModelFacts(**facts), logging.getLogger(__name__)))
        assert url or opened[-1].wait_connected(60)
        return opened[-1]

    yield connect
    for each in opened:
        each.close()


def tokens(count, seed=1):
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.uint32)


def asked(prompt, *more):
    return np.append(prompt, np.asarray(more, np.uint32)).astype(np.uint32)


@pytest.mark.parametrize("kind", [{}, {"transposed": True}, {"streams": 4}])
@pytest.mark.parametrize("count", [CHUNK, 5 * CHUNK, 5 * CHUNK + 7])
def test_a_state_comes_back(blocks, kind, count):
    saved = state(tokens(count), **kind)
    store = blocks(saved.layout)
    assert store.save(saved) == count
    found = store.find(asked(saved.tokens, 7, 8))
    assert found.tokens == count
    assert file_of(found.state).tobytes() == file_of(saved).tobytes()


def test_a_shorter_prefix_comes_back_to_the_token(blocks):
    saved = state(tokens(100))
    store = blocks(saved.layout)
    store.save(saved)
    found = store.find(asked(saved.tokens[:70], 1, 2, 3))
    expected = LlamaSequence(saved.tokens[:70], (rows(layout(), 0, 100),))
    assert found.tokens == 70
    for got, whole in zip(found.state.caches[0].rows, expected.caches[0].rows, strict=True):
        assert (got == whole[:70]).all()


def test_two_sequences_share_their_prefix(blocks):
    begin = tokens(4 * CHUNK)
    store = blocks(state(begin).layout)

    def pages():
        return daemon_stats(store._store)["store"]["pages"]

    before = pages()
    for seed in (2, 3):
        store.save(state(np.append(begin, tokens(2 * CHUNK, seed))))
    assert pages() - before == 4 + 2 + 2


def test_only_what_is_new_is_sent(blocks):
    saved = state(tokens(8 * CHUNK))
    store = blocks(saved.layout)
    head = LlamaSequence(saved.tokens[: 4 * CHUNK], state(saved.tokens[: 4 * CHUNK]).caches)
    store.save(LlamaSequence(head.tokens, (rows(layout(), 0, 4 * CHUNK),)))
    assert store.save(saved, held=4 * CHUNK) == 8 * CHUNK


def test_what_the_engine_has_is_not_loaded(blocks):
    saved = state(tokens(100))
    store = blocks(saved.layout)
    store.save(saved)
    prompt = asked(saved.tokens, 5)
    assert store.find(prompt, known=95).state is None
    assert store.find(prompt, known=95).tokens == 100
    assert store.find(prompt, known=80).state is not None


def test_windows(blocks):
    """A hit needs the window before its end. Two more cells, which no token attends to, make llama-server
    continue there."""
    saved = state(tokens(12 * CHUNK), windows=True)
    store = blocks(saved.layout)
    assert store.save(saved) == 12 * CHUNK
    found = store.find(asked(saved.tokens, 1))
    window = found.state.caches[1]
    assert found.tokens == 12 * CHUNK
    assert window.first == 12 * CHUNK - WINDOW - 1
    whole = saved.caches[1]
    for got, expected in zip(window.rows, whole.rows, strict=True):
        assert (got[1:] == expected).all()
        assert not got[0].any()


def test_a_shorter_state_whose_full_pages_are_held(blocks):
    whole = state(tokens(12 * CHUNK), windows=True)
    store = blocks(whole.layout)
    store.save(whole)
    shorter = state(whole.tokens[: 8 * CHUNK], windows=True)
    assert store.save(shorter, held=8 * CHUNK) == 8 * CHUNK
    assert store.find(asked(shorter.tokens, 1)).tokens == 8 * CHUNK


def test_a_window_that_is_incomplete_is_not_found(blocks):
    saved = state(tokens(12 * CHUNK + 5), windows=True)  # its first page lacks tokens at its front
    store = blocks(saved.layout)
    store.save(saved)
    assert store.find(asked(saved.tokens, 1)).tokens == 0
    assert store.find(asked(saved.tokens[: 11 * CHUNK], 1, 2)).tokens == 0


@pytest.mark.parametrize("other", [{"weights": "x"}, {"engine": "x"}])
def test_another_model_finds_nothing(blocks, other):
    saved = state(tokens(100))
    blocks(saved.layout).save(saved)
    assert blocks(saved.layout, **other).find(asked(saved.tokens, 1)).tokens == 0


def test_another_layout_finds_nothing(blocks):
    saved = state(tokens(100))
    blocks(saved.layout).save(saved)
    for kind in ({"transposed": True}, {"nbytes": 12}, {"layers": 2}):
        assert blocks(StateLayout((layout(**kind),))).find(asked(saved.tokens, 1)).tokens == 0


def test_a_state_of_another_layout_is_not_stored(blocks):
    with pytest.raises(UsageError, match="layout"):
        blocks(StateLayout((layout(),))).save(state(tokens(50), nbytes=12))


def test_without_a_daemon(blocks, tmp_path):
    saved = state(tokens(100))
    store = blocks(saved.layout, url=f"ipc://{tmp_path}/none")
    assert store.save(saved) == 0
    assert store.find(asked(saved.tokens, 1)).tokens == 0


def test_a_daemon_that_hangs_is_left_alone(blocks):
    directory = tempfile.mkdtemp(prefix="ts")
    stopped = DaemonProcess(directory, host_bytes=8 << 20, disk=False).start()
    settings = BlockSettings(stopped.url, chunk_tokens=CHUNK, least_tokens=8, lookup_s=0.2, load_s=0.2)
    saved = state(tokens(100))
    store = LlamaBlocks(settings, saved.layout, ModelFacts("w", "e"), logging.getLogger(__name__))
    try:
        assert store.wait_connected(60)
        store.save(saved)
        stopped.signal(signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(20):
            assert store.find(asked(saved.tokens, 1)).state is None
        assert time.monotonic() - began < 3.0  # not 20 times 0.2 s
    finally:
        stopped.signal(signal.SIGCONT)
        store.close()
        stopped.kill()
        shutil.rmtree(directory, ignore_errors=True)


def test_windows_of_unknown_length_are_refused():
    with pytest.raises(UsageError, match="unknown length"):
        spec_of(state(tokens(40), windows=True).layout, 0, CHUNK)
