"""Packs of models of several layer groups: the receiver hits as the sender does."""

from __future__ import annotations

import asyncio
import random

import pytest

import tierstore
from tests.tierstore.packs import conftest as c
from tests.tierstore.packs.test_mutations import mutated
from tests.tierstore.store.grouped_model import CHUNK, EVERYTHING, GEMMA, HYBRID, Engine
from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.packs import (
    Manifest,
    PackError,
    PackReader,
    PageHash,
    Signer,
    Trust,
    export_pack,
    import_pack,
    open_pack,
    verify_pack,
)
from tierstore.packs.format import HEAD, Head, PackedPrompt
from tierstore.spec import KVSpec

FIRST = list(range(500, 700))  # twelve chunks and a half
SECOND = [*FIRST[:96], *range(900, 1000)]
SPECS = {"windows": GEMMA, "states": HYBRID, "all kinds": EVERYTHING}


@pytest.fixture(params=SPECS)
def spec(request):
    return SPECS[request.param]


def without_pools(spec, path):
    identity = Identity.of(spec, model="played")
    return tierstore.open(path, spec, identity=identity, host_bytes=4 << 20, disk_bytes=64 << 20)


def sender(spec, path):
    """A directory with two prompts: three turns of one, one of the other."""
    with Engine(spec, path) as engine:
        for end in (48, 112, 192):
            engine.save_to(FIRST[: end + 3], end)
        engine.save_to(SECOND, 176)
        assert engine.store.flush(30)
    return path


def packed(spec, path, out, *, signer=Signer()):
    with without_pools(spec, path) as store:
        done = asyncio.run(
            export_pack(store, [store.prompt(each) for each in (FIRST, SECOND)], out, signer=signer)
        )
        hits = [store.lookup(tokens).tokens for tokens in (FIRST, SECOND, FIRST[:150], FIRST[:60])]
        with pytest.raises(UsageError, match="is there already"):
            asyncio.run(export_pack(store, [store.prompt(FIRST)], out))
    return done, hits


async def imported(store, data, *trust, seeks=True):
    return await import_pack(store, await PackReader.begin(c.Bytes(data, seeks=seeks), *trust))


def test_hits_are_the_senders(spec, tmp_path, signer):
    done, hits = packed(spec, sender(spec, tmp_path / "a"), tmp_path / "p.tskv", signer=signer[0])
    assert len(done.manifests) == len(spec.groups)
    assert max(hits) == 192

    async def through_the_file(store):
        async with open_pack(tmp_path / "p.tskv", Trust.read(signer[1])) as reader:
            await verify_pack(reader)
        async with open_pack(tmp_path / "p.tskv", Trust.read(signer[1])) as reader:
            return await import_pack(store, reader)

    with without_pools(spec, tmp_path / "b") as store:
        parts = asyncio.run(through_the_file(store))
        assert [each.pages for each in parts.manifests] == [each.pages for each in done.manifests]
        again = asyncio.run(imported(store, (tmp_path / "p.tskv").read_bytes()))
        assert again.held_pages == sum(each.pages for each in done.manifests)
        assert store.flush(30)
        store.check()
    with Engine(spec, tmp_path / "b") as engine:
        found = []
        for tokens in (FIRST, SECOND, FIRST[:150], FIRST[:60]):
            hit = engine.lookup(tokens)
            found.append(hit.tokens)
            assert engine.load(hit) == hit.tokens  # and every byte of every group is right
        assert found == hits
        engine.check()


def test_what_does_not_go_together_is_one_line(tmp_path, signer):
    packed(GEMMA, sender(GEMMA, tmp_path / "a"), tmp_path / "p.tskv", signer=signer[0])
    data = (tmp_path / "p.tskv").read_bytes()
    with c.open_store() as store, pytest.raises(PackError, match="of another model"):
        c.imported(store, data)
    with without_pools(HYBRID, tmp_path / "b") as store:
        with pytest.raises(PackError, match="of another model"):
            asyncio.run(imported(store, data))
        assert store.stats().pages == 0
    with without_pools(GEMMA, tmp_path / "c") as store, pytest.raises(UsageError, match="nothing to pack"):
        asyncio.run(export_pack(store, [store.prompt(FIRST)], tmp_path / "q.tskv"))


def test_a_group_of_another_signer_is_refused(tmp_path, signer):
    path = sender(GEMMA, tmp_path / "a")
    done, _ = packed(GEMMA, path, tmp_path / "signed.tskv", signer=signer[0])
    packed(GEMMA, path, tmp_path / "plain.tskv")
    signed, plain = ((tmp_path / name).read_bytes() for name in ("signed.tskv", "plain.tskv"))
    second = -(-done.manifest.nbytes // 4096) * 4096
    mixed = signed[:second] + plain[second:]
    cases = {mixed: "not signed", signed[:second]: "cut off", signed + b"x": "data after its end"}
    for data, words in cases.items():
        with without_pools(GEMMA, None) as store:
            with pytest.raises(PackError, match=words):
                asyncio.run(imported(store, data, Trust.read(signer[1])))
            named = store.lookup(store.prompt(FIRST).pages_of(1))
            assert bool(named.tokens) == (data == signed + b"x")


def test_mutated_packs_of_groups_bring_no_wrong_byte(tmp_path, signer):
    packed(GEMMA, sender(GEMMA, tmp_path / "a"), tmp_path / "p.tskv", signer=signer[0])
    data, chance = (tmp_path / "p.tskv").read_bytes(), random.Random(5)
    trust = Trust.read(signer[1])
    refused = 0

    async def run(store):
        nonlocal refused
        for _ in range(300):
            try:
                await imported(store, mutated(data, chance), trust, seeks=chance.random() < 0.5)
            except PackError:
                refused += 1

    with without_pools(GEMMA, tmp_path / "b") as store:
        asyncio.run(run(store))
        assert store.flush(30)
    assert refused > 250
    with Engine(GEMMA, tmp_path / "b") as engine:
        for tokens in (FIRST, SECOND):
            hit = engine.lookup(tokens)
            assert hit.tokens % CHUNK == 0
            engine.load(hit)  # compares every byte
        engine.check()


def test_an_export_of_groups_goes_on_where_it_was_cut_off(spec, tmp_path):
    path = sender(spec, tmp_path / "a")
    whole = tmp_path / "p.tskv"
    done, _ = packed(spec, path, whole)
    data = whole.read_bytes()
    ends = [0]
    for manifest in done.manifests:
        ends.append(-(-(ends[-1] + manifest.nbytes) // 4096) * 4096)
    for cut in (4096, ends[1] - 5, ends[1], ends[1] + 4096, len(data) - 7):
        part = tmp_path / "q.tskv.part"
        part.write_bytes(data[:cut])
        with without_pools(spec, path) as store:
            prompts = [store.prompt(each) for each in (FIRST, SECOND)]
            again = asyncio.run(export_pack(store, prompts, tmp_path / "q.tskv", resume=True))
        assert (tmp_path / "q.tskv").read_bytes() == data
        kept = sum(each.pages for each, end in zip(done.manifests, ends[1:], strict=True) if end <= cut)
        assert again.resumed_pages >= kept
        (tmp_path / "q.tskv").unlink()


def test_a_prompt_that_goes_on_from_named_pages_is_refused():
    spec = KVSpec.opaque(4096, chunk_tokens=8)
    named = PackedPrompt(bytes(64), bytes(32), named=True)
    chain = PackedPrompt(bytes(96), bytes(48), 0, 2)
    identity = Identity.of(spec, model="m")
    packed = Manifest(identity, spec, (named, chain), hash=PageHash.BLAKE3).head
    with pytest.raises(PackError, match="prompt 1 is inconsistent"):
        Head.decode(packed).manifest(packed[HEAD.size :])
