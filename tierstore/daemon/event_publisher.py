"""KV events: report the content of the daemon's tiers to followers (routers and indexers), in vLLM's format.

Each message on the XPUB socket has three frames: topic, sequence number (8 bytes, big-endian) and a batch of
events (msgpack): ``[seconds since 1970, [event, …], rank]``. If there are no events, an empty batch is sent
every two seconds. The sequence number of an empty batch shows a follower whether it has missed batches.

A follower requests missed batches at the ROUTER socket, with an empty frame and the first missing sequence
number. The answer is one message for each batch, and then a message with the sequence number -1. If some of
these batches are not kept any more, the answer is a snapshot: ``AllBlocksCleared``, all stored pages, and the
events that occurred since the snapshot began. The batches with the stored pages get sequence numbers below
those of these events.

Sequence numbers never repeat after a restart of the daemon. A run's first number is the time since 1970 in
units of 2⁻²⁰ s, which is above all numbers of earlier runs. A follower of an earlier run sees a gap in the
numbers and requests the missing batches. The first event of every run is ``AllBlocksCleared``. Pages of
earlier runs are reported when a client first registers their identity, because their layout is unknown
before.

An endpoint without a ROUTER socket cannot answer requests. So it reports all stored pages again, after
``AllBlocksCleared``, when a new follower has connected.

An endpoint reports the pages of all models, or of one model. Routers expect one model per endpoint. By
default, pages of tenants are not reported, because a router would direct any client to them. Events contain
prompts in clear text, so they leave this machine only with explicit permission.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from tierstore.backend import Registration
from tierstore.core.change_log import ChangeLog, Lost, Named
from tierstore.core.held import PAGES_AT_ONCE, held
from tierstore.core.state import StoreState
from tierstore.daemon.arena import SocketLock
from tierstore.daemon.endpoint import Url
from tierstore.daemon.events import AllBlocksCleared, BlockStored, EventBlocks, KvEvent, as_array
from tierstore.daemon.stats import EventStats
from tierstore.descriptors import require_room
from tierstore.errors import StoreUnavailableError, TierStoreError, UsageError
from tierstore.tiers.disk import DiskTier
from tierstore.wire.listener import tcp_sockets
from tierstore.wire.zmq_door import ZmqDoor

_log = logging.getLogger(__name__)

_KEPT_BATCHES = 10_000  # for replay
_KEPT_BYTES = 64 << 20
_MOST_EVENTS = 1024  # in a batch
_MOST_TOKENS = 1 << 16  # in a batch: a quarter of a MiB
_GATHER_S = 0.01  # how long changes are collected, because pages arrive in bursts
_HEARTBEAT_MS = 2000
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_STOPPED_S = 5.0
_SEND_S = 5.0  # time limit for sending to a follower that does not read its answer
_LINGER_MS = 1000  # the same time limit when the daemon ends
_NUMBERS_S = 1 << 20  # sequence numbers per second since 1970, more than any run uses
_NUMBERS_BEFORE = 1 << 16  # sequence numbers below a run's first batch, for the batches of snapshots
_UNREAD_BATCHES = 100  # if a follower has this many unread batches, it misses further ones
_SPARE_BATCHES = 16  # additional sequence numbers for a snapshot
_MOST_FOLLOWERS = 256  # of one endpoint
_MOST_REQUEST_BYTES = 64 << 10  # a request is a topic or a number
_DESCRIPTORS = 16  # libzmq opens this many for an endpoint
_SUBSCRIBED = b"\x01"
_ANEW_S = 1.0  # shortest pause between two full reports for new followers
_ANEW_SHARE = 20  # the pause is at least this multiple of the time that the last full report took


@dataclass(frozen=True, slots=True)
class EventOptions:
    """Options of one endpoint. ``model`` is the name that clients give their model, or the model of an
    identity; empty for all models."""

    url: str
    replay_url: str = ""
    model: str = ""
    topic: str = ""
    encoding: str = "map"
    block_tokens: int = 0
    tenants: bool = False
    anywhere: bool = False
    connect: bool = False

    def wants(self, registration: Registration) -> bool:
        """Return whether this endpoint reports the pages of an identity."""
        identity = registration.identity
        named = not self.model or self.model in (registration.model_name, identity.model)
        return named and (self.tenants or not identity.tenant)


class EventPublisher:
    """Reports the changes of a store's tiers, on its own threads. Call :meth:`stop` or :meth:`close` before
    the store is closed, because the threads read its disk.

    The constructor raises :class:`UsageError` for an address that other machines can reach, unless the
    options permit it, and :class:`StoreUnavailableError` if it cannot listen at the address.
    """

    def __init__(self, state: StoreState, disk: DiskTier | None, options: EventOptions) -> None:
        self._state = state
        self._disk = disk
        self._options = options
        self._blocks = EventBlocks(options.block_tokens)
        self._sent = _Sent(int(time.time() * _NUMBERS_S) + _NUMBERS_BEFORE)
        self._events = 0
        self._replays = 0
        self._snapshots = 0
        self._unread = 0  # reports of stored pages that a disk error has cut short
        self._anew_at = 0.0  # earliest time of the next full report for new followers
        self._closing = threading.Event()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[Any] = zmq.Context()
        self._locks: list[SocketLock] = []
        self._doors: list[ZmqDoor] = []
        try:
            self._out = self._opened(zmq.XPUB, options.url, connect=options.connect)
            self._replay = self._opened(zmq.ROUTER, options.replay_url) if options.replay_url else None
        except BaseException:
            self._close_sockets()
            self._close_doors()
            raise
        self._log = ChangeLog(self._wake, wants=options.wants)
        with state.lock:
            state.residency.followers.append(self._log)
        self._threads = [threading.Thread(target=self._run, name="tierstore-events", daemon=True)]
        if self._replay is not None:
            answer = threading.Thread(
                target=self._answer, args=(self._replay,), name="tierstore-replay", daemon=True
            )
            self._threads.append(answer)
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self.close()
            raise

    def stats(self) -> EventStats:
        return EventStats(
            model=self._options.model,
            batches=self._sent.batches,
            events=self._events,
            lost_changes=self._log.lost,
            replays=self._replays,
            snapshots=self._snapshots,
            unread_listings=self._unread,
        )

    async def stop(self) -> None:
        """Report the remaining changes, complete the answers to followers, and end."""
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._end)
        except RuntimeError:  # no thread can be started
            self._end()
        for door in self._doors:  # the event loop forwards the last messages to the followers
            await door.finish(_LINGER_MS / 1e3)
        self.close()

    def close(self) -> None:
        """End without waiting for followers. Idempotent."""
        self._end()
        self._close_doors()

    def _end(self) -> None:
        """End the threads and close their sockets. Two threads must not call this at the same time."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        for thread in self._threads:
            thread.join(_STOPPED_S)
        with self._state.lock:
            self._state.residency.followers.remove(self._log)
        if not any(thread.is_alive() for thread in self._threads):
            self._close_sockets()  # the state no longer calls _wake, which writes to a descriptor closed here

    def _close_sockets(self) -> None:
        self._context.destroy()
        os.close(self._wakeup)

    def _close_doors(self) -> None:
        for door in self._doors:
            door.close()
        for lock in self._locks:
            lock.release()

    def _opened(self, kind: int, text: str, *, connect: bool = False) -> zmq.Socket[Any]:
        url = Url.parse(text)
        if not url.loopback and not self._options.anywhere:
            raise UsageError(
                f"events contain prompts in clear text, and {text} is reachable from other machines: "
                "give ipc://PATH or a loopback address, or set events_anywhere"
            )
        require_room(_DESCRIPTORS, "an endpoint of KV events")
        opened: zmq.Socket[Any] = self._context.socket(kind)
        opened.linger = 0
        opened.sndhwm = _UNREAD_BATCHES
        opened.maxmsgsize = _MOST_REQUEST_BYTES
        if kind == zmq.ROUTER:
            # If a peer does not read its answer, sending raises an error instead of dropping messages.
            opened.router_mandatory = True
            opened.sndtimeo = int(_SEND_S * 1e3)
            opened.linger = _LINGER_MS
        else:
            opened.xpub_verbose = True  # report each new follower, also of a known topic
        try:
            if connect:
                opened.connect(url.text)
            else:
                self._doors.append(ZmqDoor(opened, self._listening(url), _MOST_FOLLOWERS))
        except zmq.ZMQError as error:
            raise StoreUnavailableError(f"cannot publish events at {text}: {error.strerror}") from error
        except TierStoreError as error:
            raise StoreUnavailableError(f"cannot publish events at {text}: {error}") from error
        return opened

    def _listening(self, url: Url) -> list[socket.socket]:
        if url.path is None:
            host, _, port = url.text.removeprefix("tcp://").rpartition(":")
            return tcp_sockets(host.strip("[]"), int(port))
        lock = SocketLock(url.path)
        self._locks.append(lock)
        return [lock.bind(url.path)]

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    # -- the publishing thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        poller.register(self._out, zmq.POLLIN)
        newcomers = False
        try:
            self._send([AllBlocksCleared()])
            while not self._closing.is_set():
                wait_ms = _HEARTBEAT_MS
                if newcomers:
                    wait_ms = max(math.ceil(1e3 * (self._anew_at - time.monotonic())), 0)
                ready = dict(poller.poll(min(wait_ms, _HEARTBEAT_MS)))
                newcomers |= self._out in ready and self._has_newcomers()
                if self._wakeup in ready:
                    self._gather()
                    self._tell()
                elif not ready and not newcomers:
                    self._send([])
                if newcomers and time.monotonic() >= self._anew_at:
                    newcomers = False
                    self._tell_anew()
            self._tell()
        except zmq.ZMQError:
            _log.exception("KV events: publishing has failed and stops")
        finally:
            self._out.close()

    def _has_newcomers(self) -> bool:
        """Return whether new followers have connected that cannot request the stored pages."""
        come = False
        with suppress(zmq.Again):
            while True:
                come |= self._out.recv_multipart(zmq.NOBLOCK)[0][:1] == _SUBSCRIBED
        return come and self._replay is None

    def _tell_anew(self) -> None:
        """Report all stored pages to all followers. Followers that connect at about the same time share one
        report, and pauses between reports limit the time spent on them to about 5 %."""
        begun = time.monotonic()
        self._announce(self._begin(Lost()))
        took_s = time.monotonic() - begun
        self._anew_at = begun + took_s + max(_ANEW_S, took_s * _ANEW_SHARE)

    def _gather(self) -> None:
        self._closing.wait(_GATHER_S)

    def _tell(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        with self._state.lock:
            changes = self._log.take()
        new: list[bytes] = []
        ordinary: list[Any] = []
        for change in changes:
            if isinstance(change, Named | Lost):
                self._send_all(self._blocks.events(ordinary))
                ordinary = []
                new += self._begin(change)
            else:
                ordinary.append(change)
        self._send_all(self._blocks.events(ordinary))
        if new:
            self._announce(new)

    def _begin(self, change: Named | Lost) -> list[bytes]:
        """Return the identities whose stored pages have to be reported."""
        with self._state.lock:
            named = [change.identity] if isinstance(change, Named) else self._log.identities
            followed = {identity: self._log.followed(identity) for identity in named}
        if isinstance(change, Lost):
            self._blocks = EventBlocks(self._options.block_tokens)
            self._send([AllBlocksCleared()])
        return [each for identity, what in followed.items() for each in self._blocks.add(identity, what)]

    def _announce(self, identities: Iterable[bytes]) -> None:
        """Report the stored pages of these identities."""
        for events in self._held(self._blocks, set(identities)):
            self._send_all(events)

    def _held(self, blocks: EventBlocks, identities: set[bytes]) -> Iterator[Iterator[KvEvent]]:
        """Yield the events for stored pages. If the disk fails or the publisher closes, end early without an
        error: an incomplete answer harms a follower less than an answer that never ends."""

        def wanted(identity: bytes, tokens: bytes) -> bool:
            return identity in identities and self._log.tells(identity, tokens)

        try:
            for pages in held(self._state, self._disk, wanted):
                yield blocks.events(pages)
                if self._closing.wait(_GATHER_S):  # pause, because a million pages may follow
                    return
        except OSError as error:
            self._unread += 1
            _log.warning("KV events: cannot list the pages on disk: %s", error)

    def _send_all(self, events: Iterable[KvEvent]) -> None:
        for batch in _batches(events):
            self._send(batch)

    def _send(self, events: Sequence[KvEvent]) -> None:
        sequence, batch = self._sent.add(self._encoded(events), keep=bool(events))
        self._out.send_multipart((self._topic, _number(sequence), batch))
        self._events += len(events)

    @property
    def _topic(self) -> bytes:
        return self._options.topic.replace("{model}", self._options.model).encode()

    def _encoded(self, events: Sequence[KvEvent]) -> bytes:
        told = [as_array(event) for event in events] if self._options.encoding == "array" else events
        return msgspec.msgpack.encode((time.time(), told, 0))

    # -- the answering thread -----------------------------------------------------------------------------

    def _answer(self, replay: zmq.Socket[Any]) -> None:
        try:
            while not self._closing.is_set():
                if replay.poll(100):
                    self._answer_one(replay)
            for _ in range(_MOST_FOLLOWERS):  # answer the requests that have already arrived
                if replay.poll(0):
                    self._answer_one(replay)
        except zmq.ZMQError:
            _log.exception("KV events: answering requests has failed and stops")
        finally:
            replay.close()

    def _answer_one(self, replay: zmq.Socket[Any]) -> None:
        """Answer a follower's request for missed batches."""
        peer, *rest = replay.recv_multipart()
        if len(rest) != 2 or len(rest[1]) != 8:
            _log.warning("KV events: malformed replay request: %d frames", len(rest))
            return
        self._replays += 1
        first = int.from_bytes(rest[1], "big")
        try:
            for sequence, batch in self._missed(first):
                replay.send_multipart((peer, b"", self._topic, _number(sequence), batch))
            replay.send_multipart((peer, b"", b"", _END_OF_REPLAY, b""))
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            _log.warning("KV events: a follower does not read the batches that it has requested")

    def _missed(self, first: int) -> Iterator[tuple[int, bytes]]:
        again = self._sent.since(first, self._encoded([]))
        if again is not None:
            yield from again
            return
        self._snapshots += 1
        told = 0
        while True:
            begun = self._sent.next
            yield from self._snapshot(told, begun)
            since = self._sent.since(begun, self._encoded([]))
            if since is not None:
                yield from since
                return
            told = begun

    def _snapshot(self, least: int, begun: int) -> Iterator[tuple[int, bytes]]:
        """Yield all stored pages, in batches with sequence numbers from ``least`` or above up to, but not
        including, ``begun``. As many numbers are used as batches are expected. If fewer batches are needed,
        the rest are empty, because a missing number would mean a missed batch. If more pages are stored, the
        last batch contains all remaining pages."""
        with self._state.lock:
            identities = {each for each in self._log.identities if self._blocks.tells(each)}
            pages = self._state.index.tree.pages + (self._disk.pages if self._disk is not None else 0)
        numbers = min(pages // PAGES_AT_ONCE + _SPARE_BATCHES, _NUMBERS_BEFORE)
        sequence = max(begun - numbers, least)
        rest: list[KvEvent] = [AllBlocksCleared()]
        for events in self._held(self._blocks.afresh(), identities):
            if sequence < begun - 1:
                yield sequence, self._encoded(rest)
                sequence, rest = sequence + 1, []
            rest += events
        for number in range(sequence, begun):
            yield number, self._encoded(rest)
            rest = []


class _Sent:
    """The most recently sent batches. Empty batches are not stored: a missing number is an empty batch."""

    def __init__(self, first: int) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._oldest = first  # all batches from this number on are kept
        self.next = first
        self.batches = 0

    def add(self, batch: bytes, *, keep: bool) -> tuple[int, bytes]:
        """Add a batch and return it with its number."""
        with self._lock:
            numbered = (self.next, batch)
            self.next += 1
            self.batches += 1
            if keep:
                self._kept.append(numbered)
                self._kept_bytes += len(batch)
                while len(self._kept) > _KEPT_BATCHES or self._kept_bytes > _KEPT_BYTES:
                    number, old = self._kept.popleft()
                    self._kept_bytes -= len(old)
                    self._oldest = number + 1
            return numbered

    def since(self, first: int, empty: bytes) -> list[tuple[int, bytes]] | None:
        """Return all batches from ``first`` on; None if some are not kept any more, or if they are more than
        ``_KEPT_BATCHES``."""
        with self._lock:
            if not self._oldest <= first or self.next - first > _KEPT_BATCHES:
                return None
            kept = dict(self._kept)
            return [(number, kept.get(number, empty)) for number in range(first, self.next)]


def _batches(events: Iterable[KvEvent]) -> Iterator[list[KvEvent]]:
    batch: list[KvEvent] = []
    tokens = 0
    for event in events:
        batch.append(event)
        tokens += len(event.token_ids) if isinstance(event, BlockStored) else 0
        if len(batch) >= _MOST_EVENTS or tokens >= _MOST_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")
