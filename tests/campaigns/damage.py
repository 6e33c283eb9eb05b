"""Damage to a store that lies still: what bad sectors, lying disks, other programs and people do to it.

Pages are found in the files by their bytes, so that it is known exactly which of them a damage costs: those,
and the ones behind them in a prompt, may be misses afterwards. All others must be served.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tests.campaigns.disk import LMDB_PAGE, SECTOR, Image
from tests.campaigns.prompts import Held, Life, page_count, pages, prompt_tokens
from tests.campaigns.recording import INDEX
from tierstore.keys import encode_tokens

DAMAGES = ("bit flip", "misdirected write", "forgotten write", "truncated file", "foreign content")

_HEAD_BYTES = 64  # enough of a page to know it by


_PageName: TypeAlias = tuple[int, tuple[int, ...]]  # book, all tokens up to the page's end


@dataclass(frozen=True, slots=True)
class Damage:
    """Damaged files, and what must still be served."""

    fault: str
    label: str
    image: Image
    must_have: Held


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    offset: int
    nbytes: int

    def covers(self, name: str, start: int, stop: int) -> bool:
        return self.name == name and self.offset < stop and start < self.offset + self.nbytes


def damages(image: Image, lives: Sequence[Life], held: Held, *, seed: int = 0) -> Iterator[Damage]:
    """Every kind of damage to every page of a closed store that holds ``held``. ``seed`` chooses the bits
    and sizes."""
    chance = random.Random(seed)
    files = _Files(image, lives, held)
    for page in files.places:
        yield from files.bit_flips(page, chance)
        yield from files.replaced(page, chance)
    for name in image:
        if name != INDEX:
            yield from files.truncated(name, chance)
            yield files.longer(name, chance)
    yield from files.index_bit_flips(chance)


class _Files:
    """A store's files, and where each page is in them. An inline page is in pieces, which are all found.

    The store must never have freed anything: an old copy of a page could be taken for the page.
    """

    def __init__(self, image: Image, lives: Sequence[Life], held: Held) -> None:
        self._image = image
        self._lives = lives
        self._held = held
        self.places: dict[_PageName, list[_Place]] = {}
        for book, number in held:
            spec = lives[book].spec
            for page, end in _pages(held, lives, book, number):
                name = (book, tuple(prompt_tokens(number, end, spec)))
                if name not in self.places:
                    self.places[name] = _locate(image, page)

    def bit_flips(self, page: _PageName, chance: random.Random) -> Iterator[Damage]:
        for place in self.places[page]:
            at = place.offset + chance.randrange(place.nbytes)
            data = bytes([self._image[place.name][at] ^ 1 << chance.randrange(8)])
            yield self._damage("bit flip", f"byte {at} of {place.name}", place.name, at, data)

    def replaced(self, page: _PageName, chance: random.Random) -> Iterator[Damage]:
        place = self.places[page][0]
        if place.name == INDEX:
            return
        others = [each[0] for name, each in self.places.items() if name != page and each[0].name != INDEX]
        if others:
            other = chance.choice(others)
            content = self._image[other.name][other.offset : other.offset + place.nbytes]
            yield self._damage(
                "misdirected write", f"{other} over {place}", place.name, place.offset, content
            )
        yield self._damage("forgotten write", f"zeros at {place}", place.name, place.offset, bytes(SECTOR))
        noise = chance.randbytes(place.nbytes)
        yield self._damage("foreign content", f"noise at {place}", place.name, place.offset, noise)

    def truncated(self, name: str, chance: random.Random) -> Iterator[Damage]:
        size = len(self._image[name])
        for cut in (0, 1, chance.randrange(size), chance.randrange(size) // LMDB_PAGE * LMDB_PAGE, size - 1):
            image = {**self._image, name: self._image[name][:cut]}
            yield Damage("truncated file", f"{name} cut at {cut}", image, self._without(name, cut, size))
        image = {each: content for each, content in self._image.items() if each != name}
        yield Damage("truncated file", f"{name} removed", image, self._without(name, 0, size))

    def longer(self, name: str, chance: random.Random) -> Damage:
        image = {**self._image, name: self._image[name] + chance.randbytes(256 * SECTOR)}
        return Damage("foreign content", f"{name} with a foreign tail", image, self._held)

    def index_bit_flips(self, chance: random.Random) -> Iterator[Damage]:
        """In the tokens of each page's record."""
        index = self._image[INDEX]
        for book, tokens in self.places:
            within = (len(tokens) - 1) % self._lives[book].spec.chunk_tokens + 1
            proof = encode_tokens(list(tokens[-within:]))
            damaged = bytearray(index)
            for start in _all(index, proof):  # also in tree pages no longer alive
                damaged[start + chance.randrange(len(proof))] ^= 1 << chance.randrange(8)
            yield Damage(
                "bit flip",
                f"the record of {len(tokens)} tokens of book {book}",
                {**self._image, INDEX: bytes(damaged)},
                self._kept(lambda name, lost=(book, tokens): name == lost),  # type: ignore[misc]
            )

    def _damage(self, fault: str, label: str, name: str, offset: int, data: bytes) -> Damage:
        content = bytearray(self._image[name])
        content[offset : offset + len(data)] = data
        must = self._without(name, offset, offset + len(data))
        return Damage(fault, label, {**self._image, name: bytes(content)}, must)

    def _without(self, file: str, start: int, stop: int) -> Held:
        """What is held without the pages that have bytes in ``start … stop`` of a file."""
        return self._kept(lambda name: any(each.covers(file, start, stop) for each in self.places[name]))

    def _kept(self, lost: Callable[[_PageName], bool]) -> Held:
        """What is held without the pages that are ``lost``, and those behind them."""
        kept: Held = {}
        for book, number in self._held:
            spec = self._lives[book].spec
            for _, end in _pages(self._held, self._lives, book, number):
                if lost((book, tuple(prompt_tokens(number, end, spec)))):
                    break
                kept[book, number] = end
        return kept


def _pages(held: Held, lives: Sequence[Life], book: int, number: int) -> Iterator[tuple[bytes, int]]:
    """(bytes, tokens up to its end) of each page of a prompt that is held."""
    spec = lives[book].spec
    tokens = held[book, number]
    for at, page in enumerate(pages(number, tokens, spec)):
        assert at < page_count(tokens, spec)
        yield page, min((at + 1) * spec.chunk_tokens, tokens)


def _locate(image: Image, page: bytes) -> list[_Place]:
    """Where a page's bytes are: one place in the extents, or its pieces in the index."""
    for name, content in image.items():
        at = content.find(page)
        if name != INDEX and at >= 0:
            return [_Place(name, at, len(page))]
    index = image[INDEX]
    places = []
    at = 0
    while at < len(page):
        # A page's bytes repeat themselves: the longest match is the piece that begins here.
        candidates = [
            _Place(INDEX, found, _common_bytes(page, at, index, found))
            for found in _all(index, page[at : at + _HEAD_BYTES])
        ]
        assert candidates, "the page is nowhere on disk"
        places.append(max(candidates, key=lambda place: place.nbytes))
        at += places[-1].nbytes
    return places


def _all(content: bytes, wanted: bytes) -> Iterator[int]:
    """Every offset of ``wanted``."""
    at = -1
    while (at := content.find(wanted, at + 1)) >= 0:
        yield at


def _common_bytes(a: bytes, a_at: int, b: bytes, b_at: int) -> int:
    """How many bytes from ``a_at`` and ``b_at`` on are the same in both."""
    most = min(len(a) - a_at, len(b) - b_at)
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if a[a_at : a_at + middle] == b[b_at : b_at + middle]:
            low = middle
        else:
            high = middle - 1
    return low
