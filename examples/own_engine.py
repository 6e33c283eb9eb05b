"""A small engine that computes in the pages of a pool. A connector finds, loads and saves the pages.

    python examples/own_engine.py [DIRECTORY | ipc://PATH]

The model is one attention head with random weights, so that the engine is short. The engine uses pages like
an engine for a GPU. Saving a page does not copy it within the pool: the page stays where it is.
"""

from __future__ import annotations

import sys
import tempfile

import numpy as np

from tierstore import Identity, KVSpec
from tierstore_connectors.base import Connector
from tierstore_connectors.bundled import open_connector

VOCABULARY, WIDTH, POOL_PAGES = 256, 32, 64
SPEC = KVSpec.uniform(layers=1, kv_heads=1, head_dim=WIDTH, dtype="float32", chunk_tokens=16)
CHUNK = SPEC.chunk_tokens


class OwnEngine:
    """Greedy decoding, one prompt at a time."""

    def __init__(self, store: str | None) -> None:
        identity = Identity.of(SPEC, model="one-head", revision="seed 0")
        self.connector: Connector = open_connector(SPEC, identity, pool_pages=POOL_PAGES, store=store)
        # The pool's memory as the model sees it: [page][K or V][token of the chunk][width].
        self.kv = self.connector.pool.array.view(np.float32).reshape(POOL_PAGES, 2, CHUNK, WIDTH)
        random = np.random.default_rng(0)
        self.embedding = random.standard_normal((VOCABULARY, WIDTH), np.float32)
        self.weights = random.standard_normal((3, WIDTH, WIDTH), np.float32) / np.sqrt(WIDTH)
        self.computed_tokens = 0

    def generate(self, text: bytes, new_tokens: int) -> bytes:
        tokens = list(text)
        prompt = self.connector.prompt(tokens)
        # The last token is always computed, because the next token is predicted from it.
        hit = self.connector.lookup(prompt, max_tokens=len(tokens) - 1)
        loaded = self.connector.load(hit, deadline_s=0.5).wait()
        pages = list(loaded.pages)
        needed = -(-(len(tokens) + new_tokens) // CHUNK)
        pages += self.connector.allocate(needed - len(pages)) or []
        assert len(pages) == needed, "a real engine waits for free pages, or preempts another sequence"

        self._prefill(tokens, loaded.tokens, pages)
        for _ in range(new_tokens):
            tokens.append(self._next_token(tokens, pages))
            self._prefill(tokens, len(tokens) - 1, pages)

        # Save the full chunks that were computed. Their pages are read-only after this call.
        first, full = loaded.tokens // CHUNK, len(tokens) // CHUNK
        prompt.extend(tokens[len(text) :])
        self.connector.save(prompt, pages[first:full], first=first)  # returns before the copies end
        self.connector.release(pages)
        return bytes(tokens[len(text) :])

    def _prefill(self, tokens: list[int], start: int, pages: list[int]) -> None:
        """Write keys and values of ``tokens[start:]`` into their pages."""
        embedded = self.embedding[tokens[start:]]
        for position, key, value in zip(
            range(start, len(tokens)), embedded @ self.weights[0], embedded @ self.weights[1], strict=True
        ):
            page, row = pages[position // CHUNK], position % CHUNK
            self.kv[page, 0, row], self.kv[page, 1, row] = key, value
        self.computed_tokens += len(tokens) - start

    def _next_token(self, tokens: list[int], pages: list[int]) -> int:
        """Attend from the last token to all tokens, and return the most likely next token."""
        keys, values = (self.kv[pages, which].reshape(-1, WIDTH)[: len(tokens)] for which in (0, 1))
        scores = keys @ (self.embedding[tokens[-1]] @ self.weights[2])
        attention = np.exp(scores - scores.max())
        return int(np.argmax(self.embedding @ (attention @ values / attention.sum())))

    def close(self) -> None:
        self.connector.close()


def main(store: str) -> None:
    document = b"The cache is asked for the longest prefix that it can give back. " * 6
    answers = []
    for life in ("first", "second"):
        engine = OwnEngine(store)
        for question in (b"Which?", b"Why?", b"Which?"):
            before = engine.computed_tokens
            answers.append(engine.generate(document + question, 24))
            computed = engine.computed_tokens - before
            print(
                f"{life} life, {question.decode():6}: computed {computed} of {len(document + question) + 24}"
            )
        engine.close()  # first writes unsaved pages to disk
    print("the same answers" if answers[:3] == answers[3:] else "DIFFERENT ANSWERS")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
