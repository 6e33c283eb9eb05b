"""Importing a pack's pages into a store.

A block's pages are saved after the whole block has been verified, with :meth:`tierstore.Store.save`: the
store decides what it has room for. Pages that the store already has are not read, so an interrupted import
continues where it stopped when it is run again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass

from tierstore import copying, memory
from tierstore.keys import Identity
from tierstore.packs.format import Manifest, PackError, PageRun
from tierstore.packs.reading import Block, PackReader
from tierstore.packs.writing import make_room
from tierstore.store import Store
from tierstore.store.buffers import copied_frames
from tierstore.units import MIB

_FLUSH_BYTES = 64 * MIB  # bytes between two flushes, if the size of the host tier is unknown
_FLUSH_S = 300.0  # the longest wait for the disk, if the host tier has no room until pages are written
_MOST_CHARS = 60


@dataclass(frozen=True)
class Imported:
    """The result of an import: all pages of a file's packs are in the store. ``held_pages`` were there
    before."""

    manifests: tuple[Manifest, ...]
    held_pages: int

    @property
    def manifest(self) -> Manifest:
        """The manifest of the first pack."""
        return self.manifests[0]


async def import_pack(
    store: Store, reader: PackReader, *, progress: Callable[[int, int], None] | None = None
) -> Imported:
    """Save the pages of a pack, and those of the packs after it (of further layer groups), in ``store``,
    which has their identity. Afterwards the store has the same hits as the exporting store.

    Raises :class:`PackError` before anything is saved if the pack has another identity. A damaged or
    truncated pack raises it after all pages before the damage have been saved. A store without room for all
    pages raises it, too.
    """
    identities = store.identity.groups
    require_identity(reader.manifest, identities)
    parts = []
    part: PackReader | None = reader
    while part is not None:
        parts.append(await import_part(store, part, progress=progress))
        part = await part.following()
    return Imported(
        tuple(manifest for each in parts for manifest in each.manifests),
        sum(each.held_pages for each in parts),
    )


async def import_part(
    store: Store, reader: PackReader, *, progress: Callable[[int, int], None] | None = None
) -> Imported:
    """Save the pages of this pack's layer group only."""
    manifest = reader.manifest
    held = [await _held(store, manifest, run) for run in manifest.runs]

    def wanted(first: int, count: int) -> bool:
        return any(run.chunk + run.count > held[run.prompt] for run in manifest.runs_of(first, count))

    pace = _Pace(store)
    held_pages = 0
    async with aclosing(reader.blocks(wanted)) as blocks:
        async for block in blocks:
            if block.pages is None:
                held_pages += block.count
            else:
                for run in manifest.runs_of(block.first, block.count):
                    await _save(store, manifest, block, run)
                await pace.saved(len(block.pages))
            if progress is not None:
                progress(block.count, block.count * manifest.page_bytes)
    await pace.flush()
    return Imported((manifest,), held_pages)


def require_identity(manifest: Manifest, known: Sequence[Identity]) -> None:
    """Check that the identities of a pack and of the packs after it are among the ``known`` ones. Raise
    :class:`PackError` if one is not, and name the difference to the most similar known identity."""
    missing = [each for each in (manifest.identity, *manifest.following) if each not in known]
    if not known or not missing:
        return
    pack = asdict(missing[0])
    fields = [asdict(other) for other in known]
    nearest = min(fields, key=lambda other: sum(other[name] != value for name, value in pack.items()))
    differ = [name for name in pack if pack[name] != nearest[name]]
    words = ", ".join(f"{name} {_short(pack[name])}, not {_short(nearest[name])}" for name in differ)
    raise PackError(f"the pack is of another model: {words}")


def _short(value: str) -> str:
    return repr(value if len(value) <= _MOST_CHARS else value[:_MOST_CHARS] + "…")


async def _held(store: Store, manifest: Manifest, run: PageRun) -> int:
    """Return the number of leading chunks of a prompt that the store has."""
    hit = await store.lookup_async(manifest.prompt(run.prompt))
    hit.release()
    held = hit.whole_chunks
    return next((at for at, chunk in enumerate(held) if chunk != at), len(held))


async def _save(store: Store, manifest: Manifest, block: Block, run: PageRun) -> None:
    assert block.pages is not None, "the pages were wanted"
    start, page_bytes = run.page - block.first, manifest.page_bytes
    pages = block.pages[start * page_bytes : (start + run.count) * page_bytes]
    source = _ImportedPages(pages, block.checksums[start : start + run.count], page_bytes)
    prompt, first = manifest.pages_to_find(run)
    expected = run.count * manifest.spec.chunk_tokens
    for last in (False, True):
        if await store.save_from(prompt, source, run.count, first=first) == expected:
            return
        if last or not await asyncio.to_thread(make_room, store, run.count):
            raise PackError(
                f"the store took only {run.page:,} of {manifest.pages:,} pages, and these stay. Check that "
                "it runs and has room, then run this again"
            )


class _Pace:
    """Makes an import wait for the disk, because pages that have no room in the write queue are not
    written."""

    def __init__(self, store: Store) -> None:
        self._store = store
        tiers = store.stats().tiers
        host = tiers.get("host")  # statistics for a client with a tenant have no tiers
        room = _FLUSH_BYTES if host is None else host.capacity_bytes // 4
        self._most_bytes = room if host is None or "disk" in tiers else math.inf
        self._nbytes = 0

    async def saved(self, nbytes: int) -> None:
        self._nbytes += nbytes
        if self._nbytes >= self._most_bytes:
            await self.flush()

    async def flush(self) -> None:
        if not await asyncio.to_thread(self._store.flush, _FLUSH_S):
            raise PackError(
                f"the store's disk did not write all pages within {_FLUSH_S:.0f} s: run this again"
            )
        self._nbytes = 0


class _ImportedPages:
    """A block's pages as the source of a save. A page that does not match its checksum is not stored."""

    def __init__(self, pages: memoryview, checksums: Sequence[int], page_bytes: int) -> None:
        self._address = memory.address_of(pages, writable=False)
        self._keep = pages
        self._checksums = checksums
        self._page_bytes = page_bytes

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> list[int | None]:
        copies = ((address, self._address + at * page_bytes) for at, address in pages)
        found = copying.copy_and_hash(copies, page_bytes)
        return [
            xxh3 if xxh3 == self._checksums[at] else None for xxh3, (at, _) in zip(found, pages, strict=True)
        ]

    def frames(
        self, positions: Sequence[int], page_bytes: int
    ) -> tuple[list[memoryview], Sequence[int | None]]:
        return copied_frames(self, positions, page_bytes)
