"""Accepting connections, with limits on their number and on the time without a request.

All listeners of this project follow these rules, before they check any key:

- A connection *waits* until its first complete request has arrived, at most ``FIRST_REQUEST_S`` seconds.
- A new connection is always accepted. If too many connections wait, the one that has waited longest is
closed.
  So silent connections cannot keep other clients out.
- At most ``most`` connections are served at the same time. For probes, ``_PROBES`` more are reserved.
- Some file descriptors are kept free. Errors of ``accept`` log at most one line per second.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tierstore.descriptors import in_reserve, limit
from tierstore.errors import UsageError

_log = logging.getLogger(__name__)

FIRST_REQUEST_S = 10.0
_MOST_WAITING = 256
_PROBES = 16  # additional connections that serve probes
_WAITING_SHARE = 16  # at most 1/16 of the process's file descriptors are waiting connections
_BATCH = 4  # connections accepted at a time, so that requests of earlier connections are read in between
_BACKLOG = 128
_PAUSE_S = 0.1  # after an error of accept
_LOG_S = 1.0


class ListenerPlace:
    """The state of one connection in :class:`Places`: waiting or served. ``hang_up`` shuts the connection
    down. The code that serves the connection notices this and calls :meth:`leave`."""

    def __init__(self, places: Places, hang_up: Callable[[], None]) -> None:
        self._places = places
        self.hang_up = hang_up
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def served(self) -> bool:
        """Whether a complete request has arrived and has no answer yet."""
        return self in self._places.served or self in self._places.probes

    def serve(self, *, probe: bool = False) -> bool:
        """Record that a complete request has arrived. Return False if the maximum of connections is being
        served. After False, the caller must refuse the request and close the connection."""
        places = self._places
        self.leave()
        if not places.full:
            places.served.add(self)
        elif probe and len(places.probes) < _PROBES:
            places.probes.add(self)
        else:
            self.wait()  # so that the client can read the refusal
            return False
        return True

    def wait(self, seconds: float = FIRST_REQUEST_S) -> None:
        """Record that the connection waits for a complete request. After ``seconds``, ``hang_up`` is
        called."""
        self.leave()
        self._places.waiting[self] = None
        self._deadline = self._places.loop.call_later(seconds, self.give_up)

    def leave(self) -> None:
        """Record that the connection has ended. Idempotent."""
        self._places.waiting.pop(self, None)
        self._places.served.discard(self)
        self._places.probes.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def give_up(self) -> None:
        """Shut the connection down, because it has sent no request in time or must make room."""
        self.leave()
        self.hang_up()


class Places:
    """The waiting and served connections of one listener. Uses the running event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_waiting = max(min(_MOST_WAITING, limit() // _WAITING_SHARE), 4 * _BATCH)
        self.loop = asyncio.get_running_loop()
        self.waiting: dict[ListenerPlace, None] = {}  # the longest-waiting one first
        self.served: set[ListenerPlace] = set()
        self.probes: set[ListenerPlace] = set()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.served) + len(self.probes)

    @property
    def full(self) -> bool:
        """Whether no more connections can be served."""
        return len(self.served) >= self._most

    def enter(self, hang_up: Callable[[], None]) -> ListenerPlace:
        """Add a new connection, which waits for its first request."""
        if len(self.waiting) >= self._most_waiting:
            self.make_room()
        place = ListenerPlace(self, hang_up)
        place.wait()
        return place

    def make_room(self) -> bool:
        """Shut down the connection that has waited longest. Return False if no connection waits."""
        for place in self.waiting:
            place.give_up()
            return True
        return False


class Listener:
    """Accepts connections at listening sockets, which it closes at its end. Uses the running event loop. For
    each connection it calls ``enter(connection, place)``, which must not block. The callee owns the
    connection, and calls ``place.leave()`` when it closes it."""

    def __init__(
        self,
        listening: Iterable[socket.socket],
        places: Places,
        enter: Callable[[socket.socket, ListenerPlace], None],
    ) -> None:
        self.places = places
        self._enter = enter
        self._loop = asyncio.get_running_loop()
        self._logs = SlowLog()
        self._sockets = list(listening)
        for each in self._sockets:
            each.setblocking(False)
            each.listen(_BACKLOG)
            self._loop.add_reader(each, self._accept, each)

    def close(self) -> None:
        """Stop accepting. Existing connections do not end. Idempotent."""
        for each in self._sockets:
            self._loop.remove_reader(each)
            each.close()
        self._sockets.clear()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_BATCH):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # too few descriptors or too little memory
                self._logs.warning("cannot accept a connection: %s", error)
                self.places.make_room()
                self._loop.remove_reader(listening)
                self._loop.call_later(_PAUSE_S, self._accept_again, listening)
                return
            if in_reserve(connection.fileno()) and not self.places.make_room():
                self._logs.warning("refused a connection: too few file descriptors are free (ulimit -n)")
                connection.close()
                return
            connection.setblocking(False)
            place = self.places.enter(lambda connection=connection: shut_down(connection))  # type: ignore[misc]
            try:
                self._enter(connection, place)
            except OSError as error:
                self._logs.warning("refused a connection: %s", error)
                place.leave()
                connection.close()

    def _accept_again(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening, self._accept, listening)


class SlowLog:
    """Logs at most one warning per second, with the number of warnings that it has left out since the
    last."""

    def __init__(self) -> None:
        self._last = -_LOG_S
        self._left_out = 0

    def warning(self, message: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._last < _LOG_S:
            self._left_out += 1
            return
        if self._left_out:
            message += f" ({self._left_out} such warnings were left out)"
        self._last, self._left_out = now, 0
        _log.warning(message, *values)


def shut_down(connection: socket.socket) -> None:
    """Shut a connection down, so that both the peer and the code that serves it notice its end."""
    with contextlib.suppress(OSError):  # raised if the connection has already ended
        connection.shutdown(socket.SHUT_RDWR)


def tcp_sockets(host: str, port: int) -> list[socket.socket]:
    """Return sockets that are bound to all addresses of ``host`` (``*``: any address), with the same port (0:
    any free port). Skip addresses that this machine does not have. Raise :class:`UsageError` if no address
    can be bound, or if the port is in use."""
    sockets: list[socket.socket] = []
    name = f"[{host}]" if ":" in host else host
    try:
        found = socket.getaddrinfo(
            None if host == "*" else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        lacking: OSError | None = None
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                sockets.append(_bound(family, kind, protocol, (address[0], port, *address[2:])))
            except OSError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
                lacking = error
                continue
            port = sockets[-1].getsockname()[1]
        if not sockets and lacking is not None:
            raise lacking
    except (OSError, UnicodeError) as error:
        for each in sockets:
            each.close()
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen at {name}:{port}: {reason}") from error
    return sockets


def _bound(family: int, kind: int, protocol: int, address: tuple[str | int, ...]) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def unix_socket(path: Path) -> socket.socket:
    """Return a socket that is bound to ``path``, with mode 0600. Raise :class:`UsageError` if ``path`` exists
    or cannot be bound."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        made.bind(str(path))
    except OSError as error:
        made.close()
        raise UsageError(f"cannot listen at {path}: {error.strerror}") from error
    finally:
        os.umask(mask)
    return made
