"""A client's use of a daemon's arena: the memory mapping (see ``mapping.py``) and the arena's unix socket.

Over the socket the daemon sends the arena's file descriptor and a token, and all messages use the socket
(:attr:`Arena.line`). While the socket is open, the daemon knows that the client's process lives. If the
daemon closes the socket, the daemon is gone. The mapping survives the daemon: a running copy under a lease
has its own reference and may finish, because no process is left to overwrite the pages that it reads.

A forked child inherits the socket, and would keep the connection alive after its parent's death. So the child
closes the socket without shutting down the connection, which belongs to the parent.
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

_SEND_BYTES = 1 << 20  # for a prompt of 100K tokens; the system may permit less

_open_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


class ArenaSocket:
    """A connection to the arena's socket ``PATH.arena``, before the daemon's header has arrived."""

    def __init__(self, path: str) -> None:
        """Connect. Raise :class:`OSError` if no process listens at ``path``, and
        :class:`StoreUnavailableError` if its directory could belong to another user."""
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
        """Read the arrived header and map the arena. If the header is not of this protocol version, raise
        :class:`StoreUnavailableError` and close the connection."""
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
    """A daemon's arena, mapped as ``memory`` (None after ``close()``). Messages go over ``line``; the first
    one, ``Hello``, must contain ``token``."""

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
        """Block until the arena's page tables are filled, so that copies run at full speed."""
        mapping = self._mapping
        if mapping is not None:
            mapping.wait_populated()

    def pin(self, device: Device, refused: Callable[[], None]) -> PinnedMemory:
        """See :meth:`Mapping.pin`. The arena must not be closed."""
        assert self._mapping is not None, "the arena is closed"
        return self._mapping.pin(device, refused)

    def close(self) -> None:
        """Close the socket. The daemon then releases all leases and reservations of this connection."""
        self._socket.close()
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.release()

    def forget_in_child(self) -> None:
        """Close the socket that a forked child has inherited."""
        self._socket.close()
        self._mapping = None


def _forget_in_child() -> None:
    for arena in list(_open_arenas):
        arena.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
