"""Pins over all layer groups: what a hit needs of each is kept, or nothing is."""

from __future__ import annotations

import time

from tierstore.backend import LookupRequest
from tierstore.groups import Group
from tierstore.keys import Prompt, TokenIds
from tierstore.store.hit import Hit
from tierstore.store.lookup import Finder


class Pins:
    """Pins and unpins prompts for one store."""

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
            requests = [request for _, request in finder.needed(prompt, hit.tokens)]
            for done, request in enumerate(requests):
                if self._backend.pin(request).wait() < request.num_tokens:  # refused, or a page has left
                    for each in requests[: done + 1]:
                        self._undo(each)
                    return 0
            return hit.tokens

    def _whole_hit(self, prompt: Prompt, limit: int) -> Hit:
        """The longest hit of whole chunks."""
        finder, chunk_tokens = self._finder, self._finder.chunk_tokens
        whole = limit // chunk_tokens * chunk_tokens
        hit = finder.begin(prompt, max_tokens=whole, began=time.monotonic()).hit()
        if hit.tokens % chunk_tokens:
            hit.release()
            return self._whole_hit(prompt, hit.tokens)
        return hit

    def unpin(self, prompt: Prompt | TokenIds) -> int:
        """See :meth:`Store.unpin <tierstore.Store.unpin>`."""
        finder = self._finder
        single = finder.single(prompt)
        if single is not None:
            return self._undo(single[1])
        prompt = finder.prompt(prompt)
        if finder.chained:
            tokens = min([self._undo(finder.chain(prompt, group)) for group in finder.chained])
        else:
            tokens = self._undo_last(prompt, finder.named[0])
        for group in finder.named if tokens else ():
            ends = group.rule.ends(tokens, finder.chunk_tokens)
            rest = ends if finder.chained or group is not finder.named[0] else ends[:-1]
            if rest:
                self._undo(finder.pages_at(prompt, group, rest))
        return tokens

    def _undo_last(self, prompt: Prompt, group: Group) -> int:
        """Unpin the page that the longest pinned hit ends with; where it ends. There are no chained pages to
        say that."""
        chunk_tokens = self._finder.chunk_tokens
        for end in range(len(prompt) // chunk_tokens * chunk_tokens, 0, -chunk_tokens):
            ends = group.rule.ends(end, chunk_tokens)
            if ends and self._undo(self._finder.pages_at(prompt, group, ends[-1:])):
                return end
        return 0

    def _undo(self, request: LookupRequest) -> int:
        return self._backend.pin(request, undo=True).wait()
