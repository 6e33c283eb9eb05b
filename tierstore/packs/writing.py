"""Making a pack from what a store holds: block by block, loaded, hashed, sealed and written one behind the
other.

While one block is written, the next is hashed and the one after it loaded, in three buffers. A file is
written under its name with ``.part`` behind it, and gets its own once all of it is on disk. What was cut off
is resumed: its whole blocks are checked and kept, if it is of the same pages and the same signer.

Blocks go to a file past the page cache, where it can be had (``O_DIRECT``): copying them there takes a fifth
of the processor that hashing leaves, and nobody reads the file soon. Rejected: syncing the file bit by bit
while later blocks are hashed, which was slower.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiofiles.os

from tierstore import copying, memory
from tierstore.errors import UsageError
from tierstore.keys import TOKEN_BYTES, Prompt, TokenIds
from tierstore.packs.format import (
    ALIGNMENT,
    FOOTER,
    FOOTER_BYTES,
    FOOTER_MAGIC,
    SEAL,
    Manifest,
    PackError,
    Run,
    block_digest,
    encode_table,
    footer_digest,
    head_digest,
    table_bytes,
)
from tierstore.packs.hashing import PageHash, page_digests
from tierstore.packs.reading import open_file, open_pack
from tierstore.packs.room import make_room
from tierstore.packs.signing import Signer, Trust
from tierstore.store import GroupedStore, Store
from tierstore.units import round_up

NO_SIGNER = Signer()
_BUFFERS = 3

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Exported:
    """A pack was made. ``asked_tokens`` are those of the prompts, ``resumed_pages`` were there already."""

    manifest: Manifest
    asked_tokens: int
    held_tokens: int
    resumed_pages: int


async def export_pack(
    store: Store,
    prompts: Sequence[Prompt],
    path: Path | None,
    *,
    signer: Signer = NO_SIGNER,
    resume: bool = False,
    progress: Progress | None = None,
    hash: PageHash | None = None,
) -> Exported:
    """Write what ``store`` holds of the whole chunks of ``prompts`` to ``path``, or to stdout (None). The
    store has no page pool. ``resume``: go on with what an earlier run left of the same pack. ``hash``: None
    is the best one that is installed.

    Raises :class:`UsageError` when nothing is held, and :class:`PackError` when pages leave the store
    meanwhile.
    """
    _check_new(path)
    held = [await _held(store, prompt) for prompt in prompts]
    manifest = Manifest.of(store.spec, held, signer.public, hash=PageHash.best() if hash is None else hash)
    export = _Export(store, manifest, signer, progress, resumable=path is not None)
    done = await _resumable(_part(path), manifest, export) if resume and path is not None else 0
    await _write_packs([export], path, done)
    asked = sum(map(len, prompts))
    return Exported(manifest, asked, sum(map(len, held)), export.resumed_pages)


async def export_groups(
    store: GroupedStore,
    prompts: Sequence[TokenIds],
    path: Path | None,
    *,
    signer: Signer = NO_SIGNER,
    progress: Progress | None = None,
) -> list[Exported]:
    """:func:`export_pack` for a model of several layer groups: a pack for each of them that has pages of the
    prompts, one behind the other in the file. What comes out of them gives the hits that ``store`` gives.

    Raises :class:`UsageError` when nothing is held, and what :func:`export_pack` raises."""
    _check_new(path)
    named = [store.prompt(prompt) for prompt in prompts]
    asked = sum(map(len, named))
    found: list[tuple[Store, list[Prompt]]] = []
    for group, own in enumerate(store.stores):
        rule = store.rules[group]
        held = [await _held(own, prompt.pages_of(group, rule)) for prompt in named]
        if any(prompt.keys for prompt in held):
            found.append((own, held))
    exported = []
    exports = []
    for number, (own, held) in enumerate(found):
        following = [other.identity for other, _ in found[number + 1 :]]
        manifest = Manifest.of(own.spec, held, signer.public, hash=PageHash.BLAKE3, following=following)
        exports.append(_Export(own, manifest, signer, progress, resumable=False))
        exported.append(Exported(manifest, asked, sum(map(len, held)), 0))
    if not exported:
        raise UsageError("nothing to pack: no whole chunk of these prompts is held")
    await _write_packs(exports, path)
    return exported


async def _write_packs(exports: Sequence[_Export], path: Path | None, done: int = 0) -> None:
    """One behind the other; of the first, ``done`` blocks are there already."""
    part = None if path is None else _part(path)
    async with open_file(sys.stdout.fileno() if part is None else part, "r+b" if done else "wb") as file:
        output = _Output(file, ours=part is not None)
        for export in exports:
            await export.run(output, done)
            done = 0
            if not export.last:
                await output.write(bytes(-FOOTER_BYTES % ALIGNMENT))
        if part is not None:
            await asyncio.to_thread(os.fsync, file.fileno())
    if part is not None and path is not None:
        await aiofiles.os.replace(part, path)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _check_new(path: Path | None) -> None:
    if path is not None and path.exists():
        raise UsageError(f"{path} is there already: choose another name, or remove it")


async def _held(store: Store, prompt: Prompt) -> Prompt:
    """The whole chunks of a prompt that the store holds now."""
    whole = len(prompt.keys) * prompt.chunk_tokens
    hit = await store.lookup_async(prompt, max_tokens=whole)
    chunks = hit.tokens // prompt.chunk_tokens
    hit.release()
    if prompt.loose:
        there = sorted(hit.positions)
        return Prompt.loose_pages(
            prompt.identity,
            b"".join(map(prompt.chunk, there)),
            [prompt.keys[at] for at in there],
            chunk_tokens=prompt.chunk_tokens,
        )
    data = prompt.token_bytes[: chunks * prompt.chunk_tokens * TOKEN_BYTES]
    return Prompt.with_keys(prompt.identity, data, prompt.keys[:chunks], chunk_tokens=prompt.chunk_tokens)


async def _resumable(part: Path, manifest: Manifest, export: _Export) -> int:
    """How many blocks of a file that was cut off are those of this pack; the export goes on from there."""
    if not part.exists():
        return 0
    good = 0
    try:
        async with open_pack(part, Trust(manifest.signer)) as reader:
            if reader.manifest.head != manifest.head:
                raise UsageError(f"{part} {_difference(reader.manifest, manifest)}, or leave --resume out")
            export.digest = reader.head_seal
            async with aclosing(reader.blocks()) as blocks:
                async for block in blocks:
                    good = block.number + 1
                    export.digest = block.seal
                    export.resumed_pages += block.count
    except PackError:
        pass  # as far as it is good it is kept, and the rest is written once more
    return good


def _difference(begun: Manifest, wanted: Manifest) -> str:
    """Why a part cannot be gone on with, and what to do."""
    if begun.hash != wanted.hash:
        name = begun.hash.name.lower()
        return f"has pages hashed by {name}, not {wanted.hash.name.lower()}: give --hash {name}, remove it"
    if begun.identity != wanted.identity:
        return f"is of another model or layout ({begun.identity.model}): remove it"
    return (
        f"is of {begun.tokens:,} tokens of {len(begun.prompts):,} prompts, and other ones are held now "
        f"({wanted.tokens:,} of {len(wanted.prompts):,}): remove it"
    )


class _Output:
    """Where a pack is written to, without a buffer of its own. ``ours``: a file that nobody else writes,
    past the page cache if that can be."""

    def __init__(self, file: Any, *, ours: bool) -> None:
        self._file = file
        self._direct = ours

    async def write(self, data: bytes | memoryview) -> None:
        """Append ``data``."""
        view = memoryview(data)
        while view:
            view = view[await self._file.write(view) :]

    async def write_aligned(self, view: memoryview) -> None:
        """Append whole blocks of :data:`ALIGNMENT` bytes, in page-aligned memory, behind others."""
        while view and self._direct and _go_direct(self._file.fileno(), True):
            try:
                view = view[await self._file.write(view) :]
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False  # a file system that takes the flag, and no such write
            finally:
                _go_direct(self._file.fileno(), False)
        await self.write(view)

    async def go_to(self, offset: int) -> None:
        """Cut the file off, and go on from there."""
        await self._file.seek(offset)
        await self._file.truncate()


def _go_direct(fd: int, wanted: bool) -> bool:
    """Write past the page cache from now on, or not. False where the file system cannot."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


class _Buffer:
    """A block on its way: its table, and its pages as a target of loads."""

    def __init__(self, page_bytes: int, pages: int) -> None:
        self._page_bytes = page_bytes
        self._pages_at = table_bytes(pages)
        nbytes = self._pages_at + round_up(pages * page_bytes, ALIGNMENT)
        self._memory = memory.Memory(nbytes, shared=False)
        self._shift = 0

    def take(self, at: int, chunk: int) -> _Buffer:
        """Get ready for pages from place ``at`` on, the first of which is ``chunk`` of what is loaded."""
        self._shift = at - chunk
        return self

    def write(self, pages: Sequence[tuple[int, int]]) -> None:
        start = self._memory.address + self._pages_at
        copies = ((start + (at + self._shift) * self._page_bytes, address) for at, address in pages)
        copying.copy_all(copies, self._page_bytes, read_next=True)

    def pages(self, count: int) -> memoryview:
        """The bytes of the first ``count`` pages."""
        return self._memory.view(self._pages_at, count * self._page_bytes)

    def sealed(self, count: int, table: bytes) -> memoryview:
        """The block of the first ``count`` pages, as it is written: behind ``table``, with its seal."""
        begins = self._pages_at - table_bytes(count)
        self._memory.view(begins, table_bytes(count))[:] = table.ljust(table_bytes(count), b"\0")
        nbytes = count * self._page_bytes
        padding = round_up(nbytes, ALIGNMENT) - nbytes
        self._memory.view(self._pages_at + nbytes, padding)[:] = bytes(padding)
        return self._memory.view(begins, table_bytes(count) + nbytes + padding)


class _Export:
    """One pack being written. ``digest`` is that of the last seal."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        signer: Signer,
        progress: Progress | None,
        *,
        resumable: bool,
    ) -> None:
        manifest.hash.digester()  # that its package is missing is said before there is a file
        self.digest = b""
        self.resumed_pages = 0
        self._store = store
        self._manifest = manifest
        self._signer = signer
        self._progress = progress
        self._resumable = resumable

    @property
    def last(self) -> bool:
        """Whether no other pack comes behind it in its file."""
        return not self._manifest.following

    async def run(self, output: _Output, done: int) -> None:
        """Write all behind the first ``done`` blocks."""
        manifest = self._manifest
        if done:
            await output.go_to(manifest.block_at(done))
        else:
            self.digest = head_digest(manifest.head)
            rest = manifest.encoded[len(manifest.head) + SEAL.size :]
            await output.write(manifest.head + self._seal() + rest)
        count = min(_BUFFERS, manifest.blocks - done)
        buffers = [_Buffer(manifest.page_bytes, manifest.block_pages) for _ in range(count)]
        writing: list[asyncio.Task[None]] = []
        try:
            for number in range(done, manifest.blocks):
                buffer = buffers[number % len(buffers)]
                if len(writing) == len(buffers):
                    await writing.pop(0)
                await self._load(number, buffer)
                before = writing[-1] if writing else None
                writing.append(asyncio.create_task(self._write(output, number, buffer, before)))
            for task in writing:
                await task
        finally:
            for task in writing:
                task.cancel()
            await asyncio.gather(*writing, return_exceptions=True)
        footer = FOOTER.pack(FOOTER_MAGIC, manifest.pages)
        self.digest = footer_digest(self.digest, footer)
        await output.write(footer + self._seal())

    async def _load(self, number: int, buffer: _Buffer) -> None:
        manifest = self._manifest
        first = number * manifest.block_pages
        for run in manifest.runs_of(first, manifest.pages_of(number)):
            if not await self._load_run(run, buffer, run.page - first):
                # Where the host tier is smaller than the prompt, the prompt's own pages are in the way.
                await asyncio.to_thread(make_room, self._store, manifest.block_pages)
                if not await self._load_run(run, buffer, run.page - first):
                    again = "again with --resume" if self._resumable else "again"
                    raise PackError(
                        f"the store has let go of pages behind {run.page:,} of {manifest.pages:,}: save "
                        f"them, and run this {again}"
                    )

    async def _load_run(self, run: Run, buffer: _Buffer, at: int) -> bool:
        """Bring pages of one prompt; whether all came."""
        prompt, chunk = self._manifest.pages_to_find(run)
        end = (chunk + run.count) * self._manifest.spec.chunk_tokens
        with await self._store.lookup_async(prompt, max_tokens=end) as hit:
            if hit.tokens < end:
                return False
            target = buffer.take(at, chunk)
            loading = self._store.load_to(hit, target, first=chunk, count=run.count)
            return (await loading).tokens == end

    async def _write(
        self, output: _Output, number: int, buffer: _Buffer, before: asyncio.Task[None] | None
    ) -> None:
        manifest = self._manifest
        count, page_bytes = manifest.pages_of(number), manifest.page_bytes
        pairs = await page_digests(buffer.pages(count), page_bytes, manifest.hash)
        if before is not None:
            await before
        table = encode_table([xxh3 for xxh3, _ in pairs], [digest for _, digest in pairs])
        self.digest = block_digest(self.digest, table)
        await output.write_aligned(buffer.sealed(count, self._seal() + table))
        if self._progress is not None:
            self._progress(count, count * page_bytes)

    def _seal(self) -> bytes:
        return SEAL.pack(self.digest, self._signer.sign(self.digest))
