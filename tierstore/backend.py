"""The protocol between a store and what is below HBM: one set of verbs, in this process or in a daemon.

A :class:`Backend` finds pages, says where their bytes are, and takes new ones. A store asks it for everything
that its own HBM pages do not answer, and copies the bytes itself: the backend never touches an engine's
memory.

::

    load    find ─▶ Lease ─▶ locate ─▶ Located.addresses ─▶ (the store copies) ─▶ Located.release, release
    save    reserve ─▶ Reservation.addresses ─▶ (the store copies) ─▶ commit

Each verb may be called from any thread and returns at once. What takes time is a
:class:`~tierstore.transfer.Transfer`: the result is there already when nothing had to be waited for, and a
result that is short, empty or None is how a miss looks, be the backend full, slow, broken or away. Nothing
raises but :class:`~tierstore.errors.UsageError` and :class:`~tierstore.errors.StoreClosedError`.

There are two: :class:`tierstore.core.backend.LocalBackend` decides,
:class:`tierstore.client.backend.RemoteBackend` asks a daemon, which is a server over a ``LocalBackend``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar

from tierstore.errors import UsageError
from tierstore.groups import GroupRule
from tierstore.index import Index, Page
from tierstore.keys import TOKEN_BYTES, Identity, PageKey, named_chunks, names_at
from tierstore.memory import Memory
from tierstore.planner import TierRate
from tierstore.stats import StoreStats
from tierstore.transfer import Transfer
from tierstore.types import Hint, checked_session

P = TypeVar("P")  # a page


@dataclass(frozen=True, slots=True)
class PrefixHandle:
    """``owner``, a backend or one session of it, remembers the first ``chunks`` chunks of a prompt under
    ``number``: they need not be said again."""

    owner: object
    number: int
    chunks: int


@dataclass(slots=True, eq=False)
class KnownPrompt:
    """A prompt asked about earlier; ``data`` may go on behind its last key. ``handle`` is the backend's,
    replaced in one piece."""

    bucket: bytes
    data: bytes
    keys: list[PageKey]
    handle: PrefixHandle | None = None


@dataclass(slots=True)
class LookupRequest:
    """A prompt as it was when somebody asked: it may grow meanwhile. Its tokens are the first ``nbytes`` of
    ``data`` (copying a long prompt costs more than matching it), ``keys`` are those of its full chunks. The
    first ``common`` chunks are also those of ``known``. Each page of it has ``page_bytes`` bytes.

    Each chunk follows the one before it. :class:`NamedRequest` is of chunks that follow nothing."""

    identity: Identity
    page_bytes: int
    chunk_tokens: int
    data: bytes
    nbytes: int
    keys: list[PageKey]
    known: KnownPrompt | None = None
    common: int = 0
    depth: int = 0  # of named chunks: how many pages come before the first one in its prompt
    gain: int = 0
    """Of named chunks: tokens of a prompt that need not be computed if those that are lacking here come from
    other hosts. Where that is enough, it is found out whether these have them."""

    named: ClassVar[bool] = False

    @property
    def registration(self) -> Registration:
        """What a backend has to know before it is asked."""
        return Registration(self.identity, self.page_bytes, self.chunk_tokens)

    @property
    def width(self) -> int:
        return self.chunk_tokens * TOKEN_BYTES

    @property
    def num_tokens(self) -> int:
        return self.nbytes // TOKEN_BYTES

    @property
    def num_chunks(self) -> int:
        """The partial tail included."""
        return -(-self.nbytes // self.width)

    def tokens_from(self, chunk: int) -> bytes:
        """Token bytes from a chunk on."""
        return self.data[chunk * self.width : self.nbytes]

    def chunk(self, index: int) -> bytes:
        """Token bytes of a chunk; the last one may be the partial tail."""
        return self.data[index * self.width : min((index + 1) * self.width, self.nbytes)]

    def cut(self, tokens: int) -> LookupRequest:
        """The first ``tokens`` of it."""
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
        """What is asked for where no hit of more than ``tokens`` tokens is wanted."""
        return self.cut(tokens)

    def found(self, lease: Lease) -> LookupRequest:
        """What of it a lease is on."""
        return self.cut(lease.tokens)

    def fits(self, pages: int, positions: Sequence[int]) -> bool:
        """Whether an answer with so many pages, at these ``positions`` if they are named, can be right."""
        return True

    def slice(self, first: int, count: int) -> tuple[LookupRequest, int]:
        """A request that has chunks ``first … first + count``, and where the first of them is in it."""
        return self.cut((first + count) * self.chunk_tokens), first

    def saved_from(self, first: int) -> int:
        """The first chunk whose page has to be known for those from chunk ``first`` on to be saved."""
        return 0

    def touch(self, index: Index, pages: Sequence[Page], positions: Iterable[int], *, hit: bool) -> None:
        """Note in an index that these pages are used. Of named chunks, ``positions`` are theirs."""
        index.touch(pages, hit=hit)

    def holding(self, pages: list[P]) -> list[P]:
        """Those of its leading ``pages`` that keep all of them in the index while they are held."""
        return pages[-1:]

    def parent(self, root: P, before: P) -> P:
        """Of ``root`` and the page ``before``: the one that a page is found behind."""
        return before

    def handle_of(self, owner: object, chunks: int | None = None) -> PrefixHandle | None:
        """The handle that ``owner`` gave for a prefix of this prompt, for at most ``chunks`` chunks (None: as
        many as it has)."""
        handle = self.known.handle if self.known is not None else None
        if handle is None or handle.owner is not owner:
            return None
        count = min(self.common, handle.chunks, len(self.keys) if chunks is None else chunks)
        return PrefixHandle(owner, handle.number, count) if count > 0 else None

    def forget_handle(self) -> None:
        """The backend does not remember it any more."""
        if self.known is not None:
            self.known.handle = None


@dataclass(slots=True)
class NamedRequest(LookupRequest):
    """Chunks that follow nothing: each is found, leased and saved by its own key
    (:meth:`~tierstore.keys.Prompt.named_pages`)."""

    named: ClassVar[bool] = True

    def part(self, chunks: Sequence[int]) -> NamedRequest:
        """Some of its chunks."""
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
    """What a caller says with a save: what it knows of the pages' future, and the conversation they belong
    to. Raises :class:`UsageError` for a session's name that is none."""

    hint: Hint | None = None
    session: str | None = None

    def __post_init__(self) -> None:
        checked_session(self.session)
        if self.hint is not None and not isinstance(self.hint, Hint):
            raise UsageError(f"hint is a tierstore.Hint, not {type(self.hint).__name__}")

    def __bool__(self) -> bool:
        return self.hint is not None or self.session is not None


NO_HINTS = SaveHints()


@dataclass(slots=True, eq=False)
class Lease:
    """The backend holds the first ``pages`` pages of a prompt (``tokens`` tokens) until ``ends`` on the
    store's clock, or until :meth:`Backend.release`. ``runs`` are their tiers: (``host`` or ``disk``, pages),
    in prefix order. ``handle`` may stand for them in later requests. One with no tokens holds nothing. Of
    named chunks, ``positions`` are those that it holds."""

    number: int
    tokens: int
    pages: int
    runs: Sequence[tuple[str, int]]
    ends: float
    handle: PrefixHandle | None = None
    positions: Sequence[int] = ()
    remote_positions: Sequence[int] = ()
    """Of named chunks: those that are not held, and other hosts seem to have."""
    page_bytes: int = 0  # of each of its pages

    def run_at(self, position: int) -> tuple[str, int]:
        """The tier of a page, and how many pages from it on are in that tier."""
        end = 0
        for tier, count in self.runs:
            end += count
            if position < end:
                return tier, end - position
        return "disk", 1


@dataclass(frozen=True, slots=True)
class Registration:
    """An identity that pages are kept under, and what they look like. In a daemon the identity has the tenant
    that the client's key stands for. ``model_name`` is what people call the model, where they do."""

    identity: Identity
    page_bytes: int
    chunk_tokens: int
    model_name: str = ""


@dataclass(frozen=True, slots=True)
class NamedGroup:
    """A layer group whose pages are found by name, as one :class:`HitRequest` asks for it. The caller has the
    pages that end at the tokens ``here`` itself."""

    registration: Registration
    rule: GroupRule
    here: Sequence[int] = ()


@dataclass(slots=True)
class HitRequest:
    """The first ``num_tokens`` tokens of a prompt, as every layer group of its model keeps them.

    ``chains`` has a request for each group that needs every token, all for the same tokens. The caller has
    the first ``here[i]`` tokens of ``chains[i]`` itself. ``named`` are the other groups. A page of theirs has
    the same name in each group: ``names[i]`` (:data:`~tierstore.keys.NAME_BYTES`) stands for the tokens up to
    the end of whole chunk ``i``; ``root`` is what the first name was chained behind. ``tail`` are the token
    bytes of the chunk that the ``num_tokens`` end in, as far as the prompt has them."""

    chunk_tokens: int
    num_tokens: int
    chains: Sequence[LookupRequest]
    here: Sequence[int]
    named: Sequence[NamedGroup] = ()
    names: Sequence[bytes] = ()
    root: bytes = b""
    tail: bytes = b""
    counted: bool = True
    """Whether the backend counts this lookup and its hit. False for a second look on behalf of one
    request."""

    def pages(self, group: NamedGroup, ends: Sequence[int]) -> NamedRequest:
        """The pages of a group that end at these tokens."""
        names = names_at(ends, self.chunk_tokens, self.names, self.root, self._chunk)
        keys, data = named_chunks(names, self.chunk_tokens)
        known = group.registration
        return NamedRequest(known.identity, known.page_bytes, self.chunk_tokens, data, len(data), keys)

    def _chunk(self, index: int) -> bytes:
        return self.chains[0].chunk(index) if self.chains else self.tail

    @property
    def registrations(self) -> list[Registration]:
        """What a backend has to know before it is asked, the chains' first."""
        return [
            *(chain.registration for chain in self.chains),
            *(group.registration for group in self.named),
        ]


@dataclass(frozen=True, slots=True)
class GroupLease:
    """The pages that a hit needs of one layer group and that the caller does not have: they end at the tokens
    ``ends``, in the order of the lease's pages. Other hosts seem to have those at ``remote_ends``."""

    lease: Lease
    ends: Sequence[int] = ()
    remote_ends: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class HitLease:
    """The answer to a :class:`HitRequest`: the longest hit that all groups support has ``tokens`` tokens.
    The groups that need every token reach to ``branch``. ``chains`` and ``named`` are in the request's order.
    Together with what other hosts seem to have, the hit would be ``remote_tokens`` longer."""

    tokens: int
    branch: int
    chains: Sequence[GroupLease]
    named: Sequence[GroupLease]
    remote_tokens: int = 0

    @property
    def groups(self) -> list[GroupLease]:
        """All of them, the chains first."""
        return [*self.chains, *self.named]


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class Located:
    """Leading pages of those asked for: their bytes are at ``addresses``, and stay there until ``ends`` on
    the store's clock or until ``release()``, whichever is first (``ends`` is infinite where nothing but the
    release ends it). Bytes that were copied after ``ends`` must not be used. Where there are
    ``checksums`` (XXH3-64, 0 where it is not known), the bytes are compared with them."""

    addresses: Sequence[int]
    ends: float = math.inf
    checksums: Sequence[int] = ()
    release: Callable[[], None] = _nothing
    renew: Callable[[Callable[[float], None]], None] | None = None
    """Ask for a later end; the callback is told it (the old one when there is none). None where ``ends`` is
    infinite or past renewing."""
    memory: Memory | Sequence[memoryview] | None = None  # keeps it mapped


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for pages that a store writes. ``positions`` (from the first page asked for on, counted as 0) are
    to be written: to ``addresses``, or by :meth:`Backend.write` where those are None. Pages that are there
    already, or find no room, are not among them. ``stored_tokens`` will be stored when all of it is
    committed.

    A reservation is never taken back while its store lives: it ends with ``commit`` or ``abort``."""

    number: int
    positions: Sequence[int]
    addresses: Sequence[int] | None
    stored_tokens: int
    handle: PrefixHandle | None = None
    owner: object = None
    memory: Memory | None = None  # keeps it mapped
    usable: Callable[[], bool] = field(default=lambda: True)
    """Whether pages may still be written: not when the daemon has gone."""


class Backend(Protocol):
    """What is below HBM, for one store. Pages of one identity have one size; a store of several layer groups
    has an identity for each group."""

    @property
    def lease_s(self) -> float:
        """How long a lookup holds its pages."""

    @property
    def reserve_bytes(self) -> int:
        """How much the store may hold in reservations at once; 0 while nothing can be saved."""

    # -- reading -------------------------------------------------------------------------------------

    def find(
        self, request: LookupRequest, *, patience_s: float, caller_receives: bool = False
    ) -> Transfer[Lease | None]:
        """Lease what is held of one layer group: the leading pages of a prompt, or each of the named ones.
        The result is None when there was no answer in ``patience_s`` seconds. ``caller_receives``: this
        thread waits for the answer at once."""

    def find_hit(
        self, request: HitRequest, *, patience_s: float, caller_receives: bool = False
    ) -> Transfer[HitLease | None]:
        """The longest hit that all layer groups of a prompt support, with a lease on exactly the pages that
        it needs and that the caller does not have; None when there was no answer in ``patience_s`` seconds.
        Release each of ``HitLease.groups``."""

    def expect(self, request: LookupRequest, *, wait_s: float) -> Transfer[None]:
        """Somebody has promised to save all whole chunks of this prompt. Ends when they are held, when it is
        known that nothing comes, or after ``wait_s`` seconds; then they are looked up like any others."""

    def batch_pages(self, lease: Lease, first: int) -> int:
        """How many pages from ``first`` on are best located at a time."""

    def locate(
        self, lease: Lease, first: int, count: int, *, wait_s: float | None
    ) -> Transfer[Located | None]:
        """Bring pages ``first … first + count`` of a lease into host memory and say where they are: the
        leading ones that are there in ``wait_s`` seconds. Each result that is not None has to be released."""

    def prefetch(self, lease: Lease, *, first: int = 0, wait_s: float | None) -> Transfer[int]:
        """Bring the pages of a lease from ``first`` on into host memory and hold them there under it. How
        many of them, from ``first`` on, are there in ``wait_s`` seconds."""

    def report_damage(self, lease: Lease, position: int) -> None:
        """The bytes of this page were not those that its checksum is of. The backend looks for itself, and
        lets go of a copy that is damaged."""

    def holds(self, lease: Lease) -> bool:
        """Whether the lease has not ended."""

    def release(self, lease: Lease) -> None:
        """The lease is not needed any more. Once, for each."""

    # -- other hosts -----------------------------------------------------------------------------------

    @property
    def remote(self) -> bool:
        """Whether pages of other hosts can be brought at all."""

    def fetch_remote(self, request: LookupRequest, first: int, count: int, *, wait_s: float) -> Transfer[int]:
        """Have whole chunks ``first … first + count`` of a prompt, or named ones, come into host memory from
        other hosts. How many came, one behind the other, in ``wait_s`` seconds; then they are found like any
        others."""

    # -- planning ------------------------------------------------------------------------------------

    def rates(self) -> Mapping[str, TierRate]:
        """What bytes of its tiers cost, as far as that was measured; see :mod:`tierstore.planner`."""

    def declined(self, tokens: Mapping[str, int]) -> None:
        """So many tokens were found and not loaded, by tier and reason. To be counted."""

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
        """Room for chunks ``first … first + count`` of a prompt, its partial tail included. ``count`` may be
        0, for the sake of ``hints``. ``handle`` is one that an earlier reservation of this very prompt
        gave."""

    def write(self, reservation: Reservation, first: int, frames: Sequence[memoryview]) -> Transfer[bool]:
        """Send the pages of positions ``first …`` of a reservation without addresses. False when they were
        not received. ``frames`` may not change until then, or the pages are not stored."""

    def commit(self, reservation: Reservation, checksums: dict[int, int]) -> Transfer[int]:
        """The pages at these positions are complete, each with its XXH3-64; the others are given up. Ends the
        reservation. How many are stored."""

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation up."""

    # -- keeping, dropping, seeing -------------------------------------------------------------------

    def pin(
        self, request: LookupRequest, *, undo: bool = False, max_tokens: int | None = None
    ) -> Transfer[int]:
        """Keep the held whole chunks of a prompt. ``undo`` takes back the newest pin of exactly this prompt
        by the same tenant. The tokens of the pin; 0 where there was nothing to pin or to undo."""

    def evict(self, tier: str, pages: int | None) -> int:
        """Let up to ``pages`` pages (None: all that may) leave ``tier``. Blocks. How many left."""

    def finish(self, session: str) -> int | None:
        """A session is over: what only it has used leaves first. How many pages; None without an answer."""

    def flush(self, timeout: float | None) -> bool:
        """Wait until all that was committed is on disk, or given up; False when ``timeout`` seconds pass."""

    def stats(self) -> StoreStats:
        """A snapshot. ``counters`` and ``open_hits`` are about this backend's client only where others have
        it too."""

    def check(self) -> None:
        """Assert that everything that is counted twice agrees."""

    @property
    def connected(self) -> bool:
        """Whether it is there, and answers."""

    def wait_connected(self, timeout: float | None) -> bool:
        """Wait until it answers; False when ``timeout`` seconds pass first."""

    def wait_ready(self, timeout: float) -> None:
        """Wait until the backend is as fast as it gets."""

    def register(self, registration: Registration) -> None:
        """Have an identity known before its first prompt is asked for."""

    def close(self) -> None:
        """Finish what is under way and give everything back. Idempotent."""
