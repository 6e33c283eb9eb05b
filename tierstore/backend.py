"""The protocol between a store and everything below HBM: one set of methods, for this process or a daemon.

A :class:`Backend` finds pages, says where their bytes are, and takes new ones. A store asks its backend for
everything that its own HBM pages do not answer, and copies the bytes itself: the backend never touches an
engine's memory.

::

    load    find ─▶ Lease ─▶ locate ─▶ Located.addresses ─▶ (the store copies) ─▶ Located.release, release
    save    reserve ─▶ Reservation.addresses ─▶ (the store copies) ─▶ commit

Each method may be called from any thread and returns at once. Slow work is a
:class:`~tierstore.transfer.Transfer`; its result is there already if nothing had to be waited for. A full,
slow, broken or absent backend gives a miss: a result that is short, empty or None. The only exceptions are
:class:`~tierstore.errors.UsageError` and :class:`~tierstore.errors.StoreClosedError`.

There are two implementations: :class:`tierstore.core.backend.LocalBackend` decides;
:class:`tierstore.client.backend.RemoteBackend` asks a daemon, which is a server over a ``LocalBackend``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from tierstore.errors import UsageError
from tierstore.explanation import Miss
from tierstore.groups import GroupRule, Past
from tierstore.index import Index, Page
from tierstore.keys import TOKEN_BYTES, Identity, PageKey, named_chunks, names_at
from tierstore.memory import Memory
from tierstore.planner import TierRate
from tierstore.stats import StoreStats
from tierstore.transfer import Transfer
from tierstore.types import ForgetReceipt, Hint, checked_session

P = TypeVar("P")  # a page


@dataclass(frozen=True, slots=True)
class PrefixHandle:
    """A short form of a prompt's first ``chunks`` chunks. ``owner``, a backend or one client connection of
    it, remembers them under ``number``, so they need not be sent again."""

    owner: object
    number: int
    chunks: int


@dataclass(slots=True, eq=False)
class KnownPrompt:
    """A prompt of an earlier request. ``data`` may continue behind its last key. ``handle`` is the backend's,
    and is replaced as a whole."""

    bucket: bytes
    data: bytes
    keys: list[PageKey]
    handle: PrefixHandle | None = None


@dataclass(slots=True)
class LookupRequest:
    """A prompt at the time of a request; it may grow meanwhile. Its tokens are the first ``nbytes`` of
    ``data`` (copying a long prompt costs more than matching it). ``keys`` has a key for each full chunk. The
    first ``common`` chunks are also those of ``known``. Each page has ``page_bytes`` bytes.

    Each chunk follows the one before it. :class:`NamedRequest` is for chunks without a parent.
    """

    identity: Identity
    page_bytes: int
    chunk_tokens: int
    data: bytes
    nbytes: int
    keys: list[PageKey]
    known: KnownPrompt | None = None
    common: int = 0
    depth: int = 0  # for named chunks: number of pages before the first one in its prompt
    gain: int = 0
    """For named chunks: tokens of a prompt that need not be computed if the missing chunks come from other
    hosts. If the gain is large enough, the backend checks whether other hosts have them."""
    counted: bool = True
    """Whether the backend counts this lookup and its hit. False for a second lookup of the same request."""

    named: ClassVar[bool] = False

    @property
    def registration(self) -> Registration:
        """The registration that a backend needs before this request."""
        return Registration(self.identity, self.page_bytes, self.chunk_tokens)

    @property
    def width(self) -> int:
        return self.chunk_tokens * TOKEN_BYTES

    @property
    def num_tokens(self) -> int:
        return self.nbytes // TOKEN_BYTES

    @property
    def num_chunks(self) -> int:
        """Number of chunks, including the partial tail."""
        return -(-self.nbytes // self.width)

    def tokens_from(self, chunk: int) -> bytes:
        """Return the token bytes from a chunk on."""
        return self.data[chunk * self.width : self.nbytes]

    def chunk(self, index: int) -> bytes:
        """Return the token bytes of a chunk. The last one may be the partial tail."""
        return self.data[index * self.width : min((index + 1) * self.width, self.nbytes)]

    def cut(self, tokens: int) -> LookupRequest:
        """Return a request for its first ``tokens`` tokens."""
        if tokens >= self.num_tokens:
            return self
        chunks = tokens // self.chunk_tokens
        return LookupRequest(
            self.identity,
            self.page_bytes,
            self.chunk_tokens,
            self.data,
            tokens * TOKEN_BYTES,
            self.keys[:chunks],
            self.known,
            min(self.common, chunks),
        )

    def limited(self, tokens: int) -> LookupRequest:
        """Return the request to send if no hit of more than ``tokens`` tokens is wanted."""
        return self.cut(tokens)

    def found(self, lease: Lease) -> LookupRequest:
        """Return the part of the request that a lease holds."""
        return self.cut(lease.tokens)

    def fits(self, pages: int, positions: Sequence[int]) -> bool:
        """Return whether an answer with ``pages`` pages, at these ``positions`` if they are named, is
        possible."""
        return True

    def slice(self, first: int, count: int) -> tuple[LookupRequest, int]:
        """Return a request that contains ``count`` chunks from ``first`` on, and the position of chunk
        ``first`` in it."""
        return self.cut((first + count) * self.chunk_tokens), first

    def saved_from(self, first: int) -> int:
        """Return the first chunk whose page must be known in order to save chunks from ``first`` on."""
        return 0

    def touch(self, index: Index, pages: Sequence[Page], positions: Iterable[int], *, hit: bool) -> None:
        """Note in an index that these pages are used. For named chunks, ``positions`` are theirs."""
        index.touch(pages, hit=hit)

    def holding(self, pages: list[P]) -> list[P]:
        """Return the pages to hold so that all of the prompt's leading ``pages`` stay in the index."""
        return pages[-1:]

    def parent(self, root: P, before: P) -> P:
        """Return the parent of a page: for chained pages the page ``before`` it, for named pages ``root``."""
        return before

    def handle_of(self, owner: object, chunks: int | None = None) -> PrefixHandle | None:
        """Return the handle of ``owner`` for a prefix of this prompt, for at most ``chunks`` chunks (None: as
        many as it has). None if there is none."""
        handle = self.known.handle if self.known is not None else None
        if handle is None or handle.owner is not owner:
            return None
        count = min(self.common, handle.chunks, len(self.keys) if chunks is None else chunks)
        return PrefixHandle(owner, handle.number, count) if count > 0 else None

    def forget_handle(self) -> None:
        """Forget the handle, because the backend no longer remembers it."""
        if self.known is not None:
            self.known.handle = None


@dataclass(slots=True)
class NamedRequest(LookupRequest):
    """Chunks without a parent: each is found, leased and saved by its own key
    (:meth:`~tierstore.keys.Prompt.named_pages`)."""

    named: ClassVar[bool] = True

    def part(self, chunks: Sequence[int]) -> NamedRequest:
        """Return a request for some of its chunks."""
        data = b"".join([self.chunk(chunk) for chunk in chunks])
        return NamedRequest(
            self.identity,
            self.page_bytes,
            self.chunk_tokens,
            data,
            len(data),
            [self.keys[chunk] for chunk in chunks],
            depth=self.depth + chunks[0] if chunks else 0,
        )

    def limited(self, tokens: int) -> LookupRequest:
        return self

    def found(self, lease: Lease) -> LookupRequest:
        return self.part(lease.positions)

    def fits(self, pages: int, positions: Sequence[int]) -> bool:
        in_order = sorted(set(positions)) == positions
        return in_order and len(positions) == pages and all(at < self.num_chunks for at in positions[-1:])

    def slice(self, first: int, count: int) -> tuple[LookupRequest, int]:
        return self.part(range(first, first + count)), 0

    def saved_from(self, first: int) -> int:
        return first

    def touch(self, index: Index, pages: Sequence[Page], positions: Iterable[int], *, hit: bool) -> None:
        depths = (self.depth + at for at in positions)
        index.touch_named(dict(zip(pages, depths, strict=True)), hit=hit)

    def holding(self, pages: list[P]) -> list[P]:
        return pages

    def parent(self, root: P, before: P) -> P:
        return root


@dataclass(frozen=True, slots=True)
class SaveHints:
    """A caller's hints for a save: a hint about the pages' future, and the session they belong to. Raise
    :class:`UsageError` for an invalid hint or session name."""

    hint: Hint | None = None
    session: str | None = None

    def __post_init__(self) -> None:
        checked_session(self.session)
        if self.hint is not None and not isinstance(self.hint, Hint):
            raise UsageError(f"hint must be a tierstore.Hint, got {type(self.hint).__name__}")

    def __bool__(self) -> bool:
        return self.hint is not None or self.session is not None


NO_HINTS = SaveHints()


@dataclass(slots=True, eq=False)
class Lease:
    """A lease on the first ``pages`` pages of a prompt (``tokens`` tokens). The backend holds them until
    ``ends`` on the store's clock, or until :meth:`Backend.release`. A lease without tokens holds nothing.

    ``runs`` are the pages' tiers in prefix order: (``host`` or ``disk``, number of pages). ``handle`` can
    replace the pages in later requests. For named chunks, ``positions`` has the positions of the held ones.
    """

    number: int
    tokens: int
    pages: int
    runs: Sequence[tuple[str, int]]
    ends: float
    handle: PrefixHandle | None = None
    positions: Sequence[int] = ()
    remote_positions: Sequence[int] = ()
    """For named chunks: positions of pages that are not held here but seem to be on other hosts."""
    page_bytes: int = 0  # size of each page

    def run_at(self, position: int) -> tuple[str, int]:
        """Return the tier of a page, and how many consecutive pages from it on are in that tier."""
        end = 0
        for tier, count in self.runs:
            end += count
            if position < end:
                return tier, end - position
        return "disk", 1


@dataclass(frozen=True, slots=True)
class Registration:
    """An identity that pages are stored under, and the size of its pages and chunks. In a daemon, the
    identity has the tenant of the client's key. ``model_name`` is the model's name for people, if it has one.
    """

    identity: Identity
    page_bytes: int
    chunk_tokens: int
    model_name: str = ""

    def named(self, model_name: str) -> Registration:
        """Return the registration with this name for its model, unless it has one."""
        return self if self.model_name else replace(self, model_name=model_name)


@dataclass(frozen=True, slots=True)
class NamedGroup:
    """A layer group whose pages are found by name, as part of a :class:`HitRequest`. The caller itself has
    the pages that end at the tokens ``here``. ``names`` is only for cross attention, and has the names of all
    pages of the prompt's inputs."""

    registration: Registration
    rule: GroupRule
    here: Sequence[int] = ()
    names: Sequence[bytes] = ()

    def names_at(
        self,
        ends: Sequence[int],
        chunk_tokens: int,
        names: Sequence[bytes],
        root: bytes,
        chunk: Callable[[int], bytes],
    ) -> list[bytes]:
        """Return the names of its pages that end there, from the names of a request's chunks; see
        :func:`tierstore.keys.names_at`."""
        if self.rule.past is Past.CROSS:
            return [self.names[end // chunk_tokens - 1] for end in ends]
        return names_at(ends, chunk_tokens, names, root, chunk)


@dataclass(slots=True)
class HitRequest:
    """A request for the longest hit on the first ``num_tokens`` tokens of a prompt, over all layer groups of
    its model.

    ``chains`` has a request for each group that needs every token, all for the same tokens. The caller itself
    has the first ``here[i]`` tokens of ``chains[i]``. ``named`` are the other groups. A page has the same
    name in each of these groups, except cross attention: ``names[i]`` (:data:`~tierstore.keys.NAME_BYTES`)
    stands for the tokens up to the end of whole chunk ``i``. ``root`` is the value that the first name was
    chained to. ``tail`` are the token bytes of the chunk in which ``num_tokens`` end, as far as the prompt
    has them.
    """

    chunk_tokens: int
    num_tokens: int
    chains: Sequence[LookupRequest]
    here: Sequence[int]
    named: Sequence[NamedGroup] = ()
    names: Sequence[bytes] = ()
    root: bytes = b""
    tail: bytes = b""
    counted: bool = True
    """Whether the backend counts this lookup and its hit. False for a second lookup of the same request."""
    explain: bool = False
    """Whether the answer has to say why the tokens behind the hit are missed."""

    def pages(self, group: NamedGroup, ends: Sequence[int]) -> NamedRequest:
        """Return a request for the pages of a group that end at these tokens."""
        names = group.names_at(ends, self.chunk_tokens, self.names, self.root, self._chunk)
        keys, data = named_chunks(names, self.chunk_tokens)
        known = group.registration
        return NamedRequest(known.identity, known.page_bytes, self.chunk_tokens, data, len(data), keys)

    def _chunk(self, index: int) -> bytes:
        return self.chains[0].chunk(index) if self.chains else self.tail

    @property
    def registrations(self) -> list[Registration]:
        """The registrations that a backend needs before this request, those of the chains first."""
        return [
            *(chain.registration for chain in self.chains),
            *(group.registration for group in self.named),
        ]


@dataclass(frozen=True, slots=True)
class GroupLease:
    """The pages of one layer group that a hit needs and the caller does not have. They end at the tokens
    ``ends``, in the order of the lease's pages. Other hosts seem to have the pages that end at
    ``remote_ends``."""

    lease: Lease
    ends: Sequence[int] = ()
    remote_ends: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class HitLease:
    """The answer to a :class:`HitRequest`. The longest hit that all groups support has ``tokens`` tokens. The
    groups that need every token reach ``branch`` tokens. ``chains`` and ``named`` are in the request's order.
    With pages that other hosts seem to have, the hit would be ``remote_tokens`` longer."""

    tokens: int
    branch: int
    chains: Sequence[GroupLease]
    named: Sequence[GroupLease]
    remote_tokens: int = 0
    misses: Sequence[Miss] = ()
    """Why the tokens behind the hit are missed, if the request asked for it. The number of a layer group is
    its place in the request."""

    @property
    def groups(self) -> list[GroupLease]:
        """All group leases, those of the chains first."""
        return [*self.chains, *self.named]


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class Located:
    """The addresses of leading pages of a request. The bytes stay at ``addresses`` until ``ends`` on the
    store's clock or until ``release()``, whichever is first. ``ends`` is infinite if only the release ends
    them. Bytes copied after ``ends`` must not be used. If there are ``checksums`` (XXH3-64, 0 if unknown),
    the copied bytes are compared with them."""

    addresses: Sequence[int]
    ends: float = math.inf
    checksums: Sequence[int] = ()
    release: Callable[[], None] = _nothing
    renew: Callable[[Callable[[float], None]], None] | None = None
    """Ask for a later end. The callback gets the new end, or the old one if it cannot be moved. None if
    ``ends`` is infinite or cannot be renewed."""
    memory: Memory | Sequence[memoryview] | None = None  # keeps the memory mapped


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for pages that a store writes. A reservation is never taken back while its store lives: it ends
    with ``commit`` or ``abort``.

    The pages at ``positions`` (counted from the first requested page, which is 0) are to be written: to
    ``addresses``, or by :meth:`Backend.write` if these are None. Pages that are stored already, or find no
    room, are not among them. After a commit of everything, ``stored_tokens`` tokens are stored.
    """

    number: int
    positions: Sequence[int]
    addresses: Sequence[int] | None
    stored_tokens: int
    handle: PrefixHandle | None = None
    owner: object = None
    memory: Memory | None = None  # keeps the memory mapped
    usable: Callable[[], bool] = field(default=lambda: True)
    """Return whether pages may still be written; False after the connection to the daemon was lost."""


class ForgottenPages(NamedTuple):
    """The pages that a forget has removed: all of ``identities`` (digests), and single ``pages`` (digest and
    key) with all pages behind them. Pools drop their copies. With these, they have been told of all forgets
    up to number ``told``."""

    identities: frozenset[bytes] = frozenset()
    pages: frozenset[tuple[bytes, PageKey]] = frozenset()
    told: int = 0


class Backend(Protocol):
    """Everything below HBM, for one store. Pages of one identity have one size. A store of several layer
    groups has an identity for each group."""

    @property
    def lease_s(self) -> float:
        """Seconds for which a lookup holds its pages."""

    @property
    def reserve_bytes(self) -> int:
        """Bytes that the store may hold in reservations at a time; 0 while nothing can be saved."""

    # -- reading -------------------------------------------------------------------------------------

    def find(
        self, request: LookupRequest, *, patience_s: float, caller_receives: bool = False
    ) -> Transfer[Lease | None]:
        """Lease the held pages of one layer group: the leading pages of a prompt, or each of the named ones.
        The result is None if there is no answer within ``patience_s`` seconds. ``caller_receives`` says that
        this thread waits for the answer at once."""

    def find_hit(
        self, request: HitRequest, *, patience_s: float, caller_receives: bool = False
    ) -> Transfer[HitLease | None]:
        """Find the longest hit that all layer groups of a prompt support. The lease holds exactly the pages
        that the hit needs and the caller does not have. The result is None if there is no answer within
        ``patience_s`` seconds. Release each of ``HitLease.groups``."""

    def expect(self, request: LookupRequest, *, wait_s: float) -> Transfer[None]:
        """Wait for promised pages: another engine will save all whole chunks of this prompt. Ends when they
        are held, when it is known that nothing comes, or after ``wait_s`` seconds. Look the pages up
        afterwards."""

    def batch_pages(self, lease: Lease, first: int) -> int:
        """Return the best number of pages to locate at a time, from ``first`` on."""

    def locate(
        self, lease: Lease, first: int, count: int, *, wait_s: float | None
    ) -> Transfer[Located | None]:
        """Load pages ``first … first + count`` of a lease into host memory and return their addresses: those
        of the leading pages that are there within ``wait_s`` seconds. Each result that is not None must be
        released."""

    def prefetch(self, lease: Lease, *, first: int = 0, wait_s: float | None) -> Transfer[int]:
        """Load the pages of a lease from ``first`` on into host memory and hold them there under the lease.
        The result is the number of consecutive pages from ``first`` on that are there within ``wait_s``
        seconds."""

    def report_damage(self, lease: Lease, position: int) -> None:
        """Report that the bytes of this page did not match their checksum. The backend checks the page, and
        drops a damaged copy."""

    def holds(self, lease: Lease) -> bool:
        """Return whether the lease has not ended."""

    def release(self, lease: Lease) -> None:
        """Release a lease that is no longer needed. Call it once for each lease."""

    # -- other hosts -----------------------------------------------------------------------------------

    @property
    def remote(self) -> bool:
        """Whether pages can be fetched from other hosts at all."""

    def fetch_remote(self, request: LookupRequest, first: int, count: int, *, wait_s: float) -> Transfer[int]:
        """Fetch whole chunks ``first … first + count`` of a prompt, or named ones, from other hosts into host
        memory. The result is the number of consecutive chunks that arrived within ``wait_s`` seconds; a
        lookup then finds them."""

    # -- planning ------------------------------------------------------------------------------------

    def rates(self) -> Mapping[str, TierRate]:
        """Return the measured rates of its tiers; see :mod:`tierstore.planner`."""

    def declined(self, tokens: Mapping[str, int]) -> None:
        """Count tokens that were found but not loaded, by tier and reason."""

    # -- writing -------------------------------------------------------------------------------------

    def reserve(
        self,
        request: LookupRequest,
        first: int,
        count: int,
        *,
        hints: SaveHints = NO_HINTS,
        handle: PrefixHandle | None = None,
    ) -> Transfer[Reservation | None]:
        """Reserve room for chunks ``first … first + count`` of a prompt, including its partial tail.
        ``count`` may be 0, to pass only ``hints``. ``handle`` comes from an earlier reservation of the same
        prompt."""

    def write(self, reservation: Reservation, first: int, frames: Sequence[memoryview]) -> Transfer[bool]:
        """Send the pages of positions ``first …`` of a reservation without addresses. The result is False if
        they were not received. ``frames`` must not change until then; otherwise the pages are not stored."""

    def commit(self, reservation: Reservation, checksums: dict[int, int]) -> Transfer[int]:
        """Commit the pages at these positions, each with its XXH3-64. The other pages are given up, and the
        reservation ends. The result is the number of stored pages."""

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation up."""

    # -- pins, eviction, statistics ------------------------------------------------------------------

    def pin(
        self, request: LookupRequest, *, undo: bool = False, max_tokens: int | None = None
    ) -> Transfer[int]:
        """Pin the held whole chunks of a prompt. ``undo`` undoes the tenant's newest pin of exactly this
        prompt. The result is the number of tokens of the pin; 0 if there was nothing to pin or to undo."""

    def evict(self, tier: str, pages: int | None) -> int:
        """Evict up to ``pages`` pages (None: all that may leave) from ``tier``. Blocks. Return the number
        evicted."""

    def finish(self, session: str) -> int | None:
        """End a session: pages that only this session has used leave first. Return their number; None without
        an answer."""

    def forget(
        self, *, tenant: str | None = None, model: str | None = None, session: str | None = None
    ) -> ForgetReceipt | None:
        """Forget a tenant, a model, or a session; see :meth:`Store.forget <tierstore.Store.forget>`. Return
        None without an answer."""

    def follow_forgets(
        self, follower: Callable[[ForgottenPages], None], limit_age: Callable[[float], None]
    ) -> None:
        """Call ``follower`` with what any client has forgotten and with what has become too old. Call
        ``limit_age`` with the seconds that pages may be kept, as soon as they are known and when they change.
        Both are called on any thread, and must not wait or raise."""

    def flush(self, timeout: float | None) -> bool:
        """Wait until everything committed so far is on disk or was given up. Return False when ``timeout``
        seconds pass first."""

    def stats(self) -> StoreStats:
        """Return a snapshot. If other clients share the backend, ``counters`` and ``open_hits`` are those of
        this client only."""

    def check(self) -> None:
        """Assert that redundant bookkeeping agrees."""

    @property
    def connected(self) -> bool:
        """Whether the backend exists and answers."""

    def wait_connected(self, timeout: float | None) -> bool:
        """Wait until the backend answers. Return False when ``timeout`` seconds pass first."""

    def wait_ready(self, timeout: float) -> None:
        """Wait until the backend has reached its full speed."""

    def register(self, registration: Registration) -> None:
        """Make an identity known before its first request."""

    def close(self) -> None:
        """Finish running work and release everything. Repeated calls do nothing."""
