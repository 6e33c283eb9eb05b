"""Stop strings: cut at the right place, however the text arrives, and nothing shown that is taken back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierstore_engine.sequence import StopMatcher

# Two letters: stop strings overlap themselves and each other all the time.
texts = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The first character at which any stop string is complete ends the text, before the longest such one."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(texts, stop_lists, st.data())
def test_any_cut_of_the_text_gives_the_same(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    matcher = StopMatcher(stops)
    shown = ""
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown += matcher.push(text[start:stop])
        assert reference(text, stops)[0].startswith(shown)
    shown += matcher.flush()
    assert (shown, matcher.stopped) == reference(text, stops)


@given(texts, stop_lists)
def test_only_what_could_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    if not matcher.stopped:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_nothing_after_the_stop() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one EN") == "one "
    assert matcher.push("D two") == ""
    assert matcher.stopped
    assert matcher.push("three") == ""
    assert matcher.flush() == ""
