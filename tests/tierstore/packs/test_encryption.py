"""Encrypted packs: who has the key gets every byte, anybody else and any change gets an error."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tierstore.packs.conftest import (
    FIRST,
    SECOND,
    Bytes,
    exported,
    held,
    open_store,
    prompt,
    save,
)
from tierstore import UsageError
from tierstore.packs import PackError, PackReader, encryption, import_pack, open_pack, verify_pack

pytest.importorskip("cryptography")

KEY = bytes(range(32))


def encrypted(data, *sizes):
    out = bytearray()

    async def run():
        async def write(part):
            out.extend(part)

        output = encryption.EncryptedOutput(write, KEY)
        at = 0
        for size in sizes or (len(data),):
            await output.write(data[at : at + size])
            at += size
        await output.write(data[at:])
        await output.finish()

    asyncio.run(run())
    return bytes(out)


def opened(data, bites=1 << 30, key=KEY):
    async def run():
        file = encryption.EncryptedInput(Bytes(data, bites=bites), key)
        parts = []
        while part := await file.read(1 << 16):
            parts.append(part)
        return b"".join(parts)

    return asyncio.run(run())


@pytest.fixture
def small_segments(monkeypatch):
    monkeypatch.setattr(encryption, "SEGMENT_BYTES", 64)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 1000])
@pytest.mark.parametrize("bites", [7, 1 << 20])
def test_every_length_comes_back(small_segments, length, bites):
    data = bytes(at % 251 for at in range(length))
    sealed = encrypted(data, 10, 100)
    assert opened(sealed, bites) == data
    assert encrypted(data) != sealed  # each file has a key of its own
    assert length < 63 or data[:32] not in sealed
    with pytest.raises(PackError, match="the key does not open the pack"):
        opened(sealed, key=bytes(32))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_change_is_an_error(data):
    plain = bytes(at % 251 for at in range(data.draw(st.sampled_from([0, 60, 64, 200, 256]))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encryption, "SEGMENT_BYTES", 64)
        sealed = bytearray(encrypted(plain))
        change = data.draw(st.sampled_from(["flip", "cut", "add", "drop", "swap"]))
        at = data.draw(st.integers(0, len(sealed) - 1))
        segment = 40 + at % (1 + len(plain) // 64) * 80
        if change == "flip":
            sealed[at] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "cut":
            del sealed[at:]
        elif change == "add":
            sealed += bytes(1 + at)
        elif change == "drop":
            del sealed[segment : segment + 80]
        else:
            first = sealed[40:120]
            sealed[40:120] = sealed[segment : segment + 80]
            sealed[segment : segment + 80] = first
            if segment == 40:
                return
        with pytest.raises(PackError):
            opened(bytes(sealed))


def test_an_encrypted_pack_brings_the_same_pages(tmp_path, signer):
    out = tmp_path / "out.tskv"
    with open_store() as store:
        for tokens in (FIRST, SECOND):
            save(store, tokens)
        exported(store, [prompt(FIRST), prompt(SECOND)], out, key=KEY, signer=signer[0])
        expected = [held(store, tokens[: len(tokens) // 8 * 8]) for tokens in (FIRST, SECOND)]
        plain = tmp_path / "plain.tskv"
        exported(store, [prompt(FIRST)], plain)
        with pytest.raises(UsageError, match="leave --resume or --key out"):
            exported(store, [prompt(FIRST)], tmp_path / "again", key=KEY, resume=True)
    data = out.read_bytes()
    assert not any(page[:64] in data for _, pages in expected for page in pages)
    assert b"layout" not in data

    async def read(path, key, store=None):
        async with open_pack(path, key=key) as reader:
            await (verify_pack(reader) if store is None else import_pack(store, reader))

    asyncio.run(read(out, KEY))
    with open_store() as store:
        asyncio.run(read(out, KEY, store))
        for tokens, (_, pages) in zip((FIRST, SECOND), expected, strict=True):
            assert held(store, tokens)[1][: len(pages)] == pages
    for path, key, why in (
        (out, None, "the pack is encrypted: give --key"),
        (out, bytes(32), "the key does not open the pack"),
        (plain, KEY, "the pack is not encrypted: leave --key out"),
    ):
        with pytest.raises(PackError, match=why):
            asyncio.run(read(path, key))


def test_a_pack_without_its_end_brings_no_wrong_byte(small_segments, tmp_path):
    out = tmp_path / "out.tskv"
    with open_store() as store:
        save(store, FIRST)
        exported(store, [prompt(FIRST)], out, key=KEY)
    data = out.read_bytes()

    async def read(data):
        reader = await PackReader.begin(encryption.EncryptedInput(Bytes(data), KEY))
        await verify_pack(reader)

    asyncio.run(read(data))
    for cut in range(41, len(data), 1031):
        with pytest.raises(PackError):
            asyncio.run(read(data[:cut]))
