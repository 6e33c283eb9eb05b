"""The objects that one client of a core holds: identities, leases, reservations, remembered prefixes. Nothing
is decided here."""

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
MOST_EXPECTING = 64  # prompts whose promised pages a client waits for: each is checked as pages arrive …
MOST_EXPECTED_TOKENS = 4 << 20  # … and their tokens, except for a single prompt
MOST_WAITING = 4096  # requests that wait for a disk: enough for a prefetch for each lease
# remembered paths: an engine asks for each prompt once per worker and KV cache group, up to 56 times
MOST_PATHS = 1024
MOST_PATH_PAGES = 1 << 18  # pages of all remembered paths together

# Starts at a random number, so that ids of an earlier process are not valid in this one.
_ids = itertools.count(secrets.randbelow(1 << 40) + 1)


class Refusal(Exception):  # not named ...Error, because it is an answer and no fault
    """A request that cannot be done as asked. ``kind`` is for programs: ``identity`` (unknown: register it),
    ``path`` (not remembered: send the whole prompt), ``denied``, ``usage`` or ``busy``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


NEVER = -1  # value of ``Path.changes`` before the tiers were looked up


@dataclass(slots=True)
class Path:
    """The whole pages of an earlier answer. ``runs`` are their tiers as of the index's change number
    ``changes``."""

    pages: Sequence[Page]
    runs: Sequence[tuple[Tier, int]]
    changes: int


@dataclass(slots=True, eq=False)
class LocalLease(Lease):
    """A lease on the pages of a hit.

    ``tail_tokens`` tokens of the last page match. ``hold`` is on the *last* page of each run in one tier: the
    pages before it cannot leave the tier earlier (see ``Page.may_leave``), so leasing takes the same time for
    a prompt of any length.
    """

    tail_tokens: int = 0
    held: Sequence[Page] = ()
    hold: PageLease = field(default_factory=PageLease)
    located: set[Page] = field(default_factory=set)  # pages that the client may be copying
    chunk_tokens: int = 0

    def holders(self, first: int, count: int) -> Sequence[Page]:
        """Return the pages whose leases hold ``count`` pages from ``first`` on: the last one in a chain, each
        page if they are named."""
        return self.held[first : first + count] if self.positions else [self.held[first + count - 1]]


@dataclass(slots=True, eq=False)
class LocalReservation(Reservation):
    """A reservation of slots. ``positions`` and ``pages`` have the same order."""

    pages: list[Page] = field(default_factory=list)
    page_bytes: int = 0
    copying: int = 0  # threads that copy the client's frames into the slots
    # position → XXH3-64 of the bytes received in frames
    arrived: dict[int, int] = field(default_factory=dict)
    ended: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return len(self.pages) * slot_bytes(self.page_bytes)


@dataclass(slots=True, eq=False)
class Client:
    """One client of a core. A ``local`` client writes to the arena itself, so its reservations end only when
    it ends. Guarded by the state's lock."""

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
    waiting: int = 0  # requests that wait for a disk
    expecting: dict[Transfer[None], int] = field(default_factory=dict)
    """Transfers that wait for promised pages, and the number of tokens of their prompts."""
    suspects: bool = False  # a page that the client has reported as damaged is being checked
    ended: bool = False

    def may_expect(self, tokens: int) -> bool:
        """Return whether the client may also wait for promised pages of a prompt of ``tokens`` tokens."""
        waiting = self.expecting.values()
        room = len(waiting) < MOST_EXPECTING and sum(waiting) + tokens <= MOST_EXPECTED_TOKENS
        return not waiting or room

    def registration(self, number: int) -> Registration:
        """Return a registered identity. Raise :class:`Refusal` if there is none of this number."""
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
        """Remove a reservation. Raise :class:`Refusal` if there is none of this number."""
        reservation = self.reservation(number)
        del self.reservations[number]
        self.reserved_bytes -= reservation.nbytes
        return reservation

    def reservation(self, number: int) -> LocalReservation:
        """Return a reservation. Raise :class:`Refusal` if there is none of this number."""
        reservation = self.reservations.get(number)
        if reservation is None:
            raise Refusal("usage", f"this client has no reservation {number}")
        return reservation

    def path(self, number: int) -> Path:
        """Return a remembered path. Raise :class:`Refusal` if there is none of this number."""
        path = self.paths.get(number)
        if path is None:
            raise Refusal("path", f"path {number} is not remembered (any more): send the whole prompt")
        self.paths.move_to_end(number)
        return path

    def remember(self, path: Path) -> int:
        """Remember a path and forget the oldest ones beyond the limits. Return its id."""
        number = next(_ids)
        self.paths[number] = path
        self.path_pages += len(path.pages)
        self._forget_paths()
        return number

    def _forget_paths(self) -> None:
        while len(self.paths) > 1 and (len(self.paths) > MOST_PATHS or self.path_pages > MOST_PATH_PAGES):
            self.forget_path(next(iter(self.paths)))

    def lengthen(self, number: int, path: Path) -> None:
        """Replace path ``number`` by a longer one that begins with it. Running requests continue with the
        shorter one."""
        self.path_pages += len(path.pages) - len(self.paths[number].pages)
        self.paths[number] = path
        self._forget_paths()

    def forget_gone(self) -> None:
        """Forget paths whose pages have left the tree."""
        self.forget_ended_leases()
        for number, path in list(self.paths.items()):
            if not any(path.pages[-1].copies):
                self.forget_path(number)

    def forget_path(self, number: int) -> None:
        path = self.paths.pop(number, None)
        self.path_pages -= len(path.pages) if path is not None else 0
