"""What a store directory holds, by identity: pages, tokens, bytes, prompts, ages, hits.

What it costs: one pass over the facts (56 bytes a page) and one over the records' lengths and heads (about
0.5 KiB a page, which is what the disk has to deliver). Token counts come from the lengths; no record is
decoded, no payload is read. A million pages take a few seconds.

**A store in use** is read without taking part in LMDB's locking: a listing must not be able to hold up its
owner's reuse of space (a registered reader does), nor to leave a mark in the lock file that the owner's next
index inherits. Pages of the index that are freed by a transaction are overwritten by the third one after it
at the earliest. So the trees are read in short bursts, each of which is believed only if at most one
transaction was committed meanwhile, and read again otherwise. A burst that is overtaken may meet anything,
even an address that is none.

Reading is another process's work in either case: LMDB believes its file, and a damaged one can kill whoever
reads it.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tierstore.errors import StoreUnavailableError
from tierstore.keys import TOKEN_BYTES, Identity
from tierstore.tiers.disk.ancestry import parent_rows
from tierstore.tiers.disk.catalog import FORMAT, Catalog, unreadable
from tierstore.tiers.disk.directory import INDEX, StoreDirectory, StoreInUseError
from tierstore.tiers.disk.inspection import stored_format
from tierstore.tiers.disk.opening import STORE, StoreMeta, decode_meta, refuse_other_formats
from tierstore.tiers.disk.records import (
    FACTS_BYTES,
    INLINE,
    decode_facts,
    stored_created_s,
    stored_tokens,
)
from tierstore.tiers.disk.trees import FORMAT_KEY

_BURST = 4096  # entries
_LEAST_BURST = 16
_SERIAL_BYTES = 8
_ATTEMPTS = 3  # at a store in use
_WHOLE = 1 << 62  # entries in a burst, where nobody writes
_IN_USE = "--in-use"
_REFUSED = 3  # exit code of the reading process: its output says why
_HEAD = struct.Struct("<Id")
_HEADS_DTYPE = np.dtype([("serial", ">u8"), ("tokens", "<u4"), ("created_s", "<f8")])


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored under one identity. Times are wall-clock seconds; None where there is no page."""

    identity: Identity
    pages: int
    prompts: int  # pages that nothing comes after
    tokens: int
    bytes: int  # of payload
    inline_pages: int  # of the pages, those that are in the index
    hits: int  # since the pages were saved
    oldest_s: float | None
    newest_s: float | None
    last_used_s: float | None


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory holds. ``lost_pages`` are those that no lookup reaches any more; the next opening
    removes them."""

    directory: str
    store: str
    created_s: float
    in_use: bool
    holdings: list[Holding]  # the one with the most bytes first
    lost_pages: int
    capacity_bytes: int | None  # the cap of its last life; None where that was not written down
    allocated_bytes: int  # everything under the directory
    extent_bytes: int  # of that, the extent files, used or not
    index_bytes: int


def list_store(path: Path) -> Listing:
    """Look at the store in ``path``, whether it is in use or not. Changes nothing.

    Raises :class:`~tierstore.errors.UsageError` when there is no store in ``path``, and
    :class:`~tierstore.errors.StoreUnavailableError` when it cannot be read.
    """
    try:
        directory = StoreDirectory.visit(path)
    except StoreInUseError:
        for _ in range(_ATTEMPTS):
            listing = _read_apart(path, in_use=True)
            if listing is not None:
                return listing
        raise StoreUnavailableError(
            f"the store in {path} is in use, and its index changes too fast to be read: try again"
        ) from None
    try:
        refuse_other_formats(directory)
        if stored_format(directory.index) is None:
            return _listing(path, None, False, [], 0)
        listing = _read_apart(path, in_use=False)
        if listing is None:
            raise unreadable(directory.index, "its trees are broken")
        return listing
    finally:
        directory.release()


def _read_apart(path: Path, *, in_use: bool) -> Listing | None:
    """What another process reads; None when it does not survive that."""
    command = [sys.executable, "-m", __name__, str(path), *([_IN_USE] if in_use else [])]
    reader = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    if reader.returncode == _REFUSED:
        raise StoreUnavailableError(reader.stdout.decode(errors="replace"))
    return msgspec.json.decode(reader.stdout, type=Listing) if reader.returncode == 0 else None


def _read(path: Path, *, in_use: bool) -> Listing:
    with Catalog(path / INDEX, map_bytes=0, read_only=True) as catalog:
        if int(catalog.get_meta(FORMAT_KEY) or b"0") != FORMAT:
            raise StoreUnavailableError(f"the store in {path} is in use by another version of tierstore")
        bursts = _Bursts(catalog, _BURST if in_use else _WHOLE)
        roots = msgspec.json.Decoder(tuple[int, bytes]).decode_lines(bursts.read(b"roots", _root_row))
        facts = decode_facts(bursts.read(b"facts", _facts_row))
        heads = np.frombuffer(bursts.read(b"pages", _head_row), _HEADS_DTYPE)
        stored = catalog.get_meta(STORE)
    holdings, lost = _holdings(facts, heads, dict(roots))
    return _listing(path, decode_meta(stored, path) if stored else None, in_use, holdings, lost)


def _listing(
    path: Path, meta: StoreMeta | None, in_use: bool, holdings: list[Holding], lost_pages: int
) -> Listing:
    return Listing(
        directory=str(path),
        store=meta.identity if meta is not None else "",
        created_s=meta.created_s if meta is not None else 0.0,
        in_use=in_use,
        holdings=holdings,
        lost_pages=lost_pages,
        capacity_bytes=meta.capacity_bytes if meta is not None else None,
        allocated_bytes=_allocated_bytes(path),
        extent_bytes=_allocated_bytes(path / "extents"),
        index_bytes=_allocated_bytes(path / INDEX),
    )


def _allocated_bytes(path: Path) -> int:
    """What a file, or everything in a directory, takes on disk. Files may come and go meanwhile."""
    total = 0
    for each in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):
            total += each.lstat().st_blocks * 512
    return total


class _Bursts:
    """Reads trees that may change meanwhile, so many entries at a time."""

    def __init__(self, catalog: Catalog, entries: int) -> None:
        self._catalog = catalog
        self._entries = entries

    def read(self, tree: bytes, take: Callable[[bytes, memoryview], bytes]) -> bytearray:
        """What ``take`` makes of every entry, side by side. Raises :class:`OSError`."""
        taken = bytearray()
        start: bytes | None = b""
        while start is not None:
            before = self._catalog.last_transaction
            rows, after = self._burst(tree, take, start)
            if self._catalog.last_transaction <= before + 1:
                taken += rows
                start = after
            else:
                self._entries = max(self._entries // 4, _LEAST_BURST)
        return taken

    def _burst(
        self, tree: bytes, take: Callable[[bytes, memoryview], bytes], start: bytes
    ) -> tuple[bytearray, bytes | None]:
        rows = bytearray()
        count = 0
        with closing(self._catalog.entries(tree, start)) as entries:
            for key, value in entries:
                rows += take(key, value)
                count += 1
                if count == self._entries:
                    return rows, key + b"\0"
        return rows, None


def _facts_row(key: bytes, value: memoryview) -> bytes:
    return b"".join((key, value)) if len(key) == _SERIAL_BYTES and len(value) == FACTS_BYTES else b""


def _head_row(key: bytes, value: memoryview) -> bytes:
    if len(key) != _SERIAL_BYTES:
        return b""
    return key + _HEAD.pack(stored_tokens(value) // TOKEN_BYTES, stored_created_s(value))


def _root_row(key: bytes, value: memoryview) -> bytes:
    return msgspec.json.encode((int.from_bytes(key, "big"), bytes(value))) + b"\n"


def _holdings(
    facts: npt.NDArray[np.void], heads: npt.NDArray[np.void], roots: dict[int, bytes]
) -> tuple[list[Holding], int]:
    """What there is of each identity, and how many pages are of none."""
    if not len(facts):
        return [], 0
    at = np.searchsorted(heads["serial"], facts["serial"])
    at[at == len(heads)] = 0
    if not len(heads) or bool((heads["serial"][at] != facts["serial"]).any()):
        there = np.isin(facts["serial"], heads["serial"])
        holdings, lost = _holdings(facts[there], heads, roots)
        return holdings, lost + int((~there).sum())
    parents = parent_rows(facts)
    parents[facts["parent"] >= facts["serial"]] = -1
    root = facts["parent"][_tops(parents)].astype(np.int64)
    identities = {serial: identity for serial, value in roots.items() if (identity := _identity(value))}
    known = np.isin(root, np.fromiter(identities, np.int64, len(identities)))
    leaf = np.bincount(parents[parents >= 0], minlength=len(facts)) == 0
    order = np.flatnonzero(known)[np.argsort(root[known], kind="stable")]
    serials, starts = np.unique(root[order], return_index=True)
    columns = {
        "pages": (np.add, np.ones(len(facts), np.int64)),
        "prompts": (np.add, leaf.astype(np.int64)),
        "tokens": (np.add, heads["tokens"][at].astype(np.int64)),
        "bytes": (np.add, facts["nbytes"].astype(np.int64)),
        "inline_pages": (np.add, (facts["place"] == INLINE).astype(np.int64)),
        "hits": (np.add, facts["hits"].astype(np.int64)),
        "oldest_s": (np.minimum, heads["created_s"][at]),
        "newest_s": (np.maximum, heads["created_s"][at]),
        "last_used_s": (np.maximum, facts["used_s"]),
    }
    totals = {
        name: reduce.reduceat(column[order], starts).tolist() if len(order) else []
        for name, (reduce, column) in columns.items()
    }
    holdings = [
        Holding(identity=identities[serial], **{name: totals[name][row] for name in totals})
        for row, serial in enumerate(serials.tolist())
    ]
    return sorted(holdings, key=lambda each: -each.bytes), int((~known).sum())


def _tops(parents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each row the first of its chain, by doubling."""
    above = np.where(parents >= 0, parents, np.arange(len(parents)))
    while bool(((further := above[above]) != above).any()):
        above = further
    return above


def _identity(value: bytes) -> Identity | None:
    try:
        return msgspec.json.decode(value, type=Identity)
    except msgspec.MsgspecError:
        return None


def _main(path: Path, *, in_use: bool) -> int:
    """The part of the other process."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(_read(path, in_use=in_use)))
    except StoreUnavailableError as error:
        sys.stdout.write(str(error))
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), in_use=_IN_USE in sys.argv[2:]))
