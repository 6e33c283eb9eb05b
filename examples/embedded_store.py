"""A store inside this process: save the KV pages of a prompt, find and load them for the next one.

    python examples/embedded_store.py [DIRECTORY]

Run it twice with the same directory: the second run finds the first one's pages on disk.
"""

from __future__ import annotations

import sys
import tempfile

import numpy as np

import tierstore
from tierstore import Identity, KVSpec, Store

# The shape of the KV cache, which says how large a page is: 64 tokens of all layers.
SPEC = KVSpec.uniform(layers=4, kv_heads=2, head_dim=64, dtype="float16")
# Whose pages they are. Others never match: another model, revision, adapter or tenant.
IDENTITY = Identity.of(SPEC, model="example", revision="1")


def compute_pages(tokens: list[int]) -> list[bytes]:
    """Stands for a model's prefill: a page for every 64 tokens, the last one partly filled."""
    count = -(-len(tokens) // SPEC.chunk_tokens)
    return [np.random.default_rng(page).bytes(SPEC.page_bytes) for page in range(count)]


def answer(store: Store, tokens: list[int]) -> None:
    """What an engine does with each prompt: reuse what is held, compute the rest, save that."""
    with store.lookup(tokens) as hit:  # holds a lease on the pages until the block ends
        buffers = [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]
        loaded = store.load(hit, buffers, deadline_s=0.5).wait()  # or: await
    print(f"{len(tokens)} tokens: {loaded.tokens} reused {dict(hit.by_tier)}")
    # Of a page that the hit ends inside of, the engine keeps the leading tokens and computes the others.
    store.save(tokens, compute_pages(tokens)).wait()


def main(directory: str) -> None:
    document = list(range(1000))
    with tierstore.open(
        directory, SPEC, identity=IDENTITY, host_bytes=64 << 20, disk_bytes=256 << 20
    ) as store:
        answer(store, [*document, 7, 7, 7])  # nothing is held, or what an earlier run left on disk
        answer(store, [*document, 8, 8, 8])  # the document is held: only the question is new
        store.flush()  # from here on all of it survives kill -9


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
