"""The conformance suite for backends: tests of everything that a store needs from the tiers below HBM.

Subclass :class:`BackendTests` and override its fixture ``open_backend``, as shown for ``open_store`` in
:mod:`tierstore.testing.store`.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import pytest
import xxhash

from tierstore import Identity
from tierstore.backend import (
    Backend,
    HitRequest,
    KnownPrompt,
    Lease,
    LookupRequest,
    NamedGroup,
    Registration,
    Reservation,
    SaveHints,
)
from tierstore.groups import GroupRule, Past, longest_of_pages
from tierstore.keys import Prompt, page_name
from tierstore.testing.clock import wait_until
from tierstore.testing.store import CHUNK, SPEC, TOKENS, new_identity, pages_of
from tierstore.transfer import TransferState

_WAIT_S = 30.0


class OpenBackend(Protocol):
    """Opens a backend for pages of :data:`~tierstore.testing.store.SPEC`, with a host tier of ``host_pages``
    pages and a disk tier, and closes it after the test. No page of ``identity`` has been saved."""

    def __call__(self, *, identity: Identity, host_pages: int = 64) -> Backend: ...


def request_of(identity: Identity, tokens: Sequence[int]) -> LookupRequest:
    prompt = Prompt(identity, tokens, chunk_tokens=CHUNK)
    data = prompt.token_bytes
    return LookupRequest(identity, SPEC.page_bytes, CHUNK, data, len(data), list(prompt.keys))


class ReferenceModel:
    """A model with random layer groups, and a random prompt. The model knows the bytes of all pages of the
    prompt."""

    def __init__(self, identity: Identity, rng: random.Random, number: int) -> None:
        self.model = replace(identity, adapter=f"model {number}")
        self.tokens = [rng.randrange(1000) for _ in range(rng.randrange(2 * CHUNK, 12 * CHUNK))]
        inputs = zip(sorted(rng.sample(range(len(self.tokens)), 2)), (CHUNK, CHUNK + 1), strict=True)
        others = [GroupRule.window(rng.choice([0, 5, CHUNK, 40])), GroupRule.state(), GroupRule.chunked(48)]
        others.append(GroupRule.cross(inputs, CHUNK))
        self.rules = [GroupRule.all(), *rng.sample(others, rng.randrange(1, 5))]
        self._rng = rng
        self._identities = [
            replace(self.model, codec=f"group {at}", layout=_layout(rule))
            for at, rule in enumerate(self.rules)
        ]
        self._chain = Prompt(self._identities[0], self.tokens, chunk_tokens=CHUNK)
        names: list[bytes] = []
        for chunk in self._chain.chunks():
            names.append(page_name(names[-1] if names else self.model.digest, chunk))
        self._names = names

    def request(self, num_tokens: int) -> HitRequest:
        """Return the request for a hit in the prompt's first ``num_tokens`` tokens, of a caller without pages
        of its own."""
        data = self._chain.token_bytes
        chain = LookupRequest(
            self._identities[0], SPEC.page_bytes, CHUNK, data, len(data), list(self._chain.keys)
        )
        named = [
            NamedGroup(
                Registration(identity, SPEC.page_bytes, CHUNK), rule, names=self._names_of_inputs(rule)
            )
            for identity, rule in zip(self._identities[1:], self.rules[1:], strict=True)
        ]
        tail = self._chain.chunk(num_tokens // CHUNK)
        return HitRequest(CHUNK, num_tokens, [chain], [0], named, self._names, self.model.digest, tail)

    def _names_of_inputs(self, rule: GroupRule) -> list[bytes]:
        pages = rule.inputs[-1][1] // CHUNK if rule.inputs else 0
        return [page_name(self.model.digest, b"page %d of the inputs" % page) for page in range(pages)]

    def page(self, group: int, end: int) -> bytes:
        """Return the bytes of the page of a group that ends at token ``end``."""
        seed = xxhash.xxh3_64_intdigest(f"{self._identities[group].digest!r} {self.tokens[:end]}".encode())
        return random.Random(seed).randbytes(SPEC.page_bytes)

    def save_some(self, tests: BackendTests, backend: Backend) -> list[set[int]]:
        """Save a random prefix of the chain, and random pages of the other groups. Return by group the tokens
        at which a hit may end: any token of the chain's saved pages, and the ends of the other saved
        pages."""
        saved = self._rng.choice([len(self.tokens), self._rng.randrange(len(self.tokens) + 1)])
        whole = saved // CHUNK
        request = self.request(len(self.tokens))
        for known in request.registrations:
            backend.register(known)
        tests.save(backend, request.chains[0].cut(whole * CHUNK), self._pages(0, whole))
        held = [set(range(1, whole * CHUNK + 1))]
        every = [*range(CHUNK, len(self.tokens) + 1, CHUNK), len(self.tokens)]
        for at, group in enumerate(request.named, 1):
            ends = list(group.rule.ends(len(self.tokens), CHUNK)) if group.names else every
            some = sorted(set(self._rng.sample(ends, self._rng.randrange(len(ends) + 1))))
            some = some if self._rng.random() < 0.7 else sorted({*some, *ends[:whole]})
            tests.save(backend, request.pages(group, some), [self.page(at, end) for end in some])
            held.append(set(some))
        return held

    def save_all(self, tests: BackendTests, backend: Backend) -> None:
        request = self.request(len(self.tokens))
        chain = request.chains[0]
        backend.register(chain.registration)
        tests.save(backend, chain, self._pages(0, chain.num_chunks))
        for at, group in enumerate(request.named, 1):
            ends = list(group.rule.ends(len(self.tokens), CHUNK))
            backend.register(group.registration)
            if ends:
                tests.save(backend, request.pages(group, ends), [self.page(at, end) for end in ends])

    def here(self, request: HitRequest, held: Sequence[set[int]]) -> list[set[int]]:
        """Change ``request`` so that the caller has some pages of its own. Return their ends by group."""
        leading = self._rng.choice([0, 0, self._rng.randrange(len(self.tokens) // CHUNK + 1)])
        here = [set(range(1, leading * CHUNK + 1))]
        request.here = [leading * CHUNK]
        named = []
        for group in request.named:
            ends = {end for end in range(CHUNK, len(self.tokens), CHUNK) if self._rng.random() < 0.2}
            here.append(ends)
            named.append(replace(group, here=sorted(ends)))
        request.named = named
        return here

    def _pages(self, group: int, count: int) -> list[bytes]:
        return [self.page(group, min((at + 1) * CHUNK, len(self.tokens))) for at in range(count)]


def _layout(rule: GroupRule) -> str:
    spec = SPEC if rule.past is Past.ALL else replace(SPEC, hashed=True)
    return spec.describe()


class BackendTests:
    """The requirements for every backend."""

    shares_memory = True
    """Whether tests read pages in the backend's own memory, and not copies that were sent from another
    host."""

    @pytest.fixture
    def open_backend(self) -> Iterator[OpenBackend]:
        """Override this fixture: see :class:`OpenBackend`."""
        raise NotImplementedError("override the fixture open_backend, which opens a backend")

    @pytest.fixture
    def identity(self) -> Identity:
        return new_identity()

    @pytest.fixture
    def backend(self, open_backend: OpenBackend, identity: Identity) -> Backend:
        backend = open_backend(identity=identity)
        assert backend.wait_connected(_WAIT_S)
        backend.register(Registration(identity, SPEC.page_bytes, CHUNK))
        return backend

    # -- helpers -----------------------------------------------------------------------------------------

    def reserve(
        self, backend: Backend, request: LookupRequest, first: int, count: int, **options: object
    ) -> Reservation:
        reservation = backend.reserve(request, first, count, **options).wait(_WAIT_S)  # type: ignore[arg-type]
        assert reservation is not None
        return reservation

    def write(self, backend: Backend, reservation: Reservation, content: Sequence[bytes]) -> dict[int, int]:
        """Write the reserved pages of ``content``. Return their checksums by position."""
        wanted = [content[position] for position in reservation.positions]
        if reservation.addresses is None:
            frames = [memoryview(page) for page in wanted]
            assert not frames or backend.write(reservation, 0, frames).wait(_WAIT_S)
        else:
            for address, page in zip(reservation.addresses, wanted, strict=True):
                ctypes.memmove(address, page, len(page))
        hashes = [xxhash.xxh3_64_intdigest(page) for page in wanted]
        return dict(zip(reservation.positions, hashes, strict=True))

    def save(self, backend: Backend, request: LookupRequest, content: Sequence[bytes], first: int = 0) -> int:
        reservation = self.reserve(backend, request, first, len(content))
        checksums = self.write(backend, reservation, content)
        if checksums:
            assert backend.commit(reservation, checksums).wait(_WAIT_S) == len(checksums)
        return reservation.stored_tokens

    def find(self, backend: Backend, request: LookupRequest) -> Lease:
        lease = backend.find(request, patience_s=_WAIT_S).wait(_WAIT_S)
        assert lease is not None
        return lease

    def read(self, backend: Backend, lease: Lease, first: int, count: int) -> list[bytes]:
        """Return the bytes of pages of a lease, up to the first page that cannot be located."""
        located = backend.locate(lease, first, count, wait_s=_WAIT_S).wait(_WAIT_S)
        if located is None:
            return []
        pages = [ctypes.string_at(address, SPEC.page_bytes) for address in located.addresses]
        if located.checksums:
            assert list(located.checksums) == [xxhash.xxh3_64_intdigest(page) for page in pages]
        located.release()
        return pages

    # -- several layer groups ------------------------------------------------------------------------

    def test_the_longest_hit_of_all_groups_is_leased_exactly(
        self, backend: Backend, identity: Identity
    ) -> None:
        """Compare hits with :func:`~tierstore.groups.longest_of_pages`, for random pages that are in the host
        tier, only on disk, or held by the caller."""
        rng = random.Random(7)
        for round_ in range(24):
            model = ReferenceModel(identity, rng, round_)
            request = model.request(rng.randrange(1, len(model.tokens) + 1))
            held = model.save_some(self, backend)
            if round_ % 3 == 1:
                assert backend.flush(_WAIT_S)
                backend.evict("host", None)
            here = model.here(request, held)
            there = [pages | own for pages, own in zip(held, here, strict=True)]
            branch = min(request.num_tokens, max(there[0], default=0))
            expected = longest_of_pages(list(zip(model.rules, there, strict=True)), branch, CHUNK)
            hit = backend.find_hit(request, patience_s=_WAIT_S).wait(_WAIT_S)
            assert hit is not None
            assert hit.tokens == expected
            for at, group in enumerate(hit.groups):
                needed = [end for end in model.rules[at].ends(expected, CHUNK) if end not in here[at]]
                if not at and needed:  # a chain is leased from its beginning
                    needed = list(model.rules[at].ends(expected, CHUNK))
                assert group.lease.pages == len(needed)
                pages = self.read(backend, group.lease, 0, len(needed)) if needed else []
                assert pages == [model.page(at, end) for end in needed]
                backend.release(group.lease)

    def test_a_hit_goes_on_where_a_chain_has_a_handle(self, backend: Backend, identity: Identity) -> None:
        model = ReferenceModel(identity, random.Random(3), 0)
        model.save_all(self, backend)
        request = model.request(len(model.tokens))
        first = backend.find_hit(request, patience_s=_WAIT_S).wait(_WAIT_S)
        assert first is not None
        assert first.tokens == first.branch == len(model.tokens)
        handle = first.chains[0].lease.handle
        assert handle is not None
        chain = request.chains[0]
        chain.known, chain.common = KnownPrompt(b"", chain.data, chain.keys, handle), handle.chunks
        again = backend.find_hit(request, patience_s=_WAIT_S).wait(_WAIT_S)
        assert again is not None
        assert again.tokens == first.tokens
        for group in (*first.groups, *again.groups):
            backend.release(group.lease)

    # -- reading and writing -------------------------------------------------------------------------

    def test_committed_pages_are_found_and_located(self, backend: Backend, identity: Identity) -> None:
        request, content = request_of(identity, TOKENS), pages_of(TOKENS)
        assert self.save(backend, request, content) == len(TOKENS)
        lease = self.find(backend, request)
        assert (lease.tokens, lease.pages, list(lease.runs)) == (len(TOKENS), 5, [("host", 5)])
        assert self.read(backend, lease, 0, 5) == content
        assert self.read(backend, lease, 3, 1) == content[3:4]
        assert backend.batch_pages(lease, 0) >= 1
        assert backend.holds(lease)
        backend.release(lease)
        assert backend.lease_s > 0

    def test_what_is_not_held_is_an_empty_lease(self, backend: Backend, identity: Identity) -> None:
        lease = self.find(backend, request_of(identity, TOKENS))
        assert (lease.tokens, lease.pages) == (0, 0)
        backend.release(lease)

    def test_reserved_pages_are_found_after_their_commit_only(
        self, backend: Backend, identity: Identity
    ) -> None:
        request, content = request_of(identity, TOKENS), pages_of(TOKENS)
        reservation = self.reserve(backend, request, 0, 5)
        assert list(reservation.positions) == [0, 1, 2, 3, 4]
        assert self.find(backend, request).tokens == 0
        checksums = self.write(backend, reservation, content)
        del checksums[3]  # page 3 is not committed, so no page behind it can be found
        assert backend.commit(reservation, checksums).wait(_WAIT_S) == 4
        lease = self.find(backend, request)
        assert lease.tokens == 3 * CHUNK
        backend.release(lease)

    def test_promised_pages_are_waited_for_until_the_last_has_come(
        self, backend: Backend, identity: Identity
    ) -> None:
        request, content = request_of(identity, TOKENS), pages_of(TOKENS)
        whole = request.cut(len(TOKENS) // CHUNK * CHUNK)
        expected = backend.expect(whole, wait_s=_WAIT_S / 4)
        parts = [(0, 1), (1, 1), (2, len(content) - 2)]
        reserved = [self.reserve(backend, request, *part) for part in parts]
        for part in (2, 0, 1):  # the last part is committed first
            assert not expected.done
            first, count = parts[part]
            checksums = self.write(backend, reserved[part], content[first : first + count])
            assert backend.commit(reserved[part], checksums).wait(_WAIT_S) == count
        expected.wait(_WAIT_S)
        assert expected.state is TransferState.DONE
        assert backend.expect(whole, wait_s=_WAIT_S).wait(_WAIT_S) is None  # the pages are already stored
        lease = self.find(backend, whole)
        assert lease.tokens == whole.num_tokens
        backend.release(lease)

    def test_promised_pages_that_never_come_cost_what_was_said(
        self, backend: Backend, identity: Identity
    ) -> None:
        request = request_of(identity, TOKENS).cut(2 * CHUNK)
        began = time.monotonic()
        backend.expect(request, wait_s=0.2).wait(_WAIT_S)
        assert time.monotonic() - began > 0.1  # a daemon's clock starts later and may end earlier
        assert self.find(backend, request).tokens == 0
        assert backend.expect(request, wait_s=_WAIT_S).cancel()
        backend.check()

    def test_an_aborted_reservation_gives_its_room_back(
        self, open_backend: OpenBackend, identity: Identity
    ) -> None:
        backend = open_backend(identity=identity, host_pages=8)
        assert backend.wait_connected(_WAIT_S)
        request = request_of(identity, TOKENS)
        for _ in range(5):
            reservation = self.reserve(backend, request, 0, 5)
            assert len(reservation.positions) == 5
            backend.abort(reservation)
        assert self.find(backend, request).tokens == 0

    @pytest.mark.parametrize("committed", [True, False], ids=["committed", "given up"])
    def test_pages_that_are_being_written_are_waited_for(
        self, backend: Backend, identity: Identity, committed: bool
    ) -> None:
        """If the pages are committed, a waiting reservation counts them as stored. If they are aborted, the
        waiting client has to write them."""
        request, content = request_of(identity, TOKENS), pages_of(TOKENS)
        writing = self.reserve(backend, request.cut(3 * CHUNK), 0, 3)
        waiting = backend.reserve(request, 0, 5)
        assert not waiting.done
        if committed:
            backend.commit(writing, self.write(backend, writing, content)).wait(_WAIT_S)
        else:
            backend.abort(writing)
        reserved = waiting.wait(_WAIT_S)
        assert reserved is not None
        assert list(reserved.positions) == ([3, 4] if committed else [0, 1, 2, 3, 4])
        assert reserved.stored_tokens == len(TOKENS)
        backend.commit(reserved, self.write(backend, reserved, content)).wait(_WAIT_S)
        lease = self.find(backend, request)
        assert self.read(backend, lease, 0, 5) == content
        backend.release(lease)

    def test_pages_that_are_there_are_not_wanted_again(self, backend: Backend, identity: Identity) -> None:
        request, content = request_of(identity, TOKENS), pages_of(TOKENS)
        self.save(backend, request, content)
        again = self.reserve(backend, request, 0, 5)
        assert (list(again.positions), again.stored_tokens) == ([], len(TOKENS))

    def test_a_handle_stands_for_a_prefix(self, backend: Backend, identity: Identity) -> None:
        tokens = [*range(CHUNK * 8)]
        request, content = request_of(identity, tokens), pages_of(tokens)
        first = self.reserve(backend, request.cut(CHUNK * 4), 0, 4)
        backend.commit(first, self.write(backend, first, content[:4])).wait(_WAIT_S)
        then = self.reserve(backend, request, 4, 4, handle=first.handle)
        backend.commit(then, self.write(backend, then, content[4:])).wait(_WAIT_S)
        lease = self.find(backend, request)
        assert self.read(backend, lease, 0, 8) == content
        backend.release(lease)

    def test_a_page_that_somebody_wrote_over_is_served_no_more(
        self, backend: Backend, identity: Identity
    ) -> None:
        request, content = request_of(identity, TOKENS), pages_of(TOKENS)
        self.save(backend, request, content)
        assert backend.flush(_WAIT_S)  # the disk has the saved bytes, not those written below
        lease = self.find(backend, request)
        located = backend.locate(lease, 0, 5, wait_s=_WAIT_S).wait(_WAIT_S)
        assert located is not None
        if self.shares_memory:
            ctypes.memset(located.addresses[2], 0x55, SPEC.page_bytes)
            located.release()
            backend.report_damage(lease, 2)
            backend.release(lease)

            def found() -> Lease:
                lease = self.find(backend, request)
                backend.release(lease)
                return lease

            wait_until(lambda: list(found().runs) != [("host", 5)])
            lease = self.find(backend, request)
        else:
            located.release()
        assert self.read(backend, lease, 0, 5) == content[: lease.pages]
        backend.release(lease)

    # -- keeping and dropping ------------------------------------------------------------------------

    def test_pages_come_up_from_disk(self, backend: Backend, identity: Identity) -> None:
        request, content = request_of(identity, TOKENS), pages_of(TOKENS)
        self.save(backend, request, content)
        assert backend.flush(_WAIT_S)
        backend.evict("host", None)
        lease = self.find(backend, request)
        assert list(lease.runs) == [("disk", 5)]
        assert backend.prefetch(lease, wait_s=_WAIT_S).wait(_WAIT_S) == 5
        assert self.read(backend, lease, 0, 5) == content
        backend.release(lease)
        again = self.find(backend, request)
        assert list(again.runs) == [("host", 5)]
        backend.release(again)

    def test_leased_and_pinned_pages_stay(self, backend: Backend, identity: Identity) -> None:
        request = request_of(identity, TOKENS)
        self.save(backend, request, pages_of(TOKENS))
        assert backend.pin(request).wait(_WAIT_S) == 64
        assert backend.flush(_WAIT_S)
        for tier in ("disk", "host"):
            backend.evict(tier, None)
        lease = self.find(backend, request)
        assert lease.tokens >= 64
        assert backend.pin(request, undo=True).wait(_WAIT_S) == 64
        backend.evict("host", None)
        assert len(self.read(backend, lease, 0, 4)) == 4
        backend.release(lease)

    def test_pins_are_undone_by_a_handle_of_pages_that_left_and_came_back(
        self, backend: Backend, identity: Identity
    ) -> None:
        request, content = request_of(identity, TOKENS), pages_of(TOKENS)
        self.save(backend, request, content)
        lease = self.find(backend, request)
        handle = lease.handle
        assert handle is not None
        backend.release(lease)
        wait_until(lambda: self.find_nothing(backend, request))
        self.save(backend, request, content)
        assert backend.pin(request).wait(_WAIT_S) == 64
        known = KnownPrompt(b"", request.data, request.keys, handle)
        again = LookupRequest(
            identity, SPEC.page_bytes, CHUNK, request.data, request.nbytes, request.keys, known, handle.chunks
        )
        assert backend.pin(again, undo=True).wait(_WAIT_S) == 64
        wait_until(lambda: self.find_nothing(backend, request))

    def find_nothing(self, backend: Backend, request: LookupRequest) -> bool:
        """Evict all evictable pages. Return whether no page of the prompt is left."""
        backend.flush(_WAIT_S)
        for tier in ("host", "disk"):
            backend.evict(tier, None)
        lease = self.find(backend, request)
        backend.release(lease)
        return lease.tokens == 0

    def test_a_finished_session_counts_its_pages(self, backend: Backend, identity: Identity) -> None:
        request = request_of(identity, TOKENS)
        reservation = self.reserve(backend, request, 0, 5, hints=SaveHints(session="a"))
        backend.commit(reservation, self.write(backend, reservation, pages_of(TOKENS))).wait(_WAIT_S)
        assert backend.finish("a") == 5
        assert backend.finish("a") == 0

    def test_a_forgotten_model_is_not_found(self, backend: Backend, identity: Identity) -> None:
        request = request_of(identity, TOKENS)
        self.save(backend, request, pages_of(TOKENS))
        receipt = backend.forget(model=identity.model)
        assert receipt is not None
        assert (receipt.identities, receipt.host_pages) == (1, 5)
        lease = self.find(backend, request)
        assert lease.tokens == 0
        backend.check()

    def test_stats_say_what_is_held(self, backend: Backend, identity: Identity) -> None:
        self.save(backend, request_of(identity, TOKENS), pages_of(TOKENS))
        stats = backend.stats()
        assert stats.tiers["host"].used_bytes >= 5 * SPEC.page_bytes
        assert backend.reserve_bytes >= SPEC.page_bytes
        backend.check()

    def test_nothing_is_found_once_it_is_closed(self, open_backend: OpenBackend, identity: Identity) -> None:
        backend = open_backend(identity=identity)
        assert backend.wait_connected(_WAIT_S)
        request = request_of(identity, TOKENS)
        self.save(backend, request, pages_of(TOKENS))
        backend.close()
        backend.close()
        wait_until(lambda: backend.find(request, patience_s=1.0).wait(_WAIT_S) is None)
        assert backend.reserve(request, 0, 5).wait(_WAIT_S) is None
