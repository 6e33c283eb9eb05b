"""Which I/O to do for a batch of extents: pure arithmetic, no files, no threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_BUFFERS = 512  # per request; the kernel takes 1024, and a page may need two


class Extent(NamedTuple):
    """Bytes ``place … place + nbytes`` of the extent space."""

    place: int
    nbytes: int


class Part(NamedTuple):
    """Bytes ``start … stop`` of extent number ``page`` of the batch."""

    page: int
    start: int
    stop: int


@dataclass(slots=True)
class Request:
    """One read or write: ``parts`` side by side, from ``offset`` of the extent space on, within one file."""

    offset: int
    nbytes: int
    parts: list[Part]

    def singles(self) -> Iterator[Request]:
        """The same, one part at a time."""
        offset = self.offset
        for part in self.parts:
            yield Request(offset, part.stop - part.start, [part])
            offset += part.stop - part.start


def plan(extents: Sequence[Extent], *, request_bytes: int, file_bytes: int) -> list[Request]:
    """Cover ``extents``, which do not overlap, with requests in order of their places.

    Neighbours share a request, up to ``request_bytes`` of them. What is larger, or lies across the border of
    two files, is cut.
    """
    requests: list[Request] = []
    last: Request | None = None
    for index in sorted(range(len(extents)), key=lambda index: extents[index].place):
        place = extents[index].place
        for start, stop in _cuts(extents[index], request_bytes, file_bytes):
            if last is not None and _joins(last, place + start, stop - start, request_bytes, file_bytes):
                last.nbytes += stop - start
                last.parts.append(Part(index, start, stop))
            else:
                last = Request(place + start, stop - start, [Part(index, start, stop)])
                requests.append(last)
    return requests


def _joins(last: Request, offset: int, nbytes: int, request_bytes: int, file_bytes: int) -> bool:
    return (
        last.offset + last.nbytes == offset
        and offset % file_bytes != 0
        and last.nbytes + nbytes <= request_bytes
        and len(last.parts) < MAX_BUFFERS
    )


def _cuts(extent: Extent, request_bytes: int, file_bytes: int) -> Iterator[tuple[int, int]]:
    start = 0
    while start < extent.nbytes:
        to_border = file_bytes - (extent.place + start) % file_bytes
        stop = min(start + min(request_bytes, to_border), extent.nbytes)
        yield start, stop
        start = stop
