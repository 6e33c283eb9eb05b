"""KV events: report the content of the daemon's tiers to routers and indexers, in vLLM's format.

Messages go out on an XPUB socket, in three frames: topic, sequence number (8 bytes, big-endian) and a batch
(msgpack): ``[seconds since 1970, [event, …], rank]``. Without events, an empty batch goes out every two
seconds, so that a follower that has missed the last batch, or is new, notices it.

A follower requests missed batches at the ROUTER socket, with an empty frame and the first wanted sequence
number. The answer is one message for each batch that is still kept, and then one with the sequence number -1.
If the batches are not kept any more, the answer is a snapshot: ``AllBlocksCleared``, all held pages, and the
events since the reading began. Its batches have the sequence numbers before that.

Sequence numbers never repeat across restarts: each run begins with the time since 1970 in units of 2⁻²⁰ s,
which no earlier run has reached with its batches. A follower of an earlier run sees a gap, and asks. The
first event of every run is ``AllBlocksCleared``. Pages of earlier runs are reported when a client first
registers their identity, because their layout is unknown before.

An endpoint without a ROUTER reports all held pages again, after ``AllBlocksCleared``, soon after a follower
has come. So a follower has the right state without asking, even after a restart that it has not noticed.

An endpoint reports the pages of all models, or of those that clients give one name. Routers expect one model
per endpoint. Pages of tenants are left out by default, because a router would find them for every client.
Events contain prompts in clear text, so they leave this machine only with explicit permission.
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
_GATHER_S = 0.01  # pages come in bursts
_HEARTBEAT_MS = 2000
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_STOPPED_S = 5.0
_SEND_S = 5.0  # time limit for a follower that does not read its answer
_LINGER_MS = 1000  # the same, when the daemon ends
_NUMBERS_S = 1 << 20  # sequence numbers per second since 1970: no run uses them up
_NUMBERS_BEFORE = 1 << 16  # numbers before a run's first, for the batches of snapshots
_UNREAD_BATCHES = 100  # unread batches of a follower before it has to ask for further ones
_SPARE_BATCHES = 16  # in a snapshot
_MOST_FOLLOWERS = 256  # of one endpoint
_MOST_REQUEST_BYTES = 64 << 10  # a request is a topic or a number
_DESCRIPTORS = 16  # libzmq opens this many for an endpoint
_SUBSCRIBED = b"\x01"
_ANEW_S = 1.0  # shortest pause between two full reports for new followers …
_ANEW_SHARE = 20  # … and a multiple of the time that the last one took


@dataclass(frozen=True, slots=True)
class EventOptions:
    """Options of one endpoint. ``model`` is a name that clients give, or an identity's model; empty for
    all."""

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
        """Return whether pages of an identity are reported here."""
        identity = registration.identity
        named = not self.model or self.model in (registration.model_name, identity.model)
        return named and (self.tenants or not identity.tenant)


class EventPublisher:
    """Reports a store's changes, on its own threads. :meth:`stop` or :meth:`close` ends it. Call one of them
    before the store is closed, because the threads read its disk.

    The constructor raises :class:`UsageError` for an address on other machines without permission, and
    :class:`StoreUnavailableError` if it cannot listen at the address.
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
        self._unread = 0  # listings that the disk cut short
        self._anew_at = 0.0  # new followers wait until then
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
        except RuntimeError:  # no thread can be started, which is why the daemon ends
            self._end()
        for door in self._doors:  # the loop passes on what the threads have sent
            await door.finish(_LINGER_MS / 1e3)
        self.close()

    def close(self) -> None:
        """End at once. Idempotent."""
        self._end()
        self._close_doors()

    def _end(self) -> None:
        """End the threads, and close their sockets. Must not be called by two threads at a time."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        for thread in self._threads:
            thread.join(_STOPPED_S)
        with self._state.lock:
            self._state.residency.followers.remove(self._log)
        if not any(thread.is_alive() for thread in self._threads):
            self._close_sockets()  # only now, because threads may still be woken before

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
            # A peer that asks and does not read causes an error; otherwise ZMQ would drop messages silently.
            opened.router_mandatory = True
            opened.sndtimeo = int(_SEND_S * 1e3)
            opened.linger = _LINGER_MS
        else:
            opened.xpub_verbose = True  # shows every new follower
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
        """Return whether there are new followers that cannot ask for the held pages."""
        come = False
        with suppress(zmq.Again):
            while True:
                come |= self._out.recv_multipart(zmq.NOBLOCK)[0][:1] == _SUBSCRIBED
        return come and self._replay is None

    def _tell_anew(self) -> None:
        """Report all held pages to all followers, from the beginning. Followers that come together share one
        report, and the pauses keep reports to a small share of the time."""
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
        """Return the identities whose held pages have to be reported."""
        with self._state.lock:
            named = [change.identity] if isinstance(change, Named) else self._log.identities
            followed = {identity: self._log.followed(identity) for identity in named}
        if isinstance(change, Lost):
            self._blocks = EventBlocks(self._options.block_tokens)
            self._send([AllBlocksCleared()])
        return [each for identity, what in followed.items() for each in self._blocks.add(identity, what)]

    def _announce(self, identities: Iterable[bytes]) -> None:
        """Report pages that are held already, and new changes between them."""
        for events in self._held(self._blocks, set(identities)):
            self._send_all(events)

    def _held(self, blocks: EventBlocks, identities: set[bytes]) -> Iterator[Iterator[KvEvent]]:
        """Yield the events for held pages. If the disk fails or the publisher closes, the rest is left out. A
        router that knows too few pages chooses less well. One whose answer has no end waits for ever."""

        def wanted(identity: bytes, tokens: bytes) -> bool:
            return identity in identities and self._log.tells(identity, tokens)

        try:
            for pages in held(self._state, self._disk, wanted):
                yield blocks.events(pages)
                if self._closing.wait(_GATHER_S):  # a pause: there may be a million pages
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
            for _ in range(_MOST_FOLLOWERS):  # those that have asked already
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
            _log.warning("KV events: a follower does not read the batches that it asked for")

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
        """Yield all held pages, in batches numbered from ``least`` at the earliest up to, but not including,
        ``begun``. There is one number for each expected batch. Unused numbers are sent empty, because a
        follower takes a missing number for a missed batch. The last batch holds everything that remains."""
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
    """The sent batches. The last ones are kept. Empty batches are not kept: missing numbers mean
    empty."""

    def __init__(self, first: int) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._oldest = first  # all batches from here on are known
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
        """Return all batches from ``first`` on; None if some are not kept any more or there are too many."""
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
