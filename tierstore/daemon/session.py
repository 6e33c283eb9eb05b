"""What one client holds: identities, leases, reservations, remembered paths. It decides nothing.

A session belongs to one thread, the event loop's. What is in the store's state (the leases themselves, the
slots behind a reservation) changes under the state's lock like everything else there.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierstore.daemon.registration import Registration
from tierstore.index import Page, Tier
from tierstore.store.leases import Lease

MOST_IDENTITIES = 1024  # a client may register
MOST_LEASES = 4096
MOST_WAITING = 4096  # requests that wait for a disk: a prefetch for each lease, if need be
MOST_WAIT_S = 600.0
MOST_PATHS = 1024  # an engine asks for each prompt once per worker and KV cache group: 56 paths a prompt
MOST_PATH_PAGES = 1 << 18  # in all remembered paths together

# Ids of an earlier life must not be taken for those of this one.
_ids = itertools.count(secrets.randbelow(1 << 40) + 1)


class Refusal(Exception):  # an answer, not an error of ours
    """The request cannot be done as asked; see :class:`~tierstore.daemon.protocol.Refused`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


NEVER = -1  # as ``changes``: their tiers have not been looked at


@dataclass(slots=True)
class Path:
    """The whole pages of an earlier answer. ``runs`` are their tiers, as of ``changes`` of the index."""

    pages: Sequence[Page]
    runs: Sequence[tuple[Tier, int]]
    changes: int


@dataclass(slots=True)
class Held:
    """The pages of one lookup. The lease holds the *last* page of each run in one tier: those before it
    cannot leave the tier before it does (see ``Page.may_leave``), so a prompt of any length is leased at
    one stroke."""

    pages: Sequence[Page]
    lease: Lease
    registration: Registration


@dataclass(slots=True)
class Reservation:
    """Slots that a client writes to. ``positions`` and ``pages`` go together."""

    positions: list[int]
    pages: list[Page]
    page_bytes: int
    copying: int = 0  # threads that copy a client's frames into the slots
    arrived: dict[int, int] = field(default_factory=dict)  # position -> XXH3-64 of what came in frames
    ended: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self.page_bytes


@dataclass(slots=True)
class Session:
    """One client. ``local`` is one that has mapped the arena: only its death ends its reservations."""

    client: str
    local: bool
    tenant: str = ""
    number: int = field(default_factory=lambda: next(_ids))
    identities: list[Registration] = field(default_factory=list)
    leases: dict[int, Held] = field(default_factory=dict)  # the earliest end first
    reservations: dict[int, Reservation] = field(default_factory=dict)
    paths: OrderedDict[int, Path] = field(default_factory=OrderedDict)
    path_pages: int = 0
    reserved_bytes: int = 0
    sending_bytes: int = 0  # of pages, handed to ZMQ and not yet sent
    sent: list[asyncio.Future[None]] = field(default_factory=list)  # waits for pages to be sent
    waiting: int = 0  # requests that wait for a disk
    ended: bool = False

    def registration(self, number: int) -> Registration:
        """Raises :class:`Refusal`."""
        if not 0 <= number < len(self.identities):
            raise Refusal("identity", f"identity {number} has not been registered in this session")
        return self.identities[number]

    def register(self, registration: Registration) -> int:
        """Raises :class:`Refusal`."""
        if registration in self.identities:
            return self.identities.index(registration)
        if len(self.identities) >= MOST_IDENTITIES:
            raise Refusal("busy", f"a session may register {MOST_IDENTITIES} identities")
        self.identities.append(registration)
        return len(self.identities) - 1

    def keep(self, held: Held) -> int:
        """Take a lease. Returns its id."""
        number = next(_ids)
        self.leases[number] = held
        return number

    def forget_ended_leases(self) -> None:
        while self.leases:
            first = next(iter(self.leases))
            if not self.leases[first].lease.released:
                return
            del self.leases[first]

    def reserve(self, reservation: Reservation) -> int:
        """Take a reservation, whose bytes are counted already. Returns its id."""
        number = next(_ids)
        self.reservations[number] = reservation
        return number

    def end_reservation(self, number: int) -> Reservation:
        """Raises :class:`Refusal`."""
        reservation = self.reservation(number)
        del self.reservations[number]
        self.reserved_bytes -= reservation.nbytes
        return reservation

    def reservation(self, number: int) -> Reservation:
        """Raises :class:`Refusal`."""
        reservation = self.reservations.get(number)
        if reservation is None:
            raise Refusal("usage", f"this session has no reservation {number}")
        return reservation

    def path(self, number: int) -> Path:
        """Raises :class:`Refusal`."""
        path = self.paths.get(number)
        if path is None:
            raise Refusal("path", f"path {number} is not remembered (any more)")
        self.paths.move_to_end(number)
        return path

    def remember(self, path: Path) -> int:
        """Remember a path, forgetting older ones. Returns its id."""
        number = next(_ids)
        self.paths[number] = path
        self.path_pages += len(path.pages)
        self._forget_paths()
        return number

    def _forget_paths(self) -> None:
        while len(self.paths) > 1 and (len(self.paths) > MOST_PATHS or self.path_pages > MOST_PATH_PAGES):
            self.forget_path(next(iter(self.paths)))

    def lengthen(self, number: int, path: Path) -> None:
        """Remember this path, which begins like path ``number``, in its place. (Requests that are at work
        with the shorter one go on with that.)"""
        self.path_pages += len(path.pages) - len(self.paths[number].pages)
        self.paths[number] = path
        self._forget_paths()

    def forget_path(self, number: int) -> None:
        path = self.paths.pop(number, None)
        self.path_pages -= len(path.pages) if path is not None else 0


def checked_wait(wait_s: float) -> float:
    """Raises :class:`Refusal`."""
    if not 0 <= wait_s <= MOST_WAIT_S:
        raise Refusal("usage", f"wait_s is {wait_s}: it must lie between 0 and {MOST_WAIT_S:.0f}")
    return wait_s


class waiting:  # reads as what it is: with waiting(session)
    """A request of this session waits for a disk. Raises :class:`Refusal` when too many do."""

    def __init__(self, session: Session) -> None:
        self._session = session
        if session.waiting >= MOST_WAITING:
            raise Refusal("busy", f"{MOST_WAITING} requests of this session are waiting already")

    def __enter__(self) -> None:
        self._session.waiting += 1

    def __exit__(self, *_: object) -> None:
        self._session.waiting -= 1
