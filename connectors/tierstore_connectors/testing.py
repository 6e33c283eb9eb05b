"""What every connector of the bundled engine must do, as a test class to inherit from.

Subclass :class:`ConnectorTests` in a test module and provide ``open_connector(pages)``; pytest finds the
rest. Set ``reuses`` to False for a connector that keeps nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from tierstore.keys import Prompt
from tierstore.testing.pages import leading_tokens, pages_of
from tierstore_connectors.base import Connector

TOKENS = list(range(100, 170))  # 16-token chunks: four whole ones and six tokens


class ConnectorTests(ABC):
    """Subclasses say how to open a connector over 16-token chunks."""

    reuses = True

    @abstractmethod
    def open_connector(self, pages: int) -> Connector:
        """A fresh connector with a pool of ``pages`` pages."""

    def compute(self, connector: Connector, prompt: Prompt, *, first: int = 0) -> list[int]:
        """Play the engine: pages for the chunks from ``first`` on, filled and saved."""
        spec = connector.pool.spec
        contents = pages_of(prompt.tokens, spec)[first:]
        pages = connector.allocate(len(contents))
        assert pages is not None
        for page, content in zip(pages, contents, strict=True):
            connector.pool.array[page] = np.frombuffer(content, np.uint8)
        connector.save(prompt, pages, first=first).wait(10)
        return pages

    def check_pages(self, connector: Connector, pages: tuple[int, ...], tokens: int) -> None:
        spec = connector.pool.spec
        for i, (page, expected) in enumerate(zip(pages, pages_of(TOKENS, spec), strict=False)):
            count = min(tokens - i * spec.chunk_tokens, spec.chunk_tokens)
            got = connector.pool.array[page].tobytes()
            assert leading_tokens(got, count, spec) == leading_tokens(expected, count, spec)

    def test_pages_are_handed_out_once_and_taken_back(self) -> None:
        connector = self.open_connector(8)
        pages = connector.allocate(8)
        assert pages is not None
        assert sorted(pages) == list(range(8))
        assert connector.allocate(1) is None
        connector.release(pages[:3])
        assert connector.available() == 3
        connector.release(pages[3:])
        assert connector.available() == 8
        connector.close()

    def test_an_unknown_prompt_is_an_empty_hit(self) -> None:
        connector = self.open_connector(8)
        hit = connector.lookup(connector.prompt(TOKENS))
        assert hit.tokens == 0
        assert not hit.by_tier
        loaded = connector.load(hit).wait(10)
        assert (loaded.tokens, loaded.pages) == (0, ())
        connector.close()

    def test_what_was_saved_is_found_and_loaded(self) -> None:
        connector = self.open_connector(12)
        connector.release(self.compute(connector, connector.prompt(TOKENS)))
        hit = connector.lookup(connector.prompt([*TOKENS, 1, 2]), max_tokens=71)
        assert hit.tokens == sum(hit.by_tier.values()) == (70 if self.reuses else 0)
        loaded = connector.load(hit).wait(10)
        assert loaded.tokens == hit.tokens
        self.check_pages(connector, loaded.pages, loaded.tokens)
        connector.release(loaded.pages)
        assert connector.available() == 12
        connector.close()

    def test_max_tokens_and_the_end_of_a_page(self) -> None:
        connector = self.open_connector(12)
        connector.release(self.compute(connector, connector.prompt(TOKENS)))
        for limit in (1, 16, 40, 69):
            hit = connector.lookup(connector.prompt(TOKENS), max_tokens=limit)
            assert hit.tokens == (limit if self.reuses else 0)
            loaded = connector.load(hit).wait(10)
            self.check_pages(connector, loaded.pages, loaded.tokens)
            if loaded.tokens % 16:
                connector.pool.array[loaded.pages[-1]] = 0  # its own copy: nobody else may notice
            connector.release(loaded.pages)
        connector.close()

    def test_a_prompt_that_grows_is_saved_piece_by_piece(self) -> None:
        connector = self.open_connector(12)
        prompt = connector.prompt(TOKENS[:32])
        pages = self.compute(connector, prompt)
        prompt.extend(TOKENS[32:])
        pages += self.compute(connector, prompt, first=2)
        connector.release(pages)
        hit = connector.lookup(connector.prompt(TOKENS))
        assert hit.tokens == (70 if self.reuses else 0)
        hit.release()
        hit.release()
        assert connector.available() == 12
        connector.close()

    def test_evicting_makes_room_and_forgets_nothing_that_is_elsewhere(self) -> None:
        connector = self.open_connector(6)
        connector.release(self.compute(connector, connector.prompt(TOKENS)))
        assert connector.evict(6) == (5 if self.reuses else 0)
        pages = connector.allocate(6)
        assert pages is not None
        connector.release(pages)
        loaded = connector.load(connector.lookup(connector.prompt(TOKENS))).wait(10)
        assert loaded.tokens == (70 if self.reuses else 0)
        self.check_pages(connector, loaded.pages, loaded.tokens)
        connector.release(loaded.pages)
        connector.close()

    def test_a_cancelled_load_gives_everything_back(self) -> None:
        connector = self.open_connector(8)
        connector.release(self.compute(connector, connector.prompt(TOKENS)))
        connector.evict(8)
        for _ in range(10):
            transfer = connector.load(connector.lookup(connector.prompt(TOKENS)))
            transfer.cancel()
            connector.release(transfer.wait(10).pages)
        connector.close()
        assert connector.available() == 8
