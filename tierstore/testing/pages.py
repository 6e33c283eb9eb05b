"""Page bytes that identify their tokens, for tests that compare every loaded byte."""

from __future__ import annotations

import numpy as np
import xxhash

from tierstore.keys import TokenIds
from tierstore.spec import KVSpec


def page_of(tokens: TokenIds, spec: KVSpec) -> bytes:
    """Return the page of the last chunk of ``tokens``. As in a real model, the bytes of a token depend on all
    tokens up to it and on none after it."""
    if not spec.groups[0].head_dim:  # a recurrent state depends on all tokens up to its end
        digest = xxhash.xxh3_128_digest(np.asarray(tokens, np.uint32).tobytes())
        return digest * (spec.page_bytes // len(digest))
    start = (len(tokens) - 1) // spec.chunk_tokens * spec.chunk_tokens
    row_bytes = spec.groups[0].head_dim * spec.dtype_bytes
    rows = np.zeros((spec.chunk_tokens, row_bytes), np.uint8)
    for i in range(start, len(tokens)):
        digest = xxhash.xxh3_128_digest(np.asarray(tokens[: i + 1], np.uint32).tobytes())
        rows[i - start] = np.frombuffer(digest * (row_bytes // 16), np.uint8)
    tiles = spec.page_bytes // rows.size
    return np.broadcast_to(rows, (tiles, *rows.shape)).tobytes()


def leading_tokens(page: bytes, count: int, spec: KVSpec) -> bytes:
    """Return the bytes of a page's first ``count`` tokens; of a recurrent state, the whole page."""
    if not spec.groups[0].head_dim:
        return page
    row_bytes = spec.groups[0].head_dim * spec.dtype_bytes
    return np.frombuffer(page, np.uint8).reshape(-1, spec.chunk_tokens, row_bytes)[:, :count].tobytes()


def pages_of(tokens: TokenIds, spec: KVSpec) -> list[bytes]:
    ends = [*range(spec.chunk_tokens, len(tokens), spec.chunk_tokens), len(tokens)] if len(tokens) else []
    return [page_of(tokens[:end], spec) for end in ends]
