"""The scheduler's side of finding: which probes are under way, and whether the daemon is worth asking."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tierstore.keys import Identity, PageKey
from tierstore_connectors.vllm.breaker import Breaker
from tierstore_connectors.vllm.guard import Faults
from tierstore_connectors.vllm.probe import Probe, Wanted
from tierstore_connectors.vllm.settings import Settings
from tierstore_connectors.vllm.stores import Stores
from tierstore_connectors.vllm.work import Shard

_THREADS = 2  # that wait for answers
# A daemon that is well has answered by the first of these. The second is for an engine that has nothing to do
# but to ask: it would spin through empty steps, and with it in the way the threads that wait for the answer
# come to run every 5 ms only.
_FIRST_LOOK_S = 0.004
_LOOK_S = 0.001
_CONNECT_S = 1.0  # that the engine's start waits for the daemon


class Finder:
    """Belongs to the scheduler's thread."""

    def __init__(
        self, settings: Settings, faults: Faults, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.breaker = Breaker()
        self._settings = settings
        self._faults = faults
        self._clock = clock
        self._stores = Stores(settings, threads=1)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tierstore-find")
        self._shards: tuple[Shard, ...] = ()

    def connect(self, shards: Sequence[Shard]) -> None:
        """The workers are ready to keep these pages. Until this is called nothing is found. Raises
        :class:`~tierstore.errors.UsageError`."""
        self._shards = tuple(shards)
        self._open()
        self._stores.wait_connected(_CONNECT_S)  # or not: then it is misses until the daemon comes

    def renew(self) -> None:
        """The identities of before are not asked for any more. Probes that are under way find nothing."""
        self._stores.renew(self._open)

    def _open(self) -> None:
        for shard in self._shards:
            for group in shard.groups:
                self._stores.open(group.identity, group.page_bytes, shard.chunk_tokens)

    @property
    def connected(self) -> bool:
        """Whether there are pages to find."""
        return bool(self._shards)

    def begin(
        self,
        keys: Sequence[PageKey],
        tokens: Callable[[], bytes],
        under: Callable[[Identity], Identity],
    ) -> Probe | None:
        """Ask what is held of a prompt. ``under`` gives the identity of the moment. None when there is nobody
        to ask, or nothing to ask for."""
        now = self._clock()
        if not keys or not self._shards or not self._stores.connected or not self.breaker.allows(now):
            return None
        wanted: Wanted = [
            (
                self._stores.open(group.identity, group.page_bytes, shard.chunk_tokens),
                under(group.identity),
                group.windowed,
            )
            for shard in self._shards
            for group in shard.groups
        ]
        probe = Probe(wanted, keys, tokens, self._shards[0].chunk_tokens, now)
        probe.ask(self._threads, self._settings.prefetch_s, self._faults)
        return probe

    def look(self, probe: Probe, *, patient: bool) -> int | None:
        """What a probe has found; None when it is worth asking again in the next step. After ``lookup_s`` a
        probe that has no answer has found nothing. ``patient``: it may take a millisecond."""
        now = self._clock()
        if probe.first_looked is None:
            probe.first_looked = now
            probe.wait(_FIRST_LOOK_S if patient else 0)
        elif patient:
            probe.wait(_LOOK_S)
        if probe.answered:
            self.breaker.succeeded()
            return probe.tokens()
        if self._clock() - probe.first_looked < self._settings.lookup_s:
            return None
        self.breaker.failed(self._clock())
        probe.release()
        return 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._stores.close()
