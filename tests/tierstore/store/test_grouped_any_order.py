"""Any layer groups, saved, evicted and looked up in any order: hits are as long as the rule allows for what
is held, no longer, and bring what they need and nothing else. Compared with all that was ever saved, and with
a search that tries every length."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tierstore.store import grouped_model as model
from tests.tierstore.store.grouped_model import CHUNK, Engine
from tierstore import groups
from tierstore.index import Tier
from tierstore.spec import KVSpec

LENGTH = 10 * CHUNK + 5
CHUNKS = LENGTH // CHUNK
TIERS = list(Tier)

chains = st.sampled_from([(model.FULL,), (model.LATENT,), (model.FULL, model.LATENT)])
others = st.lists(
    st.one_of(
        st.integers(2, 80).map(lambda window: replace(model.WINDOW, window=window)),
        st.sampled_from([16, 32, 48, 50]).map(lambda window: replace(model.CHUNKED, window=window)),
        st.just(model.STATE),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda group: group.kind,
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("chain"), st.integers(0, 3), st.integers(0, 7), st.integers(1, CHUNKS + 1)),
        st.tuples(st.just("point"), st.integers(0, 3), st.integers(1, CHUNKS), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 3), st.integers(1, LENGTH), st.integers(0, 3)),
        st.tuples(st.just("some"), st.integers(0, 3), st.integers(0, 7), st.integers(0, CHUNKS - 1)),
        st.tuples(st.just("forget"), st.integers(0, 3), st.integers(0, 7), st.integers(0, CHUNKS - 1)),
        st.tuples(st.just("evict"), st.sampled_from(TIERS), st.integers(0, 7), st.integers(1, 12)),
        st.tuples(st.just("flush"), st.just(0), st.just(0), st.just(0)),
        st.tuples(st.just("look"), st.integers(0, 3), st.integers(0, LENGTH), st.booleans()),
    ),
    min_size=4,
    max_size=30,
)


def prompts(parts):
    """Four prompts that share the first one's beginning, up to ``parts``."""
    first = list(range(1000, 1000 + LENGTH))
    return [first, *([*first[:at], *range(at, LENGTH)] for at in parts)]


def longest(engine, tokens, limit):
    """(hit, chunks that all chains have, what is held), by trying every length on what the tiers hold."""
    chunks = range(len(tokens) // CHUNK)
    held = {group: engine.held(group, tokens, chunks) for group in [*engine.chains, *engine.named]}
    runs = [next((c for c in chunks if c not in held[group]), len(chunks)) for group in engine.chains]
    whole = min([*runs, limit // CHUNK])
    for length in range(branch_of(engine, tokens, limit), whole * CHUNK, -1):
        if all(serves(engine, group, held[group], tokens, length) for group in engine.named):
            return length, whole, held
    for count in range(whole, 0, -1):
        needed = {group: set(engine.rules[group].pages(count * CHUNK, CHUNK)) for group in engine.named}
        if all(held[group].keys() >= pages for group, pages in needed.items()):
            return count * CHUNK, whole, held
    return 0, whole, held


def branch_of(engine, tokens, limit):
    """How far all chains go, as each says by itself."""
    prompt = engine.store.prompt(tokens)
    found = []
    for group in engine.chains:
        with engine.store.lookup(prompt.pages_of(group), max_tokens=limit) as hit:
            found.append(hit.tokens)
    return min(found)


def serves(engine, group, whole, tokens, length):
    """Whether a group, of which these whole chunks are held, has what a hit of that length needs, which ends
    inside of a chunk."""
    *before, last = engine.rules[group].pages(length, CHUNK) or [None]
    if last is None:
        return True
    return whole.keys() >= set(before) and bool(engine.held(group, tokens[:length], [last]))


def look(engine, tokens, limit, saved, *, load):
    expected, whole, held = longest(engine, tokens, limit)
    for group, there in held.items():
        assert all(model.content(group, tokens, chunk, 8) in saved[group] for chunk in there)
    inside = expected % CHUNK
    slowest = [
        max(there[at] for group, there in held.items() if at in engine.rules[group].pages(expected, CHUNK))
        for at in range(expected // CHUNK)
    ]
    hit = engine.lookup(tokens, max_tokens=limit)
    assert hit.tokens == expected
    if inside:  # which of several pages its last tokens are taken from is not said
        assert sum(hit.by_tier.values()) == expected
    else:
        assert hit.by_tier == {tier.label: slowest.count(tier) * CHUNK for tier in TIERS if tier in slowest}
    assert hit.branch // CHUNK == whole
    assert hit.tokens <= hit.branch <= limit
    if not load:
        hit.release()
        return
    loaded = engine.store.load(hit).wait(30)
    assert loaded.tokens == expected
    for group, part in enumerate(loaded.groups):
        wanted = engine.rules[group].pages(expected, CHUNK)
        assert len(part.pages) == len(wanted)
        assert not wanted or part.first == wanted.start
    engine.verify(tokens, loaded)
    engine.release(loaded)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(chains, others, st.tuples(*[st.integers(0, LENGTH - 1)] * 3), steps)
def test_any_order_of_things(tmp_path_factory, monkeypatch, chains, others, parts, steps):
    monkeypatch.setattr(groups, "_SCANNED", 1)  # as a long prompt is scanned: in several steps
    spec = KVSpec((*chains, *others), "float32", CHUNK)
    tokens = prompts(parts)
    saved = [set() for _ in spec.groups]
    with Engine(spec, tmp_path_factory.mktemp("any")) as engine:

        def note(group, which, chunks):
            saved[group].update(model.content(group, tokens[which], chunk, 8) for chunk in chunks)

        for what, which, number, count in steps:
            group = number % len(spec.groups)
            if what == "chain":
                group = engine.chains[number % len(engine.chains)]
                engine.save(group, tokens[which], range(count))
                note(group, which, range(min(count, CHUNKS)))
            elif what == "point":
                for point in engine.named:
                    chunks = engine.rules[point].pages(number * CHUNK, CHUNK)
                    engine.save(point, tokens[which], chunks)
                    note(point, which, chunks)
            elif what == "end":  # a sequence leaves: now and then one group loses what it had
                ended = tokens[which][:number]
                for each in range(len(spec.groups)):
                    if each != 1 or count:
                        chunks = engine.rules[each].pages(number, CHUNK)
                        engine.save(each, ended, chunks)
                        saved[each].update(model.content(each, ended, chunk, 8) for chunk in chunks)
            elif what == "some":
                group = engine.named[number % len(engine.named)]
                chunks = range(count, min(count + 3, CHUNKS))
                engine.save(group, tokens[which], chunks)
                note(group, which, chunks)
            elif what == "forget":
                engine.forget(group, tokens[which], [count], [TIERS[number % 3]])
            elif what == "evict":
                engine.store.evict(which.label, count, group=group if which is Tier.HBM else None)
            elif what == "flush":
                assert engine.store.flush(30)
            else:
                look(engine, tokens[which], number, saved, load=count)
        for each in tokens:
            look(engine, each, LENGTH, saved, load=True)
        engine.check()
