from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import UsageError
from tierstore.units import format_size, parse_size, round_up


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64KiB", 65536), ("1.5 GiB", 3 << 29), ("100GB", 10**11), ("17", 17), (17, 17), (" 2mib ", 2 << 20)],
)
def test_sizes_as_people_write_them(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "big", "-1", "1 parsec", "1e6", "KiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="not a size"):
        parse_size(text)


@given(st.integers(1, 1 << 50))
def test_formatted_sizes_read_back_nearly_equal(nbytes):
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=0.006)


@given(st.integers(0, 10**9), st.integers(1, 10**5))
def test_round_up(value, multiple):
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple
