"""The connection of commands such as ``tierstore stats`` and ``tierstore pin`` to a daemon."""

from __future__ import annotations

import itertools
import os
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer
import zmq

from tierstore.client.transport import SocketTransport, Transport
from tierstore.daemon.settings import default_listen
from tierstore.descriptors import require_room
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.wire import messages
from tierstore.wire.framing import FramedSocket, FramedSocketEnd
from tierstore.wire.local_address import require_own_directory, require_own_peer
from tierstore.wire.messages import ARENA_HEADER, ARENA_MAGIC, Answer, Message

if TYPE_CHECKING:
    from tierstore.daemon.stats import DaemonStats

_DESCRIPTORS = 16  # file descriptors that libzmq opens
_GREETING_S = 2.0
_ANSWER_S = 5.0

Connect = Annotated[
    str | None,
    typer.Option(
        "--connect",
        metavar="URL",
        help="The daemon's address: ipc://PATH or tcp://HOST:PORT (default: this user's daemon)",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ConnectOptions:
    """The address of a daemon, and the keys for a tcp:// address."""

    connect: Connect = None
    keys: Annotated[
        Path | None,
        typer.Option("--keys", metavar="FILE", help="Your .secret file, for tcp://", show_default=False),
    ] = None
    server_key: Annotated[
        Path | None,
        typer.Option(
            "--server-key", metavar="FILE", help="The daemon's .key file, for tcp://", show_default=False
        ),
    ] = None

    def operator(self) -> Operator:
        return Operator(self.connect, self.keys, self.server_key)


A = TypeVar("A", bound=Message)


class Operator:
    """A connection to a daemon for requests about the whole store. An operator uses the arena's socket
    without mapping the arena. Only one thread may use it.

    The constructor and every request raise :class:`StoreUnavailableError` if the daemon cannot be reached.
    """

    def __init__(self, url: str | None, keys: Path | None = None, server_key: Path | None = None) -> None:
        from tierstore.client.handshake import Address, CurveKeys, connect_zmq

        self.url = url or default_listen()
        address = Address.parse(self.url, CurveKeys.read(keys, server_key))
        self._ids = itertools.count(1)
        self._arena: socket.socket | None = None
        self._context: zmq.Context[Any] | None = None
        self._wire: Transport
        token = b""
        if address.arena is not None:
            self._arena, token = self._attach(address.arena)
        if self._arena is not None:
            self._wire = SocketTransport(FramedSocket(self._arena))
        else:
            require_room(_DESCRIPTORS, "a connection by ZMQ")  # libzmq would abort the process
            self._context = zmq.Context()
            try:
                self._wire = connect_zmq(self._context, address)
            except zmq.ZMQError as error:
                self._context.term()
                raise UsageError(f"cannot connect to {self.url}: {error.strerror}") from error
        try:
            hello = messages.Hello(0, token, f"tierstore operator, pid {os.getpid()}")
            welcome = self.ask(hello, messages.Welcome, wait_s=_GREETING_S)
            self.connection, self.cluster = welcome.connection, welcome.cluster
        except BaseException:
            self.close()
            raise

    def stats_json(self) -> bytes:
        return self.ask(messages.Stats(0), messages.StatsAnswer).json

    def stats(self) -> DaemonStats:
        return self.parse(self.stats_json())

    def parse(self, document: bytes) -> DaemonStats:
        """Parse the answer to :meth:`stats_json`."""
        from tierstore.daemon.stats import DaemonStats

        if "store" not in msgspec.json.decode(document, type=dict[str, Any]):
            raise UsageError(
                f"the daemon at {self.url} shows a tenant only its own statistics: use tierstore stats"
            )
        try:
            return msgspec.json.decode(document, type=DaemonStats)
        except msgspec.MsgspecError as error:
            raise StoreUnavailableError(
                f"the daemon at {self.url} has another version ({error}): "
                "install the same version here, or use --json"
            ) from error

    def ask(self, message: Any, expected: type[A], *, wait_s: float = _ANSWER_S) -> A:
        """Send a request and return its answer. Raise :class:`UsageError` if the daemon refuses the request
        as wrong."""
        message.id = next(self._ids)
        self._wire.send(messages.encode(message))
        ends = time.monotonic() + wait_s
        while True:
            for answer in self._receive():
                if isinstance(answer, messages.Refused) and answer.id in (0, message.id):
                    kind = UsageError if answer.kind == "usage" else StoreUnavailableError
                    raise kind(f"the daemon at {self.url} refuses: {answer.message}")
                if isinstance(answer, expected) and answer.id == message.id:
                    return answer
            left = ends - time.monotonic()
            if left <= 0:
                raise StoreUnavailableError(
                    f"no daemon answers at {self.url} within {wait_s:.0f} s: check that it runs and "
                    "that this is its address"
                )
            if not self._wait(min(left, messages.PING_S)) and self._arena is None:
                self._wire.send(messages.encode(messages.Ping(next(self._ids))))

    def tell(self, message: Message) -> None:
        """Send a message that has no answer."""
        self._wire.send(messages.encode(message))

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._wire.close()
        if self._arena is not None:
            self._arena.close()
        if self._context is not None:
            self._context.term()

    def __enter__(self) -> Operator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attach(self, path: str) -> tuple[socket.socket | None, bytes]:
        """Return the connection to the arena's socket and its token. Return None and b"" if the daemon has
        its maximum of such connections."""
        require_own_directory(Path(path))
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_GREETING_S)
        try:
            connection.connect(path)
            require_own_peer(connection, self.url)
            header, fds, _, _ = socket.recv_fds(connection, ARENA_HEADER.size, 1)
        except OSError as error:
            connection.close()
            raise StoreUnavailableError(
                f"no daemon at {self.url} ({error.strerror or error}): start one with `tierstore serve`, "
                "or give its address with --connect"
            ) from error
        except StoreUnavailableError:
            connection.close()
            raise
        for fd in fds:
            os.close(fd)
        if not header:  # the daemon has its maximum of connections here: connect by ZMQ instead
            connection.close()
            return None, b""
        if len(header) != ARENA_HEADER.size or ARENA_HEADER.unpack(header)[0] != ARENA_MAGIC:
            connection.close()
            raise StoreUnavailableError(f"the process at {self.url} is no daemon of this version")
        return connection, ARENA_HEADER.unpack(header)[2]

    def _wait(self, seconds: float) -> bool:
        """Wait until a message can be received or queued data can be sent. Return False after ``seconds``."""
        poll = select.poll()
        poll.register(self._wire.fd, select.POLLIN | (select.POLLOUT if self._wire.flush() else 0))
        return bool(poll.poll(1000 * seconds))

    def _receive(self) -> list[Answer]:
        try:
            return [messages.decode_answer(frames[0]) for frames in self._wire.receive()]
        except FramedSocketEnd as error:
            raise StoreUnavailableError(f"the daemon at {self.url} has ended") from error
        except (IndexError, msgspec.MsgspecError) as error:
            raise StoreUnavailableError(f"the process at {self.url} is no daemon of this version") from error
