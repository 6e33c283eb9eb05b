"""llama.cpp's states: read as they were written, and refused if anything in them is unknown."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.connectors.llamacpp.states import file_of, state
from tierstore_connectors.llamacpp.state import (
    CONTENT_MAGIC,
    LlamaStateError,
    read_context,
    read_file,
    read_sequence,
    write_context,
    write_file,
)

TOKENS = list(range(100, 140))
KINDS = [
    {},
    {"transposed": True},
    {"streams": 4},
    {"windows": True},
    {"windows": True, "transposed": True, "streams": 3},
]


def equal(a, b):
    return file_of(a).tobytes() == file_of(b).tobytes()


def sequence_of(a):
    """Return the bytes that ``llama_state_seq_get_data`` would return."""
    return np.concatenate([np.frombuffer(struct.pack("<II", CONTENT_MAGIC, 0), np.uint8), *write_file(a)[2:]])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read(kind):
    written = state(TOKENS, **kind)
    assert equal(read_file(file_of(written)), written)
    assert equal(read_sequence(sequence_of(written), written.tokens), written)
    assert equal(read_context(write_context(written, "llama"), written.tokens, "llama"), written)


def test_a_transposed_state_has_the_same_rows():
    """Whether V is transposed is of the state only: its pages are equal."""
    plain, transposed = state(TOKENS), state(TOKENS, transposed=True)
    for a, b in zip(plain.caches[0].rows, transposed.caches[0].rows, strict=True):
        assert (a == b).all()
    assert plain.layout.describe() != transposed.layout.describe()  # but other kernels have computed them


def test_cells_in_another_order():
    """A cache that was used before has a sequence's cells in any order."""
    written, count = state(TOKENS), len(TOKENS)
    data = file_of(written).copy()
    order = np.roll(np.arange(count), 7)
    at = 12 + 4 * count + 8  # behind the tokens, and the numbers of streams and cells
    blocks = [(at, 12)]
    at += 12 * count + 8
    for _ in range(6):  # K and V of three layers
        blocks.append((at + 12, 24))
        at += 12 + 24 * count
    assert at == len(data)
    for start, nbytes in blocks:
        block = data[start : start + count * nbytes].reshape(count, nbytes)
        block[:] = block[order]
    assert equal(read_file(data), written)


def server_tokens(data, tokens, media=()):
    """The file as llama-server writes it, with its own list of tokens."""
    packed = struct.pack(f"<III{len(tokens)}I", 0xFFFFFFFF, 1, len(tokens), *tokens)
    packed += struct.pack(f"<I{len(media)}I", len(media), *media)
    head = data[:8].tobytes() + struct.pack("<I", len(packed) // 4)
    return np.frombuffer(head + packed + data[12 + 4 * len(tokens) :].tobytes(), np.uint8)


def test_the_tokens_of_llama_server():
    written = state(TOKENS)
    assert equal(read_file(server_tokens(file_of(written), TOKENS)), written)


def test_images_among_the_tokens_are_refused():
    with pytest.raises(LlamaStateError, match="images or sounds"):
        read_file(server_tokens(file_of(state(TOKENS)), TOKENS, media=[3]))


def test_an_empty_slot():
    data = np.frombuffer(struct.pack("<III II", 0x67677371, 3, 0, 1, 0), np.uint8)
    assert read_file(data) is None


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_is_refused(kind):
    data = file_of(state(TOKENS[:5], **kind))
    for size in range(len(data)):
        try:
            found = read_file(data[:size])
        except LlamaStateError:
            continue
        # A state may end behind its K if V is missing as a whole (latents), or behind its first cache.
        assert found is not None
        assert found.layout != state(TOKENS[:5], **kind).layout


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 1, "magic"),
        (4, 2, "version 2"),
        (4, 4, "version 4"),
        (8, 1 << 30, "number of tokens"),
        (12 + 160, 500, "number of streams"),
        (12 + 160 + 4, 1 << 30, "number of cells"),
        (12 + 160 + 8, 7, "not consecutive"),
        (12 + 160 + 8 + 4, 2, "not those of one sequence"),
        (12 + 160 + 8 + 8, 2, "not those of one sequence"),
        (12 + 160 + 8 + 480, 2, "transposed"),
        (12 + 160 + 8 + 480 + 4, 0, "no layers"),
        (12 + 160 + 8 + 480 + 8, 5000, "a type"),
        (12 + 160 + 8 + 480 + 12, 0, "no bytes"),
    ],
)
def test_unknown_fields_are_refused(at, value, message):
    data = file_of(state(TOKENS)).copy()
    data[at : at + 4] = np.frombuffer(struct.pack("<I", value), np.uint8)
    with pytest.raises(LlamaStateError, match=message):
        read_file(data)


def test_a_state_of_another_architecture_is_refused():
    written = state(TOKENS)
    with pytest.raises(LlamaStateError, match="gemma3"):
        read_context(write_context(written, "gemma3"), written.tokens, "llama")


def test_more_cells_than_tokens_are_refused():
    with pytest.raises(LlamaStateError, match="40 for 39 tokens"):
        read_sequence(sequence_of(state(TOKENS)), np.asarray(TOKENS[:-1], np.uint32))


@given(st.binary(max_size=400))
def test_any_bytes(data):
    with contextlib.suppress(LlamaStateError):
        read_file(np.frombuffer(data, np.uint8))
