"""Tables of each rule: what the next token needs is there, and nothing leaks."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.groups import GroupRule
from tierstore.keys import Identity
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.tiers.hbm import PagePool
from tierstore.types import GroupPages, Hint
from tierstore_connectors.bundled import NoStore
from tierstore_engine.attention.base import NO_PAGE
from tierstore_engine.tables import GroupTable, SavePoint, StateTable, empty_tables

CHUNK = 8
FULL = LayerGroup(LayerKind.FULL_ATTENTION, (0,), 1, 8)
STATE = LayerGroup(LayerKind.RECURRENT_STATE, (3,), state_bytes=256)


def window(tokens: int) -> LayerGroup:
    return LayerGroup(LayerKind.SLIDING_WINDOW, (1,), 1, 8, window=tokens)


def chunked(tokens: int) -> LayerGroup:
    return LayerGroup(LayerKind.CHUNKED_ATTENTION, (2,), 1, 8, window=tokens)


def pools_of(*groups: LayerGroup, pages: int = 64) -> tuple[list[PagePool], Identity]:
    spec = KVSpec((FULL, *groups), "float32", CHUNK)
    return [PagePool(part, pages) for part in spec.split()], Identity.of(spec, model="m")


def without_store(*groups: LayerGroup, pages: int = 64) -> NoStore:
    return NoStore(*pools_of(*groups, pages=pages))


def pages_had(table: GroupTable) -> set[int]:
    snapshot = table.snapshot if isinstance(table, StateTable) else []
    return {page for page in [*table.pages, *snapshot] if page != NO_PAGE}


def new_table(connector: NoStore, number: int = 1) -> GroupTable:
    """Of group ``number``, of a sequence with no hit."""
    table = empty_tables(connector)[number]
    assert table.begin(GroupPages(), 0, 1)
    return table


class Full(NoStore):
    """Keeps what is saved, and has no page left for snapshots."""

    keeps = True

    def allocate(self, count, *, group=0, near=()):
        return None if group and self.pools[group].used_pages else super().allocate(count, group=group)


def test_a_snapshot_that_found_no_page_is_not_taken_for_saved():
    class Roomy(NoStore):
        keeps = True

    for kind, there in ((Roomy, True), (Full, False)):
        connector = kind(*pools_of(STATE))
        table = new_table(connector)
        table.passed(2 * CHUNK)
        prompt = connector.prompt(range(2 * CHUNK))
        assert len(table.save(SavePoint(prompt, [2 * CHUNK]))) == there
        assert table.saved(2 * CHUNK) == 2 * CHUNK * there
        assert table.saved(CHUNK) == 0


def test_a_state_that_leaves_needs_no_snapshot():
    for tokens in (2 * CHUNK, 2 * CHUNK + 3):
        connector = Full(*pools_of(STATE))
        table = new_table(connector)
        table.passed(tokens)
        point = SavePoint(connector.prompt(range(tokens)), [tokens])
        assert not table.save(point)
        assert table.save(replace(point, live=tokens))


def test_a_hint_comes_after_whole_windows_were_saved():
    class Noting(NoStore):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.saved = []

        def save(self, prompt, pages, *, first, group=0, hint=None, session=None):
            self.saved.append((first, len(pages), hint, session))
            return super().save(prompt, pages, first=first)

    connector = Noting(*pools_of(window(CHUNK)))
    table = empty_tables(connector, whole_windows=True)[1]
    assert table.begin(GroupPages(), 0, 1)
    assert table.grow(0, 3 * CHUNK)
    point = SavePoint(connector.prompt(range(3 * CHUNK)), [3 * CHUNK], session="s")
    for _ in range(2):
        table.save(point)
    table.passed(3 * CHUNK)
    hint = Hint(reuse="unlikely")
    table.save(replace(point, hint=hint))
    assert connector.saved == [(0, 3, None, None), (2, 1, hint, None)]


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.integers(1, 40).map(window), st.integers(1, 40).map(chunked), st.sampled_from([STATE, FULL])
    ),
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.booleans(),
)
def test_a_sequence_has_what_its_next_token_needs_and_no_more(group, steps, forks):
    connector = without_store(STATE if group is FULL else group)
    rule, number = GroupRule.of(group), int(group is not FULL)
    table, computed = new_table(connector, number), 0
    for step in steps:
        assert table.grow(computed, computed + step)
        peak = table.peak(computed + step, max(steps))
        assert len(pages_had(table)) <= peak
        if group is not STATE:
            needed = rule.needed(computed + 1)
            places = range(needed.start // CHUNK, -(-(computed + step) // CHUNK))
            assert NO_PAGE not in [table.pages[place] for place in places]
        computed += step
        table.passed(computed)
        assert len(pages_had(table)) <= table.kept(computed)
    assert table.grow(computed, computed + 1)  # the next token
    assert len(pages_had(table)) <= table.kept(computed + 1) <= table.peak(computed + 1, max(steps))
    table.trim(computed) if group is not STATE else None
    child = table.fork() if forks else None
    if child is not None:
        assert child.grow(computed, computed + 1)
        written = child.pages[-1]
        assert written not in pages_had(table), "two sequences write to one page"
        child.drop()
    table.drop()
    assert connector.pools[number].free_pages == connector.pools[number].num_pages
    assert not table.group.shared_pages
