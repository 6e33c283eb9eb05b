"""Bundles and their index: what is written is read, damage is found, nothing beyond the limits is kept."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.cluster import bundle_index
from tierstore.cluster.bundle_index import BundleIndex, decode_uses, encode_uses
from tierstore.cluster.bundles import HEAD_BYTES, Bundle, BundleError, make_bundle, merged_bundle, read_bundle
from tierstore.cluster.objects import object_name
from tierstore.cluster.orders import Origin, PromptPages
from tierstore.cluster.s3_address import S3Address
from tierstore.errors import UsageError


def names(line: int, first: int, count: int) -> list[str]:
    """The names of pages of a prompt."""
    return [object_name(random.Random(f"{line} {at}").randbytes(32)) for at in range(first, first + count)]


def bundle(line: int, first: int, count: int, object_bytes: int = 1000) -> tuple[Bundle, bytes]:
    """A bundle of these pages, and its bytes before the first page."""
    pages = PromptPages({"model": "m", "layout": "x"}, object_bytes - 128, 4, bytes(16), bytes(16))
    parent = names(line, first - 1, 1)[0] if first else ""
    return make_bundle(names(line, first, count), object_bytes, Origin(pages, count, parent))


@given(st.integers(1, 900), st.integers(129, 1 << 20), st.integers(0, 3))
def test_what_is_written_is_read(count, object_bytes, first):
    made, head = bundle(1, first, count, object_bytes)
    assert made.nbytes == len(head) + count * object_bytes
    assert made.offset(0) == len(head)
    read = read_bundle(made.name, made.nbytes, head[:HEAD_BYTES])
    assert read == HEAD_BYTES + 20 * count + 16, "with the id of the key, if there is one"
    read = read_bundle(made.name, made.nbytes, head)
    assert read == made
    assert read.origin(head[read.origin_at :]).count == count
    assert read.has_parent == (first > 0)


@given(st.data())
def test_a_bundle_with_a_wrong_byte_or_length_is_none(data):
    made, head = bundle(1, 0, 8)
    damaged = bytearray(head)
    kind = data.draw(st.sampled_from(["byte", "cut", "size", "name"]))
    nbytes, name = made.nbytes, made.name
    if kind == "byte":
        damaged[data.draw(st.integers(0, len(head) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del damaged[data.draw(st.integers(0, HEAD_BYTES - 1)) :]
    elif kind == "size":
        nbytes += data.draw(st.integers(-nbytes, nbytes).filter(bool))
    else:
        name = bundle(2, 0, 8)[0].name
    with pytest.raises(BundleError):
        read_all(name, nbytes, bytes(damaged))


def read_all(name: str, nbytes: int, data: bytes) -> None:
    read = read_bundle(name, nbytes, data)
    assert isinstance(read, Bundle)
    read.origin(data[read.origin_at :])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(1, 4), st.booleans())))
def test_an_index_finds_what_is_there_and_nothing_else(steps):
    """Against a dict of names."""
    index, expected = BundleIndex(clock=lambda: 0.0), {}
    for line, first, count, gone in steps:
        made, _ = bundle(line, first, count)
        if gone:
            index.remove([made.name])
            expected.pop(made.name, None)
        else:
            index.add(made)
            expected[made.name] = made
    asked = [name for line in range(6) for name in names(line, 0, 12)]
    there = {name for each in expected.values() for name in _names(each)}
    for name, place in zip(asked, index.find(asked), strict=True):
        assert (place is not None) == (name in there)
        if place is not None:
            assert f"ts1:{place.bundle.page_name(place.at).hex()}" == name
    assert index.nbytes == sum(each.nbytes for each in expected.values())


def _names(each: Bundle) -> list[str]:
    return [f"ts1:{each.page_name(at).hex()}" for at in range(each.pages)]


def filled(*bundles: Bundle) -> BundleIndex:
    """An index of these bundles, written a second after one another."""
    index = BundleIndex(clock=lambda: 100.0)
    index.listed([(each.name, each.nbytes, 1000.0 + at) for at, each in enumerate(bundles)], 0.0)
    for each in bundles:
        index.read(each.name, each)
    index.rebuild()
    return index


def test_the_least_used_leave_first_and_what_continues_them_before_them():
    begin, middle, end = (bundle(1, at, 4)[0] for at in (0, 4, 8))
    other = bundle(2, 0, 4)[0]
    index = filled(begin, middle, end, other)
    uses = {begin.name: 1.0, middle.name: 1.0, end.name: 1.0, other.name: 2.0}
    assert index.victims(1, 0, uses) == [end.name]
    assert index.victims(2 * end.nbytes, 0, uses) == [end.name, middle.name]
    assert index.victims(1 << 40, 0, uses) == [end.name, middle.name, begin.name, other.name]
    assert index.victims(0, 1, {other.name: -1.0}) == [other.name]


def test_the_most_used_come_first_and_follow_what_they_continue():
    begin, end = bundle(1, 0, 4)[0], bundle(1, 4, 4)[0]
    other, new = bundle(2, 0, 4)[0], bundle(3, 0, 4)[0]
    index = filled(begin, end, other, new)
    order = [each.name for each in index.by_use({end.name: 5.0, other.name: 2.0})]
    assert order == [begin.name, end.name, other.name, new.name]


def test_time_is_the_servers():
    """This host's clock is wrong by decades, and only its differences count."""
    clock = [5.0]
    index = BundleIndex(clock=lambda: clock[0])
    old, new = bundle(1, 0, 1)[0], bundle(2, 0, 1)[0]
    index.listed([(old.name, 1, 1000.0), (new.name, 1, 1090.0)], 0.0)
    assert index.now == 1090.0
    assert index.expired(100.0) == []
    clock[0] += 20.0
    assert index.expired(100.0) == [old.name]
    index.note_time(500.0)  # a server's clock that was set back
    assert index.now == 1110.0


@pytest.mark.parametrize("kept", [True, False])
def test_a_merged_bundle_is_as_old_as_its_oldest_page(monkeypatch, kept):
    """Also if its names are not kept."""
    parts = [bundle(1, at, 2)[0] for at in range(0, 8, 2)]
    index = filled(*parts)
    assert index.mergeable(4, 16_000, since=1000.0) == [parts]
    assert index.mergeable(3, 16_000, since=1000.5) == [parts[1:]]
    made, head = merged_bundle(parts, origin_of(parts), index.oldest_at(parts))
    merged = read_bundle(made.name, made.nbytes, head)
    assert isinstance(merged, Bundle)
    assert merged.oldest_at == 1000
    if not kept:
        monkeypatch.setattr(bundle_index, "_MOST_PAGES", 1)
    later = BundleIndex(clock=lambda: 0.0)
    new = bundle(2, 0, 1)[0]
    later.listed([(merged.name, merged.nbytes, 1100.0), (new.name, new.nbytes, 1100.0)], 0.0)
    later.read(merged.name, merged)
    later.rebuild()
    assert (later.find(names(1, 0, 1)) != [None]) == kept
    assert later.expired(100.5) == []
    assert later.expired(99.5) == [merged.name]
    longer, _ = merged_bundle([merged, bundle(1, 8, 2)[0]], origin_of(parts), later.oldest_at([merged]))
    assert longer.oldest_at == 1000


@pytest.mark.parametrize(("time", "kept"), [(-5.0, 0), (1e12, (1 << 32) - 1), (float("inf"), (1 << 32) - 1)])
def test_a_time_that_cannot_be_is_bounded(time, kept):
    parts = [bundle(1, 0, 1)[0], bundle(1, 1, 1)[0]]
    made, head = merged_bundle(parts, origin_of(parts), time)
    assert made.oldest_at == kept
    assert read_bundle(made.name, made.nbytes, head) == made


def test_an_index_stays_within_its_limits(monkeypatch):
    monkeypatch.setattr(bundle_index, "_MOST_PAGES", 10)
    monkeypatch.setattr(bundle_index, "MOST_BUNDLES", 3)
    made = [bundle(line, 0, 4)[0] for line in range(5)]
    index = filled(*made)
    assert index.pages == 8
    assert index.find(names(4, 0, 1)) != [None], "the newest are found"
    assert index.by_use({}) == [made[4], made[3]], "the names of others take no memory"
    assert index.excess == 2
    assert set(index.victims(0, index.excess, {})) == {made[0].name, made[1].name}
    assert len(decode_uses(encode_uses({f"{at:040x}": at for at in range(1, 5000)}))) == 1024


def test_a_listing_replaces_what_it_knew():
    clock = [1.0]
    index = BundleIndex(clock=lambda: clock[0])
    first, second = bundle(1, 0, 2)[0], bundle(2, 0, 2)[0]
    index.add(first)
    clock[0] = 2.0
    index.add(second)  # while the listing was under way
    assert index.listed([("README", 5, 1.0), ("../" + "0" * 37, 5, 1.0)], 1.5) == []
    assert index.find([names(1, 0, 1)[0], names(2, 0, 1)[0]])[0] is None
    assert index.find(names(2, 0, 1)) != [None]
    # Another size: another object, whose head is read again.
    [unread] = index.listed([(second.name, 7, 3.0)], 3.0)
    assert (unread.nbytes, index.nbytes) == (7, 7)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "s3://BUCKET/PREFIX"),
        ("s3://AKIA123:topsecret@bucket/x", "must have no credentials"),
        ("s3://bucket/x?endpoint=http://AKIA123:topsecret@host", "must have no credentials"),
        ("s3://bucket/x?secret_access_key=topsecret", "has no option 'secret_access_key'"),
        ("s3://bucket/x?topsecret/topsecret=1", "has no option of that name"),
        ("s3://bucket?endpoint=host:1", "endpoint of an address in S3 must be http"),
        ("s3://bucket?style=topsecret", "must be path or virtual"),
        ("s3://bucket?refresh_s=nan", "refresh_s of an address"),
        ("s3://[bucket", "malformed"),
    ],
)
def test_an_address_that_cannot_be_is_one_line_without_secrets(url, message):
    with pytest.raises(UsageError, match="S3") as raised:
        S3Address.parse(url)
    said = str(raised.value)
    assert message in said
    assert "topsecret" not in said
    assert "\n" not in said
    assert "AKIA123" not in said


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=12), min_size=1, max_size=4), st.data())
def test_merging_ends_and_loses_no_page(lines, data):
    """Bundles of several prompts, the second of which branches off the first one."""
    index, written = BundleIndex(), 0
    pages = []
    for line, counts in enumerate(lines):
        first = 0
        for count in counts:
            index.add(bundle(line, first, count)[0])
            first += count
        pages += names(line, 0, first)
    for _ in range(200):
        runs = index.mergeable(3, 16_000)
        for run in runs:
            sizes = [each.pages * each.object_bytes for each in run]
            assert len(run) >= 3
            assert 2 * max(sizes) <= sum(sizes) <= 16_000
            for one, following in itertools.pairwise(run):
                assert one.page_name(one.pages - 1) == following.parent
        if not runs:
            break
        run = data.draw(st.sampled_from(runs))
        made, head = merged_bundle(run, origin_of(run), index.oldest_at(run))
        assert read_bundle(made.name, made.nbytes, head) == made
        index.add(made)
        written += made.pages
        if data.draw(st.booleans()):
            index.remove(index.superseded(float("inf")))
        assert all(index.find(pages))
    assert not index.mergeable(3, 16_000)
    index.remove(index.superseded(float("inf")))
    assert all(index.find(pages))
    assert written <= 5 * len(pages), "a page is written again only when its bundle doubles"


def origin_of(run):
    return Origin(PromptPages({"model": "m", "layout": "x"}, 872, 4, bytes(16), bytes(16)), run[-1].pages)
