"""Encode pages before they are written to disk.

The store's writer lets this encode a batch before it reserves places. Low-priority threads encode, so that an
engine on the same cores is not slowed down. A page whose encoding has not begun by a deadline is written
unencoded. So a busy processor costs space on disk, but delays no page.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import xxhash

from tierstore.codec import Codec
from tierstore.keys import Identity
from tierstore.memory import Memory
from tierstore.tiers.disk.io_threads import IOThreads
from tierstore.tiers.disk.payloads import Staging
from tierstore.tiers.disk.records import room_for
from tierstore.tiers.slabs import slot_bytes
from tierstore.units import MIB

_log = logging.getLogger(__name__)

_THREADS = 2
_NICE = 10  # on a core shared with an engine, an encoder gets a tenth of the time
_DEADLINE_S = 0.5  # encoding a batch of 32 MiB takes 15 ms on two idle cores
_KEPT_BYTES = 96 * MIB  # memory kept for the payloads of batches that are being written


@dataclass(frozen=True, slots=True)
class PageBytes:
    """A page to be encoded: its bytes and its identity."""

    view: memoryview
    identity: Identity


@dataclass(frozen=True, slots=True)
class Encoded:
    """The payload to write instead of a page. ``checksum`` is that of the unencoded page. ``memory`` holds
    the payload, and must be returned with :meth:`PageEncoder.give_back` after the write."""

    codec: int
    nbytes: int  # bytes of the payload
    room: int
    checksum: int
    memory: Memory

    @property
    def payload(self) -> memoryview:
        return self.memory.view(0, self.nbytes)


class PageEncoder:
    """Encodes pages by ``codec``. Thread-safe."""

    def __init__(self, codec: Codec, *, inline_bytes: int) -> None:
        self._codec = codec
        # pages of this size or less are stored in the index, and are not encoded
        self._inline_bytes = inline_bytes
        self._staging = Staging(_KEPT_BYTES)
        self._threads = IOThreads(_THREADS, name="tierstore-encode")
        self._own = threading.local()

    def encode(self, pages: Sequence[PageBytes], *, deadline_s: float = _DEADLINE_S) -> list[Encoded | None]:
        """Encode pages. Return for each page its encoded payload, or None if the page must be written
        unencoded. Takes at most ``deadline_s`` plus the time for one page."""
        give_up = time.monotonic() + deadline_s
        futures = [self._threads.submit(partial(self._encode, page)) for page in pages]
        for future in futures:
            self._wait(future, give_up - time.monotonic())
        return [self._outcome(future) for future in futures]

    def give_back(self, encoded: Sequence[Encoded]) -> None:
        """Free payloads that are not needed any more."""
        self._staging.give_back([one.memory for one in encoded])

    def close(self) -> None:
        """Wait for running work and stop the threads."""
        self._threads.close()

    def _outcome(self, future: Future[Encoded | None]) -> Encoded | None:
        """Return the encoded page. If its encoding was cancelled or has failed, return None, so that the page
        is written unencoded."""
        if future.cancelled():
            return None
        error = future.exception()
        if error is not None:
            _log.warning("disk tier: a codec failed, so the page is written unencoded: %r", error)
            return None
        return future.result()

    def _wait(self, future: Future[Encoded | None], timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            future.exception(max(timeout_s, 0))
            return
        if not future.cancel():
            future.exception()

    def _encode(self, page: PageBytes) -> Encoded | None:
        self._yield_processor()
        if page.view.nbytes <= self._inline_bytes:
            return None
        memory = self._staging.take(self._codec.bound(page.view.nbytes))
        nbytes = self._codec.encode(page.view, memory.view(0, memory.nbytes), page.identity.layout)
        room = room_for(nbytes, page.view.nbytes)
        if not nbytes or room <= self._inline_bytes or slot_bytes(room) >= slot_bytes(page.view.nbytes):
            self._staging.give_back([memory])
            return None
        return Encoded(self._codec.number, nbytes, room, xxhash.xxh3_64_intdigest(page.view), memory)

    def _yield_processor(self) -> None:
        """Lower the calling thread's priority, once. (On Linux, each thread has its own nice value.)"""
        if not hasattr(self._own, "yields"):
            self._own.yields = True
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
