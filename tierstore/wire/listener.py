"""Accepting connections, with limits on their number and on the time without a request.

Every listener of this project follows the same rules, before it checks any key:

- A connection *waits* until its first whole request has arrived, at most ``FIRST_REQUEST_S`` seconds.
- A new connection always finds a place among the waiting ones. If there is none, the connection that has
  waited longest is closed. So silent connections cannot block others.
- At most ``most`` connections are served at the same time. Probes have reserved places.
- A reserve of file descriptors stays free. Errors of ``accept`` log at most one line per second.
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
_PROBES = 16  # places
_WAITING_SHARE = 16  # 1/16 of the process's descriptors, if those are few
_BATCH = 4  # accepted per loop round, so that requests are read before newcomers displace them
_BACKLOG = 128
_PAUSE_S = 0.1  # after an error of accept
_LOG_S = 1.0


class ListenerPlace:
    """The place of one connection. ``hang_up`` closes the connection. The code that serves it then calls
    :meth:`leave`."""

    def __init__(self, places: Places, hang_up: Callable[[], None]) -> None:
        self._places = places
        self.hang_up = hang_up
        self._probe = False
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def served(self) -> bool:
        """Whether a whole request has arrived and has no answer yet."""
        return self in self._places.served or self in self._places.probes

    def serve(self, *, probe: bool = False) -> bool:
        """Record that a whole request has arrived. Return False if the maximum of connections is served: then
        the caller refuses the request and closes the connection."""
        return self._places._serve(self, probe)

    def wait(self, seconds: float = FIRST_REQUEST_S) -> None:
        """Record that the connection waits for a request, or for its rest, at most ``seconds``."""
        self._places._wait(self, seconds)

    def leave(self) -> None:
        """Record that the connection has ended. Idempotent."""
        self._places._forget(self)


class Places:
    """The places of one listener's connections. Belongs to the running event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_waiting = max(min(_MOST_WAITING, limit() // _WAITING_SHARE), 4 * _BATCH)
        self._loop = asyncio.get_running_loop()
        self.waiting: dict[ListenerPlace, None] = {}  # the longest-waiting one first
        self.served: set[ListenerPlace] = set()
        self.probes: set[ListenerPlace] = set()
        self.hung_up = 0  # number of connections closed without a request
        self.refused = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.served) + len(self.probes)

    @property
    def full(self) -> bool:
        """Whether no more connections can be served."""
        return len(self.served) >= self._most

    def enter(self, hang_up: Callable[[], None]) -> ListenerPlace:
        """Give a new connection a place."""
        if len(self.waiting) >= self._most_waiting:
            self.make_room()
        place = ListenerPlace(self, hang_up)
        place.wait()
        return place

    def make_room(self) -> bool:
        """Close the connection that has waited longest. Return False if none waits."""
        for place in self.waiting:
            self._give_up(place)
            return True
        return False

    def _serve(self, place: ListenerPlace, probe: bool) -> bool:
        self._forget(place)
        if not self.full:
            self.served.add(place)
        elif probe and len(self.probes) < _PROBES:
            self.probes.add(place)
        else:
            self.refused += 1
            place.wait()  # until the client has read the refusal
            return False
        return True

    def _wait(self, place: ListenerPlace, seconds: float) -> None:
        self._forget(place)
        self.waiting[place] = None
        place._deadline = self._loop.call_later(seconds, self._give_up, place)

    def _forget(self, place: ListenerPlace) -> None:
        self.waiting.pop(place, None)
        self.served.discard(place)
        self.probes.discard(place)
        if place._deadline is not None:
            place._deadline.cancel()
            place._deadline = None

    def _give_up(self, place: ListenerPlace) -> None:
        self._forget(place)
        self.hung_up += 1
        place.hang_up()


class Listener:
    """Accepts connections at listening sockets, on the running event loop. ``enter(connection, place)`` takes
    over a connection and must not block. In the end it closes the connection and calls ``place.leave()``. The
    listener owns the listening sockets."""

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
        """Stop accepting. Existing connections stay. Idempotent."""
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
                self.places.refused += 1
                connection.close()
                return
            connection.setblocking(False)
            place = self.places.enter(lambda connection=connection: shut_down(connection))  # type: ignore[misc]
            try:
                self._enter(connection, place)
            except OSError as error:
                self._logs.warning("refused a connection: %s", error)
                self.places.refused += 1
                place.leave()
                connection.close()

    def _accept_again(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening, self._accept, listening)


class SlowLog:
    """A log for frequent warnings. It logs one per second, with the number of those left out before it."""

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
    """End a connection for both sides, so that the code that serves it reads its end."""
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


def tcp_sockets(host: str, port: int) -> list[socket.socket]:
    """Bind to the addresses of ``host`` (``*`` is any), all with the same port; 0 is any free one. Addresses
    that this machine does not have are skipped if another one works. Raise :class:`UsageError` if none does.
    """
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
    """Bind a socket at ``path``, which must not exist, with mode 0600. Raise :class:`UsageError` if that
    fails."""
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
