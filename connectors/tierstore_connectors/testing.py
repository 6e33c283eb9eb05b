"""Tests for every connector of the bundled engine, as a class to inherit from.

Subclass :class:`ConnectorTests` in a test module and implement ``open_connector(layout, pages)``. pytest runs
the inherited tests for models with one and with several layer groups. Set ``reuses`` to False for a connector
that stores nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import pytest

from tierstore.keys import Prompt
from tierstore.testing.layouts import LAYOUTS, ByGroup, Layout
from tierstore.testing.pages import leading_tokens
from tierstore.types import Loaded
from tierstore_connectors.base import Connector

TOKENS = list(range(100, 170))  # four whole chunks of 16 tokens, and six tokens
CHUNK = 16


class ConnectorTests(ABC):
    """Tests of the :class:`Connector` interface. A subclass opens a connector with 16-token chunks."""

    reuses = True

    @abstractmethod
    def open_connector(self, layout: Layout, pages: int) -> Connector:
        """Return a new connector for a model with the layer groups of ``layout``. The connector's pools hold
        ``pages`` pages of each group at once (:meth:`Layout.pools`)."""

    @pytest.fixture(params=LAYOUTS, ids=str)
    def layout(self, request: pytest.FixtureRequest) -> Layout:
        layout: Layout = request.param
        return layout

    # -- playing the engine ------------------------------------------------------------------------------

    def compute(
        self, connector: Connector, layout: Layout, prompt: Prompt, *, first: int = 0
    ) -> list[list[int]]:
        """Allocate, fill and save pages of every group for the chunks from ``first`` on. Return the pages of
        each group."""
        owned = []
        for group in layout.groups:
            contents = layout.pages_of(prompt.tokens.tolist(), group.number)[first:]
            pages = connector.allocate(len(contents), group=group.number)
            assert pages is not None
            for page, content in zip(pages, contents, strict=True):
                connector.pools[group.number].array[page] = np.frombuffer(content, np.uint8)
            connector.save(prompt, pages, first=first, group=group.number).wait(10)
            owned.append(pages)
        return owned

    def release(self, connector: Connector, owned: Sequence[Sequence[int]]) -> None:
        for group, pages in enumerate(owned):
            connector.release(pages, group=group)

    def release_loaded(self, connector: Connector, loaded: Loaded) -> None:
        self.release(connector, [part.pages for part in loaded.groups])

    def loaded_bytes(self, connector: Connector, layout: Layout, loaded: Loaded) -> ByGroup:
        """Return the bytes of the loaded pages of each group, in the form of :meth:`Layout.right`."""
        found: ByGroup = [[] for _ in layout.groups]
        for group, part in enumerate(loaded.groups):
            for chunk, page in enumerate(part.pages, part.first):
                count = min(loaded.tokens - chunk * CHUNK, CHUNK)
                content = connector.pools[group].array[page].tobytes()
                found[group].append(leading_tokens(content, count, layout.groups[group].spec))
        return found

    def room(self, connector: Connector, layout: Layout) -> list[int]:
        return [connector.available(group=group.number) for group in layout.groups]

    # -- the contract ------------------------------------------------------------------------------------

    def test_each_layer_group_has_a_pool_and_a_rule(self, layout: Layout) -> None:
        connector = self.open_connector(layout, 8)
        assert [pool.spec for pool in connector.pools] == list(layout.spec.split())
        assert connector.rules == tuple(group.rule for group in layout.groups)
        connector.close()

    def test_pages_are_handed_out_once_and_taken_back(self, layout: Layout) -> None:
        connector = self.open_connector(layout, 8)
        room = self.room(connector, layout)
        for group in layout.groups:
            count = room[group.number]
            pages = connector.allocate(count, group=group.number)
            assert pages is not None
            assert len(set(pages)) == count >= 8
            assert connector.allocate(1, group=group.number) is None
            connector.release(pages[:3], group=group.number)
            assert connector.available(group=group.number) == 3
            connector.release(pages[3:], group=group.number)
            assert self.room(connector, layout) == room
        connector.close()

    def test_an_unknown_prompt_is_an_empty_hit(self, layout: Layout) -> None:
        connector = self.open_connector(layout, 8)
        hit = connector.lookup(connector.prompt(TOKENS))
        assert hit.tokens == 0
        assert not hit.by_tier
        loaded = connector.load(hit).wait(10)
        assert (loaded.tokens, loaded.pages) == (0, ())
        connector.close()

    def test_every_missed_token_is_explained(self, layout: Layout) -> None:
        connector = self.open_connector(layout, 12)
        known, unknown = connector.prompt([*TOKENS, 1, 2]), connector.prompt([5, *TOKENS])
        self.release(connector, self.compute(connector, layout, connector.prompt(TOKENS)))
        for prompt, held in (known, 70 if self.reuses else 0), (unknown, 0):
            explained = connector.explain(prompt, max_tokens=len(prompt) - 1, timeout_s=10).check()
            assert (explained.prompt_tokens, explained.hit_tokens) == (len(prompt), held)
            assert sum(explained.by_reason.values()) == len(prompt) - held
        connector.close()

    def test_what_was_saved_is_found_and_loaded(self, layout: Layout) -> None:
        connector = self.open_connector(layout, 12)
        room = self.room(connector, layout)
        self.release(connector, self.compute(connector, layout, connector.prompt(TOKENS)))
        hit = connector.lookup(connector.prompt([*TOKENS, 1, 2]), max_tokens=71)
        assert hit.tokens == sum(hit.by_tier.values()) == (70 if self.reuses else 0)
        loaded = connector.load(hit).wait(10)
        assert loaded.tokens == hit.tokens
        if self.reuses:
            assert self.loaded_bytes(connector, layout, loaded) == layout.right(TOKENS, 70)
        self.release_loaded(connector, loaded)
        assert self.room(connector, layout) == room
        connector.close()

    def test_max_tokens_and_the_end_of_a_page(self, layout: Layout) -> None:
        connector = self.open_connector(layout, 12)
        self.release(connector, self.compute(connector, layout, connector.prompt(TOKENS)))
        for limit in (1, 16, 40, 69, 70):
            hit = connector.lookup(connector.prompt(TOKENS), max_tokens=limit)
            assert hit.tokens == (layout.hit_of(limit, len(TOKENS)) if self.reuses else 0)
            loaded = connector.load(hit).wait(10)
            assert loaded.tokens == hit.tokens
            if self.reuses:
                right = layout.right(TOKENS, loaded.tokens)
                assert self.loaded_bytes(connector, layout, loaded) == right
            if loaded.tokens % CHUNK:
                connector.pool.array[loaded.pages[-1]] = 0  # a private copy: no other page may change
            self.release_loaded(connector, loaded)
        connector.close()

    def test_a_prompt_that_grows_is_saved_piece_by_piece(self, layout: Layout) -> None:
        connector = self.open_connector(layout, 12)
        room = self.room(connector, layout)
        prompt = connector.prompt(TOKENS[:32])
        self.release(connector, self.compute(connector, layout, prompt))
        prompt.extend(TOKENS[32:])
        self.release(connector, self.compute(connector, layout, prompt, first=2))
        hit = connector.lookup(connector.prompt(TOKENS))
        assert hit.tokens == (70 if self.reuses else 0)
        hit.release()
        hit.release()
        assert self.room(connector, layout) == room
        connector.close()

    def test_parts_of_a_hit_are_loaded_in_any_order(self, layout: Layout) -> None:
        connector = self.open_connector(layout, 12)
        room = self.room(connector, layout)
        self.release(connector, self.compute(connector, layout, connector.prompt(TOKENS)))
        for group in layout.groups:
            connector.evict(12, group=group.number)
        hit = connector.lookup(connector.prompt(TOKENS))
        end = connector.load_part(hit, 3, 5).wait(10) if self.reuses else Loaded(0)
        front = connector.load_part(hit, 0, 3 * self.reuses, last=True).wait(10)
        if self.reuses:
            assert (front.tokens, end.tokens) == (48, 70)
            for group, needed in zip(layout.groups, layout.right(TOKENS, 70), strict=True):
                parts = [self.loaded_bytes(connector, layout, each)[group.number] for each in (front, end)]
                assert [*parts[0], *parts[1]] == needed
        self.release_loaded(connector, front)
        self.release_loaded(connector, end)
        assert self.room(connector, layout) == room
        connector.close()

    def test_evicting_makes_room_and_forgets_nothing_that_is_elsewhere(self, layout: Layout) -> None:
        connector = self.open_connector(layout, 6)
        self.release(connector, self.compute(connector, layout, connector.prompt(TOKENS)))
        for group in layout.groups:
            assert connector.evict(6, group=group.number) == (5 if self.reuses else 0)
        pages = connector.allocate(6)
        assert pages is not None
        connector.release(pages)
        loaded = connector.load(connector.lookup(connector.prompt(TOKENS))).wait(10)
        assert loaded.tokens == (70 if self.reuses else 0)
        if self.reuses:
            assert self.loaded_bytes(connector, layout, loaded) == layout.right(TOKENS, 70)
        self.release_loaded(connector, loaded)
        connector.close()

    def test_a_cancelled_load_gives_everything_back(self, layout: Layout) -> None:
        connector = self.open_connector(layout, 8)
        room = self.room(connector, layout)
        self.release(connector, self.compute(connector, layout, connector.prompt(TOKENS)))
        for group in layout.groups:
            connector.evict(8, group=group.number)
        for _ in range(10):
            transfer = connector.load(connector.lookup(connector.prompt(TOKENS)))
            transfer.cancel()
            self.release_loaded(connector, transfer.wait(10))
        connector.close()
        assert self.room(connector, layout) == room
