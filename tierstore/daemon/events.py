"""KV events: what the daemon's tiers hold, told to routers and indexers as vLLM tells what its cache holds.

Messages go out on a PUB socket, in three frames: topic, sequence number (8 bytes, big-endian) and a batch
(msgpack): ``[seconds since 1970, [event, …], rank]``. An event is a map with its ``type``, or with
``array`` encoding (vLLM up to 0.23) an array that begins with it. A page is told of as one block of
``chunk_tokens`` tokens, by the last 64 bits of its key; ``medium`` is ``CPU`` for the host tier and
``STORAGE`` for the disk. (Format: vllm/distributed/kv_events.py of vLLM 0.32.)

Whoever missed something asks the ROUTER socket: an empty frame and the first sequence number wanted; what is
still known of it comes back one message each, and then one with the sequence number -1.

Sequence numbers go on from life to life: a life begins with the time since 1970 in units of 2⁻²⁰ s, which no
earlier life has reached with its batches. A follower that has listened to an earlier life sees a gap, and
asks. The first event of every life is ``AllBlocksCleared``. Pages of an earlier life are on disk all the
same; they are told of when somebody first asks for them.

Events carry prompts in clear, tenants' too: they leave this machine only if somebody forwards them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import zmq

from tierstore.core.change_log import Change, ChangeLog, Followed, Lost, Removed, Stored
from tierstore.core.state import StoreState
from tierstore.daemon.endpoint import Url
from tierstore.daemon.stats import EventStats
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.index import Tier
from tierstore.keys import TOKEN_DTYPE

_log = logging.getLogger(__name__)

_MEDIUM = {Tier.HBM: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
_KEPT_BATCHES = 10_000  # for replay
_MOST_EVENTS = 1024  # in a batch
_GATHER_S = 0.01  # pages come in bursts
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_STOPPED_S = 5.0
_NUMBERS_S = 1 << 20  # sequence numbers for each second since 1970: no life uses them up


class Event(msgspec.Struct, tag=True, omit_defaults=True):
    """What all events have in common: nothing but their encoding."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(Event):
    pass


def block_hash(key: bytes) -> int:
    """What others call a page by: the last 64 bits of its key."""
    return int.from_bytes(key[-8:], "big")


def events_of(changes: Sequence[Change], feed: ChangeLog) -> Iterator[Event]:
    """The events that tell of ``changes``, in order. Pages that follow one another share one."""
    run: list[Stored | Removed] = []
    for change in changes:
        if run and not _continues(run[-1], change):
            yield _event(run, feed)
            run = []
        if isinstance(change, Lost):
            yield AllBlocksCleared()
        else:
            run.append(change)
    if run:
        yield _event(run, feed)


def _continues(before: Stored | Removed, change: Change) -> bool:
    if isinstance(change, Stored):
        return (
            isinstance(before, Stored)
            and change.tier is before.tier
            and change.identity == before.identity
            and change.parent == before.key
        )
    return isinstance(change, Removed) and isinstance(before, Removed) and change.tier is before.tier


def _event(run: Sequence[Stored | Removed], feed: ChangeLog) -> Event:
    hashes = [block_hash(change.key) for change in run]
    medium = _MEDIUM[run[0].tier]
    first = run[0]
    if isinstance(first, Removed):
        return BlockRemoved(hashes, medium, group_idx=0, locality="LOCAL")
    tokens = b"".join(change.tokens for change in run if isinstance(change, Stored))
    followed = feed.followed(first.identity)
    return BlockStored(
        hashes,
        block_hash(first.parent) if first.parent else None,
        np.frombuffer(tokens, TOKEN_DTYPE).tolist(),
        followed.chunk_tokens,
        None,
        medium,
        followed.identity.adapter or None,
        extra_keys=_extra_keys(followed, len(run), begins=not first.parent),
        group_idx=0,
        locality="LOCAL",
    )


def _extra_keys(followed: Followed, blocks: int, *, begins: bool) -> list[list[str] | None] | None:
    """As vLLM has them: the adapter with every block, the salt with a prompt's first."""
    adapter = [followed.identity.adapter] if followed.identity.adapter else []
    salt = [followed.identity.tenant] if followed.identity.tenant and begins else []
    keys = [adapter + salt or None, *([adapter or None] * (blocks - 1))]
    return keys if any(keys) else None


class EventPublisher:
    """Tells of a store's changes on a thread of its own. :meth:`close` ends it.

    Raises :class:`UsageError` for an address that leaves this machine, and :class:`StoreUnavailableError` for
    one that cannot be had.
    """

    def __init__(
        self, state: StoreState, url: str, *, replay_url: str = "", topic: str = "", encoding: str = "map"
    ) -> None:
        self._state = state
        self._topic = topic.encode()
        self._as_arrays = encoding == "array"
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_KEPT_BATCHES)
        self._sequence = int(time.time() * _NUMBERS_S)
        self._batches = 0
        self._events = 0
        self._replays = 0
        self._closing = threading.Event()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._out = self._bound(zmq.PUB, url)
            self._replay = self._bound(zmq.ROUTER, replay_url) if replay_url else None
        except BaseException:
            self._context.destroy(0)
            os.close(self._wakeup)
            raise
        self._feed = ChangeLog(self._wake)
        with state.lock:
            state.residency.followers.append(self._feed)
        self._thread = threading.Thread(target=self._run, name="tierstore-events", daemon=True)
        self._thread.start()

    def stats(self) -> EventStats:
        return EventStats(self._batches, self._events, self._feed.lost, self._replays)

    def close(self) -> None:
        """Tell what has happened, and end. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._wake()
            self._thread.join(_STOPPED_S)
            with self._state.lock:
                self._state.residency.followers.remove(self._feed)
            if not self._thread.is_alive():
                os.close(self._wakeup)  # only now: nobody wakes the thread any more

    # -- the thread ----------------------------------------------------------------------------------

    def _bound(self, kind: int, text: str) -> zmq.Socket[Any]:
        url = Url.parse(text)
        if not url.loopback:
            raise UsageError(
                f"events carry prompts in clear and {text} can be reached from other machines: "
                "give ipc://PATH or a loopback address, and forward from there"
            )
        bound: zmq.Socket[Any] = self._context.socket(kind)
        bound.linger = 0
        mask = os.umask(0o177)
        try:
            bound.bind(url.text)
        except zmq.ZMQError as error:
            raise StoreUnavailableError(f"cannot publish events at {text}: {error.strerror}") from error
        finally:
            os.umask(mask)
        return bound

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            self._send([AllBlocksCleared()])
            while not self._closing.is_set():
                ready = dict(poller.poll())
                if self._wakeup in ready:
                    self._closing.wait(_GATHER_S)
                    self._tell()
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
            self._tell()
        except zmq.ZMQError:
            _log.exception("KV events: no more are published")
        finally:
            self._context.destroy(0)

    def _tell(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        with self._state.lock:
            changes = self._feed.take()
        events = list(events_of(changes, self._feed))
        for start in range(0, len(events), _MOST_EVENTS):
            self._send(events[start : start + _MOST_EVENTS])

    def _send(self, events: Sequence[Event]) -> None:
        told = [_as_array(event) for event in events] if self._as_arrays else events
        batch = msgspec.msgpack.encode((time.time(), told, 0))
        self._kept.append((self._sequence, batch))
        self._out.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), batch))
        self._sequence += 1
        self._batches += 1
        self._events += len(events)

    def _answer(self, replay: zmq.Socket[Any]) -> None:
        """Send again what a follower has missed."""
        peer, *rest = replay.recv_multipart()
        if len(rest) != 2 or len(rest[1]) != 8:
            _log.warning("KV events: a request to replay that is none: %d frames", len(rest))
            return
        self._replays += 1
        first = int.from_bytes(rest[1], "big")
        for sequence, batch in self._kept:
            if sequence >= first:
                replay.send_multipart((peer, b"", self._topic, sequence.to_bytes(8, "big"), batch))
        replay.send_multipart((peer, b"", b"", _END_OF_REPLAY, b""))


def _as_array(event: Event) -> list[object]:
    """What followers of vLLM up to 0.23 can read: the name, then the fields these have."""
    fields = list(msgspec.structs.astuple(event))
    known = {BlockStored: 8, BlockRemoved: 2}.get(type(event), 0)
    return [type(event).__name__, *fields[:known]]
