"""Copies between host memory and HBM through the pool, beside plain copies of pinned memory, and their effect
on decoding."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tierstore.memory import Memory
from tierstore.tiers.device import Device, Stream
from tierstore.tiers.device_pool import DevicePool

_DECODES = 200


@dataclass(frozen=True, slots=True)
class TransferRow:
    """One case: ``nbytes`` in ``seconds``, and in ``plain_s`` by a plain copy. ``fraction`` is the rate
    divided by the plain copy's rate."""

    case: str
    nbytes: int
    seconds: float
    gb_per_s: float
    plain_s: float
    plain_gb_per_s: float
    fraction: float


@dataclass(frozen=True, slots=True)
class SlowdownRow:
    """The mean time of a decode alone, and during continuous loads."""

    alone_s: float
    while_loading_s: float
    slowdown: float


class TransferBench:
    """The first ``pages`` pages of ``pool``, and pinned host memory of the same size. Times are by the clock,
    from the call until all bytes have arrived."""

    def __init__(self, pool: DevicePool, pages: int) -> None:
        self._pool = pool
        self._pages = range(pages)
        self._page_bytes = pool.spec.page_bytes
        self.nbytes = pages * self._page_bytes
        self._host = Memory(self.nbytes, shared=False)
        self._back = Memory(self.nbytes, shared=False)
        for memory in (self._host, self._back):
            memory.populate()
            pool.register(memory.address, memory.nbytes)
        self._device: Device = pool.runtime
        # The measured copies use streams of their own, not the pool's streams.
        self._streams: list[Stream] = [self._device.stream(), self._device.stream()]

    def close(self) -> None:
        for stream in self._streams:
            self._device.release(stream)
        for memory in (self._host, self._back):
            self._pool.unregister(memory.address)

    def rows(self, repetitions: int = 3) -> Iterator[TransferRow]:
        plain_up = self._best(lambda: self._plain(up=True, down=False), repetitions)
        plain_down = self._best(lambda: self._plain(up=False, down=True), repetitions)
        plain_both = self._best(lambda: self._plain(up=True, down=True), repetitions)
        yield self._row("load", self.nbytes, self._best(self.load, repetitions), plain_up)
        yield self._row("save", self.nbytes, self._best(self.save, repetitions), plain_down)
        yield self._row("both", 2 * self.nbytes, self._best(self._both, repetitions), plain_both)

    def load(self) -> None:
        self._pool.start_writing(self._pairs(self._host)).wait()

    def save(self) -> None:
        self._pool.read_pages(self._pairs(self._back))

    def slowdown(self, decode: Callable[[], None], synchronize: Callable[[], None]) -> SlowdownRow:
        """Measure the slowdown. ``decode`` starts one decode on the device, ``synchronize`` waits for all."""

        def decodes() -> float:
            synchronize()
            began = time.perf_counter()
            for _ in range(_DECODES):
                decode()
            synchronize()
            return (time.perf_counter() - began) / _DECODES

        decodes()
        alone = decodes()
        over = threading.Event()

        def load_on() -> None:
            while not over.is_set():
                self.load()

        loading = threading.Thread(target=load_on)
        loading.start()
        try:
            beside = decodes()
        finally:
            over.set()
            loading.join()
        return SlowdownRow(alone, beside, beside / alone - 1)

    def _both(self) -> None:
        saving = threading.Thread(target=self.save)
        saving.start()
        self.load()
        saving.join()

    def _plain(self, *, up: bool, down: bool) -> None:
        """Copy all bytes once in each direction."""
        start = self._pool.address
        copies = [(start, self._host.address)] * up + [(self._back.address, start)] * down
        events = []
        for stream, (to, source) in zip(self._streams, copies, strict=False):
            self._device.copy(stream, to, source, self.nbytes)
            events.append(self._device.record(stream))
        for event in events:
            self._device.synchronize(event)

    def _pairs(self, memory: Memory) -> list[tuple[int, int]]:
        """Return every page with an address, in an order without adjacent copies, as in a cache."""
        last = self._pages[-1]
        return [(page, memory.address + (last - page) * self._page_bytes) for page in self._pages]

    def _row(self, case: str, nbytes: int, seconds: float, plain: float) -> TransferRow:
        return TransferRow(
            case, nbytes, seconds, nbytes / seconds / 1e9, plain, nbytes / plain / 1e9, plain / seconds
        )

    @staticmethod
    def _best(work: Callable[[], None], repetitions: int) -> float:
        """Return the least of several measured times, because other load on the machine only adds time."""
        work()
        took = []
        for _ in range(repetitions):
            began = time.perf_counter()
            work()
            took.append(time.perf_counter() - began)
        return min(took)
