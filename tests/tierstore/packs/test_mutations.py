"""Mutated packs: none brings a wrong byte into a store, and none does worse than to be refused.

The store that they are imported into is real. What each left there is read back and compared with what was
packed; then everything is evicted, and the next one comes. A *forger* knows the format and has everything but
the key: all checksums of what it changed are right.
"""

from __future__ import annotations

import asyncio
import random

import pytest
import xxhash

from tests.tierstore.packs import conftest as c
from tierstore.packs import PackError, PackReader, Trust, format, import_pack
from tierstore.testing.pages import pages_of

MUTANTS = [250, pytest.param(5000, marks=pytest.mark.soak)]  # with each hash, with a key and without
PAGES = {
    tuple(tokens[: 8 * (at + 1)]): page
    for tokens in (c.FIRST, c.SECOND[:56])
    for at, page in enumerate(pages_of(tokens, c.SPEC))
}


def mutated(data: bytes, chance: random.Random) -> bytes:
    """A pack with one to three accidents."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        # Most of a pack are pages: head, index and tables get as many of the accidents.
        reach = len(data) if chance.random() < 0.5 else min(len(data), 1500)
        at = chance.randrange(reach)
        length = chance.choice((1, 1, 2, 4, 8, 64, 4096))
        match chance.randrange(7):
            case 0:  # a bit
                data = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
            case 1:
                data = data[:at] + chance.randbytes(length) + data[at + length :]
            case 2:
                data = data[:at] + data[at + length :]
            case 3:
                data = data[:at] + chance.randbytes(length) + data[at:]
            case 4:
                data = data[:at]
            case 5:  # a piece of it in another place
                other = chance.randrange(len(data))
                data = data[:at] + data[other : other + length] + data[at + length :]
            case 6:  # a number that is out of all measure
                data = data[:at] + b"\xff" * chance.choice((4, 8)) + data[at + 8 :]
        if not data:
            return b""
    return data


def forged(data: bytes, manifest: format.Manifest, chance: random.Random) -> bytes:
    """A pack with a changed page, and with checksums that are right all the same."""
    digest = manifest.hash.digester()
    page_bytes, count, start = manifest.page_bytes, manifest.pages, manifest.block_at(0)
    first = start + format.table_bytes(count)
    changed = bytearray(data)
    changed[first + chance.randrange(count * page_bytes)] ^= 1 << chance.randrange(8)
    pages = [bytes(changed[first + at * page_bytes :][:page_bytes]) for at in range(count)]
    table = format.encode_table(
        [xxhash.xxh3_64_intdigest(page) for page in pages],
        [digest(memoryview(page)) for page in pages],
    )
    head = bytes(changed[: len(manifest.head)])
    digests = [format.head_digest(head)]
    digests.append(format.block_digest(digests[-1], table))
    footer = format.FOOTER.pack(format.FOOTER_MAGIC, count)
    digests.append(format.footer_digest(digests[-1], footer))
    places = len(head), start, len(data) - format.SEAL.size
    changed[start + format.SEAL.size : start + format.SEAL.size + len(table)] = table
    for digest, at in zip(digests, places, strict=True):
        changed[at : at + 32] = digest
    return bytes(changed)


def decoded(data: bytes) -> format.Manifest:
    head = format.Head.decode(data)
    return head.manifest(data[format.HEAD.size : format.HEAD.size + head.index_bytes])


@pytest.fixture
def in_blocks(monkeypatch, request, hash):
    """The same pack, in four blocks instead of one."""
    monkeypatch.setattr(format, "BLOCK_BYTES", 4 * c.SPEC.page_bytes)
    data = request.getfixturevalue("made")
    assert decoded(data).blocks == 4
    return data


class Imports:
    """Imports packs into one store, each into an empty one, and looks at what came."""

    def __init__(self, store):
        self.store = store
        self.imported = self.refused = self.partly = 0

    async def run(self, data: bytes, trust: Trust, *, seeks: bool = True) -> None:
        store = self.store
        try:
            await import_pack(store, await PackReader.begin(c.Bytes(data, seeks=seeks), trust))
            self.imported += 1
        except PackError:
            self.refused += 1
        pages = store.stats().pages
        if pages:
            self.partly += pages != 13
            found = 0
            for tokens in (c.FIRST, c.SECOND[:56]):
                held, buffers = c.held(store, tokens)
                assert buffers == [PAGES[tuple(tokens[: 8 * (at + 1)])] for at in range(held // 8)]
                found += held // 8
            assert pages <= found  # nothing else is in the store
            store.evict("host")
            assert not store.stats().pages


@pytest.mark.parametrize("with_key", [True, False], ids=["key", "no key"])
@pytest.mark.parametrize("mutants", MUTANTS)
def test_mutated_packs_bring_no_wrong_byte(in_blocks, signer, with_key, mutants):
    made, chance = in_blocks, random.Random(31)
    trust = Trust.read(signer[1]) if with_key else Trust()

    async def run(store):
        imports = Imports(store)
        await imports.run(made, trust)
        assert (imports.imported, imports.refused) == (1, 0)
        for _ in range(mutants):
            data = mutated(made, chance)
            await imports.run(data, trust, seeks=chance.random() < 0.5)
            if data != made:
                assert imports.imported == 1
            else:
                imports.imported = 1
        assert imports.refused > 0.9 * mutants
        assert imports.partly > 0.1 * mutants  # good blocks before the damage are good
        store.check()

    with c.open_store() as store:
        asyncio.run(run(store))


def test_a_forger_without_the_key_brings_nothing(made, signer):
    chance = random.Random(4)
    manifest = decoded(made)

    async def run(store):
        imports = Imports(store)
        for _ in range(200):
            await imports.run(forged(made, manifest, chance), Trust.read(signer[1]))
            assert (imports.imported, store.stats().pages) == (0, 0)

    with c.open_store() as store:
        asyncio.run(run(store))


def test_the_forgers_checksums_are_right(tmp_path):
    """Without a signature nobody could tell: only a key that is asked for makes a forgery a refusal."""
    with c.open_store() as store:
        c.save(store, c.FIRST)
        c.exported(store, [c.prompt(c.FIRST)], tmp_path / "a.tskv")
    data = (tmp_path / "a.tskv").read_bytes()
    forgery = forged(data, decoded(data), random.Random(1))
    with c.open_store() as store:
        c.imported(store, forgery)
        tokens, pages = c.held(store, c.FIRST)
        assert tokens == 80
        assert pages != pages_of(c.FIRST, c.SPEC)
