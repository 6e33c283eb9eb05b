"""A store inside this process: save the KV pages of a prompt, then find and load them for the next prompt.

    python examples/embedded_store.py [DIRECTORY]

Run the program twice with the same directory: the second run finds the pages of the first run on disk.
"""

from __future__ import annotations

import sys
import tempfile

import numpy as np

import tierstore
from tierstore import Identity, KVSpec, Store

# The shape of the KV cache. A page has the KV of 64 tokens in all layers.
SPEC = KVSpec.uniform(layers=4, kv_heads=2, head_dim=64, dtype="float16")
# The identity of the pages. Pages of another model, revision, adapter or tenant never match.
IDENTITY = Identity.of(SPEC, model="example", revision="1")


def compute_pages(tokens: list[int]) -> list[bytes]:
    """Stand in for a model's prefill: return one page for every 64 tokens or less."""
    count = -(-len(tokens) // SPEC.chunk_tokens)
    return [np.random.default_rng(page).bytes(SPEC.page_bytes) for page in range(count)]


def answer(store: Store, tokens: list[int]) -> None:
    """Handle a prompt like an engine: load stored pages, compute the other pages, and save all pages."""
    with store.lookup(tokens) as hit:  # the hit holds a lease on its pages until the with block ends
        buffers = [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]
        loaded = store.load(hit, buffers, deadline_s=0.5).wait()  # or: await
    print(f"{len(tokens)} tokens: {loaded.tokens} reused {dict(hit.by_tier)}")
    # If the hit ends inside a page, an engine keeps the loaded tokens of this page and computes the others.
    store.save(tokens, compute_pages(tokens)).wait()


def main(directory: str) -> None:
    document = list(range(1000))
    with tierstore.open(
        directory, SPEC, identity=IDENTITY, host_bytes=64 << 20, disk_bytes=256 << 20
    ) as store:
        answer(store, [*document, 7, 7, 7])  # finds nothing, or pages of an earlier run on disk
        answer(store, [*document, 8, 8, 8])  # finds the pages of the document
        store.flush()  # after this call all saved pages survive kill -9


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
