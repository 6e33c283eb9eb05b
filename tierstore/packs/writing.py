"""Writing a pack of a store's pages, block by block: load, hash, seal, write.

While one block is written, the next is hashed and the one after that loaded, in three buffers. A file is
written under its name with the suffix ``.part``, and renamed when all of it is on disk. An interrupted export
can be resumed: the whole blocks of its file are verified and kept, if pages and signer are the same.

Blocks bypass the page cache if the file system supports it (``O_DIRECT``): copying to the cache would take a
fifth of the processor time that hashing leaves, and the file is usually not read soon. Rejected alternative:
syncing the file piece by piece while later blocks are hashed, which was slower.
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
from typing import Any, TypeAlias

import aiofiles.os

from tierstore import copying, memory
from tierstore.errors import UsageError
from tierstore.keys import Prompt
from tierstore.packs.encryption import EncryptedOutput
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
from tierstore.packs.signing import Signer, Trust
from tierstore.spec import KVSpec
from tierstore.store import Store
from tierstore.units import round_up

_FLUSH_S = 300.0  # how long to wait for room before host pages are evicted
NO_SIGNER = Signer()
_BUFFERS = 3

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Exported:
    """The result of an export, which is a file with one pack for each layer group that has pages of the
    prompts. ``asked_tokens`` is the number of tokens in the prompts, and ``held_tokens`` the number of them
    that the store has in the first of these groups. ``resumed_pages`` were written by an earlier run."""

    manifests: tuple[Manifest, ...]
    asked_tokens: int
    held_tokens: int
    resumed_pages: int

    @property
    def manifest(self) -> Manifest:
        """The manifest of the first pack."""
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
    key: bytes | None = None,
) -> Exported:
    """Write the pages of ``store`` for the whole chunks of ``prompts`` to ``path``, or to stdout (None).

    The store must have no page pool. If the model has several layer groups, each has its own pack, one after
    the other in the file. A store that imports the file has the same hits as ``store``. With ``resume``, an
    earlier run for the same packs is continued. If ``hash`` is None, the fastest installed hash is used, or
    blake3 for named pages. With a ``key`` of 32 bytes, the file is encrypted.

    Raises :class:`UsageError` if the store has no pages, and for ``resume`` with a ``key``. Raises
    :class:`PackError` if pages leave the store meanwhile.
    """
    _check_new(path)
    if resume and key is not None:
        raise UsageError("an encrypted pack cannot be resumed: leave --resume or --key out")
    found: list[tuple[KVSpec, list[Prompt]]] = []
    for group in store.groups:
        held = [await _held(store, prompt.pages_of(group.number)) for prompt in prompts]
        if any(prompt.keys for prompt in held):
            found.append((group.spec, held))
    if not found:
        raise UsageError("nothing to pack: the store has no whole chunk of these prompts")
    if hash is None:
        best = PageHash.best()
        hash = best if len(store.groups) == 1 and can_have(best, found[0][1]) else PageHash.BLAKE3
    exports = []
    for number, (spec, held) in enumerate(found):
        following = [other[0].identity for _, other in found[number + 1 :]]
        manifest = Manifest.of(spec, held, signer.public, hash=hash, following=following)
        exports.append(_Export(store, manifest, signer, progress, resumable=path is not None))
    done = await _resumable(_part(path), exports) if resume and path is not None else (0, 0)
    await _write_packs(exports, path, *done, key)
    return Exported(
        tuple(export.manifest for export in exports),
        sum(map(len, prompts)),
        sum(map(len, found[0][1])),
        sum(export.resumed_pages for export in exports),
    )


async def _write_packs(
    exports: Sequence[_Export], path: Path | None, whole: int, done: int, key: bytes | None
) -> None:
    """Write the packs one after the other. ``whole`` packs and ``done`` blocks of the next one exist
    already."""
    part = None if path is None else _part(path)
    resumed = whole or done
    at = sum(round_up(export.manifest.nbytes, ALIGNMENT) for export in exports[:whole])
    async with open_file(sys.stdout.fileno() if part is None else part, "r+b" if resumed else "wb") as file:
        plain = _Output(file, ours=part is not None)
        encrypted = EncryptedOutput(plain.write, key) if key is not None else None
        output = encrypted or plain
        for export in exports[whole:]:
            await export.run(output, done, at if resumed else None)
            resumed = done = 0
            if not export.last:
                await output.write(bytes(-FOOTER_BYTES % ALIGNMENT))
        if encrypted is not None:
            await encrypted.finish()
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
    """Return the whole chunks of a prompt that the store has now."""
    whole = len(prompt.keys) * prompt.chunk_tokens
    hit = await store.lookup_async(prompt, max_tokens=whole)
    hit.release()
    return prompt.part(hit.whole_chunks)


async def _resumable(part: Path, exports: Sequence[_Export]) -> tuple[int, int]:
    """Return the number of whole packs in the file of an interrupted export, and the number of whole blocks
    in the pack after them. The packs' exports continue there."""
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
        pass  # the part before the error is kept, and the part behind it is written again
    return whole, good


def _difference(begun: Manifest, wanted: Manifest) -> str:
    """Return why a partial file cannot be continued, and what to do."""
    if begun.hash != wanted.hash:
        name = begun.hash.name.lower()
        return f"has pages hashed by {name}, not {wanted.hash.name.lower()}: give --hash {name}, remove it"
    if begun.identity != wanted.identity:
        return f"has another model or layout ({begun.identity.model}): remove it"
    return (
        f"has {begun.tokens:,} tokens of {len(begun.prompts):,} prompts, but the store has others now "
        f"({wanted.tokens:,} of {len(wanted.prompts):,}): remove it"
    )


class _Output:
    """The output of an export, without its own buffer. ``ours`` says that no other process writes the file.
    Writes bypass the page cache if possible."""

    def __init__(self, file: Any, *, ours: bool) -> None:
        self._file = file
        self._direct = ours

    async def write(self, data: bytes | memoryview) -> None:
        """Append ``data``."""
        view = memoryview(data)
        while view:
            view = view[await self._file.write(view) :]

    async def write_aligned(self, view: memoryview) -> None:
        """Append whole blocks of :data:`ALIGNMENT` bytes from page-aligned memory. The file's length must be
        aligned, too."""
        while view and self._direct and _go_direct(self._file.fileno(), True):
            try:
                view = view[await self._file.write(view) :]
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False  # the file system accepts the flag O_DIRECT, but not the write
            finally:
                _go_direct(self._file.fileno(), False)
        await self.write(view)

    async def go_to(self, offset: int) -> None:
        """Truncate the file at ``offset`` and continue there."""
        await self._file.seek(offset)
        await self._file.truncate()


_PackOutput: TypeAlias = "_Output | EncryptedOutput"


def _go_direct(fd: int, wanted: bool) -> bool:
    """Switch bypassing the page cache on or off. Return False if the file system does not support it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


class _Buffer:
    """A block that is being made: its table, and its pages, which are a target of loads."""

    def __init__(self, page_bytes: int, pages: int) -> None:
        self._page_bytes = page_bytes
        self._pages_at = table_bytes(pages)
        nbytes = self._pages_at + round_up(pages * page_bytes, ALIGNMENT)
        self._memory = memory.Memory(nbytes, shared=False)
        self._shift = 0

    def take(self, at: int, chunk: int) -> _Buffer:
        """Prepare a load of pages to the places from ``at`` on. The first of these pages is chunk ``chunk``
        of the load."""
        self._shift = at - chunk
        return self

    def write(self, pages: Sequence[tuple[int, int]]) -> None:
        start = self._memory.address + self._pages_at
        copies = ((start + (at + self._shift) * self._page_bytes, address) for at, address in pages)
        copying.copy_all(copies, self._page_bytes, read_next=True)

    def pages(self, count: int) -> memoryview:
        """Return the bytes of the first ``count`` pages."""
        return self._memory.view(self._pages_at, count * self._page_bytes)

    def sealed(self, count: int, table: bytes) -> memoryview:
        """Return the bytes to write for a block: its ``table`` with the seal, then the first ``count``
        pages."""
        begins = self._pages_at - table_bytes(count)
        self._memory.view(begins, table_bytes(count))[:] = table.ljust(table_bytes(count), b"\0")
        nbytes = count * self._page_bytes
        padding = round_up(nbytes, ALIGNMENT) - nbytes
        self._memory.view(self._pages_at + nbytes, padding)[:] = bytes(padding)
        return self._memory.view(begins, table_bytes(count) + nbytes + padding)


class _Export:
    """One pack that is being written. ``digest`` is the digest in the last seal."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        signer: Signer,
        progress: Progress | None,
        *,
        resumable: bool,
    ) -> None:
        manifest.hash.digester()  # this raises if a package is missing, before there is a file
        self.digest = b""
        self.resumed_pages = 0
        self._store = store
        self.manifest = manifest
        self._signer = signer
        self._progress = progress
        self._resumable = resumable

    @property
    def last(self) -> bool:
        """Whether this is the last pack in the file."""
        return not self.manifest.following

    async def run(self, output: _PackOutput, done: int, at: int | None) -> None:
        """Write everything after the first ``done`` blocks. ``at`` is the pack's offset in the file (None:
        the current end)."""
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
                # If the host tier is smaller than the prompt, the prompt's own earlier pages use its room.
                await asyncio.to_thread(make_room, self._store, manifest.block_pages)
                if not await self._load_run(run, buffer, run.page - first):
                    again = "again with --resume" if self._resumable else "again"
                    raise PackError(
                        f"the store has dropped pages after the first {run.page:,} of {manifest.pages:,}: "
                        f"save them, and run this {again}"
                    )

    async def _load_run(self, run: PageRun, buffer: _Buffer, at: int) -> bool:
        """Load pages of one prompt. Return whether all arrived."""
        prompt, chunk = self.manifest.pages_to_find(run)
        end = (chunk + run.count) * self.manifest.spec.chunk_tokens
        with await self._store.lookup_async(prompt, max_tokens=end) as hit:
            if hit.tokens < end:
                return False
            target = buffer.take(at, chunk)
            loading = self._store.load_to(hit, target, first=chunk, count=run.count)
            return (await loading).tokens == end

    async def _write(
        self,
        output: _PackOutput,
        number: int,
        buffer: _Buffer,
        before: asyncio.Task[None] | None,
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


def make_room(store: Store, pages: int) -> bool:
    """Evict some pages from the host tier. Return whether there may be room now.

    A chain longer than the tier cannot find room by itself, because the ancestors of its pages stay as long
    as the pages do. Without a disk nothing is evicted, because these would be the only copies.
    """
    if "disk" not in store.stats().tiers or not store.flush(_FLUSH_S):
        return False
    return store.evict("host", pages) > 0
