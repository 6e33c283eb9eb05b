"""A daemon on the event loop of a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading

from tierstore.daemon.daemon import Daemon
from tierstore.daemon.settings import Settings
from tierstore.testing.clock import wait_until


class RunningDaemon:
    """``daemon`` on the event loop of a thread."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.daemon = self.run(self._make())
        self.run(self.daemon.start())

    async def _make(self) -> Daemon:
        return Daemon(self.settings)

    def run(self, awaitable):
        return asyncio.run_coroutine_threadsafe(awaitable, self.loop).result()

    @property
    def url(self) -> str:
        return self.settings.listen[0]

    @property
    def address(self) -> str:
        """Where the last endpoint really listens."""
        return self.daemon.server.endpoints[-1].address

    def stats(self):
        return self.daemon.stats()

    def wait_for(self, condition) -> None:
        """Until ``condition(stats)`` holds."""
        wait_until(lambda: condition(self.stats()))

    def check(self) -> None:
        """Nothing is held by anybody, and everything agrees."""
        self.daemon.core.flush(10)
        self.daemon.core.check()
        stats = self.stats()
        assert stats.store.tiers["host"].leased_pages == 0
        assert stats.store.open_hits == 0
        assert stats.service.failed_requests == 0
        assert stats.store.failed_tasks == 0
        state = self.daemon.core.state
        with state.lock:
            cached = sum(page.nbytes for page in state.index.tree.walk() if page.copies[1] is not None)
            assert state.host.used_bytes == cached
            assert sum(state.residency.host_bytes.values()) == cached

    def stop(self) -> None:
        if self.thread.is_alive():
            self.run(self.daemon.stop())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()
