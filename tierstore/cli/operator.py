"""A person's connection to a daemon: what ``stats``, ``top``, ``evict`` and ``pin`` ask through."""

from __future__ import annotations

import itertools
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer
import zmq

from tierstore.daemon import protocol
from tierstore.daemon.protocol import ARENA_HEADER, ARENA_MAGIC, Answer, Message
from tierstore.daemon.settings import default_listen
from tierstore.errors import StoreUnavailableError, UsageError

if TYPE_CHECKING:
    from tierstore.daemon.stats import DaemonStats

_GREETING_S = 2.0
_ANSWER_S = 5.0

Connect = Annotated[
    str | None,
    typer.Option(
        "--connect",
        metavar="URL",
        help="The daemon: ipc://PATH or tcp://HOST:PORT (default: where this user's daemon listens)",
        show_default=False,
    ),
]
Keys = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FILE", help="Your .secret file, for tcp://", show_default=False),
]
ServerKey = Annotated[
    Path | None,
    typer.Option(
        "--server-key", metavar="FILE", help="The daemon's .key file, for tcp://", show_default=False
    ),
]

A = TypeVar("A", bound=Message)


class Operator:
    """A session with a daemon that asks and holds nothing. Of the arena, which engines map, it only keeps the
    connection, so that its session ends when it does. For one thread.

    Raises :class:`StoreUnavailableError` when there is no daemon, at first and with every question.
    """

    def __init__(self, url: str | None, keys: Path | None = None, server_key: Path | None = None) -> None:
        from tierstore.daemon.greeting import Address, CurveKeys

        self.url = url or default_listen()
        curve = CurveKeys.read(keys, server_key)
        address = Address.parse(self.url, curve)
        self._ids = itertools.count(1)
        self._arena: socket.socket | None = None
        token = b""
        if address.arena is not None:
            self._arena, token = self._attach(address.arena)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndtimeo = 0
        self._socket.maxmsgsize = protocol.MAX_MESSAGE_BYTES
        if curve is not None:
            self._socket.curve_publickey = curve.client.public
            self._socket.curve_secretkey = curve.client.secret
            self._socket.curve_serverkey = curve.server
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if self._arena is not None:
            self._poller.register(self._arena, zmq.POLLIN)
        try:
            self._socket.connect(address.url)
            hello = protocol.Hello(0, token, f"tierstore operator, pid {os.getpid()}")
            self.session = self.ask(hello, protocol.Welcome, wait_s=_GREETING_S).session
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"cannot connect to {self.url}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def stats_json(self) -> bytes:
        return self.ask(protocol.Stats(0), protocol.StatsAnswer).json

    def stats(self) -> DaemonStats:
        return self.parse(self.stats_json())

    def parse(self, document: bytes) -> DaemonStats:
        """The answer to :meth:`stats_json` as what it is."""
        from tierstore.daemon.stats import DaemonStats

        try:
            return msgspec.json.decode(document, type=DaemonStats)
        except msgspec.MsgspecError as error:
            raise StoreUnavailableError(
                f"the daemon at {self.url} is of another version: {error}; use its own tierstore, or --json"
            ) from error

    def ask(self, message: Any, expected: type[A], *, wait_s: float = _ANSWER_S) -> A:
        """One round trip. Raises :class:`UsageError` for what the daemon refuses as such."""
        message.id = next(self._ids)
        self._send(message)
        ends = time.monotonic() + wait_s
        while (left := ends - time.monotonic()) > 0:
            ready = dict(self._poller.poll(int(min(left, protocol.PING_S) * 1000)))
            if self._socket in ready:
                answer = self._receive()
                if isinstance(answer, protocol.Refused) and answer.id in (0, message.id):
                    raise _error(f"the daemon at {self.url} refuses: {answer.message}", answer.kind)
                if isinstance(answer, expected) and answer.id == message.id:
                    return answer
            elif ready:
                raise StoreUnavailableError(f"the daemon at {self.url} has ended")
            elif self._arena is None:
                self._send(protocol.Ping(next(self._ids)))
        raise StoreUnavailableError(
            f"no daemon answers at {self.url} within {wait_s:.0f} s: is it running, and is this its address?"
        )

    def close(self) -> None:
        """End the session. Idempotent."""
        if self._arena is not None:
            self._arena.close()
        self._socket.close(0)
        self._context.term()

    def __enter__(self) -> Operator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attach(self, path: str) -> tuple[socket.socket, bytes]:
        """The arena's connection and its token."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_GREETING_S)
        try:
            connection.connect(path)
            header, fds, _, _ = socket.recv_fds(connection, ARENA_HEADER.size, 1)
        except OSError as error:
            connection.close()
            raise StoreUnavailableError(
                f"no daemon at {self.url} ({error.strerror or error}): start one with `tierstore serve`, "
                "or say with --connect where it listens"
            ) from error
        for fd in fds:
            os.close(fd)
        if len(header) != ARENA_HEADER.size or ARENA_HEADER.unpack(header)[0] != ARENA_MAGIC:
            connection.close()
            raise StoreUnavailableError(f"what listens at {self.url} is no daemon of this version")
        return connection, ARENA_HEADER.unpack(header)[2]

    def _send(self, message: Message) -> None:
        with suppress(zmq.Again):  # a daemon that let nobody in: the deadline says so
            self._socket.send_multipart([protocol.VERSION, protocol.encode(message)])

    def _receive(self) -> Answer:
        try:
            return protocol.decode_answer(self._socket.recv_multipart()[1])
        except (IndexError, msgspec.MsgspecError) as error:
            raise StoreUnavailableError(f"what answers at {self.url} is no daemon of this version") from error


def _error(text: str, kind: str) -> UsageError | StoreUnavailableError:
    return UsageError(text) if kind == "usage" else StoreUnavailableError(text)
