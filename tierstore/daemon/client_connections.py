"""The connections of a daemon's clients, and the state that all connections share.

A connection checks the content of its client's messages.
"""

from __future__ import annotations

import array
import asyncio
import struct
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

from tierstore.backend import ForgottenPages, NamedGroup
from tierstore.core.backend import LocalBackend
from tierstore.core.clients import Client, LocalLease, Refusal
from tierstore.core.core import Core
from tierstore.core.hits import HitView
from tierstore.core.prompts import ChainView, NamedView, PromptView
from tierstore.daemon.stats import ClientStats
from tierstore.errors import UsageError
from tierstore.groups import GroupRule, Past
from tierstore.keys import KEY_BYTES, LEAST_NAMED_TOKENS, NAME_BYTES, TOKEN_BYTES, PageKey
from tierstore.transfer import Transfer
from tierstore.wire import messages as p

if TYPE_CHECKING:  # the module is imported only by daemons with a cluster
    from tierstore.cluster.supervisor import Cluster

_WAIT_THREADS = 4  # for requests that block for long: flushes, listings, evictions

assert sys.byteorder == "little", "messages carry positions and offsets in little-endian order"

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PageFrames:
    """An answer with pages as frames behind it. When the pages' memory is not needed any more, ``sent`` must
    be called on the event loop."""

    answer: p.Fetched
    frames: Sequence[memoryview]
    sent: Callable[[], None]


Reply: TypeAlias = "p.Answer | PageFrames | None"


class ServiceState:
    """The state that all client connections of a daemon share. ``stats_json`` returns the JSON that answers a
    :class:`p.Stats`. ``cluster`` is None without a shared store."""

    def __init__(self, core: Core, stats_json: Callable[[], bytes]) -> None:
        self.core = core
        self.stats_json = stats_json
        self.cluster: Cluster | None = None
        self.connections: dict[int, ClientConnection] = {}
        self.promised_lookups = 0
        self.broken_promises = 0
        self.threads = ThreadPoolExecutor(_WAIT_THREADS, thread_name_prefix="tierstore-wait")


@dataclass(slots=True, eq=False)
class ClientConnection:
    """The connection of one client. ``sending_bytes`` is the size of the pages that were passed to ZMQ and
    are not sent yet. The futures in ``sent`` end when some of these pages have been sent."""

    service: ServiceState
    backend: LocalBackend
    sending_bytes: int = 0
    sent: list[asyncio.Future[None]] = field(default_factory=list)
    # By reservation: the prompt whose pages are published for other hosts, and the number of its chunks.
    sharing: dict[int, tuple[PromptView, int]] = field(default_factory=dict)
    expected: dict[int, Transfer[None]] = field(default_factory=dict)  # open promises by lookup id

    @property
    def client(self) -> Client:
        return self.backend.client

    @property
    def number(self) -> int:
        return self.client.number

    @property
    def local(self) -> bool:
        return self.client.local

    @property
    def tenant(self) -> str:
        return self.client.tenant

    @property
    def cluster(self) -> Cluster | None:
        """The agents that fetch pages from other hosts for this client. None without a shared store, and if
        the client is itself an agent of the cluster, whose requests must not cause fetches."""
        cluster, name = self.service.cluster, self.client.name
        if cluster is None or (self.local and any(name.endswith(f", pid {pid}") for pid in cluster.pids)):
            return None
        return cluster

    def lease(self, number: int) -> LocalLease | None:
        """Return the client's lease with this number; None if it has ended."""
        lease = self.client.leases.get(number)
        return lease if lease is not None and self.backend.holds(lease) else None

    def release(self, leases: Sequence[int]) -> None:
        """Release leases by their numbers. Numbers that are not this client's leases are ignored."""
        for number in leases:
            lease = self.client.leases.get(number)
            if lease is not None:
                self.backend.release(lease)

    # -- messages (an inconsistent message raises :class:`Refusal`) -------------------------------------

    def view(self, part: p.PromptPart, like: PromptView | None = None) -> PromptView:
        """Return the prompt that a message describes. With ``like``, use the unpacked keys of ``like``."""
        registration = self.client.registration(part.identity)
        width = registration.chunk_tokens * TOKEN_BYTES
        whole = len(part.tokens) // width
        if len(part.tokens) % TOKEN_BYTES or len(part.keys) != whole * KEY_BYTES:
            raise Refusal(
                "usage",
                f"{len(part.tokens)} bytes of tokens in chunks of {registration.chunk_tokens} tokens need "
                f"{whole} keys of {KEY_BYTES} bytes, got {len(part.keys)} bytes",
            )
        if not 0 <= part.known <= p.MAX_CHUNKS or part.known + whole > p.MAX_CHUNKS:
            raise Refusal("usage", f"a prompt may have at most {p.MAX_CHUNKS} chunks")
        unpacked = struct.unpack(f"{KEY_BYTES}s" * whole, part.keys) if like is None else like.keys
        keys = cast(Sequence[PageKey], unpacked)
        if part.named:
            if not registration.identity.whole_pages or len(part.tokens) != whole * width:
                raise Refusal("usage", "named pages must be whole pages, of a layout that supports them")
            return NamedView(registration, keys, part.tokens, depth=part.known)
        if not part.path:
            return ChainView(registration, keys, part.tokens)
        path = self.client.path(part.path)
        if part.known > len(path.pages):
            raise Refusal("path", f"path {part.path} has {len(path.pages)} chunks, not {part.known}")
        if path.pages and path.pages[0].identity != registration.identity.digest:
            raise Refusal("path", f"path {part.path} belongs to another identity")
        return ChainView(registration, keys, part.tokens, path=path, path_number=part.path, known=part.known)

    def hit_view(self, m: p.FindHit) -> HitView:
        """Return the request for a hit that a message describes."""
        if len(m.chains) != len(m.here) or not 0 < len(m.chains) + len(m.named) <= p.MAX_GROUPS:
            raise Refusal(
                "usage",
                f"inconsistent request: {len(m.chains)} chains, {len(m.here)} entries in here, "
                f"{len(m.named)} named groups",
            )
        chains: list[ChainView] = []
        for part in m.chains:
            like = chains[0] if chains and not part.keys else None
            part.keys = part.keys or m.chains[0].keys
            part.tokens = part.tokens or m.chains[0].tokens
            if isinstance(view := self.view(part, like), ChainView):
                chains.append(view)
        named = [
            NamedGroup(
                self.client.registration(part.identity),
                _rule(part),
                array.array("I", part.here),
                _names(part.names),
            )
            for part in m.named
            if len(part.here) % 4 == 0
        ]
        registrations = [*(chain.registration for chain in chains), *(group.registration for group in named)]
        if any(group.rule.past is Past.ALL for group in named) and (
            chains or len(named) > 1 or not m.explain
        ):
            raise Refusal("usage", "a layer group that needs every token must be a chain")
        sizes = {each.chunk_tokens for each in registrations}
        whole = [group.registration.identity.whole_pages for group in named]
        if len(sizes) != 1 or len(named) != len(m.named) or not all(whole) or len(chains) < len(m.chains):
            raise Refusal("usage", "the layer groups do not belong to one model")
        [chunk_tokens] = sizes
        names = _names(m.names)
        chunks, rest = divmod(m.num_tokens, chunk_tokens)
        named_fit = not named or (
            chunk_tokens >= LEAST_NAMED_TOKENS
            and len(m.names) % NAME_BYTES == 0
            and chunks <= len(names) <= p.MAX_CHUNKS
            and (bool(chains) or len(m.tail) >= rest * TOKEN_BYTES)
            and all(_inputs_fit(group, chunk_tokens) for group in named)
        )
        if m.num_tokens < 0 or any(chain.num_tokens < m.num_tokens for chain in chains) or not named_fit:
            raise Refusal(
                "usage", f"num_tokens is {m.num_tokens}: the prompt is shorter, or the tokens have no names"
            )
        return HitView(
            chunk_tokens, m.num_tokens, chains, m.here, named, names, m.root, m.tail, m.counted, m.explain
        )

    def pages_asked_for(self, m: p.Locate | p.Fetch) -> tuple[LocalLease | None, int]:
        """Return the message's lease (None if it has ended) and how many of the requested pages it covers."""
        if m.first < 0 or m.count < 0:
            raise Refusal("usage", f"first and count must not be negative, got {m.first} and {m.count}")
        lease = self.lease(m.lease)
        return lease, max(min(m.count, lease.pages - m.first), 0) if lease is not None else 0

    def forgotten(self, forgotten: ForgottenPages) -> p.PagesForgotten | None:
        """Return the message about forgotten pages; None if this client has registered none of their
        identities."""
        numbers = [(each.identity.digest, number) for number, each in enumerate(self.client.identities)]
        identities = [number for digest, number in numbers if digest in forgotten.identities]
        keys: dict[bytes, bytes] = {}
        for digest, key in forgotten.pages:
            keys[digest] = keys.get(digest, b"") + key
        pages = [(number, keys[digest]) for digest, number in numbers if digest in keys]
        if not identities and not pages:
            return None
        return p.PagesForgotten(0, forgotten.told, identities, pages)

    # -- waiting -------------------------------------------------------------------------------------

    def note_sent(self, nbytes: int) -> None:
        """Subtract sent bytes from ``sending_bytes``, and wake the requests that wait for this."""
        self.sending_bytes -= nbytes
        for waits in self.sent:
            if not waits.done():
                waits.set_result(None)
        self.sent.clear()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a waiting request. Raise :class:`Refusal` if the client has too many waiting requests."""
        self.client.require_patience()
        self.client.waiting += 1
        try:
            yield
        finally:
            self.client.waiting -= 1

    async def aside(self, work: Callable[[], R]) -> R:
        """Run blocking work on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.service.threads, work)

    def stats(self) -> ClientStats:
        client = self.client
        return ClientStats(
            client.number,
            client.name,
            client.tenant,
            client.local,
            len(client.leases),
            client.reserved_bytes,
            self.sending_bytes,
        )


def then(transfer: Transfer[R], answer: Callable[[R], p.Answer]) -> p.Answer | Awaitable[Reply]:
    """Return ``answer(result)`` if the transfer has ended; otherwise an awaitable of it."""
    if transfer.done:
        return answer(transfer.wait())

    async def later() -> Reply:
        return answer(await transfer)

    return later()


def _names(names: bytes) -> list[bytes]:
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


def _inputs_fit(group: NamedGroup, chunk_tokens: int) -> bool:
    """Return whether a group has exactly one complete name for each page of the prompt's inputs (such as
    images)."""
    ends = [end for _, end in group.rule.inputs]
    pages = ends[-1] // chunk_tokens if ends else 0
    whole = all(len(name) == NAME_BYTES for name in group.names)
    return whole and len(group.names) == pages <= p.MAX_CHUNKS and not any(end % chunk_tokens for end in ends)


def _rule(part: p.NamedPart) -> GroupRule:
    try:
        if len(part.inputs) % 8:
            raise UsageError("each input of a prompt needs a first token and an end of its rows")
        numbers = array.array("I", part.inputs)
        inputs = tuple(zip(numbers[::2], numbers[1::2], strict=True))
        rule = GroupRule(Past(part.past), part.past_tokens, inputs)
    except (ValueError, UsageError) as error:
        raise Refusal("usage", str(error)) from error
    return rule


def checked_wait(wait_s: float) -> float:
    """Return ``wait_s``, in seconds. Raise :class:`Refusal` if ``wait_s`` is out of range."""
    if not 0 <= wait_s <= p.MOST_WAIT_S:
        raise Refusal("usage", f"wait_s must lie between 0 and {p.MOST_WAIT_S:.0f} seconds, got {wait_s}")
    return wait_s
