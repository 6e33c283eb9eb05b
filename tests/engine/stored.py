"""An engine over a store, for tests that close both."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore import Store
from tierstore_engine.engine import Engine


@dataclass
class Stored:
    """An engine and the store below it."""

    engine: Engine
    store: Store
    closed: bool = False

    def close(self) -> None:
        """Close both, after seeing that every page is where it belongs."""
        if not self.closed and not self.engine.has_work:
            assert self.store.flush(30)
            self.store.check()
            for group, pool in enumerate(self.engine.connector.pools):
                assert self.engine.connector.available(group=group) == pool.capacity
        self.closed = True
        self.engine.close()
