"""The bytes of every page in these directories, derived from the tokens before and inside of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from tierstore.spec import KVSpec, LayerKind

MODELS = {
    "full": "chunk=64;dtype=float16;full_attention[0,1]x2x64/w0/s0",
    "window": "chunk=16;dtype=float32;full_attention[1]x2x128/w0/s0;sliding_window[0,2]x1x32/w40/s0",
    "state": "chunk=32;dtype=float32;full_attention[1]x1x96/w0/s0;recurrent_state[0,2]x1x0/w0/s12288",
    "five": (
        "chunk=16;dtype=float32;full_attention[2]x1x32/w0/s0;sliding_window[4,5]x1x160/w40/s0;"
        "recurrent_state[0,1]x1x0/w0/s9216;chunked_attention[3]x1x32/w64/s0;mla_latent[6]x1x48/w0/s0"
    ),
}
"""Page layouts, as ``KVSpec.describe()`` writes them."""


def tokens_of(ranges: Sequence[Sequence[int]]) -> list[int]:
    """``[[0, 3], [7, 9]]`` stands for the tokens 0, 1, 2, 7, 8."""
    return [token for start, stop in ranges for token in range(start, stop)]


def page(part: KVSpec, group: int, tokens: Sequence[int], chunk: int) -> np.ndarray:
    """Return one page of layer group ``group``, whose layout is ``part``, for the prompt ``tokens``.

    Its shape is (tiles, tokens, bytes of a vector). Where the prompt ends inside of the page, it has fewer
    tokens. A state has one tile and one vector, which depend on all tokens up to the page's end."""
    layers = part.groups[0]
    first, stop = chunk * part.chunk_tokens, min((chunk + 1) * part.chunk_tokens, len(tokens))
    hashed = hashlib.shake_128(bytes([group]) + np.array(tokens[:first], "<u4").tobytes())
    vectors = []
    for token in tokens[first:stop]:
        hashed.update(token.to_bytes(4, "little"))
        vectors.append(np.frombuffer(hashed.digest(8), np.int8))
    if layers.kind is LayerKind.RECURRENT_STATE:
        tiles, rows, width = 1, vectors[-1:], part.page_bytes // part.dtype_bytes
    else:
        tiles, rows, width = len(layers.layers) * layers.planes * layers.kv_heads, vectors, layers.head_dim
    numbers = np.array(rows, np.float32)
    numbers = np.tile(numbers, (1, -(-width // 8)))[:, :width] / 64
    tiled = np.stack([numbers + tile for tile in range(tiles)]).astype(part.dtype)
    return tiled.view(np.uint8)
