"""Read an index, and find out which of its pages are good.

One pass over each tree copies it into arrays (about 250 bytes a page). Then the trees are compared. Records
are trusted, because they have checksums. Facts, links and pieces must agree with the records; otherwise the
page is damaged.

The number of slots in a slab depends on the capacity at the last opening, which the check does not use. With
any capacity, a slab begins at a unit border, its slots are adjacent, and no two pages overlap. The check
requires only this of a page's place. If the next opening cannot use such a place, it removes the page.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from tierstore.keys import Identity
from tierstore.memory import ALIGNMENT
from tierstore.tiers.disk.fsck.findings import Category, Finding, Findings, PageName
from tierstore.tiers.disk.index_db import MOST_COUNT, IndexDB, Misfiled, by_serial
from tierstore.tiers.disk.index_file import DamagedIndexError
from tierstore.tiers.disk.page_table import parent_rows, reachable
from tierstore.tiers.disk.records import (
    FACTS_BYTES,
    INLINE,
    NEXT_SERIAL,
    PIECE_BYTES,
    SERIAL_BYTES,
    TICK,
    TREES,
    PageRecord,
    PageUse,
    decode,
    decode_facts,
    described,
    encode_facts,
    link_of,
    stored_tokens,
    token_count,
)
from tierstore.tiers.disk.roots import identity_of

_ROW = struct.Struct("<qqqqqqBQiId48s")
ROW_DTYPE = np.dtype(
    [
        ("serial", "<i8"),
        ("parent", "<i8"),
        ("place", "<i8"),
        ("nbytes", "<i8"),  # the record's ``room``
        ("payload_bytes", "<i8"),
        ("page_bytes", "<i8"),
        ("codec", "u1"),
        ("checksum", "<u8"),
        ("identity", "<i4"),  # index into Inventory.digests
        ("tokens", "<u4"),  # number of tokens
        ("created_s", "<f8"),
        ("link", "V48"),
    ]
)
LINK_DTYPE = np.dtype([("parent", ">u8"), ("names", "V32"), ("serial", ">u8")])
PIECE_DTYPE = np.dtype([("serial", ">u8"), ("piece", ">u4")])
_REFILINGS = 4  # passes: one pass may not find all keys, because a damaged key can hide other damaged keys


@dataclass(frozen=True, slots=True)
class Records:
    """The contents of the tree of records. :class:`Inventory` describes the fields."""

    rows: npt.NDArray[np.void]
    digests: list[bytes]
    damaged: dict[int, int]
    odd: list[tuple[bytes, bytes]]
    misfiled: Misfiled


@dataclass(slots=True)
class Inventory:
    """The contents of each tree. ``rows`` and ``facts`` are in order of serials, each serial once."""

    rows: npt.NDArray[np.void]  # all records that can be decoded (ROW_DTYPE)
    digests: list[bytes]  # the identities in the records
    damaged: dict[int, int]  # records that cannot be decoded: serial → number of tokens, from the length
    facts: npt.NDArray[np.void]  # FACTS_DTYPE
    links: npt.NDArray[np.void]  # LINK_DTYPE
    pieces: npt.NDArray[np.void]  # PIECE_DTYPE
    roots: dict[int, Identity]  # roots that can be decoded, by serial
    bad_roots: list[int]  # serials of all other roots
    next_serial: int
    tick: int
    odd: list[tuple[bytes, bytes]] = field(default_factory=list)  # (tree, key) of entries with a wrong format
    misfiled: dict[bytes, Misfiled] = field(default_factory=dict)  # damaged keys by tree

    @property
    def pages(self) -> int:
        return len(self.rows) + len(self.damaged)


@dataclass(frozen=True, slots=True)
class _Trees:
    """The trees, without entries that are out of order and do not match their page's record."""

    index_db: IndexDB
    misfiled: dict[bytes, Misfiled]

    def entries(self, tree: bytes) -> Iterator[tuple[bytes, memoryview]]:
        suspects = self.misfiled[tree].suspects
        is_whole = whole_entries(self.index_db, tree) if suspects else None
        for key, value in self.index_db.entries(tree):
            if is_whole is None or key not in suspects or is_whole(key, bytes(value)):
                yield key, value


def refile(index_db: IndexDB, findings: Findings) -> None:
    """Put every tree with damaged keys in order, and report it. Raise :class:`OSError` if the disk fails, and
    :class:`DamagedIndexError` for a tree that cannot be put in order."""
    # The tree of records comes first, because entries of other trees are compared with records.
    for tree in (b"pages", *(each for each in TREES if each != b"pages")):
        misfiled = index_db.misfiled(tree)
        if misfiled:
            findings.add(_misfiled(tree, misfiled))
        for _ in range(_REFILINGS):
            if not misfiled:
                break
            index_db.refile(tree, misfiled, whole_entries(index_db, tree))
            misfiled = index_db.misfiled(tree)
        if misfiled:
            raise DamagedIndexError(index_db.path, f"its tree {tree.decode()!r} is out of order")


def whole_entries(index_db: IndexDB, tree: bytes) -> Callable[[bytes, bytes], bool]:
    """Return a function that says whether an entry (key, value) of a tree matches its page's record. For the
    trees ``payload`` and ``meta`` it always returns False, because records do not describe their entries."""

    def is_record(key: bytes, value: bytes) -> bool:
        return described(key, value) is not None

    def is_of_record(key: bytes, value: bytes) -> bool:
        serial = int.from_bytes(key[-SERIAL_BYTES:], "big")
        record = next(index_db.records([serial]), None)
        if record is None:
            return False
        if tree == b"children":
            return key == link_of(record)
        return len(key) == SERIAL_BYTES and value[:24] == encode_facts(record, PageUse(0, 0.0, 0))[:24]

    def is_root(key: bytes, value: bytes) -> bool:
        identity = identity_of(value)
        serial = int.from_bytes(key, "big")
        return identity is not None and any(
            record is not None and record.parent == serial and record.identity == identity.digest
            for _, record in index_db.scan()
        )

    kinds = {b"pages": is_record, b"facts": is_of_record, b"children": is_of_record, b"roots": is_root}
    return kinds.get(tree, lambda key, value: False)


def _misfiled(tree: bytes, misfiled: Misfiled) -> Finding:
    count = len(misfiled.suspects | misfiled.astray)
    why = f"{count} entries of the index's tree {tree.decode()!r} are not where lookups find them"
    return Finding(Category.DAMAGED, "tree", why, name=tree.decode())


def take_inventory(index_db: IndexDB, records: Records) -> Inventory:
    """Read the trees other than the tree of records, without the contents of inline payloads. Raise
    :class:`OSError` if the disk fails."""
    odd = list(records.odd)
    misfiled = {b"pages": records.misfiled}
    for tree in TREES:
        if tree not in misfiled:
            misfiled[tree] = index_db.misfiled(tree)
    trees = _Trees(index_db, misfiled)
    roots, bad_roots = _roots(trees, odd)
    return Inventory(
        rows=records.rows,
        digests=records.digests,
        damaged=records.damaged,
        facts=by_serial(decode_facts(_packed(trees, b"facts", odd, SERIAL_BYTES, FACTS_BYTES))),
        links=np.frombuffer(_packed(trees, b"children", odd, LINK_DTYPE.itemsize, 0), LINK_DTYPE),
        pieces=_pieces(trees, odd),
        roots=roots,
        bad_roots=bad_roots,
        next_serial=index_db.next_serial,
        tick=index_db.tick,
        odd=odd,
        misfiled={tree: keys for tree, keys in misfiled.items() if keys},
    )


def read_records(index_db: IndexDB, *, sealed: bool) -> Records:
    """Read the tree of records. ``sealed`` says whether the directory is encrypted. Raise :class:`OSError` if
    the disk fails."""
    misfiled = index_db.misfiled(b"pages")
    odd: list[tuple[bytes, bytes]] = []
    packed = bytearray()
    numbers: dict[bytes, int] = {}
    damaged: dict[int, int] = {}
    for key, value in _Trees(index_db, {b"pages": misfiled}).entries(b"pages"):
        if len(key) != SERIAL_BYTES:
            odd.append((b"pages", key))
            continue
        serial = int.from_bytes(key, "big")
        data = bytes(value)
        record = decode(serial, data)
        if record is None or not _is_possible(record):
            damaged[serial] = token_count(stored_tokens(data), sealed=sealed)
            continue
        packed += _ROW.pack(
            serial,
            record.parent,
            record.place,
            record.room,
            record.payload_bytes,
            record.nbytes,
            record.codec,
            record.checksum,
            numbers.setdefault(record.identity, len(numbers)),
            token_count(len(record.tokens), sealed=sealed),
            record.created_s,
            link_of(record),
        )
    return Records(by_serial(np.frombuffer(packed, ROW_DTYPE)), list(numbers), damaged, odd, misfiled)


def _is_possible(record: PageRecord) -> bool:
    return (
        record.serial < MOST_COUNT
        and record.parent < MOST_COUNT
        and 0 < record.nbytes < MOST_COUNT
        and 0 < record.payload_bytes <= record.nbytes
        and not (record.codec and record.place == INLINE)
        and INLINE <= record.place < MOST_COUNT
    )


def _packed(trees: _Trees, tree: bytes, odd: list[tuple[bytes, bytes]], key: int, value: int) -> bytearray:
    """Return the entries of a tree, one after the other, that have keys and values of these sizes. Add all
    other entries to ``odd``."""
    packed = bytearray()
    for stored, data in trees.entries(tree):
        if len(stored) == key and len(data) == value:
            packed += stored
            packed += data
        else:
            odd.append((tree, stored))
    return packed


def _pieces(trees: _Trees, odd: list[tuple[bytes, bytes]]) -> npt.NDArray[np.void]:
    packed = bytearray()
    for key, _ in trees.entries(b"payload"):
        if len(key) == PIECE_DTYPE.itemsize:
            packed += key
        else:
            odd.append((b"payload", key))
    return np.frombuffer(packed, PIECE_DTYPE)


def _roots(trees: _Trees, odd: list[tuple[bytes, bytes]]) -> tuple[dict[int, Identity], list[int]]:
    """Return the identities by serial, and the serials of roots that cannot be decoded or are duplicates."""
    roots: dict[int, Identity] = {}
    bad: list[int] = []
    last: dict[bytes, int] = {}
    for key, value in trees.entries(b"roots"):
        serial = int.from_bytes(key, "big")
        if len(key) != SERIAL_BYTES:
            odd.append((b"roots", key))
            continue
        try:
            roots[serial] = msgspec.json.decode(bytes(value), type=Identity)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            bad.append(serial)
            continue
        before = last.get(roots[serial].digest)
        if before is not None:  # lookups use the later one of two roots of an identity
            del roots[before]
            bad.append(before)
        last[roots[serial].digest] = serial
    return roots, bad


# -- comparison of the trees -------------------------------------------------------------------------

_MOST_NAMED = 8  # bytes of a key that a finding shows


class Examination:
    """The comparison of the trees of an inventory. ``good`` says for each row whether its page may stay."""

    def __init__(self, inventory: Inventory, findings: Findings) -> None:
        self.inventory = inventory
        self.findings = findings
        self.good = np.ones(len(inventory.rows), np.bool_)
        self.stray: list[tuple[bytes, bytes]] = []  # (tree, key) of entries to remove
        rows = inventory.rows
        self._parents = parent_rows(rows)
        # A parent has a lower serial than its children. A row that violates this has no parent here, so that
        # following parents always ends.
        self._parents[rows["parent"] >= rows["serial"]] = -1
        self._identities = {identity.digest: identity for identity in inventory.roots.values()}

    def compare(self) -> None:
        """Compare the trees, report defects, and mark damaged pages as bad."""
        self._odd_entries()
        self._roots_and_counters()
        for serial in self.inventory.damaged:
            self._add(
                Category.DAMAGED, "record", "its record in the index does not match its checksum", serial
            )
        self._compare_facts()
        self._compare_links()
        self._find_stray_pieces()

    def condemn(self, rows: npt.NDArray[np.intp], category: Category, what: str, why: str) -> None:
        """Mark the pages of these rows as bad, and report each."""
        self.good[rows] = False
        for serial in self.inventory.rows["serial"][rows].tolist():
            self._add(category, what, why, serial)

    def drop_unreachable(self) -> None:
        """Mark pages as bad if one of their ancestors is bad or missing."""
        rows = self.inventory.rows
        roots = self.inventory.roots
        at_root = np.isin(rows["parent"], np.fromiter(roots, np.int64, len(roots)))
        expected = np.full(len(rows), -1, np.int64)  # the number of the parent's identity in ``digests``
        numbers = {digest: number for number, digest in enumerate(self.inventory.digests)}
        held = self._parents >= 0
        expected[held] = rows["identity"][self._parents[held]]
        for row in np.flatnonzero(at_root & ~held).tolist():
            expected[row] = numbers.get(roots[int(rows["parent"][row])].digest, -1)
        connected = (held | at_root) & (expected == rows["identity"])
        kept = reachable(self._parents, self.good & connected)
        self.condemn(
            np.flatnonzero(self.good & ~kept),
            Category.ORPHANED,
            "page",
            "an earlier page of its prompt is gone, so no lookup reaches it",
        )

    def mend(self, index_db: IndexDB) -> None:
        """Remove bad pages and stray entries from the index. Raise :class:`OSError` if the disk fails."""
        index_db.forget(self.lost())
        index_db.mend(
            [
                *((tree, key, None) for tree, key in self.stray),
                (b"meta", NEXT_SERIAL, self.inventory.next_serial.to_bytes(8, "big")),
                (b"meta", TICK, self.inventory.tick.to_bytes(8, "big")),
            ]
        )

    def lost(self) -> list[int]:
        """Return the serials of the bad pages, damaged records first."""
        serials: list[int] = self.inventory.rows["serial"][~self.good].tolist()
        return [*self.inventory.damaged, *serials]

    # -- comparison in detail ------------------------------------------------------------------------

    def _odd_entries(self) -> None:
        for tree, key in self.inventory.odd:
            name = f"{tree.decode()}: {key[:_MOST_NAMED].hex()}…"
            self._stray(tree, key, "entry", "an entry of the index that no version of tierstore writes", name)
        for tree, misfiled in self.inventory.misfiled.items():
            self.findings.add(_misfiled(tree, misfiled))

    def _roots_and_counters(self) -> None:
        inventory = self.inventory
        for serial in inventory.bad_roots:
            self.stray.append((b"roots", serial.to_bytes(8, "big")))
            why = "an identity that cannot be read, or is stored twice: its pages cannot be found"
            self._add(Category.DAMAGED, "identity", why, name=f"root {serial}")
        highest = max(int(inventory.rows["serial"].max(initial=0)), *inventory.roots, 0)
        if not highest < inventory.next_serial < MOST_COUNT:
            why = f"the next serial is {inventory.next_serial}, but {highest} is taken"
            self._add(Category.DAMAGED, "counter", why, name="next_serial")
            inventory.next_serial = highest + 1
        if inventory.tick >= MOST_COUNT:
            self._add(Category.DAMAGED, "counter", f"the clock has the value {inventory.tick}", name="tick")
            ticks = inventory.facts["tick"]
            inventory.tick = int(ticks[ticks < MOST_COUNT].max(initial=0))

    def _compare_facts(self) -> None:
        rows, facts = self.inventory.rows, self.inventory.facts
        at = _find(facts["serial"], rows["serial"].astype(np.uint64))
        missing = at < 0
        wrong = np.zeros(len(rows), np.bool_)
        if len(facts):
            held = facts[np.where(missing, 0, at)]
            for name in ("parent", "place", "nbytes"):
                wrong |= held[name].astype(np.int64) != rows[name]
            wrong |= ~np.isfinite(held["used_s"])
            wrong |= (held["tick"] >= MOST_COUNT) | (held["hits"] >= MOST_COUNT)
        self.condemn(np.flatnonzero(missing), Category.DAMAGED, "facts", "its facts are not in the index")
        why = "its facts in the index contradict its record"
        self.condemn(np.flatnonzero(wrong & ~missing), Category.DAMAGED, "facts", why)
        known = _find(rows["serial"].astype(np.uint64), facts["serial"]) >= 0
        for serial in facts["serial"][~known].tolist():
            if serial not in self.inventory.damaged:
                key = serial.to_bytes(8, "big")
                self._stray(b"facts", key, "facts", "facts of a page that does not exist", f"serial {serial}")

    def _compare_links(self) -> None:
        rows, links = self.inventory.rows, self.inventory.links
        at = _find(rows["serial"].astype(np.uint64), links["serial"])
        right = at >= 0
        if len(rows):
            right &= (_words(links) == _words(rows["link"][np.where(at < 0, 0, at)])).all(axis=1)
        linked = np.zeros(len(rows), np.bool_)
        linked[at[right]] = True
        why = "no lookup finds it: its link in the index is gone"
        self.condemn(np.flatnonzero(~linked), Category.DAMAGED, "link", why)
        unlinked = set(rows["serial"][~linked].tolist())
        for number in np.flatnonzero(~right).tolist():
            serial = int(links["serial"][number])
            key = links[number].tobytes()
            if serial in unlinked or serial in self.inventory.damaged:
                self.stray.append((b"children", key))  # part of a page's damage that is already reported
            else:
                why = "a link to no page, or to a page other than the one it names"
                self._stray(b"children", key, "link", why, f"to {serial}")

    def _find_stray_pieces(self) -> None:
        rows, pieces = self.inventory.rows, self.inventory.pieces
        inline = rows[rows["place"] == INLINE]
        at = _find(inline["serial"].astype(np.uint64), pieces["serial"])
        expected = -(-inline["nbytes"] // PIECE_BYTES)
        stray = at < 0
        if len(inline):
            stray |= pieces["piece"] >= expected[np.where(at < 0, 0, at)]
        by_serial: dict[int, list[bytes]] = {}
        for number in np.flatnonzero(stray).tolist():
            by_serial.setdefault(int(pieces["serial"][number]), []).append(pieces[number].tobytes())
        for serial, keys in by_serial.items():
            if serial in self.inventory.damaged:
                continue
            self.stray += [(b"payload", key) for key in keys]
            why = f"{len(keys)} pieces of a payload that belong to no page"
            self._add(Category.UNACCOUNTED, "pieces", why, name=f"serial {serial}")

    # -- names ---------------------------------------------------------------------------------------------

    def names(self) -> dict[int, PageName]:
        """Return the descriptions of the pages in the kept findings."""
        wanted = {finding.serial for finding in self.findings.kept if finding.serial is not None}
        if not wanted:
            return {}
        return {name.serial: name for name in self._names(wanted)}

    def _names(self, wanted: set[int]) -> Iterator[PageName]:
        rows = self.inventory.rows
        starts = self._starts()
        serials = rows["serial"].astype(np.uint64)
        for serial in sorted(wanted):
            row = int(_find(serials, np.array([serial], np.uint64))[0])
            if row >= 0:
                identity = self._identity(row)
                yield _name(serial, identity, int(starts[row]), int(rows["tokens"][row]))
                continue
            # The page's record is damaged, but the separate table of facts may still name the page's parent.
            tokens = self.inventory.damaged.get(serial, 0)
            facts = int(_find(self.inventory.facts["serial"], np.array([serial], np.uint64))[0])
            above = self.inventory.facts["parent"][facts : facts + 1].astype(np.uint64)
            parent = int(_find(serials, above)[0]) if facts >= 0 else -1
            if parent >= 0:
                start = int(starts[parent]) + int(rows["tokens"][parent]) if starts[parent] >= 0 else -1
                yield _name(serial, self._identity(parent), start, tokens)
            else:
                root = self.inventory.roots.get(int(above[0])) if facts >= 0 else None
                yield _name(serial, root, 0 if root is not None else -1, tokens)

    def _identity(self, row: int) -> Identity | None:
        return self._identities.get(self.inventory.digests[int(self.inventory.rows["identity"][row])])

    def _starts(self) -> npt.NDArray[np.int64]:
        """Return the position in the prompt at which each row's page begins; -1 if an ancestor is missing."""
        rows = self.inventory.rows
        rooted = np.isin(
            rows["parent"], np.array([*self.inventory.roots, *self.inventory.bad_roots], np.int64)
        )
        whole = reachable(self._parents, rooted | (self._parents >= 0))
        jump = self._parents.copy()
        start = np.where(jump >= 0, rows["tokens"][jump], 0).astype(np.int64) if len(rows) else jump
        while (jumping := np.flatnonzero(jump >= 0)).size:
            start[jumping] += start[jump[jumping]]
            jump[jumping] = jump[jump[jumping]]
        start[~whole] = -1
        return start

    def _add(
        self, category: Category, what: str, why: str, serial: int | None = None, *, name: str = ""
    ) -> None:
        self.findings.add(Finding(category, what, why, serial, name))

    def _stray(self, tree: bytes, key: bytes, what: str, why: str, name: str) -> None:
        self.stray.append((tree, key))
        self._add(Category.UNACCOUNTED, what, why, name=name)


def _find(haystack: npt.NDArray[np.uint64], needles: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """Return the position of each needle in a sorted array, or -1."""
    if not len(haystack):
        return np.full(len(needles), -1, np.intp)
    haystack = haystack.astype(np.uint64)
    needles = needles.astype(np.uint64)
    at = np.searchsorted(haystack, needles)
    at[at == len(haystack)] = 0
    at[haystack[at] != needles] = -1
    return at


def _words(links: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(links).view(np.uint64).reshape(len(links), -1)


def _name(serial: int, identity: Identity | None, start: int, tokens: int) -> PageName:
    model = identity.model if identity is not None else "an identity that is not in the index"
    tenant = identity.tenant if identity is not None else ""
    known = start >= 0
    return PageName(serial, model, tenant, start if known else None, start + tokens if known else None)


# -- places --------------------------------------------------------------------------------------------

_MOST_SLOTS_TRIED = 64  # as in slabs.py; a slab may have more slots, if they fit into its last unit


def impossible(rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return which rows have a place that is not aligned to a block, so that nothing can be read there."""
    result: npt.NDArray[np.bool_] = (rows["place"] != INLINE) & (rows["place"] % ALIGNMENT != 0)
    return result


def misplaced(rows: npt.NDArray[np.void], unit_bytes: int) -> npt.NDArray[np.bool_]:
    """Return which rows (in order of serials) have places that are not slots of their size, or that overlap
    the place of a row with a lower serial. An opening decides in the same way."""
    outside = np.flatnonzero(rows["place"] != INLINE)
    places = rows["place"][outside]
    sizes = -(-rows["nbytes"][outside] // ALIGNMENT) * ALIGNMENT
    wrong = np.zeros(len(outside), np.bool_)
    for size in np.unique(sizes).tolist():
        members = np.flatnonzero(sizes == size)
        wrong[members] = ~_can_be_slots(places[members], size, unit_bytes)
    right = np.flatnonzero(~wrong)
    wrong[right] = _overlapping(places[right], sizes[right])
    result = np.zeros(len(rows), np.bool_)
    result[outside] = wrong
    return result


def _can_be_slots(places: npt.NDArray[np.int64], size: int, unit_bytes: int) -> npt.NDArray[np.bool_]:
    most = _MOST_SLOTS_TRIED + unit_bytes // size
    beyond = np.unique(np.arange(most + 1, dtype=np.int64) * size % unit_bytes)
    result: npt.NDArray[np.bool_] = np.isin(places % unit_bytes, beyond)
    return result


def _overlapping(places: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return which rows share bytes with a row before them (in the given order) that is not itself
    returned."""
    result = np.zeros(len(places), np.bool_)
    order = np.argsort(places, kind="stable")
    ends = np.maximum.accumulate((places + sizes)[order])
    shared = np.flatnonzero(places[order][1:] < ends[:-1]) + 1
    # Rows that share bytes with the next row, in order of places, form a group.
    groups: list[list[int]] = []
    for at in shared.tolist():
        if not groups or groups[-1][-1] != at - 1:
            groups.append([at - 1])
        groups[-1].append(at)
    for group in groups:
        taken: list[tuple[int, int]] = []
        for row in sorted(order[group].tolist()):
            start, stop = int(places[row]), int(places[row] + sizes[row])
            if any(start < other_stop and other_start < stop for other_start, other_stop in taken):
                result[row] = True
            else:
                taken.append((start, stop))
    return result
