"""Opening a link to a daemon: connect, map the daemon's arena, exchange Hello and Welcome, register.

All steps together take at most ``_GREETING_S`` seconds, and closing the connection interrupts them.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from tierstore.backend import Registration
from tierstore.client.arena import Arena, ArenaSocket
from tierstore.client.transport import SocketTransport, Transport, ZmqTransport
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.wire import messages
from tierstore.wire.framing import FramedSocketEnd
from tierstore.wire.keys import KeyPair, read_pair, read_public
from tierstore.wire.messages import Message

_GREETING_S = 2.0
_AT_ONCE = 64  # registrations that are sent before their answers are read; a daemon queues as many requests
_SECOND_TRY_MS = 20  # how long ZMQ waits before it connects again, if the daemon does not listen yet

A = TypeVar("A", bound=Message)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The key pair of this client and the daemon's public key."""

    client: KeyPair
    server: bytes

    @classmethod
    def read(cls, keys: str | Path | None, server_key: str | Path | None) -> CurveKeys | None:
        """Read the client's ``.secret`` file and the daemon's ``.key`` file. Raise :class:`UsageError` if
        only one path is given, or if a file is missing or malformed."""
        if keys is None and server_key is None:
            return None
        if keys is None or server_key is None:
            raise UsageError(
                "give both keys (this client's .secret file) and server_key (the daemon's .key file)"
            )
        return cls(read_pair(Path(keys)), read_public(Path(server_key)))


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a daemon. ``arena`` is the path of the arena's socket; None for a tcp:// address."""

    url: str
    arena: str | None
    curve: CurveKeys | None = None

    @classmethod
    def parse(cls, url: str, curve: CurveKeys | None = None) -> Address:
        """Parse ``ipc://PATH`` or ``tcp://HOST:PORT``. Raise :class:`UsageError` for anything else."""
        kind, _, rest = url.partition("://")
        if kind == "ipc" and rest:
            if curve is not None:
                raise UsageError(
                    f"{url}: keys are only for tcp://. The mode of its file protects this socket"
                )
            path = os.path.abspath(rest)
            return cls(f"ipc://{path}", f"{path}.arena")
        host, colon, port = rest.rpartition(":")
        if kind == "tcp" and host and colon and port.isdigit() and 0 < int(port) < 65536:
            return cls(url, None, curve)
        raise UsageError(f"{url} is no address of a daemon: write ipc://PATH or tcp://HOST:PORT")


def connect_zmq(context: zmq.Context[Any], address: Address) -> ZmqTransport:
    """Return a transport to the daemon at ``address`` over ZMQ. Raise :class:`zmq.ZMQError` if the address
    cannot be used."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.reconnect_ivl = _SECOND_TRY_MS
    socket.maxmsgsize = messages.MAX_MESSAGE_BYTES
    if address.curve is not None:
        socket.curve_publickey = address.curve.client.public
        socket.curve_secretkey = address.curve.client.secret
        socket.curve_serverkey = address.curve.server
    socket.ipv6 = "[" in address.url
    wire = ZmqTransport(socket)
    try:
        socket.connect(address.url)
    except zmq.ZMQError:
        wire.close()
        raise
    return wire


def registering(registration: Registration) -> messages.Register:
    """Return the message that registers an identity with a daemon."""
    fields = asdict(registration.identity)
    sizes = (registration.page_bytes, registration.chunk_tokens)
    return messages.Register(0, fields, *sizes, registration.model_name)


@dataclass(slots=True, eq=False)
class DaemonLink:
    """A link to a daemon: one connection, from its handshake until it ends. ``identities`` maps an identity's
    digest to the number that messages use for it. A running copy refers to its link, so the arena stays
    mapped."""

    number: int
    server: str
    lease_s: float
    reserve_bytes: int
    wire: Transport
    arena: Arena | None
    identities: dict[bytes, int] = field(default_factory=dict)
    cluster: bool = False  # whether the daemon can fetch pages from other hosts
    forgets: int = 0  # number of the daemon's last forget that clients were informed of
    max_age_s: float = 0.0  # how long pages may be kept; 0: no limit
    forget_log: bytes = b""  # identifies the list that these numbers count in
    forgotten: dict[bytes, int] = field(default_factory=dict)  # by digest: number of the last forget
    current: bool = True
    silent: bool = False  # whether no message has arrived since a request was late

    def close(self) -> None:
        self.current = False
        self.wire.close()
        if self.arena is not None:
            self.arena.close()


class Handshake:
    """An attempt to open a link. ``wake_fd`` becomes readable when ``closing()`` may have become true. If
    the daemon listens but cannot be used, ``refusal`` is the reason; otherwise it is empty."""

    def __init__(
        self, context: zmq.Context[Any] | None, address: Address, wake_fd: int, closing: Callable[[], bool]
    ) -> None:
        self._context = context
        self._address = address
        self._wake_fd = wake_fd
        self._closing = closing
        self.refusal = ""
        self._ends = time.monotonic() + _GREETING_S

    def open(self, registrations: Sequence[Registration]) -> DaemonLink | None:
        """Return a link; None if no daemon listens, or if it does not answer or refuses."""
        arena = None
        if self._address.arena is not None:
            arena = self._attach(self._address.arena)
            if arena is None:
                return None
        if arena is not None:
            wire: Transport = SocketTransport(arena.line)
        else:
            assert self._context is not None, "a context for tcp://"
            wire = connect_zmq(self._context, self._address)
        link = None
        try:
            link = self._greet(wire, arena, registrations)
        finally:
            if link is None:
                wire.close()
                if arena is not None:
                    arena.close()
        return link

    def _attach(self, path: str) -> Arena | None:
        try:
            waiting = ArenaSocket(path)
        except OSError:
            return None  # the socket does not exist, or may not be opened
        except StoreUnavailableError as error:
            self.refusal = str(error)
            return None
        if not self._readable(waiting.fileno()):
            waiting.close()
            return None
        try:
            return waiting.receive()
        except StoreUnavailableError:
            return None

    def _greet(
        self,
        wire: Transport,
        arena: Arena | None,
        registrations: Sequence[Registration],
    ) -> DaemonLink | None:
        token = arena.token if arena is not None else b""
        hello = messages.Hello(1, token, f"tierstore client, pid {os.getpid()}")
        welcome = self._ask(wire, hello, messages.Welcome)
        if welcome is None:
            return None
        wire.welcomed()
        link = DaemonLink(
            welcome.connection,
            welcome.server,
            welcome.lease_s,
            welcome.reserve_bytes,
            wire,
            arena,
            cluster=welcome.cluster,
            forgets=welcome.forgets,
            max_age_s=welcome.max_age_s,
            forget_log=welcome.forget_log,
        )
        for start in range(0, len(registrations), _AT_ONCE):
            if not self._register(wire, link, registrations[start : start + _AT_ONCE]):
                return None
        return link

    def _register(self, wire: Transport, link: DaemonLink, registrations: Sequence[Registration]) -> bool:
        """Send all registrations before reading the answers, because a client may have hundreds of them."""
        waited_for = {}
        for number, registration in enumerate(registrations):
            message = registering(registration)
            message.id = number
            wire.send(messages.encode(message))
            waited_for[number] = registration.identity.digest
        while waited_for:
            answers = self._receive(wire)
            for answer in answers:
                if not isinstance(answer, messages.Registered) or answer.id not in waited_for:
                    return False
                digest = waited_for.pop(answer.id)
                link.identities[digest] = answer.identity
                link.forgotten[digest] = answer.forgotten
            if not answers:
                return False
        return True

    def _ask(self, wire: Transport, message: Message, expected: type[A]) -> A | None:
        wire.send(messages.encode(message))
        answers = self._receive(wire)
        return answers[0] if answers and isinstance(answers[0], expected) else None

    def _receive(self, wire: Transport) -> list[messages.Answer]:
        """Return the next answers; an empty list after the time limit or a malformed message."""
        try:
            while not (received := wire.receive()):
                if not self._readable(wire.fd):
                    return []
            return [messages.decode_answer(frames[0]) for frames in received]
        except (FramedSocketEnd, IndexError, msgspec.MsgspecError):
            return []

    def _readable(self, fd: int) -> bool:
        """Wait until ``fd`` is readable. Return False after the time limit or if the connection is
        closing."""
        while not self._closing():
            left = self._ends - time.monotonic()
            if left <= 0:
                return False
            poll = select.poll()
            for each in (fd, self._wake_fd):
                poll.register(each, select.POLLIN)
            ready = [each for each, _ in poll.poll(math.ceil(1e3 * left))]
            if fd in ready:
                return True
            if ready and not self._closing():
                os.eventfd_read(self._wake_fd)
        return False
