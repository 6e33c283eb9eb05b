"""Reading and verifying a pack from beginning to end, from a file or a pipe.

A block is handed out after its table's seal and all of its pages have been verified. While the caller uses
it, the next block is verified and the one after that is read. There are three buffers, so a pack of any size
needs the memory of three blocks. Sizes in a pack are compared with the format's limits before memory is
allocated, and the memory is used only as bytes arrive.

A file is read through the page cache, to profit from the kernel's read-ahead. Each block leaves the cache
after it was read, so that cached data of other programs stays. In a virtual machine that returns free memory
to its host, reading took four times as long if a whole pack filled the cache.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiofiles
import numpy as np
import numpy.typing as npt

from tierstore.errors import UsageError
from tierstore.packs.encryption import EncryptedInput
from tierstore.packs.format import (
    ALIGNMENT,
    ENTRY,
    FOOTER,
    FOOTER_BYTES,
    FOOTER_MAGIC,
    HEAD,
    SEAL,
    Head,
    Manifest,
    PackError,
    block_digest,
    decode_table,
    footer_digest,
    head_digest,
    table_bytes,
)
from tierstore.packs.hashing import page_digests
from tierstore.packs.signing import Trust, Verifier
from tierstore.units import MIB, round_up

ANYBODY = Trust()
_INDEX_READ_BYTES = MIB  # an index is read in pieces of this size, because the size in its head may be wrong
_BUFFERS = 3  # the caller uses one buffer, one is being verified, and one is being filled

Wanted = Callable[[int, int], bool]


@dataclass(frozen=True)
class Block:
    """The verified pages ``first … first + count`` of a pack. ``seal`` is the digest in the seal of their
    table. ``pages`` are their bytes, valid until the next block is requested; None if they were not wanted
    and not read."""

    number: int
    first: int
    count: int
    seal: bytes
    checksums: Sequence[int]
    digests: Sequence[bytes]
    pages: memoryview | None


@dataclass(frozen=True)
class _Raw:
    """A block before its verification."""

    table: bytes
    pages: memoryview | None


class PackReader:
    """A pack with a verified head and index. Only one task may use it; see :func:`open_pack`."""

    def __init__(
        self, file: Any, manifest: Manifest, verifier: Verifier, digest: bytes, *, begins: int = 0
    ) -> None:
        self.manifest = manifest
        self.head_seal = digest
        self.leaves_cache = False
        """Whether blocks of the file leave the page cache after they were read."""
        self._seal = digest  # the last verified one
        self._begins = begins  # offset in its file
        self._leaving: list[asyncio.Future[None]] = []
        self._file = file
        self._verifier = verifier
        self._buffers: dict[int, npt.NDArray[np.uint8]] = {}  # the blocks use these buffers in turn

    @classmethod
    async def begin(cls, file: Any, trust: Trust = ANYBODY, *, begins: int = 0) -> PackReader:
        """Read and verify head and index. ``file`` was opened by aiofiles, or has the methods ``read`` and
        ``readinto`` of such a file. Raise :class:`PackError` if they are malformed."""
        data = await _read(file, HEAD.size)
        head = Head.decode(data)
        verifier = trust.verifier(head.signer)
        index = await _read(file, head.index_bytes)
        padding = round_up(HEAD.size + head.index_bytes + SEAL.size, ALIGNMENT)
        rest = await _read(file, padding - HEAD.size - head.index_bytes)
        _check_zeros(rest[SEAL.size :])
        digest = _check_seal(rest, head_digest(data + index), verifier)
        return cls(file, head.manifest(index), verifier, digest, begins=begins)

    async def blocks(self, wanted: Wanted = lambda first, count: True) -> AsyncGenerator[Block, None]:
        """Yield each block, and verify the footer. If pages ``first … first + count`` are not ``wanted``, and
        the file can be positioned, only their table is read and verified. Raise :class:`PackError` at the
        first error, after all blocks before it."""
        count = self.manifest.blocks
        reading = asyncio.ensure_future(self._read_block(0, wanted, None))
        checking = asyncio.ensure_future(self._checked(0, reading))
        try:
            for number in range(count):
                if number + 1 < count:
                    reading = asyncio.ensure_future(self._read_block(number + 1, wanted, reading))
                block = await checking
                if number + 1 < count:
                    checking = asyncio.ensure_future(self._checked(number + 1, reading))
                yield block
        finally:
            await _ended(reading, checking, *self._leaving)
        await self._check_footer()

    async def following(self) -> PackReader | None:
        """Return the next pack in the file, of another layer group, or None after the last one. Call it after
        all blocks of this pack. The next pack must have the same signer."""
        manifest = self.manifest
        if not manifest.following:
            return None
        begins = self._begins + round_up(manifest.nbytes, ALIGNMENT)
        reader = await PackReader.begin(self._file, Trust(manifest.signer), begins=begins)
        if (reader.manifest.identity, *reader.manifest.following) != manifest.following:
            raise PackError("the pack is damaged: an unexpected layer group follows")
        reader.leaves_cache = self.leaves_cache
        return reader

    async def _read_block(self, number: int, wanted: Wanted, before: asyncio.Future[_Raw] | None) -> _Raw:
        manifest = self.manifest
        if before is not None:
            await before
        count, page_bytes = manifest.pages_of(number), manifest.page_bytes
        first, nbytes = number * manifest.block_pages, round_up(count * page_bytes, ALIGNMENT)
        try:
            table = await _read(self._file, table_bytes(count))
            if not wanted(first, count) and await self._file.seekable():
                await self._file.seek(nbytes, io.SEEK_CUR)
                return _Raw(table, None)
            if number % _BUFFERS not in self._buffers:
                whole = round_up(min(manifest.block_pages, manifest.pages) * page_bytes, ALIGNMENT)
                self._buffers[number % _BUFFERS] = np.empty(whole, np.uint8)
            pages = self._buffers[number % _BUFFERS].data[:nbytes]
            await _read_into(self._file, pages)
            if self.leaves_cache:
                await self._leave_cache(number)
        except PackError as error:
            raise PackError(f"{error}, after {first:,} of {manifest.pages:,} pages") from None
        return _Raw(table, pages)

    async def _leave_cache(self, number: int) -> None:
        """Start removing a block from the page cache, while the next block is read. Wait before that until
        the previous block has been removed."""
        await asyncio.gather(*self._leaving)
        start = self._begins + self.manifest.block_at(number)
        length = self._begins + self.manifest.block_at(number + 1) - start
        advice = asyncio.to_thread(
            os.posix_fadvise, self._file.fileno(), start, length, os.POSIX_FADV_DONTNEED
        )
        self._leaving = [asyncio.ensure_future(advice)]

    async def _checked(self, number: int, reading: asyncio.Future[_Raw]) -> Block:
        raw, manifest = await reading, self.manifest
        first, count = number * manifest.block_pages, manifest.pages_of(number)
        entries_end = SEAL.size + count * ENTRY.itemsize
        table = raw.table[SEAL.size : entries_end]
        _check_zeros(raw.table[entries_end:])
        self._seal = _check_seal(raw.table, block_digest(self._seal, table), self._verifier)
        checksums, digests = decode_table(table)
        pages = raw.pages
        if pages is not None:
            _check_zeros(pages[count * manifest.page_bytes :])
            pages = pages[: count * manifest.page_bytes]
            found = await page_digests(pages, manifest.page_bytes, manifest.hash)
            if found != list(zip(checksums, digests, strict=True)):
                bad = next(at for at, pair in enumerate(found) if pair != (checksums[at], digests[at]))
                raise PackError(f"the pack is damaged: page {first + bad:,} has changed")
        return Block(number, first, count, self._seal, checksums, digests, pages)

    async def _check_footer(self) -> None:
        footer = await _read(self._file, FOOTER_BYTES)
        if footer[: FOOTER.size] != FOOTER.pack(FOOTER_MAGIC, self.manifest.pages):
            raise PackError("the pack is damaged: its footer does not match its pages")
        digest = footer_digest(self._seal, footer[: FOOTER.size])
        _check_seal(footer[FOOTER.size :], digest, self._verifier)
        if self.manifest.following:
            _check_zeros(await _read(self._file, -FOOTER_BYTES % ALIGNMENT))
        elif await self._file.read(1):
            raise PackError("the pack is damaged: there is data after its end")


@asynccontextmanager
async def open_pack(
    path: Path | None, trust: Trust = ANYBODY, key: bytes | None = None
) -> AsyncIterator[PackReader]:
    """Open the pack in a file, or on stdin if the file is None. ``key`` opens an encrypted pack. Raise
    :class:`PackError` if the pack is malformed, and :class:`UsageError` if the file cannot be read."""
    async with open_file(sys.stdin.fileno() if path is None else path, "rb") as plain:
        file = plain if key is None else EncryptedInput(plain, key)
        reader = await PackReader.begin(file, trust)
        reader.leaves_cache = path is not None and await file.seekable()
        yield reader


@asynccontextmanager
async def open_file(file: Path | int, mode: str) -> AsyncIterator[Any]:
    """Open a file with aiofiles. If it is given as a descriptor, the descriptor stays open at the end. Raise
    :class:`UsageError` if it cannot be opened."""
    try:
        opened = await aiofiles.open(
            file, mode, buffering=-1 if mode == "rb" else 0, closefd=not isinstance(file, int)
        )
    except OSError as error:
        verb = "read" if mode == "rb" else "write"
        raise UsageError(f"cannot {verb} {file}: {error.strerror}") from error
    try:
        yield opened
    finally:
        await opened.close()


async def verify_pack(reader: PackReader, progress: Callable[[int, int], None] | None = None) -> None:
    """Verify a whole pack and the packs after it in the file. Raise :class:`PackError` at the first error."""
    part: PackReader | None = reader
    while part is not None:
        async with aclosing(part.blocks()) as blocks:
            async for block in blocks:
                if progress is not None:
                    progress(block.count, block.count * part.manifest.page_bytes)
        part = await part.following()


def _check_seal(seal: bytes, digest: bytes, verifier: Verifier) -> bytes:
    """Return the digest if it matches the seal. Raise :class:`PackError` if not. Otherwise raise
    :class:`PackError`."""
    sealed, signature = SEAL.unpack_from(seal)
    if sealed != digest:
        raise PackError("the pack is damaged: a seal does not match its data")
    verifier.check(digest, signature)
    return digest


def _check_zeros(padding: bytes | memoryview) -> None:
    if any(padding):
        raise PackError("the pack is damaged: padding is not zero")


async def _read(file: Any, nbytes: int) -> bytes:
    """Read exactly ``nbytes``, in pieces as they arrive. Raise :class:`PackError` at an early end."""
    parts, missing = [], nbytes
    while missing:
        part = await file.read(min(missing, _INDEX_READ_BYTES))
        if not part:
            raise PackError("the pack is cut off")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


async def _read_into(file: Any, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = await file.readinto(view[done:])
        if not count:
            raise PackError("the pack is cut off")
        done += count


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks whose result is not needed any more, and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
