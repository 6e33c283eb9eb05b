"""Opening a session: find the daemon, map its arena, say Hello, register.

Nothing here waits for more than ``_GREETING_S``, and closing the connection interrupts all of it.
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
_AT_ONCE = 64  # identities to register: as many as a daemon lets wait unread, and far less than a line keeps
_SECOND_TRY_MS = 20  # ZMQ's own, while the daemon's sockets come up one after the other

A = TypeVar("A", bound=Message)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Who this client is, and who the daemon is."""

    client: KeyPair
    server: bytes

    @classmethod
    def read(cls, keys: str | Path | None, server_key: str | Path | None) -> CurveKeys | None:
        """From a client's ``.secret`` file and the daemon's ``.key`` file. Raises :class:`UsageError`."""
        if keys is None and server_key is None:
            return None
        if keys is None or server_key is None:
            raise UsageError("give both keys (this client's .secret file) and server_key (the daemon's)")
        return cls(read_pair(Path(keys)), read_public(Path(server_key)))


@dataclass(frozen=True, slots=True)
class Address:
    """Where a daemon is. ``arena`` is the path of its arena's socket, None for another host's."""

    url: str
    arena: str | None
    curve: CurveKeys | None = None

    @classmethod
    def parse(cls, url: str, curve: CurveKeys | None = None) -> Address:
        """Raises :class:`UsageError` for anything but ``ipc://PATH`` and ``tcp://HOST:PORT``."""
        kind, _, rest = url.partition("://")
        if kind == "ipc" and rest:
            if curve is not None:
                raise UsageError(f"{url}: keys are for tcp://, this socket is guarded by its file's mode")
            path = os.path.abspath(rest)
            return cls(f"ipc://{path}", f"{path}.arena")
        host, colon, port = rest.rpartition(":")
        if kind == "tcp" and host and colon and port.isdigit() and 0 < int(port) < 65536:
            return cls(url, None, curve)
        raise UsageError(f"{url} is no address of a daemon: write ipc://PATH or tcp://HOST:PORT")


def registering(registration: Registration) -> messages.Register:
    """The message that makes an identity known."""
    fields = asdict(registration.identity)
    sizes = (registration.page_bytes, registration.chunk_tokens)
    return messages.Register(0, fields, *sizes, registration.model_name)


@dataclass(slots=True, eq=False)
class DaemonLink:
    """What a greeting brought. ``identities`` are numbers by digest. Jobs that copy refer to it, which keeps
    the arena mapped."""

    number: int
    server: str
    lease_s: float
    reserve_bytes: int
    wire: Transport
    arena: Arena | None
    identities: dict[bytes, int] = field(default_factory=dict)
    cluster: bool = False  # whether pages of other hosts can be brought
    current: bool = True
    silent: bool = False  # a request was not answered in time, and nothing has come since

    def close(self) -> None:
        self.current = False
        self.wire.close()
        if self.arena is not None:
            self.arena.close()


class Handshake:
    """One attempt. ``wake_fd`` becomes readable when ``closing()`` may have become true. ``refusal`` says why
    a daemon that is there is not spoken to."""

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
        """A session, or None when there is no daemon, or one that does not answer, or refuses."""
        arena = None
        if self._address.arena is not None:
            arena = self._attach(self._address.arena)
            if arena is None:
                return None
        wire = self._connect() if arena is None else SocketTransport(arena.line)
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
            return None  # not there, or not ours to open
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

    def _connect(self) -> Transport:
        assert self._context is not None, "a context for tcp://"
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.reconnect_ivl = _SECOND_TRY_MS
        socket.maxmsgsize = messages.MAX_MESSAGE_BYTES
        curve = self._address.curve
        if curve is not None:
            socket.curve_publickey = curve.client.public
            socket.curve_secretkey = curve.client.secret
            socket.curve_serverkey = curve.server
        socket.ipv6 = "[" in self._address.url
        wire = ZmqTransport(socket)
        try:
            socket.connect(self._address.url)
        except zmq.ZMQError:
            wire.close()
            raise
        return wire

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
        )
        for start in range(0, len(registrations), _AT_ONCE):
            if not self._register(wire, link, registrations[start : start + _AT_ONCE]):
                return None
        return link

    def _register(self, wire: Transport, link: DaemonLink, registrations: Sequence[Registration]) -> bool:
        """Register these in one round trip: a client may have hundreds, and other clients as many."""
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
                link.identities[waited_for.pop(answer.id)] = answer.identity
            if not answers:
                return False
        return True

    def _ask(self, wire: Transport, message: Message, expected: type[A]) -> A | None:
        wire.send(messages.encode(message))
        answers = self._receive(wire)
        return answers[0] if answers and isinstance(answers[0], expected) else None

    def _receive(self, wire: Transport) -> list[messages.Answer]:
        """What comes next; nothing when nothing comes, or no answer."""
        try:
            while not (received := wire.receive()):
                if not self._readable(wire.fd):
                    return []
            return [messages.decode_answer(frames[0]) for frames in received]
        except (FramedSocketEnd, IndexError, msgspec.MsgspecError):
            return []

    def _readable(self, fd: int) -> bool:
        """Wait for something to read; False when the time is over or the connection is being closed."""
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
