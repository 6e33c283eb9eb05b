"""A day of traffic with mixed page sizes over a store's own parts: index, leases, write-behind, disk. There
is no engine, so the arena's bytes are written as they are."""

from __future__ import annotations

import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np

from tierstore import copying
from tierstore.backend import LookupRequest, Reservation
from tierstore.core.backend import LocalBackend
from tierstore.core.core import Core
from tierstore.errors import TierStoreError, UsageError
from tierstore.keys import Identity, PageKey, Prompt
from tierstore.tiers.disk import DiskTier
from tierstore.tiers.host import HostTier
from tierstore.units import KIB, MIB, format_size

PAGE_SIZES = (16 * KIB, 64 * KIB, 160 * KIB, 512 * KIB, 1792 * KIB, 4392 * KIB)
_TENTHS = 10
_BATCH_FRACTION = 32  # a batch is this fraction of the capacity, at most 64 MiB
_MOST_BATCH = 64 * MIB
_ARENA_BATCHES = 4
_FLUSH_S = 120.0
_LEAST_LARGEST = 16  # pages of the largest size that must fit


CHUNK_TOKENS = 64
_TIDES = 2 / 0.9  # cycles per day; a whole number, so that the first and the last tenth have the same shares
_LOWEST = 0.02  # the least share of a model during a cycle, as a fraction of its mean share
_REMEMBERED = 4096  # how many of a model's last prompts may be repeated
_MOST_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class ChurnRequest:
    """A prompt that an engine computes or loads."""

    page_bytes: int
    prompt: Prompt

    @property
    def nbytes(self) -> int:
        return len(self.prompt.keys) * self.page_bytes


class ChurnTraffic:
    """Prompts of one model per page size. ``reuse`` is the share of prompts that repeat an earlier one, some
    of them longer. The typical distance between the two, over all models, is ``recent_bytes``.
    ``prompt_bytes`` is the approximate size of a prompt's pages.
    """

    def __init__(
        self,
        page_sizes: Sequence[int],
        *,
        seed: int = 0,
        reuse: float = 0.4,
        recent_bytes: int,
        prompt_bytes: int,
    ) -> None:
        self._sizes = list(page_sizes)
        self._identities = [Identity(f"model {nbytes}", "layout") for nbytes in page_sizes]
        self._random = random.Random(seed)
        self._reuse = reuse
        self._recent = max(recent_bytes // prompt_bytes // len(self._sizes), 1)
        self._prompt_bytes = prompt_bytes
        self._past: list[deque[tuple[int, int]]] = [deque(maxlen=_REMEMBERED) for _ in page_sizes]
        self._next_seed = seed << 32

    def next(self, time_of_day: float) -> ChurnRequest:
        """Return the next prompt. ``time_of_day`` is from 0 to 1, and below 0 on the evening before."""
        model = self._model(time_of_day)
        seed, chunks = self._remembered(model) or self._made_up(model)
        self._past[model].append((seed, chunks))
        tokens = np.random.default_rng(seed).integers(
            0, 1 << 17, _MOST_CHUNKS * CHUNK_TOKENS, dtype=np.uint32
        )
        prompt = Prompt(self._identities[model], tokens[: chunks * CHUNK_TOKENS], chunk_tokens=CHUNK_TOKENS)
        return ChurnRequest(self._sizes[model], prompt)

    def _model(self, time_of_day: float) -> int:
        shares = []
        for model, nbytes in enumerate(self._sizes):
            phase = model / len(self._sizes)
            tide = 1 + math.cos(2 * math.pi * (_TIDES * time_of_day + phase))
            # Shares count bytes: a model with smaller prompts has more of them.
            shares.append((tide + _LOWEST) / min(self._prompt_bytes, _MOST_CHUNKS * nbytes))
        return self._random.choices(range(len(self._sizes)), shares)[0]

    def _remembered(self, model: int) -> tuple[int, int] | None:
        past = self._past[model]
        if not past or self._random.random() >= self._reuse:
            return None
        ago = min(int(self._random.expovariate(1 / self._recent)), len(past) - 1)
        seed, chunks = past[-1 - ago]
        grown = self._random.randint(1, max(chunks // 4, 1)) if self._random.random() < 0.3 else 0
        return seed, min(chunks + grown, _MOST_CHUNKS)

    def _made_up(self, model: int) -> tuple[int, int]:
        self._next_seed += 1
        mean = self._prompt_bytes / self._sizes[model]
        chunks = max(round(self._random.uniform(0.5, 1.5) * mean), 1)
        return self._next_seed, min(chunks, _MOST_CHUNKS)


@dataclass(slots=True)
class Tenth:
    """The figures of a tenth of the day."""

    written_bytes: int = 0
    write_s: float = 0.0
    cpu_s: float = 0.0  # processor time while writing; on a busy machine it varies less than write_s
    moved_bytes: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    # the share of the cap that holds pages, after each batch
    utilisation: list[float] = field(default_factory=list)

    @property
    def gb_per_s(self) -> float:
        return self.written_bytes / self.write_s / 1e9 if self.write_s else 0.0

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / self.written_bytes * 1e9 if self.written_bytes else 0.0

    @property
    def write_amplification(self) -> float:
        return 1 + self.moved_bytes / self.written_bytes if self.written_bytes else 1.0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0


class Day:
    """One store, and one day of traffic through it."""

    def __init__(
        self,
        path: Path,
        *,
        capacity_bytes: int,
        times: float,
        page_sizes: Sequence[int] = PAGE_SIZES,
        seed: int = 0,
        seen: Callable[[ChurnRequest], None] = lambda request: None,
    ) -> None:
        """After the store is full, write ``times`` times its capacity. ``seen`` is called with every request.
        Raises :class:`UsageError` for a capacity that is too small for the page sizes."""
        self.evening = Tenth()  # the requests before the day, until the first eviction
        self.tenths = [Tenth() for _ in range(_TENTHS)]
        self.most_taken_bytes = 0
        self._seen = seen
        self._path = path
        self._capacity_bytes = capacity_bytes
        self._total_bytes = int(capacity_bytes * times)
        self._batch_bytes = min(capacity_bytes // _BATCH_FRACTION, _MOST_BATCH)
        self._traffic = ChurnTraffic(
            page_sizes,
            seed=seed,
            recent_bytes=capacity_bytes // 4,
            prompt_bytes=min(max(capacity_bytes // 256, max(page_sizes)), 16 * MIB),
        )
        largest = max(page_sizes)
        if capacity_bytes < _LEAST_LARGEST * largest:
            least = format_size(_LEAST_LARGEST * largest)
            raise UsageError(
                f"pages of {format_size(largest)} need a capacity of at least {least}, "
                f"got {format_size(capacity_bytes)}"
            )
        self._disk = DiskTier.open(path, capacity_bytes=capacity_bytes, page_bytes=sorted(page_sizes)[1])
        self._host = HostTier(max(self._batch_bytes, largest) * _ARENA_BATCHES)
        self._core = Core(policy="lru", host=self._host, disk=self._disk)
        self._backend = LocalBackend(self._core)
        self._full = False
        self._reserved: set[PageKey] = set()  # in this batch

    def __enter__(self) -> Day:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._core.close()

    @property
    def written_pages(self) -> int:
        return self._disk.stats().written_pages

    @property
    def mean_bytes(self) -> float:
        """Mean bytes of the pages on disk, after it was full."""
        samples = [sample for tenth in self.tenths for sample in tenth.utilisation]
        return sum(samples) / len(samples) * self._capacity_bytes if samples else 0.0

    @property
    def dropped_pages(self) -> int:
        """Pages that were dropped before they were written."""
        return self._core.state.counters.disk_dropped_pages

    def run(self, progress: Callable[[float, Tenth], None]) -> None:
        """Fill the store, and write ``times`` its capacity. ``progress`` gets the share that is done and the
        current tenth. Raises :class:`TierStoreError` if the disk fails."""
        while not self._full:
            left = max(self._capacity_bytes - self.evening.written_bytes, 0)
            self._write(self.evening, -left / self._total_bytes)
            progress(0.0, self.evening)
        written = 0
        while written < self._total_bytes:
            tenth = self.tenths[written * _TENTHS // self._total_bytes]
            written += self._write(tenth, written / self._total_bytes)
            progress(written / self._total_bytes, tenth)
        self._core.check()

    def _write(self, tenth: Tenth, time_of_day: float) -> int:
        """Write one batch. Return its bytes."""
        before = self._disk.stats().written_bytes
        self._serve(tenth, time_of_day)
        nbytes = self._disk.stats().written_bytes - before
        if not nbytes:
            raise TierStoreError(f"a batch was not written: {self._disk} takes no pages")
        tenth.written_bytes += nbytes
        self._look(tenth)
        return nbytes

    def _serve(self, tenth: Tenth, time_of_day: float) -> None:
        """Serve requests until their new pages are a whole batch, and write the batch."""
        saves = []
        new = 0
        while new < self._batch_bytes:
            request = self._traffic.next(time_of_day)
            self._seen(request)
            save = self._reserve(request, tenth)
            new += len(save[1].positions) * request.page_bytes
            saves.append(save)
        checksums = [
            dict(zip(save.positions, copying.hash_all(save.addresses or (), nbytes), strict=True))
            for nbytes, save in saves
        ]
        write_behind = self._core.write_behind
        assert write_behind is not None, "there is a disk"
        before = write_behind.move_stats()
        started, cpu = time.perf_counter(), time.process_time()
        for (_, reserved), hashes in zip(saves, checksums, strict=True):
            self._backend.commit(reserved, hashes).wait(_FLUSH_S)
        self._reserved.clear()
        if not self._core.flush(_FLUSH_S):
            raise TierStoreError(f"a batch was not written within {_FLUSH_S:g} s")
        tenth.write_s += time.perf_counter() - started
        tenth.cpu_s += time.process_time() - cpu
        tenth.moved_bytes += write_behind.move_stats().moved_bytes - before.moved_bytes

    def _reserve(self, request: ChurnRequest, tenth: Tenth) -> tuple[int, Reservation]:
        """Reserve slots for the new pages of a prompt. The slots keep their old bytes."""
        prompt, backend = request.prompt, self._backend
        data = prompt.token_bytes
        asked = LookupRequest(
            prompt.identity, request.page_bytes, prompt.chunk_tokens, data, len(data), list(prompt.keys)
        )
        lease = backend.find(asked, patience_s=_FLUSH_S).wait(_FLUSH_S)
        assert lease is not None, "the core is open"
        backend.release(lease)
        first = lease.tokens // CHUNK_TOKENS
        # Pages that an earlier request of the same batch has reserved cannot be found yet.
        while first < len(prompt.keys) and prompt.keys[first] in self._reserved:
            first += 1
        self._reserved.update(prompt.keys[first:])
        reservation = backend.reserve(asked, first, len(prompt.keys) - first).wait(_FLUSH_S)
        assert reservation is not None, "the core is open"
        tenth.lookup_tokens += len(prompt)
        shared = reservation.stored_tokens - len(reservation.positions) * CHUNK_TOKENS
        tenth.hit_tokens += first * CHUNK_TOKENS + shared
        return request.page_bytes, reservation

    def _look(self, tenth: Tenth) -> None:
        self.most_taken_bytes = max(self.most_taken_bytes, taken_bytes(self._path))
        page_table = self._disk.page_table
        assert page_table is not None, "the disk was scanned"
        self._full = self._full or self._core.state.counters.evicted_pages["disk"] > 0
        tenth.utilisation.append(page_table.payload_bytes() / self._capacity_bytes)


def taken_bytes(path: Path) -> int:
    """Return the blocks of a directory and its files, in bytes."""
    total = 0
    for root, _, names in os.walk(path):
        for each in (root, *(os.path.join(root, name) for name in names)):
            total += os.lstat(each).st_blocks * 512
    return total
