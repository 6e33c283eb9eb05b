"""The objects that one client of a core holds: identities, leases, reservations, remembered prefixes. This
module decides nothing."""

from __future__ import annotations

import itertools
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierstore.backend import Lease, Registration, Reservation
from tierstore.index import Page, Tier
from tierstore.index.leases import PageLease
from tierstore.tiers.slabs import slot_bytes
from tierstore.transfer import Transfer

MOST_IDENTITIES = 1024  # per client
MOST_LEASES = 4096
MOST_EXPECTING = 64  # prompts whose promised pages a client may wait for: each arriving page is checked
# Tokens of all prompts whose promised pages a client waits for. A single prompt may have more.
MOST_EXPECTED_TOKENS = 4 << 20
MOST_WAITING = 4096  # most requests that may wait for a disk: enough for a prefetch for each lease
# Remembered paths: an engine looks up each prompt once per worker and KV cache group, up to 56 times.
MOST_PATHS = 1024
MOST_PATH_PAGES = 1 << 18  # most pages of all remembered paths together

# The first id is random, so that ids of an earlier process are not valid in this one.
_ids = itertools.count(secrets.randbelow(1 << 40) + 1)


class Refusal(Exception):  # not named ...Error, because it is an answer to a client and not a fault
    """A refused request. ``kind`` is for programs: ``identity`` (unknown: register it), ``path`` (not
    remembered: send the whole prompt), ``denied``, ``usage`` or ``busy``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


NEVER = -1  # value of ``Path.changes`` before the tiers were looked up


@dataclass(slots=True)
class Path:
    """The whole pages that an earlier lookup found. ``runs`` are the pages' tiers, as they were when the
    index's ``changes`` had this value."""

    pages: Sequence[Page]
    runs: Sequence[tuple[Tier, int]]
    changes: int


@dataclass(slots=True, eq=False)
class LocalLease(Lease):
    """A lease on the pages of a hit.

    ``tail_tokens`` tokens of the last page match. ``hold`` holds only the *last* page of each run of pages in
    one tier. The pages before it cannot leave the tier earlier (see ``Page.may_leave``), so taking a lease
    takes the same time for a prompt of any length.
    """

    tail_tokens: int = 0
    held: Sequence[Page] = ()
    hold: PageLease = field(default_factory=PageLease)
    located: set[Page] = field(default_factory=set)  # pages that the client may be copying
    chunk_tokens: int = 0

    def holders(self, first: int, count: int) -> Sequence[Page]:
        """Return the pages whose leases hold the ``count`` pages from ``first`` on: only the last page of a
        chain, but every named page."""
        return self.held[first : first + count] if self.positions else [self.held[first + count - 1]]


@dataclass(slots=True, eq=False)
class LocalReservation(Reservation):
    """A reservation of slots. ``pages[i]`` is the page for ``positions[i]``."""

    pages: list[Page] = field(default_factory=list)
    page_bytes: int = 0
    copying: int = 0  # threads that copy the client's frames into the slots
    # XXH3-64 of the bytes received in frames, by position
    arrived: dict[int, int] = field(default_factory=dict)
    ended: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.pages) * slot_bytes(self.page_bytes)


@dataclass(slots=True, eq=False)
class Client:
    """One client of a core. A ``local`` client writes to the arena itself, so the slots of its open
    reservations stay reserved until it disconnects. The state's lock guards this object."""

    name: str = ""
    local: bool = True
    tenant: str = ""
    number: int = field(default_factory=lambda: next(_ids))
    identities: list[Registration] = field(default_factory=list)
    leases: dict[int, LocalLease] = field(default_factory=dict)  # the earliest end first
    reservations: dict[int, LocalReservation] = field(default_factory=dict)
    paths: OrderedDict[int, Path] = field(default_factory=OrderedDict)
    path_pages: int = 0
    reserved_bytes: int = 0
    waiting: int = 0  # number of requests that wait for a disk
    expecting: dict[Transfer[None], int] = field(default_factory=dict)
    """Transfers that wait for promised pages, and the number of tokens of their prompts."""
    suspects: bool = False  # a page that the client has reported as damaged is being checked
    ended: bool = False

    def may_expect(self, tokens: int) -> bool:
        """Return whether the client may wait for promised pages of one more prompt of ``tokens`` tokens."""
        waiting = self.expecting.values()
        room = len(waiting) < MOST_EXPECTING and sum(waiting) + tokens <= MOST_EXPECTED_TOKENS
        return not waiting or room

    def registration(self, number: int) -> Registration:
        """Return a registered identity. Raise :class:`Refusal` if the number is unknown."""
        if not 0 <= number < len(self.identities):
            raise Refusal("identity", f"identity {number} is not registered on this connection")
        return self.identities[number]

    def register(self, registration: Registration) -> int:
        """Register an identity and return its number. Raise :class:`Refusal` at the limit."""
        if registration in self.identities:
            return self.identities.index(registration)
        if len(self.identities) >= MOST_IDENTITIES:
            raise Refusal("busy", f"a client may register at most {MOST_IDENTITIES} identities")
        self.identities.append(registration)
        return len(self.identities) - 1

    def keep(self, lease: LocalLease) -> LocalLease:
        """Add a lease and give it a number."""
        lease.number = next(_ids)
        self.leases[lease.number] = lease
        return lease

    def require_room(self, leases: int = 1) -> None:
        """Raise :class:`Refusal` if the client may not hold ``leases`` more leases."""
        self.forget_ended_leases()
        if len(self.leases) + leases > MOST_LEASES:
            raise Refusal("busy", f"a client may hold at most {MOST_LEASES} leases: release some")

    def require_patience(self) -> None:
        """Raise :class:`Refusal` when too many requests wait for a disk."""
        if self.waiting >= MOST_WAITING:
            raise Refusal("busy", f"{MOST_WAITING} requests of this client already wait: try again later")

    def forget_ended_leases(self) -> None:
        while self.leases:
            first = next(iter(self.leases))
            if not self.leases[first].hold.released:
                return
            del self.leases[first]

    def reserve(self, reservation: LocalReservation) -> int:
        """Add a reservation whose bytes are already counted. Return its id."""
        number = next(_ids)
        self.reservations[number] = reservation
        return number

    def end_reservation(self, number: int) -> LocalReservation:
        """Remove a reservation and return it. Raise :class:`Refusal` if the number is unknown."""
        reservation = self.reservation(number)
        del self.reservations[number]
        self.reserved_bytes -= reservation.nbytes
        return reservation

    def reservation(self, number: int) -> LocalReservation:
        """Return a reservation. Raise :class:`Refusal` if the number is unknown."""
        reservation = self.reservations.get(number)
        if reservation is None:
            raise Refusal("usage", f"this client has no reservation {number}")
        return reservation

    def path(self, number: int) -> Path:
        """Return a remembered path. Raise :class:`Refusal` if the number is unknown."""
        path = self.paths.get(number)
        if path is None:
            raise Refusal("path", f"path {number} is not remembered (any more): send the whole prompt")
        self.paths.move_to_end(number)
        return path

    def remember(self, path: Path) -> int:
        """Remember a path, and forget the oldest paths beyond the limits. Return its id."""
        number = next(_ids)
        self.paths[number] = path
        self.path_pages += len(path.pages)
        self._forget_paths()
        return number

    def _forget_paths(self) -> None:
        while len(self.paths) > 1 and (len(self.paths) > MOST_PATHS or self.path_pages > MOST_PATH_PAGES):
            self.forget_path(next(iter(self.paths)))

    def lengthen(self, number: int, path: Path) -> None:
        """Replace path ``number`` by a longer path that begins with it. Running requests still use the
        shorter path."""
        self.path_pages += len(path.pages) - len(self.paths[number].pages)
        self.paths[number] = path
        self._forget_paths()

    def forget_gone(self) -> None:
        """Forget ended leases, and paths whose last page is in no tier."""
        self.forget_ended_leases()
        for number, path in list(self.paths.items()):
            if not any(path.pages[-1].copies):
                self.forget_path(number)

    def forget_path(self, number: int) -> None:
        path = self.paths.pop(number, None)
        self.path_pages -= len(path.pages) if path is not None else 0
