"""Packs between embedded stores: what goes in comes out, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import stat
from dataclasses import replace

import blake3
import pytest

import tierstore
from tests.tierstore.packs import conftest as c
from tierstore.errors import UsageError
from tierstore.keys import Identity, PageKey, Prompt
from tierstore.packs import (
    Manifest,
    PackError,
    PackReader,
    PageHash,
    Signer,
    Trust,
    format,
    open_pack,
    require_identity,
    signing,
    verify_pack,
)
from tierstore.packs.hashing import hash_pages
from tierstore.packs.reading import open_file
from tierstore.packs.writing import _Output
from tierstore.spec import KVSpec
from tierstore.testing.pages import pages_of

LARGE = KVSpec.uniform(layers=8, kv_heads=8, head_dim=64, dtype="float32", chunk_tokens=32)  # 1 MiB pages
LARGE_IDENTITY = Identity.of(LARGE, model="large")
LARGE_TOKENS = list(range(40 * 32))  # 40 pages: three blocks


def large_store():
    return c.open_store(LARGE_IDENTITY, spec=LARGE, host_bytes=64 << 20)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A pack of three blocks; the file, and the store it was made of."""
    path = tmp_path_factory.mktemp("large") / "a.tskv"
    with large_store() as store:
        c.save(store, LARGE_TOKENS, LARGE)
        c.exported(store, [c.prompt(LARGE_TOKENS, LARGE_IDENTITY, LARGE)], path)
        yield path, store


def verified(path, trust=None):
    async def run():
        async with open_pack(path, *([trust] if trust else [])) as reader:
            await verify_pack(reader)
            return reader.manifest

    return asyncio.run(run())


# -- round trips ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bites", [7, 1 << 30])
def test_another_store_has_the_same_bytes(made, bites):
    with c.open_store() as store:
        done = c.imported(store, made, bites=bites)
        assert (done.manifest.pages, done.held_pages) == (13, 0)
        assert c.held(store, c.FIRST) == (80, pages_of(c.FIRST, c.SPEC))
        assert c.held(store, c.SECOND) == (56, pages_of(c.SECOND[:56], c.SPEC))
        assert store.stats().pages == 13
        store.check()


def test_a_pack_says_where_everything_is(made):
    manifest = format.Head.decode(made).manifest(
        made[format.HEAD.size : format.HEAD.size + format.Head.decode(made).index_bytes]
    )
    assert manifest.nbytes == len(made)
    assert [(run.chunk, run.page, run.count) for run in manifest.runs] == [(0, 0, 10), (4, 10, 3)]
    at = manifest.block_at(0) + format.table_bytes(13)
    assert made[at : at + c.SPEC.page_bytes] == pages_of(c.FIRST, c.SPEC)[0]


def test_a_prompt_within_another_takes_no_room():
    whole = Manifest.of(c.SPEC, [c.prompt(c.FIRST), c.prompt(c.FIRST[:24])])
    assert (len(whole.prompts), whole.pages) == (1, 10)
    longer = Manifest.of(c.SPEC, [c.prompt(c.FIRST[:24]), c.prompt(c.FIRST)])
    assert (len(longer.prompts), longer.pages) == (2, 10)


def test_what_is_held_of_a_prompt_is_packed(tmp_path):
    with c.open_store() as store:
        c.save(store, c.FIRST[:40])
        done = c.exported(store, [c.prompt(c.FIRST)], tmp_path / "a.tskv")
        assert (done.asked_tokens, done.held_tokens, done.manifest.pages) == (80, 40, 5)
        with pytest.raises(UsageError, match="nothing to pack"):
            c.exported(store, [c.prompt(range(9000, 9080))], tmp_path / "b.tskv")
        with pytest.raises(UsageError, match="is there already"):
            c.exported(store, [c.prompt(c.FIRST)], tmp_path / "a.tskv")


def test_opaque_pages_travel_with_their_engines_keys(tmp_path):
    spec = KVSpec.opaque(4096, chunk_tokens=8)
    identity = Identity.of(spec, model="theirs")
    tokens = c.prompt(range(24), identity, spec).token_bytes
    keys = [PageKey(bytes([at]) * 16) for at in range(3)]
    named = Prompt.with_keys(identity, tokens, keys, chunk_tokens=8)
    pages = [bytes([at]) * 4096 for at in range(3)]
    with c.open_store(identity, spec=spec) as store:
        assert store.save(named, pages).wait(30) == 24
        c.exported(store, [named], tmp_path / "a.tskv")
    with c.open_store(identity, spec=spec) as store:
        c.imported(store, (tmp_path / "a.tskv").read_bytes())
        assert c.held(store, named, spec) == (24, pages)
        assert store.lookup(list(range(24))).tokens == 0  # by keys of our own they are not found


def test_tenants_do_not_see_each_others_packs(tmp_path, signer):
    one, other = (replace(c.IDENTITY, tenant=name) for name in ("a", "b"))
    with c.open_store(one) as store:
        c.save(store, c.FIRST)
        c.exported(store, [c.prompt(c.FIRST, one)], tmp_path / "a.tskv")
    data = (tmp_path / "a.tskv").read_bytes()
    with c.open_store(other) as store:
        with pytest.raises(PackError, match=r"another model: tenant 'a', not 'b'"):
            c.imported(store, data)
        assert store.stats().pages == 0
    with c.open_store(one) as store:
        c.imported(store, data)
        assert store.lookup(c.FIRST).tokens == 80
        assert store.lookup(c.prompt(c.FIRST, other)).tokens == 0


# -- what is refused --------------------------------------------------------------------------------------


def test_another_model_is_one_line(made):
    other = Identity.of(c.SPEC, model="m", revision="2")
    with c.open_store(other) as store:
        with pytest.raises(PackError, match=r"^the pack is of another model: revision '1', not '2'$"):
            c.imported(store, made)
        assert store.stats().pages == 0


def test_the_nearest_of_several_models_is_named(made):
    manifest = Manifest.of(c.SPEC, [c.prompt(c.FIRST)])
    far = Identity.of(c.SPEC, model="x", revision="9", adapter="y")
    near = replace(c.IDENTITY, rope="other")
    with pytest.raises(PackError, match=r"rope '', not 'other'$"):
        require_identity(manifest, [far, near])
    require_identity(manifest, [far, c.IDENTITY])
    require_identity(manifest, [])


def test_only_the_right_signer_is_believed(made, signer, tmp_path):
    _, public = signer
    pem, other = signing.generate(tmp_path, "other")
    with c.open_store() as store:
        c.imported(store, made, Trust.read(public))
        assert store.lookup(c.FIRST).tokens == 80
        c.exported(store, [c.prompt(c.FIRST)], tmp_path / "unsigned.tskv")
        c.exported(store, [c.prompt(c.FIRST)], tmp_path / "other.tskv", signer=Signer.read(pem))
    assert stat.S_IMODE(pem.stat().st_mode) == 0o600
    for data, key, words in (
        (made, other, "signed by"),
        ((tmp_path / "unsigned.tskv").read_bytes(), public, "not signed"),
        ((tmp_path / "other.tskv").read_bytes(), public, "signed by"),
    ):
        with c.open_store() as store:
            with pytest.raises(PackError, match=words):
                c.imported(store, data, Trust.read(key))
            assert store.stats().pages == 0


def test_keys_that_are_none_are_one_line(tmp_path):
    pem, public = signing.generate(tmp_path, "k")
    with pytest.raises(UsageError, match="is there already"):
        signing.generate(tmp_path, "k")
    with pytest.raises(UsageError, match="cannot be a key's name"):
        signing.generate(tmp_path, "../k")
    with pytest.raises(UsageError, match="cannot read a private key"):
        Signer.read(public)
    with pytest.raises(UsageError, match="cannot read a public key"):
        Trust.read(pem)
    pem.chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others"):
        Signer.read(pem)


def test_declared_sizes_take_no_memory(made):
    """What a head declares is refused, or compared with what comes, before there is memory for it."""
    magic, version, flags, index, page, pages, signer = format.HEAD.unpack_from(made)
    rest = made[format.HEAD.size :]
    for head in (
        (1 << 63, page, pages),
        (index, 1 << 62, pages),
        (index, page, (1 << 64) - 1),
        (index, format.MOST_PAGE_BYTES, format.MOST_PAGES),
        (format.MOST_INDEX_BYTES, page, pages),
    ):
        data = format.HEAD.pack(magic, version, flags, *head, signer) + rest
        with c.open_store() as store:
            with pytest.raises(PackError):
                c.imported(store, data)
            assert store.stats().pages == 0


def test_a_layout_of_huge_pages_is_cut_off_not_allocated():
    spec = KVSpec.opaque(format.MOST_PAGE_BYTES, chunk_tokens=8)
    identity = Identity.of(spec, model="m")
    manifest = Manifest.of(spec, [c.prompt(range(80), identity, spec)])
    seal = format.SEAL.pack(format.head_digest(manifest.head), bytes(64))
    data = (manifest.head + seal).ljust(len(manifest.encoded), b"\0")

    async def run():
        reader = await PackReader.begin(c.Bytes(data))
        await verify_pack(reader)

    with pytest.raises(PackError, match="cut off, after 0 of 10 pages"):
        asyncio.run(run())


def test_other_files_are_no_packs(tmp_path):
    for data, words in (
        (b"", "cut off"),
        (b"x" * 4096, "not a pack"),
        (format.MAGIC + b"\3" * 4096, "version"),
    ):
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(PackError, match=words):
            verified(tmp_path / "a")
    with pytest.raises(UsageError, match="cannot read"):
        verified(tmp_path)
    with pytest.raises(UsageError, match="cannot read"):
        verified(tmp_path / "missing")


@pytest.mark.parametrize("hash", PageHash)
def test_the_head_says_the_hash(hash):
    """A changed version is another hash, and the seal of the head says so."""
    manifest = Manifest.of(c.SPEC, [c.prompt(c.FIRST)], hash=hash)
    head = format.Head.decode(manifest.head)
    assert head.manifest(manifest.head[format.HEAD.size :]) == manifest
    digest = {PageHash.SHA256: hashlib.sha256, PageHash.BLAKE3: blake3.blake3}[hash]
    data = memoryview(b"page" * 512)
    ((_, found),) = hash_pages(data, len(data), hash)
    assert found == digest(data).digest()


def test_a_file_that_takes_no_direct_writes_is_written_all_the_same(tmp_path):
    data = memoryview(bytes(range(256)) * 64)

    async def write():
        async with open_file(tmp_path / "a", "wb") as file:
            output = _Output(file, ours=True)
            await output.write_aligned(data[1 : 1 + 8192])  # not aligned: EINVAL, if it was direct
            await output.write(b"the end")

    asyncio.run(write())
    assert (tmp_path / "a").read_bytes() == bytes(data[1 : 1 + 8192]) + b"the end"


# -- cut off, and resumed ---------------------------------------------------------------------------------


def test_an_import_that_was_cut_off_has_whole_blocks_and_goes_on(large):
    data = large[0].read_bytes()
    manifest = verified(large[0])
    assert manifest.blocks == 3
    with large_store() as store:
        with pytest.raises(PackError, match="cut off, after 32 of 40 pages"):
            c.imported(store, data[: manifest.block_at(2) + 70_000])
        assert store.lookup(LARGE_TOKENS).tokens == 32 * 32
        file = c.Bytes(data)

        async def again():
            return await c.import_pack(store, await PackReader.begin(file))

        assert asyncio.run(again()).held_pages == 32
        assert file.read_bytes < 9 << 20  # of 40 MiB: what is held is not read
        assert c.held(store, LARGE_TOKENS, LARGE) == (1280, pages_of(LARGE_TOKENS, LARGE))


def test_a_pipe_is_read_to_its_end_where_pages_are_held(large):
    data = large[0].read_bytes()
    with large_store() as store:
        c.save(store, LARGE_TOKENS[: 20 * 32], LARGE)
        done = c.imported(store, data, seeks=False)
        assert done.held_pages == 0
        assert c.held(store, LARGE_TOKENS, LARGE) == (1280, pages_of(LARGE_TOKENS, LARGE))


@pytest.mark.parametrize("damage", ["cut", "changed", "whole"])
def test_an_export_that_was_cut_off_goes_on(large, tmp_path, damage):
    path, store = large
    data, manifest = path.read_bytes(), verified(path)
    part = tmp_path / "b.tskv.part"
    if damage == "cut":
        part.write_bytes(data[: manifest.block_at(1) + 100_000])
    elif damage == "changed":
        at = manifest.block_at(1) + 50_000
        part.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    else:
        part.write_bytes(data)
    done = c.exported(
        store, [c.prompt(LARGE_TOKENS, LARGE_IDENTITY, LARGE)], tmp_path / "b.tskv", resume=True
    )
    assert done.resumed_pages == (40 if damage == "whole" else 16)
    assert (tmp_path / "b.tskv").read_bytes() == data
    assert not part.exists()


def test_an_export_goes_on_with_the_same_pages_only(large, tmp_path):
    path, store = large
    (tmp_path / "b.tskv.part").write_bytes(path.read_bytes()[: 20 << 20])
    fewer = c.prompt(LARGE_TOKENS[:640], LARGE_IDENTITY, LARGE)
    with pytest.raises(
        UsageError, match=r"has 1,280 tokens of 1 prompts, but the store has others .* \(640 of 1\)"
    ):
        c.exported(store, [fewer], tmp_path / "b.tskv", resume=True)
    same = c.prompt(LARGE_TOKENS, LARGE_IDENTITY, LARGE)
    other = PageHash.SHA256 if verified(path).hash is PageHash.BLAKE3 else PageHash.BLAKE3
    with pytest.raises(
        UsageError, match=f"hashed by .*: give --hash {verified(path).hash.name.lower()}, remove it"
    ):
        c.exported(store, [same], tmp_path / "b.tskv", resume=True, hash=other)
    c.exported(store, [fewer], tmp_path / "b.tskv")
    assert verified(tmp_path / "b.tskv").pages == 20


def test_pages_that_leave_the_store_end_an_export(tmp_path, monkeypatch):
    with large_store() as store:
        c.save(store, LARGE_TOKENS, LARGE)
        looked, look = [], store.lookup_async

        async def lookup(prompt, **kwargs):
            looked.append(prompt)
            if len(looked) == 3:  # what is held, the first block, and then
                store.evict("host")
            return await look(prompt, **kwargs)

        monkeypatch.setattr(store, "lookup_async", lookup)
        prompt = c.prompt(LARGE_TOKENS, LARGE_IDENTITY, LARGE)
        with pytest.raises(PackError, match=r"dropped pages after the first 16 of 40: .* --resume"):
            c.exported(store, [prompt], tmp_path / "b.tskv")
        assert [file.name for file in tmp_path.iterdir()] == ["b.tskv.part"]
        c.save(store, LARGE_TOKENS, LARGE)
        assert c.exported(store, [prompt], tmp_path / "b.tskv", resume=True).resumed_pages in (0, 16)
        assert verified(tmp_path / "b.tskv").pages == 40


def test_a_store_without_room_says_how_far_it_came(large):
    with c.open_store(LARGE_IDENTITY, spec=LARGE, host_bytes=20 << 20) as store:
        with pytest.raises(PackError, match="took only 16 of 40 pages"):
            c.imported(store, large[0].read_bytes())
        held, pages = c.held(store, LARGE_TOKENS, LARGE)
        assert pages == pages_of(LARGE_TOKENS[:held], LARGE)


def test_a_host_tier_smaller_than_the_pack_goes_through_its_disk(large, tmp_path):
    data = large[0].read_bytes()
    with tierstore.open(
        tmp_path / "d", LARGE, identity=LARGE_IDENTITY, host_bytes=20 << 20, disk_bytes=256 << 20
    ) as store:
        c.imported(store, data)
        assert store.stats().tiers["disk"].pages == 40
        c.exported(store, [c.prompt(LARGE_TOKENS, LARGE_IDENTITY, LARGE)], tmp_path / "b.tskv")
    assert (tmp_path / "b.tskv").read_bytes() == data
