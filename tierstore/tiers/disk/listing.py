"""List the contents of a store directory by identity: pages, tokens, bytes, prompts, ages, hits.

The listing takes one pass over the facts (56 bytes a page) and one pass over the records (about 0.5 KiB a
page read from disk). Token counts follow from the records' lengths. No payload is read. A million pages take
a few seconds. A directory in use cannot be listed, because its index changes during the listing."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tierstore.errors import StoreUnavailableError
from tierstore.keys import Identity
from tierstore.tiers.disk.directory import INDEX, StoreDirectory, StoreInUseError
from tierstore.tiers.disk.index_db import IndexDB
from tierstore.tiers.disk.index_file import check_index, stored_format
from tierstore.tiers.disk.opening import STORE, StoreMeta, decode_meta, refuse_other_formats
from tierstore.tiers.disk.page_table import parent_rows
from tierstore.tiers.disk.records import INLINE, SERIAL_BYTES, stored_created_s, stored_tokens, token_count
from tierstore.tiers.disk.roots import identity_of, model_name_of

_HEAD = struct.Struct("<Id")
_HEADS_DTYPE = np.dtype([("serial", ">u8"), ("tokens", "<u4"), ("created_s", "<f8")])


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """The pages of one identity. Times are wall-clock seconds; None if there is no page."""

    identity: Identity
    name: str  # the model's name for display; empty if the engine gave none
    pages: int
    prompts: int  # pages without children
    tokens: int
    bytes: int  # of payload
    inline_pages: int  # pages whose payload is in the index
    hits: int  # sum over the pages, since each was saved
    oldest_s: float | None
    newest_s: float | None
    last_used_s: float | None


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a directory. ``lost_pages`` is the number of pages that no lookup can reach. The next
    opening removes these pages."""

    directory: str
    store: str
    created_s: float
    holdings: list[Holding]  # in descending order of bytes
    lost_pages: int
    capacity_bytes: int | None  # the capacity at the last opening; None if it was not stored
    allocated_bytes: int  # disk space of the directory with everything in it
    extent_bytes: int  # disk space of the extent files, used or not
    index_bytes: int


def list_store(path: Path) -> Listing:
    """List the store in ``path``, which no process may own. Changes nothing.

    Raise :class:`~tierstore.errors.UsageError` if there is no store in ``path``, and
    :class:`~tierstore.errors.StoreUnavailableError` if it is in use or cannot be read.
    """
    try:
        directory = StoreDirectory.visit(path)
    except StoreInUseError as error:
        raise StoreUnavailableError(
            f"{path} is in use by process {error.owner}: "
            "ask it with `tierstore stats`, if it is a daemon, or stop it"
        ) from None
    try:
        refuse_other_formats(directory)
        if stored_format(directory.index) is None:
            return _listing(path, None, [], 0)
        check_index(directory.index)
        with IndexDB(directory.index, map_bytes=0, read_only=True) as index_db:
            facts, roots, stored = index_db.facts(), index_db.roots(), index_db.get_meta(STORE)
            meta = decode_meta(stored, path) if stored else None
            sealed = meta is not None and bool(meta.keyring)
            rows = b"".join(
                key + _HEAD.pack(token_count(stored_tokens(value), sealed=sealed), stored_created_s(value))
                for key, value in index_db.entries(b"pages")
                if len(key) == SERIAL_BYTES
            )
        holdings, lost = _holdings(facts, np.frombuffer(rows, _HEADS_DTYPE), roots)
        return _listing(path, meta, holdings, lost)
    except OSError as error:
        raise StoreUnavailableError(f"cannot read the store in {path}: {error.strerror or error}") from error
    finally:
        directory.release()


def _listing(path: Path, meta: StoreMeta | None, holdings: list[Holding], lost_pages: int) -> Listing:
    return Listing(
        directory=str(path),
        store=meta.identity if meta is not None else "",
        created_s=meta.created_s if meta is not None else 0.0,
        holdings=holdings,
        lost_pages=lost_pages,
        capacity_bytes=meta.capacity_bytes if meta is not None else None,
        allocated_bytes=_allocated_bytes(path),
        extent_bytes=_allocated_bytes(path / "extents"),
        index_bytes=_allocated_bytes(path / INDEX),
    )


def _allocated_bytes(path: Path) -> int:
    """Return the disk space of a file, or of a directory and everything in it. Files may be created and
    removed meanwhile."""
    total = 0
    for each in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):
            total += each.lstat().st_blocks * 512
    return total


def _holdings(
    facts: npt.NDArray[np.void], heads: npt.NDArray[np.void], roots: dict[int, bytes]
) -> tuple[list[Holding], int]:
    """Return the pages of each identity, and the number of pages whose identity is unknown."""
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
    identities = {serial: identity for serial, value in roots.items() if (identity := identity_of(value))}
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
        Holding(
            identity=identities[serial],
            name=model_name_of(roots[serial]),
            **{name: totals[name][row] for name in totals},
        )
        for row, serial in enumerate(serials.tolist())
    ]
    return sorted(holdings, key=lambda each: -each.bytes), int((~known).sum())


def _tops(parents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the row of each row's first ancestor, by pointer doubling."""
    above = np.where(parents >= 0, parents, np.arange(len(parents)))
    while bool(((further := above[above]) != above).any()):
        above = further
    return above
