"""The protocol between a store and everything below HBM, the same for a backend in this process and for a
daemon.

A :class:`Backend` finds pages, returns the addresses of their bytes, and stores new pages. A store calls its
backend for all pages that its own HBM does not hold. The store copies the bytes itself: the backend never
accesses an engine's memory.

::

    load    find ─▶ Lease ─▶ locate ─▶ Located.addresses ─▶ (the store copies) ─▶ Located.release, release
    save    reserve ─▶ Reservation.addresses ─▶ (the store copies) ─▶ commit

Each method of a backend may be called from any thread and returns without waiting. A method with slow work
returns a :class:`~tierstore.transfer.Transfer`, which has ended already if no work was slow. A full, slow,
broken or absent backend gives a miss: a result that is short, empty or None. A backend raises only
:class:`~tierstore.errors.UsageError` and :class:`~tierstore.errors.StoreClosedError`.

The protocol has two implementations: :class:`tierstore.core.backend.LocalBackend` makes all decisions;
:class:`tierstore.client.backend.RemoteBackend` sends requests to a daemon, which is a server over a
``LocalBackend``.
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
    """A number that stands for the first ``chunks`` chunks of a prompt in later requests. ``owner``, a
    backend or one client connection of a backend, remembers these chunks under ``number``."""

    owner: object
    number: int
    chunks: int


@dataclass(slots=True, eq=False)
class KnownPrompt:
    """A prompt of an earlier request. ``data`` may have more tokens than ``keys`` covers. ``handle`` is the
    backend's short form of the prompt. It may be replaced by another handle, but never changes itself."""

    bucket: bytes
    data: bytes
    keys: list[PageKey]
    handle: PrefixHandle | None = None


@dataclass(slots=True)
class LookupRequest:
    """The state of a prompt when a store sends a request, although the prompt may grow meanwhile. The request
    covers the first ``nbytes`` bytes of ``data`` (copying a long prompt would cost more than matching it).
    ``keys`` has a key for each full chunk. The request shares its first ``common`` chunks with the prompt
    ``known``. Each page has ``page_bytes`` bytes.

    Each chunk is the child of the chunk before it. :class:`NamedRequest` is for chunks without a parent.
    """

    identity: Identity
    page_bytes: int
    chunk_tokens: int
    data: bytes
    nbytes: int
    keys: list[PageKey]
    known: KnownPrompt | None = None
    common: int = 0
    depth: int = 0  # for named chunks: number of pages in the prompt before the first of these chunks
    gain: int = 0
    """For named chunks: number of prompt tokens that need not be computed if other hosts have the missing
    chunks. If this number is large enough, the backend checks whether other hosts have these chunks."""
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
        """Number of chunks, including a partial chunk at the end."""
        return -(-self.nbytes // self.width)

    def tokens_from(self, chunk: int) -> bytes:
        """Return the bytes of all tokens from ``chunk`` on."""
        return self.data[chunk * self.width : self.nbytes]

    def chunk(self, index: int) -> bytes:
        """Return the bytes of one chunk's tokens. The last chunk may be partial."""
        return self.data[index * self.width : min((index + 1) * self.width, self.nbytes)]

    def cut(self, tokens: int) -> LookupRequest:
        """Return a request for the first ``tokens`` tokens of this request."""
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
        """Return the request to send if a hit of more than ``tokens`` tokens is useless."""
        return self.cut(tokens)

    def found(self, lease: Lease) -> LookupRequest:
        """Return the part of the request that a lease holds."""
        return self.cut(lease.tokens)

    def fits(self, pages: int, positions: Sequence[int]) -> bool:
        """Return whether an answer with ``pages`` pages is possible. For named pages, the answer gives their
        ``positions``."""
        return True

    def slice(self, first: int, count: int) -> tuple[LookupRequest, int]:
        """Return a request that contains ``count`` chunks from chunk ``first`` on, and the position of chunk
        ``first`` in the returned request."""
        return self.cut((first + count) * self.chunk_tokens), first

    def saved_from(self, first: int) -> int:
        """Return the first chunk whose page the backend must know before it can save chunks from ``first``
        on."""
        return 0

    def touch(self, index: Index, pages: Sequence[Page], positions: Iterable[int], *, hit: bool) -> None:
        """Record in an index that these pages are used. For named chunks, ``positions`` has the pages'
        positions."""
        index.touch(pages, hit=hit)

    def holding(self, pages: list[P]) -> list[P]:
        """Return the pages to hold so that all of ``pages``, the leading pages of the prompt, stay in the
        index."""
        return pages[-1:]

    def parent(self, root: P, before: P) -> P:
        """Return the parent of a page: of a chained page the page ``before`` it, of a named page ``root``."""
        return before

    def handle_of(self, owner: object, chunks: int | None = None) -> PrefixHandle | None:
        """Return a handle of ``owner`` for at most the first ``chunks`` chunks of this prompt (None: as many
        chunks as the known handle has). Return None if ``owner`` has no handle."""
        handle = self.known.handle if self.known is not None else None
        if handle is None or handle.owner is not owner:
            return None
        count = min(self.common, handle.chunks, len(self.keys) if chunks is None else chunks)
        return PrefixHandle(owner, handle.number, count) if count > 0 else None

    def forget_handle(self) -> None:
        """Forget the handle, because the backend no longer remembers its chunks."""
        if self.known is not None:
            self.known.handle = None


@dataclass(slots=True)
class NamedRequest(LookupRequest):
    """A request for chunks without a parent: each chunk is found, leased and saved by its own key
    (:meth:`~tierstore.keys.Prompt.named_pages`)."""

    named: ClassVar[bool] = True

    def part(self, chunks: Sequence[int]) -> NamedRequest:
        """Return a request for some chunks of this request."""
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
    """A caller's hint for the pages of a save, and the session that the pages belong to. Raise
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
    """A lease on the first ``pages`` pages of a prompt, which have ``tokens`` tokens. The backend holds these
    pages until ``ends`` on the store's clock, or until :meth:`Backend.release`. A lease with 0 tokens holds
    nothing.

    ``runs`` gives the tiers of the pages in prefix order, as pairs of (``host`` or ``disk``, number of
    pages). Later requests can send ``handle`` in place of the leased pages. For named chunks, ``positions``
    has the positions of the held chunks.
    """

    number: int
    tokens: int
    pages: int
    runs: Sequence[tuple[str, int]]
    ends: float
    handle: PrefixHandle | None = None
    positions: Sequence[int] = ()
    remote_positions: Sequence[int] = ()
    """For named chunks: positions of pages that are not held here but probably on other hosts."""
    page_bytes: int = 0  # size of each page

    def run_at(self, position: int) -> tuple[str, int]:
        """Return the tier of a page, and the number of consecutive pages from this page on that are in the
        same tier."""
        end = 0
        for tier, count in self.runs:
            end += count
            if position < end:
                return tier, end - position
        return "disk", 1


@dataclass(frozen=True, slots=True)
class Registration:
    """An identity that pages are stored under, and the size of its pages and chunks. A daemon adds the tenant
    of the client's key to the identity. ``model_name`` is the model's name for people; it may be empty."""

    identity: Identity
    page_bytes: int
    chunk_tokens: int
    model_name: str = ""

    def named(self, model_name: str) -> Registration:
        """Return this registration, with ``model_name`` if it has no model name."""
        return self if self.model_name else replace(self, model_name=model_name)


@dataclass(frozen=True, slots=True)
class NamedGroup:
    """A layer group whose pages are found by name, as part of a :class:`HitRequest`. ``here`` lists the token
    positions at which the caller's own pages of this group end. ``names`` is only for cross attention, and
    has the names of all pages of the prompt's inputs."""

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
        """Return the names of the group's pages that end at ``ends``, computed from the ``names`` of a
        request's chunks; see :func:`tierstore.keys.names_at`."""
        if self.rule.past is Past.CROSS:
            return [self.names[end // chunk_tokens - 1] for end in ends]
        return names_at(ends, chunk_tokens, names, root, chunk)


@dataclass(slots=True)
class HitRequest:
    """A request for the longest hit on the first ``num_tokens`` tokens of a prompt, over all layer groups of
    its model.

    ``chains`` has a request for each layer group with chained pages; all are for the same
    tokens. The caller already holds the first ``here[i]`` tokens of ``chains[i]``. ``named`` has all other
    layer groups. A page has the same name in each named group, except cross attention: ``names[i]``
    (:data:`~tierstore.keys.NAME_BYTES` long) stands for all tokens up to the end of whole chunk ``i``.
    ``root`` takes the place of a parent's name for the first chunk. ``tail`` has the token bytes of the chunk
    in which token ``num_tokens`` lies, as far as the prompt contains them.
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
    """Whether the answer must explain why the tokens behind the hit are missed."""

    def pages(self, group: NamedGroup, ends: Sequence[int]) -> NamedRequest:
        """Return a request for the pages of ``group`` that end at the tokens ``ends``."""
        names = group.names_at(ends, self.chunk_tokens, self.names, self.root, self._chunk)
        keys, data = named_chunks(names, self.chunk_tokens)
        known = group.registration
        return NamedRequest(known.identity, known.page_bytes, self.chunk_tokens, data, len(data), keys)

    def _chunk(self, index: int) -> bytes:
        return self.chains[0].chunk(index) if self.chains else self.tail

    @property
    def registrations(self) -> list[Registration]:
        """The registrations that a backend needs before this request. The chains' registrations are first."""
        return [
            *(chain.registration for chain in self.chains),
            *(group.registration for group in self.named),
        ]


@dataclass(frozen=True, slots=True)
class GroupLease:
    """A lease on the pages of one layer group that a hit needs and the caller does not have. The leased pages
    end at the tokens ``ends``, in the same order. Other hosts probably have the pages that end at the tokens
    ``remote_ends``."""

    lease: Lease
    ends: Sequence[int] = ()
    remote_ends: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class HitLease:
    """The answer to a :class:`HitRequest`. The longest hit that all layer groups support has ``tokens``
    tokens. The chained layer groups alone would support ``branch`` tokens. ``chains`` and ``named`` have the
    request's order. The hit would be ``remote_tokens`` longer if the pages that other hosts probably have
    were here."""

    tokens: int
    branch: int
    chains: Sequence[GroupLease]
    named: Sequence[GroupLease]
    remote_tokens: int = 0
    misses: Sequence[Miss] = ()
    """Why the tokens behind the hit are missed, if the request has ``explain``. Layer groups are numbered as
    in the request."""

    @property
    def groups(self) -> list[GroupLease]:
        """All group leases. The leases of the chains are first."""
        return [*self.chains, *self.named]


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class Located:
    """The addresses of the leading pages of a request. The bytes stay at ``addresses`` until ``ends`` on the
    store's clock or until ``release()``, whichever is first. ``ends`` is infinite if the bytes stay until
    ``release()``. Bytes copied after ``ends`` must not be used. If there are ``checksums`` (XXH3-64, 0 if
    unknown), the store compares them with the copied bytes."""

    addresses: Sequence[int]
    ends: float = math.inf
    checksums: Sequence[int] = ()
    release: Callable[[], None] = _nothing
    renew: Callable[[Callable[[float], None]], None] | None = None
    """Request a later value of ``ends``. The callback gets the new value, or the old value if the backend
    refuses. None if ``ends`` is infinite or cannot be renewed."""
    memory: Memory | Sequence[memoryview] | None = None  # keeps the memory mapped


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for pages that a store writes. A backend never takes a reservation back while its store lives: the
    reservation ends with ``commit`` or ``abort``.

    ``positions`` has the pages that the store must write, counted from 0 at the first requested page. Their
    bytes go to ``addresses``, or to :meth:`Backend.write` if ``addresses`` is None. ``positions`` leaves out
    pages that are stored already and pages that find no room. After a commit of all positions,
    ``stored_tokens`` tokens of the prompt are stored.
    """

    number: int
    positions: Sequence[int]
    addresses: Sequence[int] | None
    stored_tokens: int
    handle: PrefixHandle | None = None
    owner: object = None
    memory: Memory | None = None  # keeps the memory mapped
    usable: Callable[[], bool] = field(default=lambda: True)
    """Return whether pages may still be written. False after the connection to the daemon was lost."""


class ForgottenPages(NamedTuple):
    """The pages that a forget has removed: all pages of ``identities`` (digests), and each of ``pages``
    (digest and key) with all pages behind it. A page pool drops its copies of them. With this report, pools
    have received all forgets up to number ``told``."""

    identities: frozenset[bytes] = frozenset()
    pages: frozenset[tuple[bytes, PageKey]] = frozenset()
    told: int = 0


class Backend(Protocol):
    """All tiers below HBM, as one store uses them. All pages of one identity have the same size. A store of
    several layer groups has an identity for each group."""

    @property
    def lease_s(self) -> float:
        """Seconds for which a lookup holds its pages."""

    @property
    def reserve_bytes(self) -> int:
        """Bytes that the store may reserve at a time; 0 while nothing can be saved."""

    # -- reading -------------------------------------------------------------------------------------

    def find(
        self, request: LookupRequest, *, patience_s: float, caller_receives: bool = False
    ) -> Transfer[Lease | None]:
        """Lease the stored pages of one layer group: the leading pages of a prompt, or each stored page of a
        named request. The result is None without an answer within ``patience_s`` seconds. ``caller_receives``
        says that the calling thread waits for the answer immediately."""

    def find_hit(
        self, request: HitRequest, *, patience_s: float, caller_receives: bool = False
    ) -> Transfer[HitLease | None]:
        """Find the longest hit that all layer groups of a prompt support. The lease holds exactly the pages
        that the hit needs and the caller does not have. The result is None without an answer within
        ``patience_s`` seconds. The caller must release each lease in ``HitLease.groups``."""

    def expect(self, request: LookupRequest, *, wait_s: float) -> Transfer[None]:
        """Wait until another engine has saved all whole chunks of this prompt, as it promised. The wait ends
        when the pages are stored, when it is known that they will not be saved, or after ``wait_s`` seconds.
        The caller then looks the pages up."""

    def batch_pages(self, lease: Lease, first: int) -> int:
        """Return the best number of pages for one call of :meth:`locate` that begins at page ``first``."""

    def locate(
        self, lease: Lease, first: int, count: int, *, wait_s: float | None
    ) -> Transfer[Located | None]:
        """Load pages ``first … first + count`` of a lease into host memory. The result has the addresses of
        the leading pages that are in host memory within ``wait_s`` seconds. The caller must release each
        result that is not None."""

    def prefetch(self, lease: Lease, *, first: int = 0, wait_s: float | None) -> Transfer[int]:
        """Load all pages of a lease from page ``first`` on into host memory, where the lease holds them. The
        result is the number of consecutive pages from ``first`` on that are in host memory within ``wait_s``
        seconds."""

    def report_damage(self, lease: Lease, position: int) -> None:
        """Report that the bytes of this page did not match their checksum. The backend checks the page, and
        drops a damaged copy of it."""

    def holds(self, lease: Lease) -> bool:
        """Return whether the lease still holds its pages."""

    def release(self, lease: Lease) -> None:
        """Release a lease that the caller no longer needs. Call ``release`` once for each lease."""

    # -- other hosts -----------------------------------------------------------------------------------

    @property
    def remote(self) -> bool:
        """Whether the backend can fetch pages from other hosts."""

    def fetch_remote(self, request: LookupRequest, first: int, count: int, *, wait_s: float) -> Transfer[int]:
        """Fetch chunks ``first … first + count`` of a request from other hosts into host memory; of a prompt,
        only whole chunks. The result is the number of consecutive chunks that arrived within ``wait_s``
        seconds. A lookup then finds these chunks."""

    # -- planning ------------------------------------------------------------------------------------

    def rates(self) -> Mapping[str, TierRate]:
        """Return the measured speed of each tier; see :mod:`tierstore.planner`."""

    def declined(self, tokens: Mapping[str, int]) -> None:
        """Count tokens that were found but not loaded. ``tokens`` maps a tier and a reason to a number of
        tokens."""

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
        """Reserve room for chunks ``first … first + count`` of a prompt, including its partial tail. With
        ``count=0``, the call only passes ``hints`` to the backend. ``handle`` comes from an earlier
        reservation of the same prompt."""

    def write(self, reservation: Reservation, first: int, frames: Sequence[memoryview]) -> Transfer[bool]:
        """Send the pages at positions ``first …`` of a reservation without addresses. The result is False if
        the backend did not receive the pages. ``frames`` must not change until the transfer ends; otherwise
        the pages are not stored."""

    def commit(self, reservation: Reservation, checksums: dict[int, int]) -> Transfer[int]:
        """Store the pages at the positions in ``checksums``, which has the XXH3-64 of each page. The
        reservation ends, and all its other pages are not stored. The result is the number of stored pages."""

    def abort(self, reservation: Reservation) -> None:
        """End a reservation without storing its pages."""

    # -- pins, eviction, statistics ------------------------------------------------------------------

    def pin(
        self, request: LookupRequest, *, undo: bool = False, max_tokens: int | None = None
    ) -> Transfer[int]:
        """Pin the stored whole chunks of a prompt. ``undo`` removes the tenant's newest pin of exactly this
        prompt. The result is the number of pinned or unpinned tokens; 0 if there was nothing to pin or to
        unpin."""

    def evict(self, tier: str, pages: int | None) -> int:
        """Evict up to ``pages`` pages (None: all pages that may be evicted) from ``tier``. Blocks. Return the
        number of evicted pages."""

    def finish(self, session: str) -> int | None:
        """End a session: the pages that only this session has used are evicted first. Return the number of
        these pages, or None without an answer."""

    def forget(
        self, *, tenant: str | None = None, model: str | None = None, session: str | None = None
    ) -> ForgetReceipt | None:
        """Forget a tenant, a model, or a session; see :meth:`Store.forget <tierstore.Store.forget>`. Return
        None without an answer from the backend."""

    def follow_forgets(
        self, follower: Callable[[ForgottenPages], None], limit_age: Callable[[float], None]
    ) -> None:
        """Call ``follower`` with the pages that any client has forgotten, and with pages that have become too
        old. Call ``limit_age`` with the number of seconds that pages may be kept, as soon as this number is
        known and when it changes. The backend may call these functions on any thread, and they must not wait
        or raise."""

    def flush(self, timeout: float | None) -> bool:
        """Wait until every page committed so far is on disk or will not be written. Return False if
        ``timeout`` seconds pass first."""

    def stats(self) -> StoreStats:
        """Return a snapshot of the statistics. If several clients share the backend, ``counters`` and
        ``open_hits`` are this client's own."""

    def check(self) -> None:
        """Assert that the backend's redundant bookkeeping agrees."""

    @property
    def connected(self) -> bool:
        """Whether the backend exists and answers."""

    def wait_connected(self, timeout: float | None) -> bool:
        """Wait until the backend answers. Return False if ``timeout`` seconds pass first."""

    def wait_ready(self, timeout: float) -> None:
        """Wait until the backend has reached its full speed."""

    def register(self, registration: Registration) -> None:
        """Register an identity, before its first request."""

    def close(self) -> None:
        """Finish all running work, then release everything. Repeated calls do nothing."""
