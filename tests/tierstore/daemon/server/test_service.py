"""The service without sockets, against a dict: sessions that look up, reserve, commit, give up and die."""

from __future__ import annotations

import asyncio
import inspect
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.tierstore.daemon.server.client import offsets, page_bytes, part, positions
from tierstore.core.clients import MOST_WAITING
from tierstore.daemon.daemon import open_core
from tierstore.daemon.service import _VERBS, Service
from tierstore.daemon.settings import Settings
from tierstore.index import Tier
from tierstore.keys import Identity, Prompt
from tierstore.wire import messages as p

CHUNK = 4
PAGE = 4096
HOST_PAGES = 12
RESERVE_PAGES = 6
IDENTITIES = [Identity(model="a", layout="x"), Identity(model="b", layout="x")]
SECONDS = 5.0

# A forest with shared prefixes: prompts meet on the same pages, part inside chunks, and end in partial ones.
STEMS = [list(range(40)), [*range(13), *range(100, 120)], [*range(8), *range(200, 230)]]

sessions = st.integers(0, 2)
prompts = st.tuples(
    st.sampled_from([0, 0, 0, 1]), st.integers(0, len(STEMS) - 1), st.sampled_from([3, 8, 12, 15, 20, 22, 30])
)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Loaded:
    """A lease, and what its pages must contain for as long as it lasts."""

    def __init__(self, session, number, prompt, found, ends):
        self.session, self.number, self.prompt, self.found, self.ends = session, number, prompt, found, ends
        self.places = {}  # offset by position


class ServiceMachine(RuleBasedStateMachine):
    disk = False

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp(prefix="tierstore-test-"))
        self.clock = Clock()
        config = Settings(
            host_bytes=HOST_PAGES * PAGE,
            reserve_bytes=RESERVE_PAGES * PAGE,
            lease_s=10.0,
            disk=self.directory if self.disk else None,
            disk_bytes=2 << 20,
            page_bytes=PAGE,
        )
        self.later = []
        self.core = open_core(config, clock=self.clock, defer=self.later.append)
        self.service = Service(self.core, config, stats_json=lambda: b"{}")
        self.sessions = [self._begin(n) for n in range(3)]
        self.leases: list[Loaded] = []
        self.reservations = {}  # id -> (session, prompt, first, Reserved)
        self.ever_saved = set()  # (identity, tokens) of every page that was committed
        self.paths = {}  # id -> (session, prompt, known)
        self.next_id = 1

    def _begin(self, number):
        session = self.service.begin(f"client {number}", local=True)
        for identity in IDENTITIES:
            self.ask(session, p.Register(0, asdict(identity), PAGE, CHUNK))
        return session

    def ask(self, session, message, meanwhile=lambda: None):
        answer = self.service.handle(session, message)
        if inspect.isawaitable(answer):
            meanwhile()

            async def wait():
                return await answer

            answer = self.loop.run_until_complete(asyncio.wait_for(wait(), 20))
        while self.later:
            self.later.pop()()
        return answer

    def prompt(self, spec):
        which, stem, length = spec
        return Prompt(IDENTITIES[which], STEMS[stem][:length], chunk_tokens=CHUNK)

    def number(self, prompt):
        return IDENTITIES.index(prompt.identity)

    def described(self, session, prompt, use_path):
        """The prompt, with a path that it begins like if that is asked for and there is one."""
        for number, (owner, other, known) in self.paths.items():
            shared = 0
            while (
                use_path
                and owner is session
                and other.identity == prompt.identity
                and shared < min(known, len(prompt.keys))
                and prompt.keys[shared] == other.keys[shared]
            ):
                shared += 1
            if shared:
                return part(prompt, self.number(prompt), path=number, known=shared)
        return part(prompt, self.number(prompt))

    def expected(self, prompt, position):
        tokens = prompt.tokens[: (position + 1) * CHUNK].tolist()
        return page_bytes([self.number(prompt), *tokens], PAGE)

    def bytes_at(self, offset):
        return bytes(self.core.host.view(offset, PAGE))

    # -- rules -------------------------------------------------------------------------------------------

    @rule(
        who=sessions,
        spec=prompts,
        limit=st.sampled_from([40, 40, 40, 17, 8, 0]),
        use_path=st.booleans(),
        give_back=st.integers(0, 2),
    )
    def lookup(self, who, spec, limit, use_path, give_back):
        session, prompt = self.sessions[who], self.prompt(spec)
        asked = self.described(session, prompt, use_path)
        released = [lease for lease in self.leases if lease.session is session][:give_back]
        self.leases = [lease for lease in self.leases if lease not in released]
        numbers = [lease.number for lease in released]
        found = self.ask(session, p.Find(0, asked, limit, SECONDS, numbers))
        assert not session.client.leases.keys() & set(numbers)
        if isinstance(found, p.Refused):
            assert found.kind == "path", found
            del self.paths[asked.path]
            return
        assert found.tokens <= min(limit, len(prompt))
        pages = sum(count for _, count in found.tiers)
        assert pages == -(-found.tokens // CHUNK)
        for position in range(pages):
            whole = tuple(prompt.tokens[: (position + 1) * CHUNK].tolist())
            held = whole[: found.tokens]
            number = self.number(prompt)
            assert any(n == number and tokens[: len(held)] == held for n, tokens in self.ever_saved)
        if found.lease:
            self.leases.append(Loaded(session, found.lease, prompt, found, self.clock.now + 10))
        if found.path:
            self.paths[found.path] = (session, prompt, found.known)

    # With a disk, what there is depends on how far the writer is. So what a rule draws must not depend on it.

    @rule(
        which=st.integers(0, 99),
        first=st.sampled_from([0, 0, 0, 2]),
        count=st.sampled_from([9, 9, 2, 0]),
        prefetch=st.booleans(),
    )
    def load(self, which, first, count, prefetch):
        if not self.leases:
            return
        lease = self.leases[which % len(self.leases)]
        if prefetch:
            self.ask(lease.session, p.Prefetch(0, lease.number, SECONDS))
        located = self.ask(lease.session, p.Locate(0, lease.number, first, count, SECONDS))
        pages = sum(held for _, held in lease.found.tiers)
        there = offsets(located.offsets)
        assert len(there) <= max(min(count, pages - first), 0)
        if not self.disk:
            alive = self.clock.now < lease.ends
            assert len(there) == (max(min(count, pages - first), 0) if alive else 0)
        for position, offset in enumerate(there, first):
            lease.places[position] = offset

    @rule(
        who=sessions, spec=prompts, first=st.integers(0, 4), count=st.integers(0, 8), use_path=st.booleans()
    )
    def reserve(self, who, spec, first, count, use_path):
        session, prompt = self.sessions[who], self.prompt(spec)
        chunks = -(-len(prompt) // CHUNK)
        first = min(first, chunks)
        count = min(count, chunks - first)
        asked = self.described(session, prompt, use_path)
        written = self.being_written(prompt, first, count)
        reserved = self.ask(
            session,
            p.Reserve(0, asked, first, count),
            meanwhile=lambda: [self.end(number) for number in written],
        )
        if not self.disk and any(number in self.reservations for number in written):
            assert isinstance(reserved, p.Refused)  # it has not waited for them, which may not be on disk
        if isinstance(reserved, p.Refused):
            assert reserved.kind == "path", reserved
            del self.paths[asked.path]
            return
        assert reserved.known <= min(first + count, len(prompt.keys))
        if reserved.path:
            self.paths[reserved.path] = (session, prompt, reserved.known)
        if not reserved.reservation:
            return
        self.reservations[reserved.reservation] = (session, prompt, first, reserved)
        for position, offset in zip(positions(reserved), offsets(reserved.offsets), strict=True):
            self.core.host.view(offset, PAGE)[:] = self.expected(prompt, first + position)

    @rule(who=sessions, spec=prompts)
    def save(self, who, spec):
        before = set(self.reservations)
        self.reserve(who, spec, 0, 99, False)
        for number in set(self.reservations) - before:
            self._commit(number, positions(self.reservations[number][3]))

    def being_written(self, prompt, first, count):
        """The reservations that hold one of these pages."""
        asked = self.names(prompt, range(first, first + count))
        return [
            number
            for number, (_, other, start, reserved) in self.reservations.items()
            if asked & self.names(other, (start + position for position in positions(reserved)))
        ]

    def names(self, prompt, chunks):
        return {(prompt.identity, tuple(prompt.tokens[: (at + 1) * CHUNK].tolist())) for at in chunks}

    def end(self, number):
        """Commit a reservation, or abort it."""
        if number % 2:
            self._commit(number, positions(self.reservations[number][3]))
        else:
            session, *_ = self.reservations.pop(number)
            self.ask(session, p.Abort(number))

    @rule(which=st.integers(0, 99), left_out=st.sets(st.integers(0, 8)))
    def commit(self, which, left_out):
        if not self.reservations:
            return
        number = sorted(self.reservations)[which % len(self.reservations)]
        reserved = positions(self.reservations[number][3])
        self._commit(number, [each for each in reserved if each not in left_out] or reserved)

    def _commit(self, number, done):
        session, prompt, first, _ = self.reservations.pop(number)
        sums = [xxhash.xxh3_64_intdigest(self.expected(prompt, first + position)) for position in done]
        answer = self.ask(
            session,
            p.Commit(0, number, np.asarray(done, np.uint32).tobytes(), np.asarray(sums, np.uint64).tobytes()),
        )
        assert answer.pages == len(done)
        for position in done:
            tokens = tuple(prompt.tokens[: (first + position + 1) * CHUNK].tolist())
            self.ever_saved.add((self.number(prompt), tokens))

    @rule(which=st.integers(0, 99))
    def abort(self, which):
        if not self.reservations:
            return
        number = sorted(self.reservations)[which % len(self.reservations)]
        session, *_ = self.reservations.pop(number)
        self.ask(session, p.Abort(number))

    @rule(which=st.integers(0, 99))
    def release(self, which):
        if not self.leases:
            return
        lease = self.leases.pop(which % len(self.leases))
        self.ask(lease.session, p.Release([lease.number, 12345]))

    @rule(who=sessions, tier=st.sampled_from(["host", "host", "disk"]), pages=st.sampled_from([-1, -1, 1, 3]))
    def evict(self, who, tier, pages):
        assert self.ask(self.sessions[who], p.Evict(0, tier, pages)).pages >= 0

    @rule(who=sessions, spec=prompts)
    def look_up_what_has_left(self, who, spec):
        for lease in self.leases:
            self.ask(lease.session, p.Release([lease.number]))
        self.leases.clear()
        self.evict(who, "host", -1)
        self.lookup(who, spec, 40, True, 0)

    @rule(who=sessions)
    def flush(self, who):
        assert self.ask(self.sessions[who], p.Flush(0, SECONDS)).done

    @rule(seconds=st.sampled_from([1.0, 1.0, 6.0, 11.0]))
    def time_passes(self, seconds):
        self.clock.now += seconds
        self.leases = [lease for lease in self.leases if lease.ends > self.clock.now]

    @rule(who=sessions)
    def die(self, who):
        self._die(who)
        self.sessions[who] = self._begin(who)

    def _die(self, who):
        session = self.sessions[who]
        self.service.end(session)
        self.leases = [lease for lease in self.leases if lease.session is not session]
        self.reservations = {n: r for n, r in self.reservations.items() if r[0] is not session}
        self.paths = {n: path for n, path in self.paths.items() if path[0] is not session}

    # -- what always holds -------------------------------------------------------------------------------

    @invariant()
    def what_is_leased_stays_as_it_was(self):
        for lease in self.leases:
            for position, offset in lease.places.items():
                whole = -(-lease.found.tokens // CHUNK)
                tokens = CHUNK if position + 1 < whole else lease.found.tail_tokens
                if tokens == CHUNK and (position + 1) * CHUNK <= len(lease.prompt):
                    assert self.bytes_at(offset) == self.expected(lease.prompt, position)

    @invariant()
    def what_is_leased_is_there(self):
        for lease in self.leases:
            held = lease.session.client.leases[lease.number]
            pages = sum(count for _, count in lease.found.tiers)
            assert len(held.held) == pages
            assert all(page.ready_tier() is not None for page in held.held)

    @invariant()
    def what_is_reserved_is_nobody_elses(self):
        places = []
        for _, prompt, first, reserved in self.reservations.values():
            for position, offset in zip(positions(reserved), offsets(reserved.offsets), strict=True):
                assert self.bytes_at(offset) == self.expected(prompt, first + position)
                places.append(offset)
        for lease in self.leases:
            assert not set(places) & set(lease.places.values())
        assert len(places) == len(set(places))

    @invariant()
    def counts_agree(self):
        stats = self.service.stats()
        assert stats.reserved_bytes == PAGE * sum(
            len(positions(reserved)) for _, _, _, reserved in self.reservations.values()
        )
        assert stats.reserved_bytes <= 3 * RESERVE_PAGES * PAGE
        assert stats.failed_requests == 0
        with self.core.state.lock:
            self.core.state.check()

    def teardown(self):
        try:
            for who in range(3):
                self._die(who)
            self.core.flush(SECONDS)
            self.core.check()
            state = self.core.state
            stats = self.core.stats()
            assert stats.open_hits == 0
            assert all(tier.leased_pages == 0 for tier in stats.tiers.values())
            cached = [page for page in state.index.tree.walk() if page.copies[Tier.HOST] is not None]
            assert self.core.host.used_bytes == len(cached) * PAGE
            assert self.service.stats().connections == 0
        finally:
            self.service.close()
            self.core.close()
            self.loop.close()
            shutil.rmtree(self.directory)


class DiskMachine(ServiceMachine):
    disk = True


TestInMemory = ServiceMachine.TestCase
TestInMemory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWithDisk = DiskMachine.TestCase
TestWithDisk.settings = settings(
    max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture
def service(request):
    reserve_pages = getattr(request, "param", 64)
    config = Settings(
        host_bytes=64 * PAGE, reserve_bytes=reserve_pages * PAGE, quotas={"bob": 8 * PAGE, "tim": 64 * PAGE}
    )
    assembly = open_core(config)
    made = Service(assembly, config, stats_json=lambda: b"{}")
    yield made
    made.close()
    assembly.close()


def test_every_request_has_a_verb():
    by_others = {p.Write, p.Hello, p.Bye}  # with frames behind it; the server's own
    assert set(_VERBS) | by_others == set(get_args(p.Request))


def save(service, session, tokens):
    prompt = Prompt(IDENTITIES[0], tokens, chunk_tokens=CHUNK)
    reserved = service.handle(session, p.Reserve(1, part(prompt), 0, len(prompt) // CHUNK))
    if reserved.reservation:
        sums = bytes(8 * len(positions(reserved)))
        service.handle(session, p.Commit(2, reserved.reservation, reserved.positions, sums))
    return reserved.stored_tokens // CHUNK


def found(service, session, tokens):
    prompt = Prompt(IDENTITIES[0], tokens, chunk_tokens=CHUNK)
    answer = service.handle(session, p.Find(1, part(prompt), len(prompt), 0.0))
    service.handle(session, p.Release([answer.lease]))
    return answer.tokens // CHUNK


def test_tenants_do_not_see_each_other_and_the_daemon_says_who_is_who(service):
    sessions = [service.begin("", local=True, tenant=tenant) for tenant in ("bob", "eve", "")]
    for session in sessions:
        fields = asdict(IDENTITIES[0]) | {"tenant": "bob" if session.tenant == "" else ""}
        service.handle(session, p.Register(0, fields, PAGE, CHUNK))
    bob, eve, nobody = sessions
    assert save(service, bob, range(16)) == 4
    assert (found(service, bob, range(16)), found(service, eve, range(16))) == (4, 0)
    assert found(service, nobody, range(16)) == 0


def test_a_tenant_over_its_quota_makes_room_among_its_own_pages(service):
    bob, eve = (service.begin("", local=True, tenant=tenant) for tenant in ("bob", "eve"))
    for session in (bob, eve):
        service.handle(session, p.Register(0, asdict(IDENTITIES[0]), PAGE, CHUNK))
    assert save(service, eve, range(40)) == 10
    assert save(service, bob, range(24)) == 6
    assert save(service, bob, range(1000, 1020)) == 5
    assert service.stats().tenants["bob"].host_bytes <= 8 * PAGE
    assert found(service, bob, range(1000, 1020)) == 5
    assert found(service, bob, range(24)) == 3
    assert save(service, bob, range(2000, 2080)) == 8  # one prompt that is larger than the quota
    assert found(service, eve, range(40)) == 10
    assert service.stats().quota_evicted_pages > 0


@pytest.mark.parametrize(
    ("service", "tenant"),
    [(64, "bob"), (8, "tim"), (8, "")],
    indirect=["service"],
    ids=["quota", "both", "limit"],
)
def test_nobody_leaves_for_pages_that_are_not_let_in(service, tenant):
    """Though room is made for several at a time."""
    eve, other = (service.begin("", local=True, tenant=each) for each in ("eve", tenant))
    for session in (eve, other):
        service.handle(session, p.Register(0, asdict(IDENTITIES[0]), PAGE, CHUNK))
    for first in range(8):
        assert save(service, eve, range(1000 * first, 1000 * first + 32)) == 8
    assert save(service, other, range(9000, 9080)) == 8
    assert sum(found(service, eve, range(1000 * first, 1000 * first + 32)) for first in range(8)) == 56


def test_requests_that_wait_are_bounded(service):
    session = service.begin("", local=True)
    session.client.waiting = MOST_WAITING
    answer = service.handle(session, p.Flush(1, 1.0))
    assert asyncio.run(_await(answer)).kind == "busy"


async def _await(answer):
    return await answer
