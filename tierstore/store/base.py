"""What every store does, wherever its pages are: in this process, in a daemon, on another machine.

A connector is written against :class:`Store` and :class:`Hit`. Which store it gets is decided in one place:
:meth:`Store.open` (embedded: host memory and a directory of its own) or :meth:`Store.connect` (a daemon's).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from tierstore.errors import UsageError
from tierstore.hints import Hint
from tierstore.index import Tier
from tierstore.keys import Identity, Prompt, TokenIds
from tierstore.policy import DEFAULT_POLICY
from tierstore.spec import KVSpec
from tierstore.store.health import STALL_S
from tierstore.store.stats import StoreStats
from tierstore.tiers.hbm import PagePool
from tierstore.transfer import Transfer
from tierstore.units import GIB, KIB

if TYPE_CHECKING:
    from tierstore.daemon.connected import ConnectedStore
    from tierstore.store.embedded import EmbeddedStore
    from tierstore.store.load import Loaded
    from tierstore.tiers.disk import FileIO

DEFAULT_HOST_BYTES = 1 * GIB
DEFAULT_DISK_BYTES = 10 * GIB
DEFAULT_LEASE_S = 60.0

H = TypeVar("H", bound="Hit")


class Hit(ABC):
    """``tokens`` leading tokens of a prompt can be loaded. The pages stay where they are until
    :meth:`release`, the end of the load, or the end of the lease; a later load brings what is still there.

    ``by_tier`` counts the tokens by the fastest tier that held them at the lookup, fastest first.
    """

    tokens: int
    chunk_tokens: int
    by_tier: Mapping[str, int]

    @property
    def num_pages(self) -> int:
        """Pages of the hit, the one it ends inside of included: as many buffers take a load."""
        return -(-self.tokens // self.chunk_tokens)

    @abstractmethod
    def prefetch(self, *, deadline_s: float | None = None) -> Transfer[int]:
        """Bring what is on disk into host memory, in prefix order, and hold it there. The result is the
        number of leading tokens that are then above the disk; at the deadline it is what has arrived."""

    @abstractmethod
    def release(self) -> None:
        """Give the lease back. Repeating it is harmless."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tokens} tokens, {dict(self.by_tier)})"

    def __enter__(self: H) -> H:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Store(ABC):
    """A stack of tiers that pages are found in, loaded from and saved to. Thread-safe.

    Pages are found by a :class:`~tierstore.keys.Prompt` (or bare tokens, under the store's own identity).
    Nothing here raises because a tier is full, slow, broken or away: fewer tokens come back, or fewer are
    stored. :class:`~tierstore.errors.UsageError` and :class:`~tierstore.errors.StoreClosedError` are for
    mistakes of the caller.

    What takes time is a :class:`~tierstore.transfer.Transfer`: poll it, ``wait()`` for it, or ``await`` it.
    """

    spec: KVSpec
    identity: Identity
    pool: PagePool | None

    # -- opening one ---------------------------------------------------------------------------------

    @staticmethod
    def open(
        path: str | Path | None,
        spec: KVSpec,
        *,
        identity: Identity | None = None,
        pool: PagePool | None = None,
        host_bytes: int = DEFAULT_HOST_BYTES,
        disk_bytes: int = DEFAULT_DISK_BYTES,
        inline_bytes: int = 16 * KIB,
        policy: str = DEFAULT_POLICY,
        lease_s: float = DEFAULT_LEASE_S,
        mover_threads: int = 4,
        stall_s: float = STALL_S,
        io: FileIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> EmbeddedStore:
        """Open an embedded store: its tiers are this process's own.

        ``path`` is the disk tier's directory (made if it is not there; one process at a time), None for none.
        ``pool`` is the engine's HBM page pool, if pages are to be found and kept there too. ``identity``
        stands for tokens given without a prompt; without one only the layout tells pages apart, so give one
        wherever weights, adapters or tenants can differ. ``lease_s`` is how long a hit holds its pages.
        ``policy`` is one of ``tierstore.policy.POLICIES`` and says who leaves a full tier first.
        A disk that has not answered a call for ``stall_s`` seconds is not waited for any more, until it does.
        ``io`` and ``clock`` are for tests that make the disk fail.

        Raises :class:`UsageError` for capacities that cannot hold a page and
        :class:`~tierstore.errors.StoreUnavailableError` for a directory that cannot be used.
        """
        from tierstore.store.embedded import open_embedded

        return open_embedded(
            path,
            spec,
            identity=identity,
            pool=pool,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            inline_bytes=inline_bytes,
            policy=policy,
            lease_s=lease_s,
            mover_threads=mover_threads,
            stall_s=stall_s,
            io=io,
            clock=clock,
        )

    @staticmethod
    def connect(
        url: str,
        spec: KVSpec,
        *,
        identity: Identity | None = None,
        pool: PagePool | None = None,
        lookup_s: float = 0.5,
        mover_threads: int = 2,
        keys: str | Path | None = None,
        server_key: str | Path | None = None,
    ) -> ConnectedStore:
        """Use the daemon at ``url``: ``ipc://PATH`` on this host, ``tcp://HOST:PORT`` on another.

        It need not be there yet: while it is not, lookups miss and nothing is stored. ``lookup_s`` is the
        longest that a lookup (and every verb without a deadline of its own) waits for an answer. ``keys`` is
        this client's ``.secret`` file, ``server_key`` the daemon's ``.key`` file (see ``tierstore keygen``),
        for ``tcp://``. The other arguments are those of :meth:`open`.

        Raises :class:`UsageError` for an address or keys that cannot be used.
        """
        from tierstore.daemon.connected import ConnectedStore

        return ConnectedStore.connect(
            url,
            spec,
            identity=identity,
            pool=pool,
            lookup_s=lookup_s,
            mover_threads=mover_threads,
            keys=keys,
            server_key=server_key,
        )

    # -- finding and loading -------------------------------------------------------------------------

    @abstractmethod
    def prompt(self, tokens: TokenIds) -> Prompt:
        """``tokens`` under the store's own identity, with their keys."""

    @abstractmethod
    def lookup(self, prompt: Prompt | TokenIds, *, max_tokens: int | None = None) -> Hit:
        """The longest prefix of ``prompt`` (at most ``max_tokens``) that is held in any tier, leased until
        the hit is loaded or released, or the lease ends."""

    @abstractmethod
    def load(
        self,
        hit: Hit,
        into: Sequence[bytearray | memoryview] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Transfer[Loaded]:
        """Bring a hit's pages into HBM pages (the default, for a store with a pool) or ``into`` buffers of
        ``page_bytes``, one for each page of the hit.

        The transfer ends with the leading pages that arrived by the deadline; ``cancel()`` gives everything
        back and ends with none. The hit is released when it ends.
        """

    # -- saving --------------------------------------------------------------------------------------

    @abstractmethod
    def save(
        self,
        prompt: Prompt | TokenIds,
        pages: Sequence[bytes | bytearray | memoryview],
        *,
        first: int = 0,
        hint: Hint | None = None,
        session: str | None = None,
    ) -> Transfer[int]:
        """Store ``pages`` as chunks ``first, first + 1, …`` of ``prompt``; the last may be its partial tail.

        Each page is a buffer of ``page_bytes`` that must stay as it is until the transfer ends: its bytes
        are then in the host tier, and go to disk behind the caller's back (see :meth:`flush`). The result is
        the number of tokens that are stored; pages that are there already count and are not copied.

        ``hint`` is what the caller knows of the pages' future, ``session`` any name of the conversation that
        they are part of (see :mod:`tierstore.hints`, and :meth:`finish`). Neither changes what is found or
        loaded, only what leaves first when a tier is full. A save of no pages can carry them, too.
        """

    @abstractmethod
    def save_hbm(
        self,
        prompt: Prompt,
        hbm_pages: Sequence[int],
        *,
        first: int = 0,
        hint: Hint | None = None,
        session: str | None = None,
    ) -> Transfer[int]:
        """Like :meth:`save`, for pages of the pool that the caller owns: they are published where they are,
        become read-only, and are cached after ``release_hbm``."""

    @abstractmethod
    def finish(self, session: str) -> int:
        """A session is over: those of its pages that no other session, and nobody without one, has saved or
        gone on from leave first from now on. Returns how many pages that is. An unknown session has none."""

    @abstractmethod
    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was saved is on disk (or was given up); False when ``timeout`` seconds pass."""

    # -- room in HBM (for the engine that owns the pool) -----------------------------------------------

    @abstractmethod
    def allocate_hbm(self, count: int) -> list[int] | None:
        """``count`` private pages of the pool, evicting cached ones; None when that many cannot be had."""

    @abstractmethod
    def release_hbm(self, hbm_pages: Sequence[int]) -> None:
        """The caller is done with these pages (once for each time it came to own one)."""

    @abstractmethod
    def available_hbm(self) -> int:
        """Pages that ``allocate_hbm`` could find: free ones and cached ones that may leave."""

    # -- keeping and dropping ------------------------------------------------------------------------

    @abstractmethod
    def evict(self, tier: str, pages: int | None = None) -> int:
        """Let up to ``pages`` pages (None: all that may) leave ``tier`` (``hbm``, ``host`` or ``disk``), the
        policy's worst first. Returns how many left; leased and pinned ones stay."""

    @abstractmethod
    def pin(self, prompt: Prompt | TokenIds) -> int:
        """Keep the held whole chunks of ``prompt`` in the store until :meth:`unpin`; returns their tokens. A
        pinned page may leave fast tiers, but not its last and coldest one."""

    @abstractmethod
    def unpin(self, prompt: Prompt | TokenIds) -> int:
        """Undo one :meth:`pin` of the same prompt; returns the tokens that were pinned."""

    # -- seeing and ending ---------------------------------------------------------------------------

    @abstractmethod
    def stats(self) -> StoreStats:
        """A snapshot of everything that is counted."""

    @abstractmethod
    def check(self) -> None:
        """Assert that everything that is counted twice agrees. For tests and idle moments."""

    @abstractmethod
    def wait_ready(self) -> None:
        """Block until the store is as fast as it gets (it works before that, more slowly)."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way and give everything back. Idempotent."""

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


S = TypeVar("S", bound=Store)


def checked_tier(name: str) -> Tier:
    """Raises :class:`UsageError` for a name that is no tier's."""
    for tier in Tier:
        if tier.label == name:
            return tier
    raise UsageError(f"unknown tier {name!r} (known: {', '.join(tier.label for tier in Tier)})")


def check_chunks(first: int, count: int, chunks: int) -> None:
    """Raises :class:`UsageError` if chunks ``first … first + count`` are not all within ``chunks``."""
    if first < 0 or first + count > chunks:
        raise UsageError(f"chunks {first} … {first + count} do not lie within a prompt of {chunks} chunks")


def checked_prompt(store: Store, layout: str, prompt: Prompt | TokenIds) -> Prompt:
    """``prompt`` if it was made for ``layout`` (``store.spec.describe()``), bare tokens under the store's own
    identity. Raises :class:`UsageError` for a prompt of another layout."""
    if not isinstance(prompt, Prompt):
        return store.prompt(prompt)
    if prompt.chunk_tokens != store.spec.chunk_tokens or prompt.identity.layout != layout:
        raise UsageError("the prompt was made for another page layout than this store's")
    return prompt
