"""Packs of a small store, made in memory."""

from __future__ import annotations

import asyncio
import io

import pytest

import tierstore
from tierstore.keys import Identity, Prompt
from tierstore.packs import PackReader, PageHash, Signer, export_pack, import_pack, signing
from tierstore.spec import KVSpec
from tierstore.testing.pages import pages_of

SPEC = KVSpec.uniform(layers=1, kv_heads=1, head_dim=16, dtype="float32", chunk_tokens=8)  # 1 KiB pages
IDENTITY = Identity.of(SPEC, model="m", revision="1")
FIRST = list(range(100, 180))  # ten chunks
SECOND = [*FIRST[:32], *range(500, 524), 7, 8, 9]  # four chunks in common, three of its own, and a tail


class Bytes:
    """A pack in memory, as aiofiles would give it; ``seeks`` as a file, or not, as a pipe. ``bites`` is how
    much it gives at a time."""

    def __init__(self, data: bytes, *, seeks: bool = True, bites: int = 1 << 30):
        self._io = io.BytesIO(data)
        self._seeks = seeks
        self._bites = bites
        self.read_bytes = 0

    async def read(self, nbytes):
        data = self._io.read(min(nbytes, self._bites))
        self.read_bytes += len(data)
        return data

    async def readinto(self, view):
        count = self._io.readinto(view[: self._bites])
        self.read_bytes += count
        return count

    async def seekable(self):
        return self._seeks

    async def seek(self, *where):
        return self._io.seek(*where)


def open_store(identity=IDENTITY, *, spec=SPEC, host_bytes=4 << 20, **kwargs):
    return tierstore.open(None, spec, identity=identity, host_bytes=host_bytes, **kwargs)


def prompt(tokens, identity=IDENTITY, spec=SPEC):
    return Prompt(identity, tokens, chunk_tokens=spec.chunk_tokens)


def save(store, tokens, spec=SPEC):
    assert store.save(tokens, pages_of(tokens, spec)).wait(30) == len(tokens)


def held(store, tokens, spec=SPEC):
    """How many tokens of a prompt a store has, and their bytes."""
    with store.lookup(tokens) as hit:
        buffers = [bytearray(spec.page_bytes) for _ in range(hit.num_pages)]
        loaded = store.load(hit, buffers).wait(30)
    return loaded.tokens, [bytes(buffer) for buffer in buffers]


def exported(store, prompts, path, **kwargs):
    return asyncio.run(export_pack(store, prompts, path, **kwargs))


def imported(store, data, trust=None, **kwargs):
    """Import a pack given as bytes."""

    async def run():
        arguments = () if trust is None else (trust,)
        reader = await PackReader.begin(Bytes(data, **kwargs), *arguments)
        return await import_pack(store, reader)

    return asyncio.run(run())


@pytest.fixture(scope="session")
def signer(tmp_path_factory):
    """A signer, and the file of its public key."""
    pem, public = signing.generate(tmp_path_factory.mktemp("keys"), "me")
    return Signer.read(pem), public


@pytest.fixture(params=PageHash, ids=lambda hash: hash.name.lower())
def hash(request):
    return request.param


@pytest.fixture
def made(tmp_path, signer, hash):
    """A signed pack of two prompts, as bytes."""
    with open_store() as store:
        save(store, FIRST)
        save(store, SECOND)
        exported(store, [prompt(FIRST), prompt(SECOND)], tmp_path / "a.tskv", signer=signer[0], hash=hash)
    return (tmp_path / "a.tskv").read_bytes()
