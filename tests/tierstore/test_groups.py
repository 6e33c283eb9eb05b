from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore import groups as layer_groups
from tierstore.errors import UsageError
from tierstore.groups import (
    GroupRule,
    Past,
    longest_hit,
    longest_of_pages,
    page_ranges,
    search,
    served_lengths,
)
from tierstore.spec import LayerGroup, LayerKind

CHUNK = 4
PAGES = 12


def attended(rule: GroupRule, token: int) -> set[int]:
    """The tokens before ``token`` that it looks at, said in the words of attention masks."""
    if rule.past is Past.ALL:
        return set(range(token))
    if rule.past is Past.CROSS:
        return {row for start, end in rule.inputs if start < token for row in range(end)}
    if rule.past is Past.WINDOW:
        return {each for each in range(token) if token - each <= rule.tokens}
    return {each for each in range(token) if each // rule.tokens == token // rule.tokens}


class KeepsEverything:
    """The tokens, and the snapshots, that are held of one group of a prompt."""

    def __init__(self, rule: GroupRule, pages: set[int], tail: int) -> None:
        self.rule = rule
        tokens = {page * CHUNK + at for page in pages for at in range(CHUNK)}
        if rule.past is not Past.STATE:
            tokens |= set(range(PAGES * CHUNK, PAGES * CHUNK + tail))
        self.tokens = tokens
        self.snapshots = {(page + 1) * CHUNK for page in pages} | {0}

    def ranges(self, pages: set[int], tail: int) -> list[range]:
        held = page_ranges(list(pages), CHUNK)
        if tail and self.rule.past is not Past.STATE:
            held.append(range(PAGES * CHUNK, PAGES * CHUNK + tail))
        return held

    def serves(self, length: int) -> bool:
        if self.rule.past is Past.STATE:
            return length in self.snapshots
        return attended(self.rule, length) <= self.tokens


@st.composite
def crosses(draw: st.DrawFn) -> GroupRule:
    """The rule of cross attention in a prompt with some inputs, each of some pages."""
    starts = sorted(draw(st.sets(st.integers(0, PAGES * CHUNK), max_size=3)))
    return GroupRule.cross(((start, draw(st.integers(1, 3 * CHUNK))) for start in starts), CHUNK)


RULES = st.one_of(
    crosses(),
    st.just(GroupRule.all()),
    st.builds(GroupRule.window, st.integers(0, 20)),
    st.builds(GroupRule.chunked, st.integers(1, 20)),
    st.just(GroupRule.state()),
)


@st.composite
def evictions(draw: st.DrawFn) -> set[int]:
    """The pages of a group that are left, after some were saved and some of those evicted."""
    saved = set(range(draw(st.integers(0, PAGES))))
    return saved - draw(st.sets(st.integers(0, PAGES - 1), max_size=4)) | draw(
        st.sets(st.integers(0, PAGES - 1), max_size=3)
    )


@given(
    st.lists(st.tuples(RULES, evictions()), min_size=1, max_size=4),
    st.integers(0, CHUNK - 1),
    st.integers(0, PAGES * CHUNK + CHUNK),
    st.sampled_from([1, CHUNK]),
)
def test_a_hit_is_what_a_model_that_keeps_everything_says(groups, tail, limit, align):
    models = [KeepsEverything(rule, pages, tail) for rule, pages in groups]
    held = [model.ranges(pages, tail) for model, (_, pages) in zip(models, groups, strict=True)]
    hit = longest_hit(
        [(rule, each) for (rule, _), each in zip(groups, held, strict=True)], limit, align=align
    )
    possible = [
        length for length in range(0, limit + 1, align) if all(model.serves(length) for model in models)
    ]
    assert hit == max(possible)
    lengths = served_lengths([(rule, each) for (rule, _), each in zip(groups, held, strict=True)], limit)
    assert [length for length in [0, *lengths] if length % align == 0] == possible
    for model in models:
        needed = model.rule.needed(hit)
        if model.rule.past is Past.STATE:
            assert needed == range(max(hit - 1, 0), hit)
        else:
            assert set(needed) == attended(model.rule, hit)
        assert set(needed) <= model.tokens  # needed, and held


ENDS = st.integers(1, PAGES * CHUNK + CHUNK)


def by_trying(groups: list[tuple[GroupRule, set[int]]], branch: int) -> int:
    """The longest hit that pages with these ends serve: whole chunks, or inside of the last one."""
    whole = branch // CHUNK * CHUNK
    lengths = [*range(branch, whole, -1), *range(whole, 0, -CHUNK)]
    for length in lengths:
        if all(set(rule.ends(length, CHUNK)) <= held for rule, held in groups):
            return length
    return 0


@given(
    st.lists(st.tuples(RULES, evictions(), st.sets(ENDS, max_size=12)), min_size=1, max_size=4),
    st.integers(0, PAGES * CHUNK + CHUNK),
    st.sampled_from([1, 2, 64]),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), ENDS), max_size=3),
)
def test_a_search_finds_the_longest_hit_and_ends_with_what_it_needs(groups, branch, scanned, leaving):
    """``leaving``: at this question, a page of this group leaves."""
    rules = [rule for rule, _, _ in groups]
    held = [{(page + 1) * CHUNK for page in pages} | ends for _, pages, ends in groups]
    longest = by_trying(list(zip(rules, held, strict=True)), branch)
    assert longest == longest_of_pages(list(zip(rules, held, strict=True)), branch, CHUNK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_groups, "_SCANNED", scanned)
        steps = search(dict(enumerate(rules)), branch, CHUNK)
        asked, questions = next(steps), 1
        while True:
            for at, group, end in leaving:
                if at == questions and group < len(held):
                    held[group].discard(end)
            answer = {group: [end for end in ends if end in held[group]] for group, ends in asked.items()}
            assert all(asked.values()) or not asked
            try:
                asked, questions = steps.send(answer), questions + 1
            except StopIteration as end:
                found = end.value
                break
    assert found <= longest
    if not leaving:
        assert found == longest
    if found:
        needed = {number: list(rule.ends(found, CHUNK)) for number, rule in enumerate(rules)}
        assert {group: ends for group, ends in answer.items() if ends} == {
            number: ends for number, ends in needed.items() if ends
        }


@given(RULES, evictions(), st.integers(0, PAGES * CHUNK))
def test_a_group_by_itself_serves_what_it_says(rule, pages, length):
    model = KeepsEverything(rule, pages, 0)
    assert rule.serves(page_ranges(list(pages), CHUNK), length) == model.serves(length)


@given(RULES, st.integers(0, 60), st.integers(1, 9))
def test_the_pages_of_a_hit_cover_what_it_needs_and_no_more(rule, length, chunk_tokens):
    chunk_tokens = CHUNK if rule.past is Past.CROSS else chunk_tokens  # its inputs have whole pages
    touched, ends = {at // chunk_tokens for at in rule.needed(length)}, rule.ends(length, chunk_tokens)
    assert set(rule.pages(length, chunk_tokens)) == touched
    if rule.past is Past.CROSS:
        assert [rule.chunk_of(end, CHUNK) for _, end in rule.inputs] == [at // CHUNK for at, _ in rule.inputs]
        length = rule.needed(length).stop
    stops = [min((page + 1) * chunk_tokens, length) for page in sorted(touched)]
    assert list(ends) == stops


def test_an_attention_chunk_that_begins_needs_nothing_before_it():
    assert longest_hit([(GroupRule.all(), [range(100)]), (GroupRule.chunked(16), [])], 100) == 96


def test_states_limit_a_hit_to_their_snapshots():
    state = (GroupRule.state(), [range(60, 64), range(124, 128)])
    assert longest_hit([(GroupRule.all(), [range(100)]), state], 200) == 64
    assert longest_hit([(GroupRule.all(), [range(63)]), state], 200) == 0


@given(evictions(), st.integers(1, PAGES).map(lambda pages: pages * CHUNK), st.sampled_from([1, CHUNK]))
def test_an_input_is_a_hit_as_a_whole_or_not_at_all(pages, rows, align):
    """By whatever function it is asked: with ranges, with pages, and question by question."""
    rule, expected = GroupRule.input(), rows if pages >= set(range(rows // CHUNK)) else 0
    held = page_ranges(list(pages), CHUNK)
    assert longest_hit([(rule, held)], rows, align=align) == expected
    assert served_lengths([(rule, held)], rows) == [expected][: bool(expected)]
    ends = {(page + 1) * CHUNK for page in pages}
    assert longest_of_pages([(rule, ends)], rows, CHUNK) == expected
    steps = search({0: rule}, rows, CHUNK)
    asked = next(steps)
    assert list(asked[0]) == list(range(CHUNK, rows + 1, CHUNK))
    with pytest.raises(StopIteration) as end:
        steps.send({0: [each for each in asked[0] if each in ends]})
    assert end.value.value == expected


@pytest.mark.parametrize(
    ("group", "rule"),
    [
        (LayerGroup(LayerKind.FULL_ATTENTION, (0,), 1, 8), GroupRule.all()),
        (LayerGroup(LayerKind.MLA_LATENT, (0,), 1, 8), GroupRule.all()),
        (LayerGroup(LayerKind.SLIDING_WINDOW, (0,), 1, 8, window=1024), GroupRule.window(1023)),
        (LayerGroup(LayerKind.CHUNKED_ATTENTION, (0,), 1, 8, window=8192), GroupRule.chunked(8192)),
        (LayerGroup(LayerKind.RECURRENT_STATE, (0,), state_bytes=8), GroupRule.state()),
        (LayerGroup(LayerKind.OPAQUE, (0,), state_bytes=8), GroupRule.all()),
        (LayerGroup(LayerKind.EMBEDDING, (0,), 1, 8), GroupRule.input()),
        (LayerGroup(LayerKind.CROSS_ATTENTION, (0,), 1, 8), GroupRule.cross()),
    ],
)
def test_a_layer_group_of_a_spec_has_a_rule(group, rule):
    assert GroupRule.of(group) == rule


@pytest.mark.parametrize(
    ("past", "tokens"), [(Past.ALL, 4), (Past.STATE, 1), (Past.INPUT, 1), (Past.WINDOW, -1), (Past.CHUNK, 0)]
)
def test_tokens_that_a_past_cannot_have_are_refused(past, tokens):
    with pytest.raises(UsageError):
        GroupRule(past, tokens)
