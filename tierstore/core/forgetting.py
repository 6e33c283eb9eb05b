"""Forget tenants, models, sessions and pages that are too old, in host memory and on disk.

Forgetting a tenant or a model takes four steps:

1. **Memory.** Copies of the pages are marked as damaged, so that no lookup finds them.
2. **Keys.** In an encrypted store, the tenant's or model's data keys are removed from the keyring, durably.
3. **Roots.** The roots of the identities are deleted from the index on disk, durably. No lookup reaches a
   page without its root, and the next opening removes such pages. So a forget takes the same time for one
   page and for a terabyte on disk. Then the HBM pools, of this process and of the daemon's engines, receive a
   notice of the forget. An engine that is disconnected learns of the forget when it reconnects
   (:class:`ForgetLog`).
4. **Pages.** A thread drops the marked copies. A copy that a load or a write uses is dropped when its last
   holder releases it. Then the thread removes the pages from the disk, in small batches. Without encryption,
   it first overwrites their payloads in the extents, and afterwards discards index pages that have become
   free.

The call returns after the third step. Pages of a save that ends after the call are not forgotten. A page may
get a place on disk before the keys are removed, and be sealed (encrypted) after that: it is sealed with a
random key that is not kept (``DiskTier.moment``).

**Forgetting a session** covers the pages that no other session has used (:mod:`tierstore.index.sessions`).
The store knows these pages only while the process runs. The tenant's other pages have the same root, so the
roots stay. Instead of the third step, the session's pages are recorded in the index, durably, and the next
opening removes the recorded pages that the fourth step has not removed. A session's pages are also
overwritten in an encrypted store. With **session keys**, the forget also covers all pages that the session's
keys encrypt, including pages that other sessions use, and also after a restart: the page table has the number
of each page's key. All pages behind a session's pages are removed, too, and the second step removes the
session's keys.

With a **maximum age**, each lookup first marks the pages in the tree that are too old, and no page on disk
that is too old enters the tree. A thread removes pages that are too old as it removes a session's pages. The
thread also reads all records on disk, at the interval :func:`expiry_s`. Ages follow the wall clock, because
pages must also age while no process runs."""

from __future__ import annotations

import itertools
import logging
import math
import os
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b

from tierstore.backend import ForgottenPages, Registration
from tierstore.core.departures import Cause
from tierstore.core.quotas import Pins
from tierstore.core.state import StoreState
from tierstore.errors import StoreUnavailableError
from tierstore.index import Page, Tier
from tierstore.index.sessions import NO_SESSION
from tierstore.keys import Identity, PageKey, outer_tenant
from tierstore.tiers.disk import DiskTier, PageRecord
from tierstore.tiers.disk.keyring import Scope, scope_name, session_hash
from tierstore.types import ForgetReceipt, Forgettable

_log = logging.getLogger(__name__)

_MARKED_AT_ONCE = 4096  # pages under one hold of the lock: takes several milliseconds
_AT_ONCE = 256  # pages that leave memory or the disk under one hold of the lock
_READ_AT_ONCE = 4096  # records read from the disk's index at once
_MOST_UNCOMMITTED = 4096  # most removals that may wait for a commit
_KEPT_FORGETS = 256
_PAUSE_S = 0.5  # minimum time between removals of pages that lookups found too old: each searches all pools
_NAME_BYTES = 8
_HEAD = struct.Struct(f"<{_NAME_BYTES}sQ")  # the log's name, and the number of the last forget
_LOGGED = struct.Struct("<16s16s")  # tenant, model
_ANY = bytes(16)


class ForgetLog:
    """The last forgets of tenants and models, numbered from 1. A client that reconnects finds out which of
    its identities were forgotten meanwhile. Forgetting a session is logged as a forget of its tenant. Names
    are hashed. ``name`` is random and changes when a log starts anew, so that clients do not compare the
    numbers of different logs. Not thread-safe.

    >>> log = ForgetLog()
    >>> log.add("acme", None)
    >>> log.latest("acme", "my-model"), log.latest("globex", "my-model")
    (1, 0)
    """

    def __init__(self, stored: bytes = b"") -> None:
        """Continue the log ``stored``, a value of :meth:`dump`; start a new log if it is empty."""
        self._entries: deque[tuple[bytes, bytes]] = deque(maxlen=_KEPT_FORGETS)
        self.last, self.name = 0, os.urandom(_NAME_BYTES)
        if len(stored) % _LOGGED.size == _HEAD.size:
            self.name, self.last = _HEAD.unpack_from(stored)
            self._entries.extend(_LOGGED.iter_unpack(stored[_HEAD.size :]))

    def add(self, tenant: str | None, model: str | None) -> None:
        self.last += 1
        self._entries.append((_logged(tenant), _logged(model)))

    def latest(self, tenant: str, *models: str) -> int:
        """Return the number of the last forget that covers pages of this tenant and of a model with one of
        these names. If no such forget is in the log, return the number of the last forget that was dropped
        from the log."""
        tenants = {_ANY, _logged(tenant), _logged(outer_tenant(tenant))}
        names = {_ANY, *map(_logged, models)}
        for at, (one, other) in enumerate(reversed(self._entries)):
            if one in tenants and other in names:
                return self.last - at
        return self.last - len(self._entries)

    def dump(self) -> bytes:
        return _HEAD.pack(self.name, self.last) + b"".join(itertools.starmap(_LOGGED.pack, self._entries))


def expiry_s(max_age_s: float) -> float:
    """Return the interval, in seconds, at which the disk is searched for pages older than ``max_age_s``.

    >>> expiry_s(3600.0), expiry_s(30 * 86400.0)
    (72.0, 51840.0)
    """
    return max(max_age_s / 50, 60.0)


def _on_disk(pages: Iterable[Page]) -> dict[int, float]:
    """Return the time at which each of these pages was saved, by serial, for pages on disk. Needs the
    lock."""
    return {
        page.serial: page.record.created_s
        for page in pages
        if page.copies[Tier.DISK] is not None and page.record is not None
    }


def _logged(name: str | None) -> bytes:
    return _ANY if name is None else blake2b(name.encode(), digest_size=len(_ANY)).digest()


class Forgetting:
    """Forgets pages of one core. Thread-safe. ``registered`` has the identities of clients, by digest."""

    def __init__(
        self, state: StoreState, disk: DiskTier | None, registered: dict[bytes, Identity], pins: Pins
    ) -> None:
        self._state = state
        self._pins = pins
        self._disk = disk
        self._registered = registered
        self._one = threading.Lock()  # held by an expiry and by the clean-up of a forget
        self._closing = False
        self._cleaners: list[threading.Thread] = []
        self._oldest_s = -math.inf  # lower bound of the times at which pages on disk were saved
        self.followers: list[Callable[[ForgottenPages], None]] = []
        self._expiry: threading.Thread | None = None
        self._log = ForgetLog(disk.forgets.log() if disk is not None else b"")  # needs the state's lock
        self._telling = threading.Lock()  # held while pools are notified, so that notices arrive in order
        self._untold: set[int] = set()  # numbers of forgets without a notice yet; guarded by the state's lock

    def start(self) -> None:
        """Start removing pages that become too old, in the background."""
        if self._state.ages.most_s < math.inf:
            self._expiry = threading.Thread(target=self._expire_often, name="tierstore-expiry", daemon=True)
            self._expiry.start()

    def forget(self, what: Forgettable) -> ForgetReceipt:
        """Forget all pages that ``what`` covers. Blocks for at most several tenths of a second and one commit
        to the disk. Raise :class:`UsageError` for a session's invalid name, and
        :class:`StoreUnavailableError` if the disk or the keyring cannot be written: then the pages have left
        memory but not the disk, and the caller must forget again."""
        began, at_s = time.monotonic(), time.time()
        with self._state.lock:
            self._state.require_open()
        try:
            if what.session is not None:
                counts = self._forget_session(what, what.session)
            else:
                counts = self._forget_identities(what)
            self._keep_log()
        except OSError as error:
            raise StoreUnavailableError(
                f"not everything is forgotten: {error.strerror or error}; repair the disk or the keyring, "
                "and forget again"
            ) from error
        return ForgetReceipt(
            tenant=what.tenant,
            model=what.model,
            session=what.session,
            encrypted=self._disk is not None and self._disk.keyring is not None,
            at_s=at_s,
            took_s=time.monotonic() - began,
            **counts,
        )

    @property
    def told(self) -> int:
        """The number of the last forget for which pools were notified of it and of all earlier ones. (Several
        forgets may run at once and end in any order.) If there is a disk, the numbers continue after a
        restart."""
        with self._state.lock:
            return self._told_but(0)

    @property
    def log_name(self) -> bytes:
        return self._log.name

    def _told_but(self, number: int) -> int:
        """Return :attr:`told` as if pools had been notified of forget ``number``, too. Needs the lock."""
        return min(self._untold - {number}, default=self._log.last + 1) - 1

    def _note(self, what: Forgettable) -> int:
        of_session = what.session is not None
        self._log.add((what.tenant or "") if of_session else what.tenant, None if of_session else what.model)
        self._untold.add(self._log.last)
        return self._log.last

    def latest(self, registration: Registration) -> int:
        """Return the number of the last forget that covers pages of an identity; see
        :meth:`ForgetLog.latest`."""
        identity = registration.identity
        with self._state.lock:
            return self._log.latest(identity.tenant, identity.model, registration.model_name)

    def expire(self, *, whole: bool = True) -> None:
        """Remove pages that are too old from memory and disk: with ``whole`` all such pages and the pages
        behind them, otherwise only the pages that lookups have found too old. Blocks until the removals from
        disk are durable. Pages in use are removed by a later call. Raise :class:`OSError` if the disk
        fails."""
        state, disk = self._state, self._disk
        with state.lock:
            state.expire()
            pages, state.too_old = state.too_old, []
            own = set(pages)
            self._pins.forget(own.__contains__)
        pages.sort(key=lambda page: page.depth)
        if pages:
            self._tell(ForgottenPages(pages=frozenset((page.identity, page.key) for page in pages)))
        with self._one:
            serials = sorted(page.serial for page in pages if page.copies[Tier.DISK] is not None)
            self._drop(pages, Cause.EXPIRED)
            if disk is None or not disk.wait_scanned():
                return
            if whole and state.ages.is_over(self._oldest_s):
                serials = sorted({*serials, *self._too_old(disk)})
            if serials:
                self._remove(serials, pages, Cause.EXPIRED, erased=True)
                if not self._closing:
                    disk.forgets.discard_freed()

    def _too_old(self, disk: DiskTier) -> Sequence[int]:
        """Return the serials of all pages on disk that are too old, and of the pages behind them, ascending.
        Update ``_oldest_s``."""
        ages = self._state.ages
        found = array("Q")
        known: set[int] = set()
        oldest_s = math.inf
        for serial, record in self._stored(disk):
            if record.parent in known or ages.is_over(record.created_s):
                known.add(serial)
                found.append(serial)
            else:
                oldest_s = min(oldest_s, record.created_s)
        with self._state.lock:
            pages = self._state.index.by_serial
            behind = {pages[serial] for serial in found if serial in pages}
            self._pins.forget(behind.__contains__)
        # Pages saved after the search are younger. A page that was found may stay if it is in use.
        self._oldest_s = -math.inf if found else min(oldest_s, ages.clock())
        return found

    def _stored(self, disk: DiskTier) -> Iterator[tuple[int, PageRecord]]:
        """Yield the serials and records of all pages on disk, ascending, until the store is closed."""
        start = 0
        while not self._closing and (records := disk.stored_from(start, _READ_AT_ONCE)):
            yield from ((serial, record) for serial, record in records if record is not None)
            start = records[-1][0] + 1
            self._state.yield_lock()

    def _expire_often(self) -> None:
        state = self._state
        every_s = expiry_s(state.ages.most_s)
        due = time.monotonic()
        while not self._closing:
            whole = time.monotonic() >= due
            due += every_s if whole else 0.0
            try:
                self.expire(whole=whole)
            except OSError as error:
                with state.lock:
                    state.counters.disk_write_errors += 1
                _log.warning("disk tier: pages that are too old are not removed yet: %s", error)
            with state.lock:
                state.changed.wait_for(lambda: self._closing, _PAUSE_S)
                left_s = max(due - time.monotonic(), 0.0)
                state.changed.wait_for(lambda: self._closing or state.too_old, left_s)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the pages that were forgotten so far have left the disk. Return False if ``timeout``
        seconds pass first."""
        ends = None if timeout is None else time.monotonic() + timeout
        for cleaner in list(self._cleaners):
            cleaner.join(None if ends is None else max(ends - time.monotonic(), 0.0))
        return not any(cleaner.is_alive() for cleaner in self._cleaners)

    def close(self) -> None:
        """Stop removing pages. The next opening removes the remaining forgotten pages."""
        self._closing = True
        with self._state.lock:
            self._state.changed.notify_all()
        self.wait()
        if self._expiry is not None:
            self._expiry.join()

    # -- tenants and models --------------------------------------------------------------------------

    def scopes(self, what: Forgettable) -> set[Scope]:
        """Return the tenants and models of the known identities that ``what`` covers."""
        return {Scope(each.tenant, each.model) for each in self._covered(what).values()}

    def _covered(self, what: Forgettable) -> dict[bytes, Identity]:
        """Return the known identities that ``what`` covers, by digest."""
        state = self._state
        with state.lock:
            known = {**self._registered, **state.identities}
            names = dict(state.names)
        if self._disk is not None:
            known.update(self._disk.serials.identities())
        return {
            digest: each
            for digest, each in known.items()
            if what.covers(each.tenant, each.model, names.get(digest, each.model))
        }

    def _forget_identities(self, what: Forgettable) -> dict[str, int]:
        state, disk = self._state, self._disk
        known = self._covered(what)
        digests = set(known)
        short = replace(  # what to forget, with the names that keyrings store
            what,
            tenant=None if what.tenant is None else scope_name(what.tenant),
            model=None if what.model is None else scope_name(what.model),
        )
        scopes = {Scope(scope_name(each.tenant), scope_name(each.model)) for each in known.values()}
        encrypted = disk is not None and disk.keyring is not None
        with state.lock:
            self._pins.forget(lambda page: page.identity in digests)
            forget = self._note(what)
        pages = self._in_tree(digests)
        marked = self._mark(pages, erased=not encrypted)
        keys, find = 0, None
        try:
            if disk is not None:
                # Remove keys after marking pages: otherwise a page placed on disk later would get a lasting
                # key.
                if disk.keyring is not None:
                    keys = disk.keyring.drop(
                        lambda scope: scope.whole in scopes or short.covers(*scope.names)
                    )
                before = self._forget_roots(disk, digests)
                find = partial(self._of, disk, digests, before)
                again = self._in_tree(digests, before)  # lookups may have added pages from disk meanwhile
                self._mark(again, erased=not encrypted)
                pages += again
        finally:
            self._tell(ForgottenPages(frozenset(digests)), forget)
            self._clean_up(pages, find, erased=not encrypted)
        return {"identities": len(digests), "host_pages": marked, "keys": keys}

    def _forget_roots(self, disk: DiskTier, digests: set[bytes]) -> int:
        """Delete the roots of these identities from the disk's index. Return a serial that is greater than
        the serials of all pages under these roots, and less than those of later pages."""
        state = self._state
        with state.lock:
            before = disk.serials.new()
            roots = disk.serials.forget(digests)
            for root in filter(None, map(state.index.tree.known_root, digests)):
                root.serial = 0
        disk.forget_roots(roots)
        return before

    def _in_tree(self, digests: set[bytes], before: int | None = None) -> list[Page]:
        """Return the pages of these identities in the tree, parents first. With ``before``, return only pages
        on disk with a lower serial."""
        with self._state.lock:
            return [
                page
                for page in self._state.index.tree.walk()
                if page.identity in digests and (before is None or 0 < page.serial < before)
            ]

    def _of(self, disk: DiskTier, digests: set[bytes], before: int) -> Sequence[int]:
        """Return the serials below ``before`` of all pages on disk of these identities, ascending."""
        stored = itertools.takewhile(lambda each: each[0] < before, self._stored(disk))
        return array("Q", (serial for serial, record in stored if record.identity in digests))

    # -- sessions ------------------------------------------------------------------------------------

    def _forget_session(self, what: Forgettable, name: str) -> dict[str, int]:
        state, disk = self._state, self._disk
        keyring = disk.keyring if disk is not None else None
        session = session_hash(what.tenant or "", name) if keyring is not None else b""
        if disk is not None and keyring is not None and keyring.of_session(session):
            disk.wait_scanned()  # after the scan, the page table is complete
        with state.lock:
            number = state.sessions.forget(what.tenant or "", name)
            pages = state.index.of_session(number, session)
            own = set(pages)
            self._pins.forget(own.__contains__)
            forget = self._note(what)
        marked = self._mark(pages, erased=True)
        with state.lock:  # after marking, so that pages whose write was still running are included
            encrypted = [key.number for key in keyring.of_session(session)] if keyring is not None else []
            unloaded = self._unloaded(number, encrypted, pages)
            on_disk = _on_disk(pages)
        dropped = 0
        keys = {(page.identity, page.key) for page in pages}
        try:
            if disk is not None:
                records = [record for record in disk.stored_records(unloaded) if record is not None]
                on_disk.update((record.serial, record.created_s) for record in records)
                opened = filter(None, disk.records(unloaded))
                keys.update((record.identity, PageKey(record.key)) for record in opened)
                disk.forgets.note(on_disk)
            if keyring is not None:
                # Remove keys after marking pages: otherwise a page placed on disk later would get a lasting
                # key.
                dropped = keyring.drop(lambda scope: scope.session == session)
                with state.lock:
                    again = state.index.of_session(NO_SESSION, session)  # pages that running saves have added
                self._mark(again, erased=True)
                with state.lock:
                    on_disk.update(_on_disk(again))
                pages += again
                keys.update((page.identity, page.key) for page in again)
        finally:
            self._tell(ForgottenPages(pages=frozenset(keys)), forget)
            self._clean_up(pages, lambda: sorted(on_disk), erased=True)
        return {"identities": 0, "host_pages": marked, "keys": dropped}

    def _unloaded(self, number: int, keys: Sequence[int], pages: list[Page]) -> list[int]:
        """Return the serials of a session's pages that are not in the tree, found by the session's number and
        the numbers of its keys. No lookup loads these pages any more. If a page is in the tree but not in
        ``pages``, mark it and add it to ``pages``. Needs the lock."""
        state = self._state
        if state.page_table is None:
            return []
        encrypted = state.page_table.of_keys(keys) if keys else []
        known = set(encrypted)
        serials = [*encrypted, *(state.page_table.of_session(number) if number else [])]
        loaded = state.index.by_serial
        added = [
            page
            for serial in serials
            if (page := loaded.get(serial)) is not None
            and (page.session == number or serial in known)
            and page.ready_tier() is not None
        ]
        for page in added:
            state.residency.condemn(page, erased=True)
        pages += added
        unloaded = [serial for serial in serials if serial not in loaded]
        state.residency.erased.update(unloaded)
        return unloaded

    # -- pools ---------------------------------------------------------------------------------------

    def _tell(self, forgotten: ForgottenPages, forget: int = 0) -> None:
        """Notify the pools of forgotten pages, which were marked before. ``forget`` is the number of the
        forget; 0 for pages that were too old."""
        with self._telling:
            with self._state.lock:
                told = self._told_but(forget)
            for follower in list(self.followers):
                follower(forgotten._replace(told=told))
            with self._state.lock:
                self._untold.discard(forget)

    def _keep_log(self) -> None:
        with self._state.lock:
            dump = self._log.dump()
        if self._disk is not None:
            self._disk.forgets.keep_log(dump)

    # -- pages in memory -----------------------------------------------------------------------------

    def _mark(self, pages: Sequence[Page], *, erased: bool) -> int:
        """Mark these pages, so that no lookup finds them. With ``erased``, their bytes on disk are
        overwritten when they leave. Return the number of the pages' copies in host memory."""
        condemn = self._state.residency.condemn
        in_host = 0
        for start in range(0, len(pages), _MARKED_AT_ONCE):
            with self._state.lock:
                some = pages[start : start + _MARKED_AT_ONCE]
                in_host += sum(condemn(page, erased=erased) for page in some)
            self._state.yield_lock()
        return in_host

    def _drop(self, pages: Sequence[Page], cause: Cause) -> None:
        """Drop the marked copies of these pages, which follow their parents in ``pages``. A copy in use is
        dropped when its last holder releases it."""
        for end in range(len(pages), 0, -_AT_ONCE):
            if self._closing:
                return
            with self._state.lock:
                for page in reversed(pages[max(end - _AT_ONCE, 0) : end]):
                    self._drop_copies(page, cause)
                self._state.changed.notify_all()
            self._state.yield_lock()

    def _drop_copies(self, page: Page, cause: Cause) -> None:
        residency, table = self._state.residency, self._state.page_table
        _, host, disk = page.copies
        idle = disk is not None and disk.damaged and not disk.leases
        if idle and table is not None and not table.children(page.serial):
            residency.drop(page, Tier.DISK, cause)
        if host is not None and host.damaged and not host.leases and not host.children:
            residency.drop(page, Tier.HOST, cause)

    # -- cleaning up ---------------------------------------------------------------------------------

    def _clean_up(
        self, pages: Sequence[Page], find: Callable[[], Sequence[int]] | None, *, erased: bool
    ) -> None:
        """Remove pages from memory and disk in the background. ``find`` returns the serials of the pages on
        disk, ascending."""

        def work() -> None:
            with self._one:
                self._drop(pages, Cause.BY_REQUEST)
                if self._disk is None or find is None or not self._disk.wait_scanned() or self._closing:
                    return
                try:
                    removed = self._remove(find(), pages, Cause.BY_REQUEST, erased=erased)
                    try:
                        if erased and removed and not self._closing:
                            self._disk.forgets.discard_freed()
                    finally:  # otherwise the next opening would remove the pages again
                        self._disk.forgets.settle(self._left)
                except OSError as error:
                    _log.warning("disk tier: forgotten pages are not removed yet: %s", error)
                else:
                    _log.info("disk tier: %d forgotten pages were removed", removed)

        thread = threading.Thread(target=work, name="tierstore-forget", daemon=True)
        self._cleaners = [each for each in self._cleaners if each.is_alive()] + [thread]
        thread.start()

    def _remove(self, serials: Sequence[int], pages: Sequence[Page], cause: Cause, *, erased: bool) -> int:
        """Remove pages from disk, children (which have higher serials) before parents. Then drop the marked
        ``pages`` whose children were removed. Wait until the removals are durable. Return the number of
        removed pages."""
        state = self._state
        removed = 0
        for end in range(len(serials), 0, -_AT_ONCE):
            with state.lock:
                some = serials[max(end - _AT_ONCE, 0) : end][::-1]
                removed += self._remove_some(some, cause, erased=erased)
                self._wait_for_commit(_MOST_UNCOMMITTED)
            if self._closing:
                break
            state.yield_lock()
        self._drop(pages, cause)
        with state.lock:
            self._wait_for_commit(0)
        return removed

    def _left(self, serials: Sequence[int]) -> list[int]:
        """Return those of these serials whose pages are removed durably."""
        state = self._state
        with state.lock:
            table = state.page_table
            if table is None or state.residency.uncommitted:
                return []
            pages = state.index.by_serial
            return [
                serial
                for serial in serials
                if serial not in table
                and ((page := pages.get(serial)) is None or page.copies[Tier.DISK] is None)
            ]

    def _remove_some(self, serials: Sequence[int], cause: Cause, *, erased: bool) -> int:
        state = self._state
        table = state.page_table
        if erased and table is not None:
            state.residency.erased.update(serial for serial in serials if serial in table)
        state.residency.choice = cause
        try:
            return sum(state.eviction.leaves_disk(serial) for serial in serials)
        finally:
            state.residency.choice = Cause.EVICTED

    def _wait_for_commit(self, most: int) -> None:
        """Wait until at most ``most`` removals are not durable, or until the disk cannot be written."""
        state = self._state
        state.changed.wait_for(
            lambda: state.residency.uncommitted <= most or self._closing or not state.health.writable
        )
