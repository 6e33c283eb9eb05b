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
from tierstore.keys import Prompt
from tierstore.packs.format import (
    ALIGNMENT,
    FOOTER,
    FOOTER_BYTES,
    FOOTER_MAGIC,
    SEAL,
    Manifest,
    PackError,
    PageRun,
    block_digest,
    can_have,
    encode_table,
    footer_digest,
    head_digest,
    table_bytes,
)
from tierstore.packs.hashing import PageHash, page_digests
from tierstore.packs.reading import PackReader, open_file, open_pack
from tierstore.packs.room import make_room
from tierstore.packs.signing import Signer, Trust
from tierstore.spec import KVSpec
from tierstore.store import Store
from tierstore.units import round_up

NO_SIGNER = Signer()
_BUFFERS = 3

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Exported:
    """A file was made, of a pack for each layer group that has pages of the prompts. ``asked_tokens`` are
    those of the prompts, ``held_tokens`` those that the first of these groups holds; ``resumed_pages`` were
    there already."""

    manifests: tuple[Manifest, ...]
    asked_tokens: int
    held_tokens: int
    resumed_pages: int

    @property
    def manifest(self) -> Manifest:
        """Of the first."""
        return self.manifests[0]


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
    store has no page pool. Where the model has several layer groups, each has a pack of its own, one behind
    the other in the file: what comes out of them gives the hits that ``store`` gives. ``resume``: go on with
    what an earlier run left of the same packs. ``hash``: None is the best one that is installed, or blake3
    where pages are named.

    Raises :class:`UsageError` when nothing is held, and :class:`PackError` when pages leave the store
    meanwhile.
    """
    _check_new(path)
    found: list[tuple[KVSpec, list[Prompt]]] = []
    for group in store.groups:
        held = [await _held(store, prompt.pages_of(group.number)) for prompt in prompts]
        if any(prompt.keys for prompt in held):
            found.append((group.spec, held))
    if not found:
        raise UsageError("nothing to pack: no whole chunk of these prompts is held")
    if hash is None:
        best = PageHash.best()
        hash = best if len(store.groups) == 1 and can_have(best, found[0][1]) else PageHash.BLAKE3
    exports = []
    for number, (spec, held) in enumerate(found):
        following = [other[0].identity for _, other in found[number + 1 :]]
        manifest = Manifest.of(spec, held, signer.public, hash=hash, following=following)
        exports.append(_Export(store, manifest, signer, progress, resumable=path is not None))
    done = await _resumable(_part(path), exports) if resume and path is not None else (0, 0)
    await _write_packs(exports, path, *done)
    return Exported(
        tuple(export.manifest for export in exports),
        sum(map(len, prompts)),
        sum(map(len, found[0][1])),
        sum(export.resumed_pages for export in exports),
    )


async def _write_packs(exports: Sequence[_Export], path: Path | None, whole: int, done: int) -> None:
    """One behind the other; ``whole`` packs, and ``done`` blocks of the next, are there already."""
    part = None if path is None else _part(path)
    resumed = whole or done
    at = sum(round_up(export.manifest.nbytes, ALIGNMENT) for export in exports[:whole])
    async with open_file(sys.stdout.fileno() if part is None else part, "r+b" if resumed else "wb") as file:
        output = _Output(file, ours=part is not None)
        for export in exports[whole:]:
            await export.run(output, done, at if resumed else None)
            resumed = done = 0
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
    hit.release()
    return prompt.part(hit.whole_chunks)


async def _resumable(part: Path, exports: Sequence[_Export]) -> tuple[int, int]:
    """How many packs of a file that was cut off are whole, and how many blocks of the next are there; the
    exports go on from there."""
    if not part.exists():
        return 0, 0
    whole = good = 0
    try:
        async with open_pack(part, Trust(exports[0].manifest.signer)) as first:
            reader: PackReader | None = first
            for whole, export in enumerate(exports):
                good = 0
                manifest = export.manifest
                if reader is None or reader.manifest.head != manifest.head:
                    if reader is not None and not whole:
                        difference = _difference(reader.manifest, manifest)
                        raise UsageError(f"{part} {difference}, or leave --resume out")
                    break
                export.digest = reader.head_seal
                async with aclosing(reader.blocks()) as blocks:
                    async for block in blocks:
                        good = block.number + 1
                        export.digest = block.seal
                        export.resumed_pages += block.count
                if not export.last:
                    reader = await reader.following()
    except PackError:
        pass  # as far as it is good it is kept, and the rest is written once more
    return whole, good


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
        self.manifest = manifest
        self._signer = signer
        self._progress = progress
        self._resumable = resumable

    @property
    def last(self) -> bool:
        """Whether no other pack comes behind it in its file."""
        return not self.manifest.following

    async def run(self, output: _Output, done: int, at: int | None) -> None:
        """Write all behind the first ``done`` blocks. ``at``: the pack begins there in the file (None: where
        it is written to now)."""
        manifest = self.manifest
        if at is not None:
            await output.go_to(at + (manifest.block_at(done) if done else 0))
        if not done:
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
        manifest = self.manifest
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

    async def _load_run(self, run: PageRun, buffer: _Buffer, at: int) -> bool:
        """Bring pages of one prompt; whether all came."""
        prompt, chunk = self.manifest.pages_to_find(run)
        end = (chunk + run.count) * self.manifest.spec.chunk_tokens
        with await self._store.lookup_async(prompt, max_tokens=end) as hit:
            if hit.tokens < end:
                return False
            target = buffer.take(at, chunk)
            loading = self._store.load_to(hit, target, first=chunk, count=run.count)
            return (await loading).tokens == end

    async def _write(
        self, output: _Output, number: int, buffer: _Buffer, before: asyncio.Task[None] | None
    ) -> None:
        manifest = self.manifest
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
