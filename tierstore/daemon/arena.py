"""The arena's own socket: hands the arena's file over, is the line to local clients, and shows their death.

``PATH.arena`` beside ``ipc://PATH``, a unix stream socket of mode 0600. Whoever connects is sent the header
and the file descriptor (see ``wire/messages.py``) and keeps the connection, to talk over it
(``wire/framing.py``). The kernel closes it when the process dies, however it dies, and the event loop hears
of it in the same moment.

``PATH.lock`` says whose the sockets are. It is locked for as long as the daemon lives, so a socket file
that is found under a lock that is free is a dead daemon's, and may be replaced."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tierstore.daemon.endpoint import Received
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.wire.framing import FramedSocket, FramedSocketEnd
from tierstore.wire.local_address import require_own_directory
from tierstore.wire.messages import ARENA_HEADER, ARENA_MAGIC, VERSION

_log = logging.getLogger(__name__)

_BACKLOG = 128
_BATCH = 32  # messages of one client, and then the others get their turn
_MOST_CONNECTIONS = 1024
_TOKEN_BYTES = 16
_MOST_PATH_BYTES = 107  # of a unix socket's address
_PEER = struct.Struct("3i")  # pid, uid, gid


class SocketLock:
    """The right to listen at ``ipc://PATH``: one daemon at a time. Raises :class:`UsageError` for a path that
    cannot be one, :class:`StoreUnavailableError` when a daemon has it, or another user its directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if len(os.fsencode(path)) + len(".arena") > _MOST_PATH_BYTES:
            raise UsageError(
                f"{path} is too long for a unix socket ({_MOST_PATH_BYTES - 6} bytes): shorten it"
            )
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            require_own_directory(path)
            self._fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UsageError(f"cannot listen at {path}: {error.strerror}") from error
        try:
            if os.fstat(self._fd).st_uid != os.getuid():
                raise UsageError(f"cannot listen at {path}: {path}.lock belongs to another user")
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove_stale()
        except BlockingIOError as error:
            os.close(self._fd)
            raise StoreUnavailableError(
                f"a daemon listens at {path} already: stop it, or give another --listen"
            ) from error
        except UsageError:
            os.close(self._fd)
            raise

    def _remove_stale(self) -> None:
        for name in (self.path, Path(f"{self.path}.arena")):
            try:
                found = name.lstat()
            except FileNotFoundError:
                continue
            if not stat.S_ISSOCK(found.st_mode):
                raise UsageError(f"cannot listen at {self.path}: {name} is a file that is no socket")
            name.unlink()

    def release(self) -> None:
        """Remove the sockets and let others have the path. (The lock file stays: removing it would race.)"""
        for name in (self.path, Path(f"{self.path}.arena")):
            name.unlink(missing_ok=True)
        os.close(self._fd)


@dataclass(slots=True, eq=False)
class _Client:
    """One connection. ``waiting`` are messages whose turn has not come; until then no more are received."""

    socket: socket.socket
    line: FramedSocket
    pid: int
    waiting: deque[memoryview] = field(default_factory=deque)
    writing: bool = False  # the loop says when the socket takes more


class ArenaListener:
    """Listens at ``PATH.arena``. ``take(listener, message)`` is called for each message, ``peer`` being the
    token of the connection that it came on; ``gone(token)`` when that has ended. Belongs to the event loop's
    thread."""

    def __init__(
        self,
        path: Path,
        fd: int,
        nbytes: int,
        take: Callable[[ArenaListener, Received], None],
        gone: Callable[[bytes], None],
    ) -> None:
        """``fd`` is the arena's. Raises :class:`UsageError`."""
        self.path = path
        self._fd = fd
        self._nbytes = nbytes
        self._take = take
        self._gone = gone
        self._clients: dict[bytes, _Client] = {}  # by token
        self.refused = 0
        self.received = self.received_bytes = self.sent = 0
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        except OSError as error:
            self._socket.close()
            raise UsageError(f"cannot listen at {path}: {error.strerror}") from error
        finally:
            os.umask(mask)
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)
        self._loop.add_reader(self._socket, self._accept)

    def __repr__(self) -> str:
        return f"ArenaListener({self.path}, {len(self._clients)} clients)"

    def __len__(self) -> int:
        """Connections."""
        return len(self._clients)

    def __contains__(self, token: bytes) -> bool:
        return token in self._clients

    def pid(self, token: bytes) -> int:
        """The process at the other end, as the kernel says."""
        return self._clients[token].pid

    def close(self) -> None:
        """Hang up, by which clients learn that the daemon has gone."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for token in list(self._clients):
            self._hang_up(token)

    # -- connections ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError):
            return  # whoever it was has gone again
        except OSError as error:  # out of descriptors: the others must not notice
            self.refused += 1
            _log.warning("an arena connection could not be accepted: %s", error)
            self._loop.remove_reader(self._socket)
            self._loop.call_later(1.0, self._accept_again)
            return
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            if len(self._clients) >= _MOST_CONNECTIONS:
                raise OSError(f"{_MOST_CONNECTIONS} clients are connected")
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            line = FramedSocket(connection)
            header = ARENA_HEADER.pack(ARENA_MAGIC, self._nbytes, token)
            socket.send_fds(connection, [header], [self._fd])
        except OSError as error:
            self.refused += 1
            _log.warning("an arena connection was refused: %s", error)
            connection.close()
            return
        self._clients[token] = _Client(connection, line, _PEER.unpack(peer)[0])
        self._loop.add_reader(connection, self._readable, token)

    def _accept_again(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)

    def _hang_up(self, token: bytes) -> None:
        client = self._clients.pop(token)
        self._loop.remove_reader(client.socket)
        if client.writing:
            self._loop.remove_writer(client.socket)
        client.socket.close()

    # -- messages ------------------------------------------------------------------------------------

    def send(self, token: bytes, body: bytes) -> bool:
        """Send one answer. False when the client has gone, or has too many unread ones."""
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
