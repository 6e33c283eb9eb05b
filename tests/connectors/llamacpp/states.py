"""States of sequences with random rows."""

from __future__ import annotations

import numpy as np

from tierstore_connectors.llamacpp.state import CacheRows, CellLayout, LlamaSequence, Row, write_file

WINDOW = 64


def layout(layers=3, *, nbytes=24, transposed=False, streams=1):
    keys = tuple(Row(1, nbytes) for _ in range(layers))
    values = tuple(Row(1, nbytes, 2 if transposed else 0) for _ in range(layers))
    return CellLayout(streams, transposed, keys, values)


def rows(kind, first, stop, seed=0):
    """Each row depends on its position and its layer only."""
    rng = np.random.default_rng(seed)
    every = rng.integers(0, 256, (len(kind.rows), stop, kind.rows[0].nbytes), np.uint8)
    return CacheRows(kind, first, tuple(each[first:stop] for each in every))


def state(tokens, *, windows=False, seed=0, **kind):
    count = len(tokens)
    caches = [rows(layout(**kind), 0, count, seed)]
    if windows:
        caches.append(rows(layout(2, **kind), max(count - WINDOW, 0), count, seed + 1))
    return LlamaSequence(np.asarray(tokens, np.uint32), tuple(caches))


def file_of(sequence):
    return np.concatenate(write_file(sequence))
