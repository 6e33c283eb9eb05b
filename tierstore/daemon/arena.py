"""The arena's own socket: hands the arena's file over, and is how a local client's death is seen.

``PATH.arena`` beside ``ipc://PATH``, a unix stream socket of mode 0600. Whoever connects is sent the
header and the file descriptor (see ``protocol.py``) and keeps the connection: the kernel closes it when
the process dies, however it dies, and the event loop hears of it in the same moment.

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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tierstore.daemon.protocol import ARENA_HEADER, ARENA_MAGIC
from tierstore.errors import StoreUnavailableError, UsageError

_log = logging.getLogger(__name__)

_BACKLOG = 128
_MOST_CONNECTIONS = 1024
_TOKEN_BYTES = 16
_MOST_PATH_BYTES = 107  # of a unix socket's address
_PEER = struct.Struct("3i")  # pid, uid, gid


class SocketLock:
    """The right to listen at ``ipc://PATH``: one daemon at a time. Raises :class:`UsageError` for a path that
    cannot be one, :class:`StoreUnavailableError` when a daemon has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if len(os.fsencode(path)) + len(".arena") > _MOST_PATH_BYTES:
            raise UsageError(
                f"{path} is too long for a unix socket ({_MOST_PATH_BYTES - 6} bytes): shorten it"
            )
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
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


class ArenaListener:
    """Listens at ``PATH.arena``. ``gone(token)`` is called when a client's connection ends. Belongs to the
    event loop's thread."""

    def __init__(self, path: Path, fd: int, nbytes: int, gone: Callable[[bytes], None]) -> None:
        """``fd`` is the arena's. Raises :class:`UsageError`."""
        self.path = path
        self._fd = fd
        self._nbytes = nbytes
        self._gone = gone
        self._connections: dict[bytes, socket.socket] = {}  # by token
        self._pids: dict[bytes, int] = {}
        self.refused = 0
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
        return f"ArenaListener({self.path}, {len(self._connections)} clients)"

    def __len__(self) -> int:
        """Connections."""
        return len(self._connections)

    def __contains__(self, token: bytes) -> bool:
        return token in self._connections

    def pid(self, token: bytes) -> int:
        """The process at the other end, as the kernel says."""
        return self._pids[token]

    def close(self) -> None:
        """Hang up, by which clients learn that the daemon has gone."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for token in list(self._connections):
            self._hang_up(token)

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
        connection.setblocking(False)
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            if len(self._connections) >= _MOST_CONNECTIONS:
                raise OSError(f"{_MOST_CONNECTIONS} clients are connected")
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            header = ARENA_HEADER.pack(ARENA_MAGIC, self._nbytes, token)
            socket.send_fds(connection, [header], [self._fd])
        except OSError as error:
            self.refused += 1
            _log.warning("an arena connection was refused: %s", error)
            connection.close()
            return
        self._connections[token] = connection
        self._pids[token] = _PEER.unpack(peer)[0]
        self._loop.add_reader(connection, self._readable, token)

    def _accept_again(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)

    def _readable(self, token: bytes) -> None:
        with suppress(OSError):  # a reset is an end, too
            if self._connections[token].recv(1, socket.MSG_PEEK):
                self.refused += 1  # a client has nothing to say here
        self._hang_up(token)
        self._gone(token)

    def _hang_up(self, token: bytes) -> None:
        connection = self._connections.pop(token)
        del self._pids[token]
        self._loop.remove_reader(connection)
        connection.close()
