"""The arena's unix socket, ``PATH.arena`` beside ``ipc://PATH``, for clients on the same host.

The daemon sends a process that connects a header and the arena's file descriptor (see ``wire/messages.py``).
The process sends all its messages over the same connection (``wire/framing.py``). When the process dies, in
any way, the kernel closes the connection, and the event loop notices at once.

A lock on the file ``PATH.lock`` decides which process owns the sockets. The daemon holds the lock for its
whole life. If the lock is free and no process listens at a socket file, the file is left over from a dead
daemon and is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tierstore.daemon.endpoint import Received
from tierstore.errors import StoreUnavailableError, TierStoreError, UsageError
from tierstore.locks import PathLock
from tierstore.wire.framing import FramedSocket, FramedSocketEnd
from tierstore.wire.listener import Listener, ListenerPlace, Places, unix_socket
from tierstore.wire.local_address import require_own_directory
from tierstore.wire.messages import ARENA_HEADER, ARENA_MAGIC, VERSION

_log = logging.getLogger(__name__)

_BATCH = 32  # messages of one client that are handled before those of other clients
_MOST_CONNECTIONS = 1024
_TOKEN_BYTES = 16
_MOST_PATH_BYTES = 107  # limit of a unix socket's address
_PEER = struct.Struct("3i")  # pid, uid, gid


class SocketLock:
    """The exclusive right to listen at the unix socket ``path`` and at the sockets ``path`` + suffix, for the
    suffixes in ``beside``. Locks ``PATH.lock``. A socket at which a process listens is never removed, even if
    its lock file was removed. Raises :class:`UsageError` for an unusable path, and
    :class:`StoreUnavailableError` if another process listens or the directory belongs to another user."""

    def __init__(self, path: Path, *, beside: Sequence[str] = ()) -> None:
        self.path = path
        self._bound: dict[Path, os.stat_result] = {}
        self._names = [path, *(Path(f"{path}{end}") for end in beside)]
        longest = max(len(os.fsencode(name)) for name in self._names) - len(os.fsencode(path))
        if len(os.fsencode(path)) + longest > _MOST_PATH_BYTES:
            raise UsageError(
                f"{path} is too long for a unix socket ({_MOST_PATH_BYTES - longest} bytes): shorten it"
            )
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            require_own_directory(path)
            self._lock = PathLock(Path(f"{path}.lock"))
        except BlockingIOError as error:
            raise self._taken() from error
        except OSError as error:
            raise UsageError(
                f"cannot listen at {path}: {error.filename or path}: {error.strerror}"
            ) from error
        try:
            if os.fstat(self._lock.fd).st_uid != os.getuid():
                raise UsageError(f"cannot listen at {path}: {path}.lock belongs to another user")
            for name in self._names:
                self._remove_stale(name)
        except TierStoreError:
            self._lock.release()
            raise

    def bind(self, path: Path) -> socket.socket:
        """Return a socket that is bound to one of the paths. Raise :class:`UsageError` if binding fails."""
        bound = unix_socket(path)
        self._bound[path] = path.lstat()
        return bound

    def _remove_stale(self, name: Path) -> None:
        """Remove the socket of a process that has ended."""
        try:
            found = name.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise UsageError(f"cannot listen at {self.path}: {name} exists and is not a socket")
        if is_listening(name):
            raise self._taken()
        name.unlink()

    def _taken(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"another process listens at {self.path} already: stop it, or give another address"
        )

    def release(self) -> None:
        """Remove the sockets that :meth:`bind` made, and release the lock. Keep the lock file, and a socket
        that another process has bound to one of the paths. Idempotent."""
        for name, bound in self._bound.items():
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(name.lstat(), bound):
                    name.unlink()
        self._bound.clear()
        self._lock.release()


def is_listening(path: Path) -> bool:
    """Return whether a process listens at a unix socket. Ask the kernel, because lock files can be
    removed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(str(path))
        except BlockingIOError:  # the queue of a listening socket is full
            return True
        except OSError:
            return False
        return True


@dataclass(slots=True, eq=False)
class _ArenaClient:
    """One connection. ``waiting`` are received messages that are not handled yet. Until all are handled, no
    further message is received."""

    socket: socket.socket
    line: FramedSocket
    pid: int
    place: ListenerPlace
    waiting: deque[memoryview] = field(default_factory=deque)
    writing: bool = False  # whether the event loop waits for the socket to become writable


class ArenaListener:
    """Listens at ``PATH.arena``. For each message it calls ``take(listener, message)``; ``message.peer`` is
    the token of the client's connection. When a connection has ended, it calls ``gone(token)``. May be used
    on the event loop's thread only."""

    def __init__(
        self,
        path: Path,
        listening: socket.socket,
        fd: int,
        nbytes: int,
        take: Callable[[ArenaListener, Received], None],
        gone: Callable[[bytes], None],
    ) -> None:
        """``listening`` is bound to ``path``. ``fd`` and ``nbytes`` are the arena's file and its size."""
        self.path = path
        self._fd = fd
        self._nbytes = nbytes
        self._take = take
        self._gone = gone
        self._clients: dict[bytes, _ArenaClient] = {}  # by token
        self.received = self.received_bytes = self.sent = 0
        self._loop = asyncio.get_running_loop()
        self.places = Places(_MOST_CONNECTIONS)
        self._listener = Listener([listening], self.places, self._enter)

    def __repr__(self) -> str:
        return f"ArenaListener({self.path}, {len(self._clients)} clients)"

    def __len__(self) -> int:
        """Return the number of connections."""
        return len(self._clients)

    def __contains__(self, token: bytes) -> bool:
        return token in self._clients

    def serve(self, token: bytes) -> bool:
        """Record that the process behind a connection has sent a complete request. Return False if the limit
        of clients is reached."""
        place = self._clients[token].place
        return place.served or place.serve()

    def pid(self, token: bytes) -> int:
        """Return the id of the client's process, as the kernel reports it."""
        return self._clients[token].pid

    def close(self) -> None:
        """Close all connections. The clients then know that the daemon is gone."""
        self._listener.close()
        for token in list(self._clients):
            self._hang_up(token)

    # -- connections ---------------------------------------------------------------------------------

    def _enter(self, connection: socket.socket, place: ListenerPlace) -> None:
        if self.places.full:
            raise OSError(f"{_MOST_CONNECTIONS} clients are connected")
        token = secrets.token_bytes(_TOKEN_BYTES)
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        line = FramedSocket(connection)
        socket.send_fds(connection, [ARENA_HEADER.pack(ARENA_MAGIC, self._nbytes, token)], [self._fd])
        self._clients[token] = _ArenaClient(connection, line, _PEER.unpack(peer)[0], place)
        self._loop.add_reader(connection, self._readable, token)

    def _hang_up(self, token: bytes) -> None:
        client = self._clients.pop(token)
        self._loop.remove_reader(client.socket)
        if client.writing:
            self._loop.remove_writer(client.socket)
        client.socket.close()
        client.place.leave()

    # -- messages ------------------------------------------------------------------------------------

    def send(self, token: bytes, body: bytes) -> bool:
        """Send one answer. Return False if the client is gone or has too many unread answers."""
        client = self._clients.get(token)
        if client is None or not client.line.send(body):
            return False
        self.sent += 1
        if client.line.unsent and not client.writing:
            client.writing = True
            self._loop.add_writer(client.socket, self._writable, token)
        return True

    def _writable(self, token: bytes) -> None:
        client = self._clients[token]
        if not client.line.flush() or not client.line.unsent:
            client.writing = False
            self._loop.remove_writer(client.socket)

    def _readable(self, token: bytes) -> None:
        client = self._clients[token]
        try:
            messages = client.line.receive()
        except FramedSocketEnd as end:
            _log.debug("an arena connection has ended: %s", end)
            self._hang_up(token)
            self._gone(token)
            return
        if messages and not self.serve(token):
            self._hang_up(token)
            self._gone(token)
            return
        if len(messages) <= _BATCH:
            for body in messages:
                self._took(token, body)
        else:
            client.waiting.extend(messages)
            self._loop.remove_reader(client.socket)
            self._take_waiting(token)

    def _take_waiting(self, token: bytes) -> None:
        client = self._clients.get(token)
        if client is None:
            return
        for _ in range(min(len(client.waiting), _BATCH)):
            self._took(token, client.waiting.popleft())
        if client.waiting:
            self._loop.call_soon(self._take_waiting, token)
        else:
            self._loop.add_reader(client.socket, self._readable, token)

    def _took(self, token: bytes, body: memoryview) -> None:
        self.received += 1
        self.received_bytes += len(body)
        self._take(self, Received(token, VERSION, body, (), ""))
