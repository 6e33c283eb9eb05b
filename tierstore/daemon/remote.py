"""What is below HBM, for a client: the daemon's leases on a prompt's pages, asked for and given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierstore.daemon import protocol
from tierstore.daemon.call import Call
from tierstore.daemon.connection import Connection
from tierstore.daemon.greeting import Session
from tierstore.daemon.registration import Registration
from tierstore.daemon.remembered import Name, Question, Remembered

_WAIT_SHARE = 0.8  # of a lookup's time, that the daemon may take


@dataclass(frozen=True, slots=True)
class RemoteLease:
    """The daemon holds the first ``pages`` pages of a prompt for us until ``ends``, by our own clock.
    ``runs`` are their tiers: (``host`` or ``disk``, pages), in prefix order."""

    session: Session
    number: int
    tokens: int
    pages: int
    runs: Sequence[tuple[str, int]]
    ends: float

    def run_at(self, position: int) -> tuple[str, int]:
        """The tier of a page, and how many pages from it on are in that tier."""
        end = 0
        for tier, count in self.runs:
            end += count
            if position < end:
                return tier, end - position
        return "disk", 1


@dataclass(frozen=True, slots=True)
class Asked:
    """A lookup on its way, sent at ``at`` by the store's clock: the lease ends no earlier than ``lease_s``
    after that."""

    question: Question
    session: Session
    call: Call[protocol.Found]
    at: float


class Remote:
    """Lookups at the daemon. Thread-safe. ``clock`` is compared with the ends of leases."""

    def __init__(
        self,
        connection: Connection,
        remembered: Remembered,
        page_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.connection = connection
        self.remembered = remembered
        self.clock = clock
        self.page_bytes = page_bytes

    def registering(self, question: Question) -> Call[protocol.Registered] | None:
        """What has to end before this prompt can be spoken of; None in nearly all cases."""
        session = self.connection.session
        if session is None or question.identity.digest in session.identities:
            return None
        registration = Registration(question.identity, self.page_bytes, question.chunk_tokens)
        return self.connection.register(session, registration)

    def introduce(self, question: Question) -> None:
        """Wait for :meth:`registering`."""
        registering = self.registering(question)
        if registering is not None:
            registering.wait()

    def session_for(self, question: Question) -> Session | None:
        """The session, if there is one that knows the prompt's identity."""
        session = self.connection.session
        if session is None or question.identity.digest not in session.identities:
            return None
        return session

    def ask(self, question: Question, patience_s: float, *, led: bool = False) -> Asked | None:
        """Send a lookup, which is waited for ``patience_s`` seconds at most; None when the daemon is away or
        there is no time. ``led``: this thread waits for the answer at once."""
        session = self.session_for(question)
        if session is None or patience_s <= 0:
            return None
        wait_s = patience_s * _WAIT_SHARE
        at = self.clock()

        def message() -> protocol.Lookup:
            return protocol.Lookup(0, question.part(session), question.num_tokens, wait_s)

        def whole() -> protocol.Lookup:
            question.forgotten()
            return message()

        # The daemon's waiting is within our patience, not on top of it.
        call = self.connection.call(
            session, message(), protocol.Found, patience_s=patience_s, otherwise=whole, led=led
        )
        return Asked(question, session, call, at)

    def answer(self, asked: Asked) -> RemoteLease | None:
        """The lease that an ended lookup brought, if any."""
        found = asked.call.wait()
        session, question = asked.session, asked.question
        if found is None:
            return None
        self.remembered.remember(question, Name.of(session, found))
        pages = -(-found.tokens // question.chunk_tokens)
        sound = 0 <= found.tokens <= question.num_tokens and sum(n for _, n in found.tiers) == pages
        if not found.lease:
            return None
        ends = asked.at + session.lease_s
        lease = RemoteLease(session, found.lease, found.tokens, pages, found.tiers, ends)
        if not sound or not found.tokens:
            self.release(lease)
            return None
        return lease

    def give_up(self, asked: Asked) -> None:
        """Nobody wants this answer any more. (One that is still to come is given back by the connection.)"""
        if not asked.call.cancel():
            lease = self.answer(asked)
            if lease is not None:
                self.release(lease)

    def renew(self, question: Question, then: Callable[[RemoteLease | None], None]) -> None:
        """Look up again; ``then`` is called with the new lease, on whatever thread knows it."""
        asked = self.ask(question, self.connection.patience_s)
        if asked is None:
            then(None)
        else:
            asked.call.on_end(lambda: then(self.answer(asked)))

    def release(self, lease: RemoteLease) -> None:
        self.connection.release(lease.session, lease.number)
