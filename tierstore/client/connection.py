"""The client's connection to a daemon, and the thread that maintains it. Any thread sends requests.

The connection's thread sleeps until a message arrives or a deadline passes. So an idle connection costs
nothing (over TCP, one ping a second). The connection is in one of two states. *Away*: the thread tries to
connect, with pauses that grow from 50 ms to 0.4 s, and every request fails at once. *Linked*: requests are
sent at once. Each ends with its answer, at its deadline, or when the daemon goes away. A request is never
sent again over a new link, because its leases, reservations and paths belong to the old link.

If a daemon hangs, every request would wait until its deadline. So after one late request the link is
*silent*: the daemon is pinged, and requests fail at once until a message from the daemon arrives.

A forked child does not have the thread, so a ``Store`` refuses to be used in the child. Processes started by
``spawn`` or ``exec`` make their own connections.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import zmq

from tierstore.backend import ForgottenPages, Registration
from tierstore.client.channel import Call, Channel, ConnectionCounters
from tierstore.client.handshake import Address, DaemonLink, Handshake, registering
from tierstore.descriptors import require_room
from tierstore.errors import StoreUnavailableError
from tierstore.keys import KEY_BYTES, PageKey
from tierstore.tiers.pinned import Pin
from tierstore.transfer import Transfer
from tierstore.wire import messages
from tierstore.wire.messages import Message

_log = logging.getLogger(__name__)

_DESCRIPTORS = 16  # libzmq's file descriptors for one connection, and some for other connections
_PAUSES_S = (0.05, 0.1, 0.2, 0.4)  # so short that clients reconnect to a restarted daemon within a second

A = TypeVar("A", bound=Message)
R = TypeVar("R")


class Connection:
    """A connection to one daemon, which reconnects by itself. Thread-safe.

    Every link begins by registering ``registrations``. A request may take ``patience_s`` seconds in addition
    to the time that it allows the daemon. ``reach`` is :meth:`~tierstore.tiers.pinned.Reach.share` of the
    device to which pages of the arena are copied. ``log`` (or None) gets one line when the connection is made
    and one when it is lost."""

    def __init__(
        self,
        address: Address,
        registrations: Sequence[Registration],
        *,
        patience_s: float,
        reach: Callable[[Pin], None] | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        self.address = address
        self._log = log
        self._reach = reach
        self.patience_s = patience_s
        self.counters = ConnectionCounters()
        self._registrations = {each.identity.digest: each for each in registrations}
        self._ids = itertools.count(1)
        try:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise StoreUnavailableError(f"cannot connect to {address.url}: {error.strerror}") from error
        self._channel: Channel | None = None
        self._changed = threading.Condition()
        self._link: DaemonLink | None = None  # guarded by _changed, as is _closing
        self._closing = False
        # Guarded by _changed. Called with forgotten pages, and with the age limit of the daemon's pages.
        self._followers: list[tuple[Callable[[ForgottenPages], None], Callable[[float], None]]] = []
        self._max_age_s: float | None = None  # None before the first link
        self._forgets: int | None = None  # number of the last known forget; None before the first link
        self._forget_log = b""  # identifies the daemon's list of forgets, which _forgets is a position in
        self._context: zmq.Context[Any] | None = None  # only for tcp://, and once enough descriptors are free
        self._thread = threading.Thread(target=self._run, name="tierstore-connection", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._wake_fd)
            raise StoreUnavailableError(f"cannot connect to {address.url}: {error}") from error

    @property
    def link(self) -> DaemonLink | None:
        """The current link; None while the daemon is away or hangs."""
        link = self._link
        return None if link is None or link.silent else link

    @property
    def any_link(self) -> DaemonLink | None:
        """The current link, even if the daemon hangs; None while the daemon is away."""
        return self._link

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait until the daemon is connected. Return False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._link is not None or self._closing, timeout)

    def call(
        self,
        link: DaemonLink,
        message: Any,
        expected: type[A],
        then: Callable[[A | None, Sequence[memoryview]], R],
        *,
        wait_s: float = 0.0,
        patience_s: float | None = None,
        frames: Sequence[memoryview] = (),
        otherwise: Callable[[], Message] | None = None,
        caller_receives: bool = False,
        though_silent: bool = False,
    ) -> Call[A, R]:
        """Send a request over ``link``, and set its ``id``. If the link has ended, the request fails at once.
        The time limit is ``wait_s``, the seconds that the request allows the daemon, plus ``patience_s``
        (default: the connection's). ``caller_receives``: the calling thread waits for the answer at once.
        ``though_silent``: send the request even if the daemon hangs."""
        patience_s = self.patience_s if patience_s is None else patience_s
        call = Call(expected, wait_s + patience_s, then, otherwise=otherwise)
        call.number = message.id = next(self._ids)
        self.counters.requests += 1
        channel = self._channel_of(link) if though_silent or not link.silent else None
        if channel is None or not channel.send(message, call, frames, caller_receives=caller_receives):
            self.counters.failed_requests += 1
            call.fail()
        else:
            call.receive = channel.receive_for
        return call

    def send(self, link: DaemonLink, message: Message) -> None:
        """Send a message that has no answer, unless ``link`` has ended."""
        channel = self._channel_of(link)
        if channel is not None:
            channel.send(message)

    def release(self, link: DaemonLink, lease: int) -> None:
        """Release a lease, unless ``link`` has ended."""
        channel = self._channel_of(link)
        if channel is not None:
            channel.release(lease)

    def _channel_of(self, link: DaemonLink) -> Channel | None:
        channel = self._channel
        return channel if channel is not None and channel.link is link else None

    def ask(
        self, message: Any, expected: type[A], *, wait_s: float = 0.0, link: DaemonLink | None = None
    ) -> A | None:
        """Send a request and wait for the answer. Return None if it does not arrive."""
        link = link if link is not None else self.link
        if link is None:
            return None

        def itself(answer: A | None, _: object) -> A | None:
            return answer

        return self.call(link, message, expected, itself, wait_s=wait_s).wait()

    def register(self, link: DaemonLink, registration: Registration) -> Transfer[None]:
        """Register an identity over this link and all later ones."""
        digest = registration.identity.digest
        self._registrations[digest] = registration

        def note(answer: messages.Registered | None, _: object) -> None:
            if answer is not None:
                link.identities[digest] = answer.identity

        return self.call(link, registering(registration), messages.Registered, note)

    def follow_forgets(
        self, follower: Callable[[ForgottenPages], None], limit_age: Callable[[float], None]
    ) -> None:
        """See :meth:`tierstore.backend.Backend.follow_forgets`."""
        with self._changed:
            self._followers.append((follower, limit_age))
            max_age_s = self._max_age_s
        if max_age_s is not None:
            limit_age(max_age_s)

    def close(self) -> None:
        """End the connection and all open requests. Idempotent."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        if self._context is not None:
            self._context.term()
        os.close(self._wake_fd)

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        """Open one link after the other, also after errors of any kind: without a link, every lookup of this
        process would miss."""
        failures = 0
        refusal = ""
        while not self._closing:
            why = ""
            try:
                link, why = self._open()
                if link is not None:
                    failures, refusal = 0, ""
                    self.counters.links += 1
                    self._serve(link)
                    continue
            except OSError as error:  # usually too few free descriptors
                why = f"cannot connect to {self.address.url}: {error.strerror or error}"
            except Exception as error:  # noqa: BLE001  # a bug, no memory, or no thread
                why = f"the connection to {self.address.url} has failed: {type(error).__name__}: {error}"
                _log.debug("%s", why, exc_info=True)
            self.counters.failed_handshakes += 1
            if why not in ("", refusal):
                _log.warning("every lookup misses: %s", why)
            refusal = why
            with self._changed:
                pause_s = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
                self._changed.wait_for(lambda: self._closing, pause_s)
            failures += 1

    def _open(self) -> tuple[DaemonLink | None, str]:
        """Return a link, or the reason why there is none."""
        if self.address.arena is None:
            require_room(_DESCRIPTORS, "a connection by tcp://")  # libzmq would abort the process
            if self._context is None:
                self._context = zmq.Context()
        handshake = Handshake(self._context, self.address, self._wake_fd, lambda: self._closing)
        return handshake.open(tuple(self._registrations.values())), handshake.refusal

    def _serve(self, link: DaemonLink) -> None:
        channel: Channel | None = None
        try:
            channel = Channel(link, self._wake_fd, self._ids, self.counters, lambda: self._closing)
            self._channel = channel
            channel.forgotten = partial(self._pages_forgotten, link)
            self._catch_up(link)
            if link.arena is not None and self._reach is not None:
                self._reach(partial(link.arena.pin, refused=self._refused))
            self._become(link)
            channel.run()
        finally:
            self._become(None)
            link.close()
            if channel is not None:
                channel.fail_all()

    def _catch_up(self, link: DaemonLink) -> None:
        """Before the first request, drop the pages that the daemon has forgotten since the last link."""
        with self._changed:
            self._max_age_s = max_age_s = link.max_age_s or math.inf
            followers = list(self._followers)
        for _, limit_age in followers:
            limit_age(max_age_s)
        seen, self._forgets = self._forgets, link.forgets
        same_log = self._forget_log == link.forget_log
        self._forget_log = link.forget_log
        if seen is None:
            return
        lost = bool(seen) and not same_log  # the daemon began a new list: any page may be forgotten
        late = [digest for digest, number in link.forgotten.items() if lost or number > seen]
        if late:
            self._forgotten(ForgottenPages(frozenset(late)))

    def _pages_forgotten(self, link: DaemonLink, m: messages.PagesForgotten) -> None:
        self._forgets = max(self._forgets or 0, m.number)
        digests: dict[int, list[bytes]] = {}
        for digest, number in link.identities.items():
            digests.setdefault(number, []).append(digest)
        pages = {
            (digest, PageKey(keys[at : at + KEY_BYTES]))
            for number, keys in m.pages
            for digest in digests.get(number, ())
            for at in range(0, len(keys), KEY_BYTES)
        }
        identities = {digest for number in m.identities for digest in digests.get(number, ())}
        self._forgotten(ForgottenPages(frozenset(identities), frozenset(pages)))

    def _forgotten(self, forgotten: ForgottenPages) -> None:
        for follower, _ in list(self._followers):
            follower(forgotten)

    def _refused(self) -> None:
        self.counters.unpinned_arenas += 1

    def _become(self, link: DaemonLink | None) -> None:
        with self._changed:
            before, self._link = self._link, link
            self._changed.notify_all()
        if self._log is not None and link is not None:
            self._log.info("tierstore: connected to the daemon at %s (%s)", self.address.url, link.server)
        elif self._log is not None and before is not None and not self._closing:
            self._log.warning(
                "tierstore: the daemon at %s is gone: every lookup misses until it is back", self.address.url
            )
