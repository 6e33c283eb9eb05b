"""Pins over all layer groups: what a hit needs of each is kept, or nothing is."""

from __future__ import annotations

import hashlib
import threading
import time

from tierstore.backend import LookupRequest
from tierstore.groups import Group
from tierstore.keys import Prompt, TokenIds
from tierstore.store.hit import Hit
from tierstore.store.lookup import Finder


class Pins:
    """Pins and unpins prompts for one store. Of groups with chained pages all held whole chunks are pinned,
    of the others what the longest hit needs. How long that was is remembered here, for the unpin. (A pin that
    another process has made is found by looking for it.) Thread-safe."""

    def __init__(self, finder: Finder) -> None:
        self._finder = finder
        self._backend = finder.backend
        self._lock = threading.Lock()
        self._lengths: dict[bytes, list[int]] = {}  # of pinned hits, by prompt, the newest last

    def pin(self, prompt: Prompt | TokenIds) -> int:
        """See :meth:`Store.pin <tierstore.Store.pin>`."""
        finder = self._finder
        single = finder.single(prompt)
        if single is not None:
            return self._backend.pin(single[1]).wait()
        prompt = finder.prompt(prompt)
        with self._whole_hit(prompt, len(prompt)) as hit:
            requests = self._requests(prompt, hit.tokens)
            for done, (request, tokens) in enumerate(requests):
                if self._backend.pin(request).wait() < tokens:  # refused, or a page has left
                    for each, _ in requests[: done + 1]:
                        self._undo(each)
                    return 0
            if hit.tokens:
                with self._lock:
                    self._lengths.setdefault(_name(prompt), []).append(hit.tokens)
            return hit.tokens

    def unpin(self, prompt: Prompt | TokenIds) -> int:
        """See :meth:`Store.unpin <tierstore.Store.unpin>`."""
        finder = self._finder
        single = finder.single(prompt)
        if single is not None:
            return self._undo(single[1])
        prompt = finder.prompt(prompt)
        whole = len(prompt) // finder.chunk_tokens * finder.chunk_tokens
        for group in finder.chained:
            whole = min(whole, self._undo(finder.chain(prompt, group)))
        with self._lock:
            name = _name(prompt)
            lengths = self._lengths.get(name, [])
            known = lengths.pop() if lengths and whole else 0
            if not lengths:
                self._lengths.pop(name, None)
        for tokens in (known,) if known else range(whole, 0, -finder.chunk_tokens):
            undone = [self._undo(each) for each in self._named(prompt, tokens)]
            if known or any(undone):
                return tokens
        return whole if finder.chained else 0

    def _whole_hit(self, prompt: Prompt, limit: int) -> Hit:
        """The longest hit of whole chunks."""
        finder, chunk_tokens = self._finder, self._finder.chunk_tokens
        whole = limit // chunk_tokens * chunk_tokens
        hit = finder.begin(prompt, max_tokens=whole, began=time.monotonic()).hit()
        if hit.tokens % chunk_tokens:
            hit.release()
            return self._whole_hit(prompt, hit.tokens)
        return hit

    def _requests(self, prompt: Prompt, tokens: int) -> list[tuple[LookupRequest, int]]:
        """What is pinned for a hit of so many tokens, and how many tokens of it have to be."""
        finder = self._finder
        if not tokens:
            return []
        # A pin is known by its prompt, so chains are pinned by all of it.
        chains = [(finder.chain(prompt, group), tokens) for group in finder.chained]
        return [*chains, *((each, each.num_tokens) for each in self._named(prompt, tokens))]

    def _named(self, prompt: Prompt, tokens: int) -> list[LookupRequest]:
        finder = self._finder

        def ends(group: Group) -> list[int]:
            return list(group.rule.ends(tokens, finder.chunk_tokens))

        return [finder.pages_at(prompt, group, ends(group)) for group in finder.named if ends(group)]

    def _undo(self, request: LookupRequest) -> int:
        return self._backend.pin(request, undo=True).wait()


def _name(prompt: Prompt) -> bytes:
    return hashlib.sha256(prompt.identity.digest + prompt.token_bytes).digest()
