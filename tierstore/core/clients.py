"""What one client of a core holds: identities, leases, reservations, remembered prefixes. It decides
nothing."""

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

MOST_IDENTITIES = 1024  # a client may register
MOST_LEASES = 4096
MOST_EXPECTING = 64  # prompts whose promised pages a client waits for: each is looked at as pages come …
MOST_EXPECTED_TOKENS = 4 << 20  # … and their tokens, unless there is one prompt only
MOST_WAITING = 4096  # requests that wait for a disk: a prefetch for each lease, if need be
MOST_PATHS = 1024  # an engine asks for each prompt once per worker and KV cache group: 56 paths a prompt
MOST_PATH_PAGES = 1 << 18  # in all remembered paths together

# Ids of an earlier life must not be taken for those of this one.
_ids = itertools.count(secrets.randbelow(1 << 40) + 1)


class Refusal(Exception):  # an answer, not an error of ours
    """The request cannot be done as asked; ``kind`` is for programs: ``identity`` (unknown: register it),
    ``path`` (not remembered: say the whole prompt), ``denied``, ``usage``, ``busy``."""

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


@dataclass(slots=True, eq=False)
class LocalLease(Lease):
    """Of the last page matched, ``tail_tokens`` tokens match. ``hold`` is on the *last* page of each run in
    one tier: those before it cannot leave the tier before it does (see ``Page.may_leave``), so a prompt of
    any length is leased at one stroke."""

    tail_tokens: int = 0
    held: Sequence[Page] = ()
    hold: PageLease = field(default_factory=PageLease)
    located: set[Page] = field(default_factory=set)  # that hold what a client may be copying
    chunk_tokens: int = 0

    def holders(self, first: int, count: int) -> Sequence[Page]:
        """The pages whose leases hold pages ``first … first + count``: the last one, but of named pages
        each."""
        return self.held[first : first + count] if self.positions else [self.held[first + count - 1]]


@dataclass(slots=True, eq=False)
class LocalReservation(Reservation):
    """``positions`` and ``pages`` go together."""

    pages: list[Page] = field(default_factory=list)
    page_bytes: int = 0
    copying: int = 0  # threads that copy a client's frames into the slots
    arrived: dict[int, int] = field(default_factory=dict)  # position -> XXH3-64 of what came in frames
    ended: bool = False

    @property
    def nbytes(self) -> int:
        """Of the slots."""
        return len(self.pages) * slot_bytes(self.page_bytes)


@dataclass(slots=True, eq=False)
class Client:
    """One client of a core. ``local`` is one that writes to the arena itself: only its end ends its
    reservations. Guarded by the state's lock."""

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
    """What waits for promised pages, and their prompts' tokens."""
    suspects: bool = False  # a page that it takes for damaged is being looked at
    ended: bool = False

    def may_expect(self, tokens: int) -> bool:
        """Whether it may wait for promised pages of a prompt of so many tokens, too."""
        waiting = self.expecting.values()
        room = len(waiting) < MOST_EXPECTING and sum(waiting) + tokens <= MOST_EXPECTED_TOKENS
        return not waiting or room

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
            raise Refusal("busy", f"a client may register {MOST_IDENTITIES} identities")
        self.identities.append(registration)
        return len(self.identities) - 1

    def keep(self, lease: LocalLease) -> LocalLease:
        """Take a lease, and number it."""
        lease.number = next(_ids)
        self.leases[lease.number] = lease
        return lease

    def require_room(self, leases: int = 1) -> None:
        """Raise :class:`Refusal` unless ``leases`` more may be held."""
        self.forget_ended_leases()
        if len(self.leases) + leases > MOST_LEASES:
            raise Refusal("busy", f"a client may hold {MOST_LEASES} leases: release some")

    def require_patience(self) -> None:
        """Raises :class:`Refusal` when too many requests wait for a disk."""
        if self.waiting >= MOST_WAITING:
            raise Refusal("busy", f"{MOST_WAITING} requests of this client are waiting already")

    def forget_ended_leases(self) -> None:
        while self.leases:
            first = next(iter(self.leases))
            if not self.leases[first].hold.released:
                return
            del self.leases[first]

    def reserve(self, reservation: LocalReservation) -> int:
        """Take a reservation, whose bytes are counted already. Returns its id."""
        number = next(_ids)
        self.reservations[number] = reservation
        return number

    def end_reservation(self, number: int) -> LocalReservation:
        """Raises :class:`Refusal`."""
        reservation = self.reservation(number)
        del self.reservations[number]
        self.reserved_bytes -= reservation.nbytes
        return reservation

    def reservation(self, number: int) -> LocalReservation:
        """Raises :class:`Refusal`."""
        reservation = self.reservations.get(number)
        if reservation is None:
            raise Refusal("usage", f"this client has no reservation {number}")
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

    def forget_gone(self) -> None:
        """Let go of pages that have left the tree."""
        self.forget_ended_leases()
        for number, path in list(self.paths.items()):
            if not any(path.pages[-1].copies):
                self.forget_path(number)

    def forget_path(self, number: int) -> None:
        path = self.paths.pop(number, None)
        self.path_pages -= len(path.pages) if path is not None else 0
