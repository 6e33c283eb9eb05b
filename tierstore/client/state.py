"""The state that the parts of a :class:`~tierstore.client.backend.RemoteBackend` share, and the functions
that describe prompts in messages."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tierstore.backend import Lease, LookupRequest, PrefixHandle, Registration
from tierstore.client.connection import Connection
from tierstore.client.handshake import DaemonLink
from tierstore.keys import Identity
from tierstore.planner import TierRate
from tierstore.transfer import Transfer
from tierstore.wire import messages
from tierstore.wire.messages import Message


@dataclass(slots=True, eq=False)
class RemoteLease(Lease):
    """A lease of a daemon. The daemon is informed of the end of the lease when it is released and no copy
    uses it any more. ``request`` describes the leased part of the prompt. ``RemoteState.lock`` guards the
    mutable fields."""

    link: DaemonLink | None = None
    request: LookupRequest | None = None
    copies: int = field(default=0)
    released: bool = False


@dataclass(slots=True, eq=False)
class RemoteState:
    """The state of one backend. Thread-safe. Identities without a model name are registered under
    ``model_name``. :class:`~tierstore.client.backend.RemoteBackend` explains the other public fields."""

    connection: Connection
    model_name: str = ""
    verify: bool = False
    loads: bool = True
    saves: bool = True
    clock: Callable[[], float] = time.monotonic
    lock: threading.Lock = field(default_factory=threading.Lock)
    # The lock also guards _rates and _declined.
    _rates: Mapping[str, TierRate] = field(default_factory=dict)  # as last reported by the daemon
    _declined: Counter[str] = field(default_factory=Counter)  # tokens to report with the next lookup

    # -- identities ----------------------------------------------------------------------------------

    def register(self, registration: Registration) -> None:
        registering = self.registering(registration)
        if registering is not None:
            registering.wait()

    def registering(self, registration: Registration) -> Transfer[None] | None:
        """Start to register an identity, and return the transfer that ends when the daemon knows it. Return
        None if the daemon knows it already or is away."""
        link = self.connection.link
        if link is None or registration.identity.digest in link.identities:
            return None
        named = registration.named(self.model_name)
        return self.connection.register(link, named)

    def link_for(self, *identities: Identity, saving: bool = False) -> DaemonLink | None:
        """Return the current link; None if the daemon is away or does not know these identities. Lookups also
        get None while the daemon hangs. Saves do not, because they have a longer time limit."""
        link = self.connection.any_link if saving else self.connection.link
        if link is None or any(each.digest not in link.identities for each in identities):
            return None
        return link

    # -- leases --------------------------------------------------------------------------------------

    def release(self, lease: Lease) -> None:
        with self.lock:
            if not isinstance(lease, RemoteLease) or lease.released:
                return
            lease.released = True
            unused = not lease.copies
        if unused:
            self.give_back(lease)

    def give_back(self, lease: RemoteLease) -> None:
        """Tell the daemon that a lease has ended."""
        if lease.link is not None:
            self.connection.release(lease.link, lease.number)

    # -- planning ------------------------------------------------------------------------------------

    def rates(self) -> Mapping[str, TierRate]:
        with self.lock:
            return self._rates

    def note_rates(self, figures: Mapping[str, tuple[float, float, float]]) -> None:
        """Store the rates of the daemon's tiers, and ignore impossible figures."""
        rates = {
            tier: TierRate(*each)
            for tier, each in figures.items()
            if each[0] > 0 and all(0 <= figure < math.inf for figure in each)
        }
        with self.lock:
            self._rates = rates

    def declined(self, tokens: Mapping[str, int]) -> None:
        with self.lock:
            self._declined.update(tokens)

    def take_declined(self) -> dict[str, int]:
        """Return and reset the counts of tokens that were declined since the last lookup, by tier."""
        with self.lock:
            declined, self._declined = dict(self._declined), Counter()
        return declined


def link_of(lease: Lease) -> DaemonLink | None:
    return lease.link if isinstance(lease, RemoteLease) else None


def handle_in(link: DaemonLink, path: int, known: int) -> PrefixHandle | None:
    """Return the handle that an answer gives: over this link, ``path`` is the daemon's number for the first
    ``known`` chunks of the prompt. Return None if the daemon knows no chunk of the prompt."""
    return PrefixHandle(link, path, known) if path and known > 0 else None


def prompt_part(link: DaemonLink, request: LookupRequest, handle: PrefixHandle | None) -> messages.PromptPart:
    """Return the part of a message that describes a prompt. The chunks that ``handle`` covers are described
    by the path's number, the rest by keys and tokens."""
    identity = link.identities[request.identity.digest]
    if handle is None or not handle.chunks:
        keys = b"".join(request.keys)
        tokens = request.tokens_from(0)
        return messages.PromptPart(identity, keys, tokens, known=request.depth, named=request.named)
    keys = b"".join(request.keys[handle.chunks :])
    return messages.PromptPart(
        identity, keys, request.tokens_from(handle.chunks), handle.number, handle.chunks
    )


def in_full(message: Callable[[], Message], *requests: LookupRequest) -> Callable[[], Message]:
    """Return a function that forgets the handles of these requests and calls ``message``, which then
    describes the prompts in full."""

    def again() -> Message:
        for request in requests:
            request.forget_handle()
        return message()

    return again


def pages_of(answer: messages.Prefetched | messages.Committed | None, _: object) -> int:
    return answer.pages if answer is not None else 0
