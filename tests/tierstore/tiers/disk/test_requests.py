from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.tiers.disk.payloads import Extent, plan

BLOCK = 4096


@st.composite
def extents(draw):
    """Extents that do not overlap, in any order."""
    at = 0
    found = []
    for gap, blocks in draw(st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 7]), st.integers(1, 20)))):
        at += gap * BLOCK
        found.append(Extent(at, blocks * BLOCK))
        at += blocks * BLOCK
    return draw(st.permutations(found))


@settings(deadline=None)
@given(wanted=extents(), request_blocks=st.integers(1, 16), file_blocks=st.integers(1, 40))
def test_requests_cover_every_byte_once_and_stay_within_their_bounds(wanted, request_blocks, file_blocks):
    request_bytes, file_bytes = request_blocks * BLOCK, file_blocks * BLOCK
    covered = {index: [] for index in range(len(wanted))}
    for request in plan(wanted, request_bytes=request_bytes, file_bytes=file_bytes):
        assert request.nbytes <= request_bytes
        assert request.offset // file_bytes == (request.offset + request.nbytes - 1) // file_bytes
        offset = request.offset
        for part in request.parts:
            assert offset == wanted[part.page].place + part.start
            covered[part.page].append((part.start, part.stop))
            offset += part.stop - part.start
        assert offset == request.offset + request.nbytes
        singles = list(request.singles())
        assert [single.parts for single in singles] == [[part] for part in request.parts]
        assert sum(single.nbytes for single in singles) == request.nbytes
    for index, parts in covered.items():
        parts.sort()
        assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
        assert parts[-1][1] == wanted[index].nbytes


def test_neighbours_share_a_request():
    places = [Extent(3 * BLOCK, BLOCK), Extent(0, BLOCK), Extent(BLOCK, 2 * BLOCK), Extent(9 * BLOCK, BLOCK)]
    requests = plan(places, request_bytes=16 * BLOCK, file_bytes=100 * BLOCK)
    assert [(request.offset, request.nbytes) for request in requests] == [(0, 4 * BLOCK), (9 * BLOCK, BLOCK)]
    assert [part.page for part in requests[0].parts] == [1, 2, 0]


def test_no_request_has_more_buffers_than_the_kernel_takes():
    places = [Extent(index * BLOCK, BLOCK) for index in range(2000)]
    for request in plan(places, request_bytes=1 << 30, file_bytes=1 << 40):
        assert len(request.parts) <= 512
