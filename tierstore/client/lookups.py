"""Lookups in a daemon, which return leases on the stored pages of a prompt.

If an answer contradicts its request, the lookup is a miss, and the leases in the answer are released.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from tierstore.backend import (
    GroupLease,
    HitLease,
    HitRequest,
    Lease,
    LookupRequest,
    NamedGroup,
    Registration,
)
from tierstore.client.channel import numbers
from tierstore.client.handshake import DaemonLink
from tierstore.client.state import RemoteLease, RemoteState, handle_in, in_full, prompt_part
from tierstore.transfer import Transfer, TransferState
from tierstore.wire import messages

R = TypeVar("R")

_WAIT_SHARE = 0.8  # share of a lookup's time limit that the daemon may use


class RemoteLookups:
    """The lookups of one client. Thread-safe."""

    def __init__(self, state: RemoteState) -> None:
        self._state = state
        self._connection = state.connection

    def find(
        self, request: LookupRequest, *, patience_s: float, caller_receives: bool = False
    ) -> Transfer[Lease | None]:
        return self._once_known(
            [request.registration],
            patience_s,
            lambda left_s, receives: self.ask(request, left_s, caller_receives and receives),
            self._state.release,
        )

    def find_hit(
        self, request: HitRequest, *, patience_s: float, caller_receives: bool = False
    ) -> Transfer[HitLease | None]:
        return self._once_known(
            request.registrations,
            patience_s,
            lambda left_s, receives: self._find_hit(request, left_s, caller_receives and receives),
            self._release_hit,
        )

    def _once_known(
        self,
        registrations: Sequence[Registration],
        patience_s: float,
        ask: Callable[[float, bool], Transfer[R | None]],
        give_back: Callable[[R], None],
    ) -> Transfer[R | None]:
        """Call ``ask`` as soon as the daemon knows these identities, usually immediately. The arguments of
        ``ask`` are the remaining seconds and whether the calling thread may receive the answer. If the caller
        has cancelled the lookup, the result is passed to ``give_back``."""
        if not self._state.loads:
            return Transfer.completed(None)
        state = self._state
        registering = [each for known in registrations if (each := state.registering(known)) is not None]
        if not registering:
            return ask(patience_s, True)
        ends = time.monotonic() + patience_s
        found: Transfer[R | None] | None = None

        def settle(state: TransferState) -> R | None:
            if found is None:
                return None
            if state is TransferState.DONE or not found.cancel():
                lease = found.wait()
                if state is TransferState.DONE:
                    return lease
                if lease is not None:
                    give_back(lease)
            return None

        both: Transfer[R | None] = Transfer(settle, pages=0, nbytes=0, deadline_s=patience_s)
        waited_for = iter(registering)

        def go_on() -> None:
            nonlocal found
            following = next(waited_for, None)
            if following is not None:
                following.on_end(go_on)
                return
            left = ends - time.monotonic()
            if left <= 0 or both.stopped:
                both.finish()
                return
            found = ask(left, False)
            found.on_end(both.finish)

        go_on()
        return both

    def _release_hit(self, hit: HitLease) -> None:
        for group in hit.groups:
            self._state.release(group.lease)

    def _find_hit(
        self, request: HitRequest, patience_s: float, caller_receives: bool
    ) -> Transfer[HitLease | None]:
        link = self._state.link_for(*(each.identity for each in request.registrations))
        if link is None:
            return Transfer.completed(None)
        at = self._state.clock()
        declined = self._state.take_declined()

        def message() -> messages.FindHit:
            return messages.FindHit(
                0,
                _chain_parts(link, request.chains),
                list(request.here),
                [_named_part(link, group) for group in request.named],
                b"".join(request.names),
                request.root,
                request.tail,
                request.num_tokens,
                min(patience_s * _WAIT_SHARE, messages.MOST_WAIT_S),
                declined=declined,
                counted=request.counted,
                explain=request.explain,
            )

        def leased(found: messages.HitFound | None, _: object) -> HitLease | None:
            return self._leased_hit(link, request, found, at) if found is not None else None

        return self._connection.call(
            link,
            message(),
            messages.HitFound,
            leased,
            patience_s=patience_s,
            otherwise=in_full(message, *request.chains),
            caller_receives=caller_receives,
        )

    def _leased_hit(
        self, link: DaemonLink, request: HitRequest, found: messages.HitFound, at: float
    ) -> HitLease:
        """Return the answer as leases. If it contradicts the request, release its leases and return a
        miss."""
        self._state.note_rates(found.rates)
        ends = at + link.lease_s
        chains = [
            self._group_lease(link, chain.cut(group.tokens), group, range(0), ends)
            for chain, group in zip(request.chains, found.chains, strict=False)
        ]
        named = []
        for kind, group in zip(request.named, found.named, strict=False):
            needed = kind.rule.ends(found.tokens, request.chunk_tokens)
            lacking = [end for end in needed if end not in kind.here]
            named.append(self._group_lease(link, request.pages(kind, lacking), group, lacking, ends))
        remote_tokens = max(found.remote_tokens, 0)
        hit = HitLease(found.tokens, found.branch, chains, named, remote_tokens, tuple(found.misses))
        sound = (
            len(chains) == len(request.chains)
            and len(named) == len(request.named)
            and 0 <= found.tokens <= min(found.branch, request.num_tokens)
            and all(
                max(here, group.lease.tokens) >= found.tokens
                for here, group in zip(request.here, chains, strict=True)
            )
            and all(group.lease.pages == len(group.ends) for group in named)
        )
        if not sound:
            self._release_hit(hit)
            empty = GroupLease(Lease(0, 0, 0, (), 0.0))
            return HitLease(0, 0, [empty] * len(request.chains), [empty] * len(request.named))
        return hit

    def _group_lease(
        self,
        link: DaemonLink,
        request: LookupRequest,
        found: messages.GroupFound,
        page_ends: Sequence[int],
        ends: float,
    ) -> GroupLease:
        """Return the lease on the pages of one layer group, which ``request`` describes."""
        remote_ends = numbers(found.remote_ends, "<u4").tolist()
        pages = max(-(-found.tokens // request.chunk_tokens), 0)
        lease = self._lease(link, request, found, ends, range(pages), pages == request.num_chunks)
        return GroupLease(lease, page_ends, remote_ends)

    def _lease(
        self,
        link: DaemonLink,
        request: LookupRequest,
        found: messages.Found | messages.GroupFound,
        ends: float,
        positions: Sequence[int],
        sound: bool,
    ) -> Lease:
        """Return the lease that an answer gives on pages of ``request``. If the answer is not ``sound``,
        release the daemon's lease and return an empty lease."""
        handle = handle_in(link, found.path, found.known)
        pages = -(-found.tokens // request.chunk_tokens)
        if found.lease and pages > 0 and sound and pages == sum(count for _, count in found.tiers):
            lease = RemoteLease(found.lease, found.tokens, pages, found.tiers, ends, handle, positions)
            lease.page_bytes, lease.link, lease.request = request.page_bytes, link, request
            return lease
        if found.lease:
            self._connection.release(link, found.lease)
        return Lease(0, 0, 0, (), 0.0, handle)

    def ask(self, request: LookupRequest, patience_s: float, caller_receives: bool) -> Transfer[Lease | None]:
        """Look up a prompt as :meth:`find` does. An identity that is not registered is a miss."""
        link = self._state.link_for(request.identity)
        if link is None or patience_s <= 0:
            return Transfer.completed(None)
        wait_s = min(patience_s * _WAIT_SHARE, messages.MOST_WAIT_S)  # a part of the limit, not in addition
        at = self._state.clock()
        declined = self._state.take_declined()

        def message() -> messages.Find:
            prompt = prompt_part(link, request, request.handle_of(link))
            return messages.Find(
                0,
                prompt,
                request.num_tokens,
                wait_s,
                declined=declined,
                gain=request.gain,
                counted=request.counted,
            )

        def leased(found: messages.Found | None, _: object) -> Lease | None:
            return self._leased(link, request, found, at)

        return self._connection.call(
            link,
            message(),
            messages.Found,
            leased,
            patience_s=patience_s,
            otherwise=in_full(message, request),
            caller_receives=caller_receives,
        )

    def expect(self, request: LookupRequest, *, wait_s: float) -> Transfer[None]:
        wait_s = min(wait_s, messages.MOST_EXPECT_S)
        if wait_s <= 0 or not self._state.loads or self._connection.link is None:
            return Transfer.completed(None)
        # A promise may stay unanswered until ``wait_s``, so the call must not count as late then: a late call
        # is a sign of a hanging daemon.
        stop: list[Callable[[], None]] = []

        def settle(state: TransferState) -> None:
            if state is TransferState.CANCELLED:
                for each in stop:
                    each()

        transfer: Transfer[None] = Transfer(settle, pages=0, nbytes=0, deadline_s=wait_s)

        def ask() -> None:
            asked = self._expect(request, transfer.remaining_s or 0.0, stop)
            transfer.watch(asked)
            asked.on_end(transfer.finish)
            if transfer.state is TransferState.CANCELLED:  # before ``stop`` had an entry
                settle(transfer.state)

        registering = self._state.registering(request.registration)
        if registering is None:
            ask()
        else:
            transfer.watch(registering)
            registering.on_end(ask)
        return transfer

    def _expect(
        self, request: LookupRequest, wait_s: float, stop: list[Callable[[], None]]
    ) -> Transfer[None]:
        link = self._state.link_for(request.identity)
        if link is None or wait_s <= 0:
            return Transfer.completed(None)

        def message() -> messages.Find:
            prompt = prompt_part(link, request, request.handle_of(link))
            return messages.Find(0, prompt, 0, 0.0, expect=request.num_tokens, expect_s=wait_s)

        call = self._connection.call(
            link,
            message(),
            messages.Found,
            lambda *_: None,
            wait_s=wait_s,
            otherwise=in_full(message, request),
        )
        unexpect = self._connection.send
        stop.append(lambda: None if call.done else unexpect(link, messages.Unexpect(call.number)))
        return call

    def _leased(
        self, link: DaemonLink, request: LookupRequest, found: messages.Found | None, at: float
    ) -> Lease | None:
        if found is None:
            return None
        self._state.note_rates(found.rates)
        pages = -(-found.tokens // request.chunk_tokens)
        positions = numbers(found.positions, "<u4").tolist()
        sound = 0 <= found.tokens <= request.num_tokens and request.fits(pages, positions)
        lease = self._lease(link, request, found, at + link.lease_s, positions, sound)
        there = set(numbers(found.remote_positions, "<u4").tolist()).difference(positions)
        lease.remote_positions = sorted(at for at in there if at < request.num_chunks)
        return lease


def _named_part(link: DaemonLink, group: NamedGroup) -> messages.NamedPart:
    here = np.array(group.here, "<u4").tobytes()
    number = link.identities[group.registration.identity.digest]
    inputs = np.array(group.rule.inputs, "<u4").tobytes()
    return messages.NamedPart(
        number, group.rule.past.value, group.rule.tokens, here, inputs, b"".join(group.names)
    )


def _chain_parts(link: DaemonLink, chains: Sequence[LookupRequest]) -> list[messages.PromptPart]:
    """Return the chains of one prompt as parts of a message. All parts leave out the same number of chunks
    that the daemon knows. A chain with the same keys and tokens as the first chain does not repeat them."""
    handles = [chain.handle_of(link) for chain in chains]
    common = min((0 if handle is None else handle.chunks for handle in handles), default=0)
    parts: list[messages.PromptPart] = []
    for chain in chains:
        handle, first = chain.handle_of(link, common), chains[0]
        if parts and chain.data is first.data and (chain.nbytes, chain.keys) == (first.nbytes, first.keys):
            identity, path = link.identities[chain.identity.digest], handle.number if handle else 0
            parts.append(messages.PromptPart(identity, b"", b"", path, common))
        else:
            parts.append(prompt_part(link, chain, handle))
    return parts
