"""Planted causes: every missed token gets the planted reason and its detail.

Each scenario plants one cause, or two, in a store whose past is known, and says which spans it expects. The
explanation itself asserts that its spans and the hit are exactly the prompt.
"""

from __future__ import annotations

import random

import pytest

from tests.portions import chosen, portion
from tierstore import Hint, Identity, Store
from tierstore.explanation import MissReason as R
from tierstore.policy import DEFAULT_POLICY
from tierstore.testing.clock import wait_until
from tierstore.testing.layouts import CHUNK, LAYOUTS
from tierstore.testing.opening import connect_store, open_store
from tierstore.testing.store import new_identity

_MIB = 1 << 20
_VOCABULARY = 1 << 17


class Bench:
    """A store of one layout, embedded or over a daemon, and prompts that no other scenario uses."""

    def __init__(self, layout, store, draw, times):
        self.layout, self.store, self.draw, self.times = layout, store, draw, times

    def tokens(self, count=None):
        """A prompt of whole chunks whose beginning no other prompt shares."""
        count = count if count is not None else CHUNK * self.draw.randint(3, 9)
        return [self.draw.randrange(_VOCABULARY) for _ in range(count)]

    def saved(self, tokens=None, **options):
        tokens = tokens if tokens is not None else self.tokens()
        assert self.layout.save(self.store, tokens, **options) == len(tokens)
        return tokens

    def fill(self, chunks):
        """Save other prompts, so that this many chunks of them fill the host tier."""
        for _ in range(-(-chunks // 8)):
            self.saved(self.tokens(8 * CHUNK))

    def reasons(self, tokens, **options):
        """The spans of a prompt: its reason, or that of a layer group that lacks pages, and its tokens."""
        explanation = self.store.explain(tokens, **options)
        return explanation, [(miss.cause or miss.reason, miss.tokens) for miss in explanation.misses]

    def end(self, count):
        """The longest hit in which the first ``count`` tokens are the same."""
        return count if self.layout.single else count - count % CHUNK


EMBEDDED = {f"embedded, {layout}": ("embedded", layout) for layout in LAYOUTS}
PLACES = {**EMBEDDED, **{f"daemon, {layout}": ("daemon", layout) for layout in LAYOUTS}}


@pytest.fixture(params=chosen(PLACES, *EMBEDDED, f"daemon, {LAYOUTS[0]}", f"daemon, {LAYOUTS[-1]}"))
def place(request):
    """Where the store is, and its layout."""
    return PLACES[request.param]


@pytest.fixture
def layout(place):
    return place[1]


@pytest.fixture(params=portion(2, 20))
def times(request):
    """How often a scenario is played."""
    return request.param


@pytest.fixture
def open_bench(place, layout, times, tmp_path, make_daemon):
    """Open a bench: ``host_chunks`` chunks in host memory, and a disk unless ``disk_bytes`` is 0."""
    opened = []

    def open_(*, host_chunks=64, disk_bytes=0, seed=0, identity=None, **options):
        host_bytes = host_chunks * layout.chunk_bytes
        identity = identity or new_identity(layout.spec)
        path = tmp_path / "kv"
        if place[0] == "embedded":
            store = open_store(
                path if disk_bytes else None,
                layout.spec,
                identity=identity,
                host_bytes=host_bytes,
                disk_bytes=disk_bytes or _MIB,
                **options,
            )
        else:
            arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
            daemon = make_daemon(*arguments, host_bytes=host_bytes, disk=disk_bytes > 0)
            store = connect_store(daemon.url, layout.spec, identity=identity, lookup_s=60.0)
            assert store.wait_connected(30)
        opened.append(store)
        return Bench(layout, store, random.Random(seed), times)

    yield open_
    for store in opened:
        store.close()


def test_a_prompt_that_is_held_has_no_misses(open_bench):
    bench = open_bench()
    for _ in range(bench.times):
        explanation, spans = bench.reasons(bench.saved())
        assert spans == []
        assert explanation.hit_tokens == explanation.prompt_tokens


def test_a_new_prompt_was_never_saved(open_bench):
    bench = open_bench()
    bench.saved()
    for _ in range(bench.times):
        tokens = bench.tokens(bench.draw.randint(1, 200))
        _, spans = bench.reasons(tokens)
        tail = 0 if bench.layout.single else len(tokens) % CHUNK
        assert sum(count for reason, count in spans if reason is R.NEVER_SAVED) >= len(tokens) - tail
        assert {reason for reason, _ in spans} <= {R.NEVER_SAVED, R.TAIL}


def test_a_continued_prompt_was_never_saved_behind_its_end(open_bench):
    bench = open_bench()
    for _ in range(bench.times):
        tokens = bench.saved()
        more = bench.tokens(bench.draw.randint(1, 5) * CHUNK)
        explanation, spans = bench.reasons([*tokens, *more])
        assert explanation.hit_tokens == len(tokens)
        assert spans == [(R.NEVER_SAVED, len(more))]


def test_a_changed_token_is_where_prompts_diverge(open_bench):
    bench = open_bench(host_chunks=512)
    for _ in range(bench.times):
        tokens = bench.saved()
        at = bench.draw.randrange(1, len(tokens))
        changed = [*tokens[:at], tokens[at] ^ 1 << 20, *tokens[at + 1 :]]
        explanation, _ = bench.reasons(changed)
        assert explanation.hit_tokens == bench.end(at)
        diverged = [miss for miss in explanation.misses if miss.reason is R.DIVERGED]
        assert [miss.at for miss in diverged] == [at]
        assert diverged[-1].end == len(tokens)
        assert diverged[-1].held_tokens[: len(tokens) - at] == tuple(tokens[at:])


def test_evicted_to_make_room(open_bench):
    bench = open_bench(host_chunks=16)
    for _ in range(bench.times):
        tokens = bench.saved()
        bench.fill(32)
        explanation, spans = bench.reasons(tokens)
        assert spans == [(R.EVICTED, len(tokens))], explanation
        details = [(miss.tier, miss.policy) for miss in explanation.misses]
        assert details == [("host", DEFAULT_POLICY)] or not bench.layout.single
        assert explanation.misses[0].more_bytes >= bench.layout.groups[0].page_bytes


def test_an_evicted_prompt_that_ends_inside_a_chunk(open_bench):
    """As it was, with another end, and longer."""
    bench = open_bench(host_chunks=16)
    for _ in range(bench.times):
        tokens = bench.saved(bench.tokens(3 * CHUNK + bench.draw.randrange(1, CHUNK)))
        bench.fill(32)
        _, spans = bench.reasons(tokens)
        whole = 3 * CHUNK
        if bench.layout.single:
            assert spans == [(R.EVICTED, len(tokens))]
            more = [*tokens, *bench.tokens(CHUNK)]
            assert bench.reasons(more)[1] == [(R.EVICTED, len(tokens)), (R.NEVER_SAVED, CHUNK)]
            with bench.store.lookup(tokens) as hit:
                assert hit.tokens == 0
        else:
            assert sum(count for reason, count in spans if reason is R.EVICTED) >= whole


def test_evicted_by_request(open_bench):
    bench = open_bench(host_chunks=64, disk_bytes=64 * _MIB)
    for _ in range(bench.times):
        tokens = bench.saved()
        assert bench.store.flush(30)
        bench.store.evict("host")
        bench.store.evict("disk")
        assert bench.store.flush(30)
        wait_until(lambda tokens=tokens: bench.reasons(tokens)[1] == [(R.EVICTED, len(tokens))])
        explanation, _ = bench.reasons(tokens)
        assert {miss.policy for miss in explanation.misses} == {"request"}
        assert {miss.tier for miss in explanation.misses} == {"disk"}


def test_the_rest_of_a_prompt_is_evicted(open_bench):
    """The last pages leave first: what is left is a hit, and the rest has left."""
    bench = open_bench(host_chunks=64)
    for _ in range(bench.times):
        tokens = bench.saved(bench.tokens(8 * CHUNK))
        pages = bench.draw.randint(1, 7)
        bench.store.evict("host", pages)
        explanation, spans = bench.reasons(tokens)
        assert explanation.hit_tokens < len(tokens)
        assert {reason for reason, _ in spans} <= {R.EVICTED, R.NEVER_SAVED}
        assert spans[0][0] is R.EVICTED or not bench.layout.single
        bench.store.evict("host")


def test_a_time_to_live_is_over(open_bench):
    bench = open_bench(host_chunks=64)
    for _ in range(bench.times):
        tokens = bench.saved(bench.tokens(3 * CHUNK), hint=Hint(ttl_s=0.0))
        bench.fill(128)
        _, spans = bench.reasons(tokens)
        assert spans == [(R.EXPIRED, len(tokens))]


def test_a_session_has_ended(open_bench):
    bench = open_bench(host_chunks=16)
    for number in range(bench.times):
        tokens = bench.saved(session=f"session {number}")
        assert bench.store.finish(f"session {number}") > 0
        bench.fill(32)
        _, spans = bench.reasons(tokens)
        assert spans == [(R.LET_GO, len(tokens))]


@pytest.mark.parametrize(
    ("field", "value"), [("revision", "2"), ("adapter", "lora"), ("rope", "yarn"), ("shard", "tp0/2,pp0/1")]
)
def test_another_identity_holds_it(open_bench, layout, field, value):
    bench = open_bench(identity=Identity.of(layout.spec, model="same"))
    other = Identity.of(layout.spec, model="same", **{field: value})
    saver = Store(bench.store.backend, layout.spec, identity=other, lookup_s=60.0)
    for _ in range(bench.times):
        tokens = bench.tokens()
        assert layout.save(saver, tokens) == len(tokens)
        explanation, spans = bench.reasons([*tokens, *bench.tokens(CHUNK)])
        assert spans == [(R.OTHER_IDENTITY, len(tokens)), (R.NEVER_SAVED, CHUNK)]
        assert explanation.misses[0].fields == (field,)


def test_the_write_budget_is_used_up(open_bench):
    bench = open_bench(host_chunks=16, disk_bytes=64 * _MIB, disk_write_budget=1)
    bench.saved()
    for _ in range(bench.times):
        tokens = bench.saved()
        bench.fill(32)
        explanation, spans = bench.reasons(tokens)
        assert spans == [(R.NOT_WRITTEN, len(tokens))]
        assert "budget" in explanation.misses[0].why or not bench.layout.single


def test_no_room_in_host_memory(open_bench):
    """All pages of the host tier are leased, so a save finds no room."""
    bench = open_bench(host_chunks=16)
    held = bench.saved(bench.tokens(16 * CHUNK))
    with bench.store.lookup(held) as hit:
        assert hit.tokens == len(held)
        for _ in range(bench.times):
            tokens = bench.tokens()
            stored = bench.layout.save(bench.store, tokens)
            explanation, spans = bench.reasons(tokens)
            if stored == 0:
                assert (R.NOT_WRITTEN, len(tokens)) in spans, explanation


def test_the_token_that_has_to_be_computed(open_bench):
    bench = open_bench()
    for _ in range(bench.times):
        tokens = bench.saved()
        explanation, spans = bench.reasons(tokens, max_tokens=len(tokens) - 1)
        end = bench.end(len(tokens) - 1)
        assert explanation.hit_tokens <= end
        assert spans[-1][0] is R.TAIL
