"""A connection's hold on a daemon's arena: the mapping (see ``mapping.py``) and the unix socket that shows
the daemon that this process lives.

The socket is opened once. It hands over the arena's file descriptor and a token, and all messages use it
(:attr:`Arena.line`). It stays open until the process ends or closes the connection. If the daemon closes its
end, the daemon is gone. The mapping survives that: a copy that runs under a lease has its own reference and
may finish, because no process is left to overwrite its source.

A forked child has both, too, and would keep its dead parent's connection alive. So the child closes the
socket without shutting down the connection, which belongs to the parent.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable
from pathlib import Path

from tierstore.client.mapping import Mapping, map_arena
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.memory import Memory
from tierstore.tiers.device import Device
from tierstore.tiers.pinned import PinnedMemory
from tierstore.wire.framing import FramedSocket
from tierstore.wire.local_address import require_own_directory, require_own_peer
from tierstore.wire.messages import ARENA_HEADER, ARENA_MAGIC

_SEND_BYTES = 1 << 20  # takes a prompt of 100K tokens at once, if the system permits

_open_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


class ArenaSocket:
    """A connection to ``PATH.arena`` that has not received the header yet."""

    def __init__(self, path: str) -> None:
        """Connect. Raise :class:`OSError` if no process listens there, and :class:`StoreUnavailableError` if
        the directory could belong to another user."""
        require_own_directory(Path(path))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # not inherited on exec
        try:
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
            self._socket.connect(path)
            require_own_peer(self._socket, path)
        except (OSError, StoreUnavailableError):
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Arena:
        """Read the header, which has arrived, and map the arena. If the data is not the header of a daemon of
        this version, raise :class:`StoreUnavailableError` and close the connection."""
        fds: list[int] = []
        try:
            header, fds, _, _ = socket.recv_fds(
                self._socket, ARENA_HEADER.size, 1, flags=socket.MSG_CMSG_CLOEXEC
            )
            if len(header) != ARENA_HEADER.size or len(fds) != 1:
                raise StoreUnavailableError(
                    "the daemon's arena socket sent no arena: the daemon may have its maximum of clients"
                )
            magic, nbytes, token = ARENA_HEADER.unpack(header)
            if magic != ARENA_MAGIC:
                raise StoreUnavailableError(
                    "the daemon's arena socket has another protocol version: install the same tierstore"
                )
            mapping = map_arena(fds[0], nbytes)
        except (OSError, UsageError) as error:
            self.close(fds)
            raise StoreUnavailableError(f"cannot map the daemon's arena: {error}") from error
        except StoreUnavailableError:
            self.close(fds)
            raise
        return Arena(self._socket, mapping, token)

    def close(self, fds: list[int] | None = None) -> None:
        self._socket.close()
        for fd in fds or ():
            os.close(fd)


class Arena:
    """A daemon's arena, mapped as ``memory`` (None once closed). ``Hello`` has to carry ``token`` and goes
    over ``line``."""

    def __init__(self, connection: socket.socket, mapping: Mapping, token: bytes) -> None:
        self.token = token
        self.line = FramedSocket(connection)
        self._socket = connection
        self._mapping: Mapping | None = mapping
        _open_arenas.add(self)

    @property
    def memory(self) -> Memory | None:
        mapping = self._mapping
        return mapping.memory if mapping is not None else None

    def wait_populated(self) -> None:
        """Block until copies have reached their full speed."""
        mapping = self._mapping
        if mapping is not None:
            mapping.wait_populated()

    def pin(self, device: Device, refused: Callable[[], None]) -> PinnedMemory:
        """See :meth:`Mapping.pin`. The arena must not be closed."""
        assert self._mapping is not None, "the arena is closed"
        return self._mapping.pin(device, refused)

    def close(self) -> None:
        """Close the socket, which tells the daemon that this connection uses nothing any more."""
        self._socket.close()
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.release()

    def forget_in_child(self) -> None:
        """Close the copies that a fork has made."""
        self._socket.close()
        self._mapping = None


def _forget_in_child() -> None:
    for arena in list(_open_arenas):
        arena.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
