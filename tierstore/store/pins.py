"""Pins over all layer groups: either every page that a hit needs is pinned, or none."""

from __future__ import annotations

import time

from tierstore.backend import LookupRequest
from tierstore.keys import Prompt, TokenIds
from tierstore.store.hit import Hit
from tierstore.store.lookup import Finder


class StorePins:
    """Pins and unpins the prompts of one store. Thread-safe."""

    def __init__(self, finder: Finder) -> None:
        self._finder = finder
        self._backend = finder.backend

    def pin(self, prompt: Prompt | TokenIds) -> int:
        """See :meth:`Store.pin <tierstore.Store.pin>`."""
        finder = self._finder
        single = finder.single(prompt)
        if single is not None:
            return self._backend.pin(single[1]).wait()
        prompt = finder.prompt(prompt)
        with self._whole_hit(prompt, len(prompt)) as hit:
            if not hit.tokens:
                return 0
            chains, named = self._chains(prompt), self._named(prompt, hit.tokens)
            pinned = [self._backend.pin(each, max_tokens=hit.tokens).wait() for each in chains]
            pinned += [self._backend.pin(each).wait() for each in named]
            needed = [hit.tokens] * len(chains) + [each.num_tokens for each in named]
            if pinned != needed:  # a pin was refused, or a page was evicted
                for each, tokens in zip([*chains, *named], pinned, strict=True):
                    if tokens:
                        self._undo(each)
                return 0
            return hit.tokens

    def unpin(self, prompt: Prompt | TokenIds) -> int:
        """See :meth:`Store.unpin <tierstore.Store.unpin>`."""
        finder = self._finder
        single = finder.single(prompt)
        if single is not None:
            return self._undo(single[1])
        prompt = finder.prompt(prompt)
        if finder.chained:  # the backend knows the length of the pinned hit from the pin of a chain
            tokens = min(self._undo(each) for each in self._chains(prompt))
            for each in self._named(prompt, tokens):
                self._undo(each)
            return tokens
        whole = len(prompt) // finder.chunk_tokens * finder.chunk_tokens
        for tokens in range(whole, 0, -finder.chunk_tokens):
            undone = [self._undo(each) for each in self._named(prompt, tokens)]
            if any(undone):
                return tokens
        return 0

    def _whole_hit(self, prompt: Prompt, limit: int) -> Hit:
        finder, chunk_tokens = self._finder, self._finder.chunk_tokens
        whole = limit // chunk_tokens * chunk_tokens
        hit = finder.begin(prompt, max_tokens=whole, began=time.monotonic()).hit()
        if hit.tokens % chunk_tokens:
            hit.release()
            return self._whole_hit(prompt, hit.tokens)
        return hit

    def _chains(self, prompt: Prompt) -> list[LookupRequest]:
        """Return the request for the whole prompt, which identifies a pin, in each group with chained
        pages."""
        return [self._finder.chain(prompt, group) for group in self._finder.chained]

    def _named(self, prompt: Prompt, tokens: int) -> list[LookupRequest]:
        finder = self._finder
        return [request for _, request in finder.named_needed(prompt, tokens)]

    def _undo(self, request: LookupRequest) -> int:
        return self._backend.pin(request, undo=True).wait()
