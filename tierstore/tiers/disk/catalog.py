"""The index of a store directory: LMDB, and the only module that knows it.

Six named trees. Pages are keyed by their serials, big-endian, so that those of one prompt lie side by side::

    meta      format, store identity, geometry, next serial, logical clock
    roots     serial → identity, as JSON                (one for each identity that ever had a page)
    pages     serial → record                           (never changes while the page exists)
    facts     serial → parent, place, size, use         (all that is read at open: 56 bytes a page)
    children  parent, four tokens, key, serial → b""    (how a lookup finds its way)
    payload   serial, piece → 4080 bytes                (pages whose place is INLINE)

A page's parent is a page or a root: both have serials from one count. A payload lies in pieces that fill one
LMDB page each. So the space never needs a run of free pages, and churn of mixed sizes cannot fragment it.

A write transaction belongs to the thread that began it; :meth:`Catalog.apply` begins and ends one (its caller
sees to it that there is one at a time). Readers are never blocked.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from tierstore.errors import StoreUnavailableError
from tierstore.memory import ALIGNMENT
from tierstore.tiers.disk.change import FREE_PER_PAGE, REMOVED_AT_ONCE, Change, Writing, small_steps
from tierstore.tiers.disk.records import (
    FACTS_BYTES,
    PageRecord,
    decode,
    decode_facts,
    encode,
    stored_place,
    with_place,
)
from tierstore.tiers.disk.trees import (
    BEGINNING,
    FORMAT_KEY,
    NEXT_SERIAL,
    PIECE_BYTES,
    TICK,
    TREES,
    child_prefix,
    page_key,
    payload_key,
)

FORMAT = 2
MOVING_FORMAT = 1000 + FORMAT  # of one whose pages are on their way to a smaller one (rebuild.py)
_SIMILAR_TRIED = 16
_FIXED_PAGES = 8  # two meta pages, the directory of trees, the roots of the free list


@dataclass(frozen=True, slots=True)
class IndexUsage:
    """What a transaction left behind."""

    used_bytes: int  # everything alive
    tree_bytes: int  # of that, what later transactions rewrite; the rest is payload


class Catalog:
    """An open index. Raises :class:`OSError` for whatever goes wrong while it is in use."""

    def __init__(self, path: Path, *, map_bytes: int, read_only: bool = False) -> None:
        """Open or make the index; its file will never be larger than ``map_bytes`` unless it already is.

        ``read_only`` changes no file, not even LMDB's lock: it is for whoever holds the directory, and for
        those who look at :attr:`last_transaction` before they believe what they have read. ``map_bytes`` 0
        takes the size that the index was last opened with.

        Raises :class:`StoreUnavailableError` when there is one that cannot be read.
        """
        self.path = path
        try:
            self._env = lmdb.open(
                str(path),
                subdir=False,
                map_size=map_bytes,
                max_dbs=len(TREES),
                mode=0o600,
                readahead=True,
                readonly=read_only,
                lock=not read_only,
                create=not read_only,
            )
            trees = [self._env.open_db(name, create=not read_only) for name in TREES]
        except lmdb.Error as error:
            raise unreadable(path, str(error)) from error
        self._meta, self._roots, self._pages, self._facts, self._children, self._payload = self._trees = trees
        self.map_bytes = map_bytes or int(self._env.info()["map_size"])

    def close(self) -> None:
        self._env.close()

    def __enter__(self) -> Catalog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the store's own facts -----------------------------------------------------------------------

    def get_meta(self, name: bytes) -> bytes | None:
        with _os_errors(), self._env.begin(db=self._meta) as txn:
            value: bytes | None = txn.get(name)
            return value

    def put_meta(self, values: Mapping[bytes, bytes]) -> None:
        """Store facts, and with them the mark of this format, in one transaction."""
        with _os_errors(), self._env.begin(write=True, db=self._meta) as txn:
            txn.put(FORMAT_KEY, str(FORMAT).encode())
            for name, value in values.items():
                txn.put(name, value)

    @property
    def moving(self) -> bool:
        """Whether some of the pages are in another file already, and no longer in this one."""
        return self.get_meta(FORMAT_KEY) == str(MOVING_FORMAT).encode()

    def set_moving(self, *, moving: bool) -> None:
        """Begin to be :attr:`moving`, durably, or end it."""
        with _os_errors(), self._env.begin(write=True, db=self._meta) as txn:
            txn.put(FORMAT_KEY, str(MOVING_FORMAT if moving else FORMAT).encode())

    @property
    def next_serial(self) -> int:
        """The lowest serial that was never used by anything durable."""
        return self._number(NEXT_SERIAL, default=1)

    @property
    def tick(self) -> int:
        """The store's logical clock at the last commit."""
        return self._number(TICK, default=0)

    @property
    def last_transaction(self) -> int:
        """The number of the last transaction that was committed, by whatever process."""
        return int(self._env.info()["last_txnid"])

    def _number(self, name: bytes, *, default: int) -> int:
        value = self.get_meta(name)
        return int.from_bytes(value, "big") if value else default

    @property
    def usage(self) -> IndexUsage:
        """How much of the map is taken now."""
        with _os_errors(), self._env.begin() as txn:
            stats = [txn.stat(db) for db in self._trees]
        tree = sum(stat["branch_pages"] + stat["leaf_pages"] for stat in stats)
        used = tree + sum(stat["overflow_pages"] for stat in stats) + _FIXED_PAGES
        free = max(self._env.info()["last_pgno"] + 1 - used, 0) // FREE_PER_PAGE
        return IndexUsage((used + free) * ALIGNMENT, (tree + free) * ALIGNMENT)

    # -- pages ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        with _os_errors(), self._env.begin() as txn:
            return int(txn.stat(self._pages)["entries"])

    def scan(self) -> Iterator[tuple[int, PageRecord | None]]:
        """Every (serial, record) in order of serials; None for a record that is damaged."""
        with ExitStack() as stack:
            stack.enter_context(_os_errors())
            txn = stack.enter_context(self._env.begin(db=self._pages))
            for key, data in stack.enter_context(txn.cursor()):
                serial = int.from_bytes(key, "big")
                yield serial, decode(serial, data)

    def records(self, serials: Iterable[int]) -> Iterator[PageRecord | None]:
        """The record of each serial; None for one that is not there or damaged."""
        with ExitStack() as stack:
            stack.enter_context(_os_errors())
            txn = stack.enter_context(self._env.begin(db=self._pages))
            for serial in serials:
                data = txn.get(page_key(serial))
                yield decode(serial, data) if data is not None else None

    def facts(self) -> npt.NDArray[np.void]:
        """The facts of every page in order of serials (``FACTS_DTYPE``). One pass over a compact tree: a
        second for a million pages."""
        rows = bytearray()
        with _os_errors(), self._env.begin(db=self._facts) as txn, txn.cursor() as cursor:
            for key, value in cursor:
                if len(value) == FACTS_BYTES:
                    rows += key
                    rows += value
        return decode_facts(rows)

    def roots(self) -> dict[int, bytes]:
        """Serial → identity, for every identity that ever had a page here."""
        with _os_errors(), self._env.begin(db=self._roots) as txn, txn.cursor() as cursor:
            return {int.from_bytes(key, "big"): value for key, value in cursor}

    def entries(self, tree: bytes, start: bytes = b"") -> Generator[tuple[bytes, memoryview], None, None]:
        """Every (key, value) of a tree as they lie there, from ``start`` on. A value is there until the next
        one is asked for."""
        with ExitStack() as stack:
            stack.enter_context(_os_errors())
            txn = stack.enter_context(self._env.begin(db=self._trees[TREES.index(tree)], buffers=True))
            cursor = stack.enter_context(txn.cursor())
            if cursor.set_range(start):
                for key, value in cursor:
                    yield bytes(key), value

    def links(self, start: bytes, count: int) -> tuple[list[bytes], bytes | None]:
        """Up to ``count`` keys of the tree ``children``, from ``start`` on, and where to go on; None at the
        end. What is added behind ``start`` between two calls is found."""
        with _os_errors(), self._env.begin(db=self._children) as txn, txn.cursor() as cursor:
            if not cursor.set_range(start):
                return [], None
            found = list(itertools.islice(cursor.iternext(keys=True, values=False), count))
        return found, found[-1] + b"\0" if len(found) == count else None

    def misfiled(self, tree: bytes) -> int:
        """How many entries of a tree are out of order, or not to be found by their keys."""
        db = self._trees[TREES.index(tree)]
        seen = wrong = 0
        before = b""
        with _os_errors(), self._env.begin(db=db) as txn, txn.cursor() as cursor, txn.cursor() as finder:
            for key in cursor.iternext(keys=True, values=False):
                seen += 1
                wrong += not (key > before and finder.set_key(key))
                before = key
            return wrong + abs(int(txn.stat(db)["entries"]) - seen)

    def find(self, parent: int, identity: bytes, chunks: Iterable[tuple[bytes, bytes]]) -> list[PageRecord]:
        """Follow (key, tokens) after (key, tokens) down from ``parent``, as far as there are pages with
        exactly these tokens under this identity."""
        found: list[PageRecord] = []
        with (
            _os_errors(),
            self._env.begin(db=self._pages) as txn,
            txn.cursor(self._children) as cursor,
        ):
            for key, tokens in chunks:
                prefix = child_prefix(parent, tokens) + key
                more = cursor.set_range(prefix)
                record = None
                while record is None and more and cursor.key().startswith(prefix):
                    record = self._child(txn, cursor.key(), parent, identity)
                    if record is not None and record.tokens != tokens:
                        record = None  # a twin: equal keys, other tokens
                    more = cursor.next()
                if record is None:
                    break
                found.append(record)
                parent = record.serial
        return found

    def find_similar(self, parent: int, identity: bytes, tokens: bytes) -> list[PageRecord]:
        """Some children of ``parent`` that begin with the same four tokens as ``tokens``, or have fewer and
        begin with those."""
        found: list[PageRecord] = []
        beginnings = [tokens, *(tokens[:nbytes] for nbytes in range(BEGINNING - 4, 0, -4))]
        with (
            _os_errors(),
            self._env.begin(db=self._pages) as txn,
            txn.cursor(self._children) as cursor,
        ):
            for prefix in {child_prefix(parent, beginning): None for beginning in beginnings}:
                more = cursor.set_range(prefix)
                while more and len(found) < _SIMILAR_TRIED and cursor.key().startswith(prefix):
                    record = self._child(txn, cursor.key(), parent, identity)
                    if record is not None:
                        found.append(record)
                    more = cursor.next()
        return found

    def _child(self, txn: Any, link: bytes, parent: int, identity: bytes) -> PageRecord | None:
        serial = link[-8:]
        data = txn.get(serial)
        record = decode(int.from_bytes(serial, "big"), data) if data is not None else None
        if record is None or record.parent != parent or record.identity != identity:
            return None
        return record

    def read_payload(self, record: PageRecord, view: memoryview) -> bool:
        """Copy an inline payload into ``view``. False when it is not there, or not in full."""
        with _os_errors(), self._env.begin(buffers=True) as txn, txn.cursor(self._payload) as cursor:
            more = cursor.set_key(payload_key(record.serial, 0))
            for piece, start in enumerate(range(0, record.nbytes, PIECE_BYTES)):
                target = view[start : min(start + PIECE_BYTES, record.nbytes)]
                if not more or bytes(cursor.key()) != payload_key(record.serial, piece):
                    return False
                if len(cursor.value()) != len(target):
                    return False
                target[:] = cursor.value()
                more = cursor.next()
        return True

    def apply(self, change: Change) -> None:
        """Do all of ``change``, durably, or nothing of its additions.

        Raises :class:`OSError`; ENOSPC when the map is full. Removals may then have been done already.
        """
        with _os_errors():
            try:
                self._apply(change)
            except lmdb.MapFullError:
                self._make_room(change)
                self._apply(change)

    def forget(self, serials: Sequence[int]) -> None:
        """Delete pages whatever their records say, durably."""
        with _os_errors():
            for start in range(0, len(serials), REMOVED_AT_ONCE):
                with self._env.begin(write=True) as txn:
                    for serial in serials[start : start + REMOVED_AT_ONCE]:
                        Writing(txn, self._trees).delete(serial)

    def relocate(self, moved: Sequence[tuple[PageRecord, int]]) -> None:
        """Give pages new places (in extents), durably: each record as it is to be, and the place it had.

        Raises :class:`OSError`; then nothing has changed.
        """
        with _os_errors(), self._env.begin(write=True) as txn:
            for record, before in moved:
                key = page_key(record.serial)
                stored, facts = txn.get(key, db=self._pages), txn.get(key, db=self._facts)
                assert stored is not None, f"page {record.serial} is not there"
                assert facts is not None, f"page {record.serial} has no facts"
                assert stored_place(stored) == before, f"page {record.serial} is not at {before}"
                txn.put(key, encode(record), db=self._pages)
                txn.put(key, with_place(facts, record.place), db=self._facts)

    def mend(self, edits: Sequence[tuple[bytes, bytes, bytes | None]]) -> None:
        """Put each (tree, key, value) as it is given, or delete the key where the value is None; durably."""
        with _os_errors():
            for start in range(0, len(edits), REMOVED_AT_ONCE):
                with self._env.begin(write=True) as txn:
                    for tree, key, value in edits[start : start + REMOVED_AT_ONCE]:
                        db = self._trees[TREES.index(tree)]
                        if value is None:
                            txn.delete(key, db=db)
                        else:
                            txn.put(key, value, db=db)

    def _apply(self, change: Change) -> None:
        with self._env.begin(write=True) as txn:
            Writing(txn, self._trees).make(change)

    def _make_room(self, change: Change) -> None:
        # LMDB reuses what a transaction freed only in the second one after it (the one before must stay
        # readable until then). So remove in small steps, and let two transactions pass.
        for removed in small_steps(change.removed):
            try:
                self._apply(Change(removed=removed, next_serial=change.next_serial, tick=change.tick))
            except lmdb.MapFullError:  # what was freed just before cannot be used yet
                for removal in removed:
                    self._let_turns_pass()
                    self._apply(Change(removed=[removal], next_serial=change.next_serial, tick=change.tick))
        self._let_turns_pass()

    def _let_turns_pass(self) -> None:
        for _ in range(2):
            with self._env.begin(write=True, db=self._meta) as txn:
                txn.put(b"turn", (txn.id() % 256).to_bytes(1, "big"))


def unreadable(path: Path, why: str) -> StoreUnavailableError:
    """What to tell a person about an index that is there and is none."""
    return StoreUnavailableError(
        f"{path} cannot be read ({why}): it is damaged or not an index of tierstore; "
        "remove the directory to start afresh, or give another one"
    )


class _os_errors:
    """Turns LMDB's errors into :class:`OSError`, which is what a disk that fails looks like from above."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, lmdb.MapFullError):
            raise OSError(errno.ENOSPC, "the index is full") from error
        if isinstance(error, lmdb.DiskError):
            raise OSError(errno.ENOSPC, "no space left on the device for the index") from error
        if isinstance(error, lmdb.Error):
            raise OSError(errno.EIO, f"the index failed: {error}") from error
