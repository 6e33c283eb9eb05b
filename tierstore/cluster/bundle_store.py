"""A shared store in a bucket of an object store. A bundle is an object with pages of one prompt
(``bundles.py``).

::

    PREFIX/bundles/NAME    pages; the index of each agent (``bundle_index.py``) lists them
    PREFIX/uses/ID         how often prompts of one host used each bundle, for warm-up and deletion

With a sharing key, bundles are sealed, that is encrypted (``forms.py``), and their keys are in another bucket
(``shared_keys.py``). After a key was deleted, agents that write to the bucket also delete the bundles that it
sealed.

A lookup uses the index in memory and never waits for the server. A thread lists the bucket every
``refresh_s`` seconds and reads the head of each new bundle.

Errors of the server are misses. After an error, the store sends no request for 1 s. If the next request fails
too, the pause doubles, up to 30 s. The daemon's health line shows the error.

**Limits.** Before a bundle is written, other bundles are deleted until it fits ``most_bytes``: the least used
bundles first. A host learns of other hosts' bundles at its next listing. So all hosts together may exceed the
limit by the bytes that they write within ``refresh_s`` seconds. Objects with other names are neither counted
nor deleted.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import msgspec

from tierstore import memory
from tierstore.cluster import orders as o
from tierstore.cluster.bundle_index import (
    MOST_BUNDLES,
    BundleIndex,
    BundlePlace,
    StoredBundle,
    decode_uses,
    encode_uses,
    is_bundle,
)
from tierstore.cluster.bundles import Bundle, BundleError, make_bundle, merged_bundle, read_bundle
from tierstore.cluster.forms import ObjectForms, opened_origin
from tierstore.cluster.objects import is_intact
from tierstore.cluster.s3 import Bucket, BucketError, Listed, NoObjectError
from tierstore.cluster.s3_address import S3Address
from tierstore.cluster.shared_keys import SharedKeys
from tierstore.cluster.shared_store import (
    NOT_THERE,
    Memory,
    SharedStore,
    SharedStoreOptions,
)
from tierstore.errors import SharedStoreError
from tierstore.keys import KEY_BYTES

_BUNDLES = "bundles"
_USES = "uses"
_HEAD_READ_BYTES = 16 << 10  # bytes of a bundle's first read: the head and the names of 800 pages
_RANGE_BYTES = 2 << 20  # most bytes of one request; the readers send several at a time
_READERS = 8
_READ_S = 3.0  # time limit of a request; a fetch waits 2 s, and a hanging agent is killed 5 s later
_PATIENT_READ_S = 60.0  # time limit of a request that no engine waits for
_AGAIN_S = (1.0, 30.0)
_SLACK = 20  # a deletion frees 1/20 of the limit more than is needed
_MOST_USES = 4096  # most bundles whose uses this host counts
_MOST_USE_FILES = 256
_MOST_LISTED_FILES = 10_000
_USES_BYTES = 256 << 10
_USE_HALVES_S = 86400.0  # a use counts half after a day …
_USE_ENDS_S = 14 * 86400.0  # … and not at all after two weeks
_MERGED_BYTES = 16 << 20  # most bytes of pages in a merged bundle
_MERGED_LEAST = 4  # least number of bundles to merge
_SUPERSEDED_S = 120.0  # after this time plus two listings, all hosts know a merged bundle
_USES_S = 60.0  # time between two reads of the uses that other hosts have counted


@dataclass(frozen=True, slots=True)
class _BundleRange:
    """Consecutive pages of a bundle from page ``at`` on. ``into`` has their positions in the caller's
    list."""

    bundle: Bundle
    at: int
    into: list[int]

    @property
    def nbytes(self) -> int:
        return len(self.into) * self.bundle.object_bytes


class BundleStore(SharedStore):
    """The bundles below a prefix in a bucket. The constructor reads the heads of all bundles. It raises
    :class:`UsageError` if the store can never be used.

    Agents open it with ``watch``: a thread keeps the index up to date, and the server need not answer when
    the store is opened. Without ``watch``, a request may take 60 s, and the constructor raises
    :class:`SharedStoreError` if the server does not answer.
    """

    def __init__(self, options: SharedStoreOptions, *, watch: bool = True) -> None:
        self.transport = "s3"
        self.bucket = Bucket(S3Address.parse(options.url), _READ_S if watch else _PATIENT_READ_S)
        self.index = BundleIndex()
        self._options = replace(options, sharing_key=b"")  # only SharedKeys keeps it, in locked memory
        self._lock = threading.Lock()  # guards changes of the index, and the fields below
        self._again_at = 0.0
        self._pause_s = _AGAIN_S[0]
        self._uses: Counter[str] = Counter()  # uses by this host since the start, by bundle
        self._written_uses = 0
        self._uses_name = f"{_USES}/{secrets.token_hex(8)}"
        self._others: tuple[float, Mapping[str, float]] = (0.0, {})  # next read's time, and other hosts' uses
        self._readers = ThreadPoolExecutor(_READERS, "tierstore-s3")
        if options.sharing_key:
            keys = Bucket(S3Address.parse(options.keys_url), self.bucket.read_s)
            self.keys = SharedKeys(keys, options.sharing_key, self._readers, options.tell, options.held)
        self._forms = ObjectForms(b"", self.keys)  # for origins, which do not depend on a secret
        self._writes = False  # whether this agent has written a bundle
        self._writing_bytes = 0  # bytes of bundles that are being written, or about to be
        self._listed = False  # until the first listing, the bytes in the bucket are unknown
        try:
            self._refresh()
        except BucketError as error:
            if not watch:
                raise
            self._failed(error)
        if watch:
            threading.Thread(target=self._watch, name="tierstore-s3-list", daemon=True).start()

    def exists(self, names: Sequence[str]) -> list[bool]:
        if self._pausing:
            raise SharedStoreError(self.trouble)
        return [place is not None for place in self.index.find(names)]

    def get(self, names: Sequence[str], into: Sequence[Memory]) -> list[int]:
        sizes = [NOT_THERE] * len(names)
        if not self._pausing:
            ranges = list(_ranges(self.index.find(names), into))
            came = self._readers.map(lambda each: self._read(each, into), ranges)
            for part in (each for each, whole in zip(ranges, came, strict=True) if whole):
                for at in part.into:
                    sizes[at] = part.bundle.object_bytes
        return sizes

    def put(self, names: Sequence[str], of: Sequence[Memory], origin: o.Origin) -> list[bool]:
        form = self._forms.of(origin.pages)
        if form is None:  # another thread has forgotten the pages' key
            return [False] * len(names)
        bundle, head = make_bundle(names, of[0][1], origin, form.seal_origin)
        pages = [memoryview((ctypes.c_char * nbytes).from_address(address)) for address, nbytes in of]
        try:
            with self._under_way(bundle.nbytes):
                if self._pausing or not self._listed or not self._make_room(bundle.nbytes):
                    return [False] * len(names)
                self.bucket.write(f"{_BUNDLES}/{bundle.name}", b"".join([head, *pages]))
                with self._lock:
                    self.index.add(bundle)
                    self._uses[bundle.name] += 1
        except BucketError as error:
            self._failed(error)
            return [False] * len(names)
        self._answered()
        self._writes = True
        return [True] * len(names)

    def remove(self, name: str) -> None:
        """Remove the whole bundle with this page."""
        place = self.index.find([name])[0]
        if place is not None:
            self._discard(place.bundle)
            try:
                self.bucket.delete([f"{_BUNDLES}/{place.bundle.name}"])
            except BucketError as error:
                self._failed(error)

    def used(self, names: Sequence[str]) -> None:
        bundles = {place.bundle.name for place in self.index.find(names) if place is not None}
        with self._lock:
            self._uses.update(bundles)
            if len(self._uses) > 2 * _MOST_USES:
                self._uses = Counter(dict(self._uses.most_common(_MOST_USES)))

    def origin(self, bundle: Bundle) -> o.Origin:
        """Read the origin (prompt and identity) of a bundle. Raise :class:`BundleError` if it was changed."""
        data = self.bucket.read(f"{_BUNDLES}/{bundle.name}", bundle.origin_at, bundle.origin_bytes)
        return bundle.origin(bytes(data), partial(opened_origin, keys=self.keys) if bundle.key_id else bytes)

    def _has_origin(self, bundle: Bundle) -> bool:
        """Return whether this host can open the origin of a bundle."""
        return not bundle.key_id if self.keys is None else self.keys.by_id(bundle.key_id) is not None

    def uses(self) -> Mapping[str, float]:
        """Return how often each bundle was used by this host, and by other hosts as far as they have reported
        it."""
        now = time.monotonic()
        if self._others[0] <= now:
            self._others = now + _USES_S, self._read_uses()
        total = dict(self._others[1])
        with self._lock:
            for name, count in self._uses.items():
                total[name] = total.get(name, 0.0) + count
        return total

    # -- health --------------------------------------------------------------------------------------

    @property
    def _pausing(self) -> bool:
        return time.monotonic() < self._again_at

    def _failed(self, error: BucketError) -> None:
        with self._lock:
            now = time.monotonic()
            if now >= self._again_at:  # several threads may get the same error
                self._again_at = now + self._pause_s
                self._pause_s = min(2 * self._pause_s, _AGAIN_S[1])
            told, self.trouble = self.trouble, str(error)
        if told != str(error):
            self._options.tell(o.Trouble(str(error)))

    def _answered(self) -> None:
        if self.trouble:
            with self._lock:
                self.trouble, self._pause_s, self._again_at = "", _AGAIN_S[0], 0.0
            self._options.tell(o.Trouble(""))

    # -- reading -------------------------------------------------------------------------------------

    def _read(self, part: _BundleRange, into: Sequence[Memory]) -> bool:
        """Read pages into memory. Return whether all pages have arrived."""
        bundle = part.bundle
        try:
            data = self.bucket.read(f"{_BUNDLES}/{bundle.name}", bundle.offset(part.at), part.nbytes)
        except NoObjectError:  # deleted by another host since the last listing
            self._discard(bundle)
            return False
        except BucketError as error:
            self._failed(error)
            return False
        self._answered()
        if len(data) != part.nbytes:
            self._damaged(bundle)
            return False
        start = memory.address_of(data, writable=False)
        for number, at in enumerate(part.into):
            ctypes.memmove(into[at][0], start + number * bundle.object_bytes, bundle.object_bytes)
        return True

    def _damaged(self, bundle: Bundle) -> None:
        self._options.tell(o.Counted({"damaged_objects": 1}))
        self._discard(bundle)

    def _discard(self, bundle: Bundle) -> None:
        """Forget the pages of a bundle until it is written again."""
        with self._lock:
            self.index.discard(bundle)

    # -- the index -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        refresh_s = self.bucket.address.refresh_s
        while True:
            left_s = self._again_at - time.monotonic()
            time.sleep(min(max(left_s, _AGAIN_S[0] / 2), refresh_s) if self.trouble else refresh_s)
            try:
                self._refresh()
                self._write_uses()
                if self._writes:
                    self.compact()
            except BucketError as error:
                self._failed(error)
            except Exception as error:  # noqa: BLE001  # reported to the daemon
                self._options.tell(o.Failed(f"{type(error).__name__}: {error} (index of the bucket)"))
            else:
                self._answered()

    def _refresh(self) -> None:
        """Update the index from a listing. Raise :class:`BucketError` if the bucket does not answer."""
        if self.keys is not None:
            self.keys.refresh()
        began = time.monotonic()
        named = ((_last(each), each.nbytes, each.written_at) for each in self.bucket.list(_BUNDLES))
        # If there are more bundles, the next write deletes some, and a later listing has the rest.
        listing = list(islice((each for each in named if is_bundle(each[0])), 2 * MOST_BUNDLES))
        with self._lock:
            unread = self.index.listed(listing, began)
            self._listed = True
            expired = self.index.expired(self._options.lifetime_s) if self._options.lifetime_s else []
        for each, bundle in zip(unread, self._readers.map(self._read_head, unread), strict=True):
            with self._lock:
                self.index.read(each.name, bundle)
        if unread:
            with self._lock:
                self.index.rebuild()
            self._options.tell(o.Counted({"read_heads": len(unread)}))
        if expired:  # after everything else, because this host may not be allowed to delete
            self._delete(expired, "expired_objects")
        if self.keys is not None and (self._writes or self.keys.deletes):
            with self._lock:
                unreadable = self.index.of_keys(self.keys.gone)
            if unreadable:
                self._delete(unreadable, "forgotten_objects")

    def _read_head(self, stored: StoredBundle) -> Bundle | None:
        """Read the head and the page names of a bundle. Return None if it is damaged, of another version, or
        deleted since the listing."""
        path = f"{_BUNDLES}/{stored.name}"
        try:
            data = bytes(self.bucket.read(path, 0, _HEAD_READ_BYTES))
            bundle = read_bundle(stored.name, stored.nbytes, data)
            if isinstance(bundle, int):
                data += bytes(self.bucket.read(path, len(data), bundle - len(data)))
                bundle = read_bundle(stored.name, stored.nbytes, data)
            if isinstance(bundle, int):
                raise BundleError(f"bundle {stored.name} is cut off")
        except NoObjectError:
            return None
        except BundleError:
            self._options.tell(o.Counted({"damaged_objects": 1}))
            return None
        return bundle

    # -- limits --------------------------------------------------------------------------------------

    @contextmanager
    def _under_way(self, nbytes: int) -> Iterator[None]:
        """Count a bundle of ``nbytes`` against the limit while this block writes it, because other threads
        write, too."""
        with self._lock:
            self._writing_bytes += nbytes
        try:
            yield
        finally:
            with self._lock:
                self._writing_bytes -= nbytes

    @property
    def _excess(self) -> int:
        """The bytes beyond the limit, including bundles that are being written."""
        with self._lock:
            return self.index.nbytes + self._writing_bytes - self._options.most_bytes

    def _make_room(self, nbytes: int) -> bool:
        """Delete bundles until a new one of ``nbytes``, which :meth:`_under_way` counts, fits. Return False
        if it is larger than the limit. Raise :class:`BucketError` if the bucket does not answer."""
        most = self._options.most_bytes
        if nbytes > most:
            return False
        excess = self._excess
        if excess > 0 or self.index.excess:
            uses = self.uses()
            with self._lock:
                victims = self.index.victims(max(excess, 0) + most // _SLACK, self.index.excess, uses)
            self._delete(victims, "deleted_objects")
        return True

    def _delete(self, names: Sequence[str], counter: str) -> None:
        self.bucket.delete([f"{_BUNDLES}/{name}" for name in names])
        with self._lock:
            self.index.remove(names)
        self._options.tell(o.Counted({counter: len(names)}))

    # -- compaction ----------------------------------------------------------------------------------

    def compact(self) -> None:
        """Merge one run of small bundles, and delete bundles whose pages are all in a merged bundle. Raise
        :class:`BucketError` if the bucket does not answer.

        The merged bundle is written before the small bundles are deleted, and listings alone decide which
        bundles to delete. So a crash at any point loses no page, and a later call continues. The small
        bundles stay until all hosts have listed the merged bundle. Hosts that merge the same bundles write
        the same object.
        """
        wait_s = _SUPERSEDED_S + 2 * self.bucket.address.refresh_s
        lifetime_s = self._options.lifetime_s
        with self._lock:
            superseded = self.index.superseded(self.index.now - wait_s)
            # A merged bundle expires with its oldest page. So merge no page after half of its lifetime.
            since = self.index.now - lifetime_s / 2 if lifetime_s else 0.0
            runs = self.index.mergeable(_MERGED_LEAST, _MERGED_BYTES, since)
        runs = [run for run in runs if self._has_origin(run[-1])]
        if superseded:
            self._delete(superseded, "superseded_objects")
        if runs:
            self._merge(secrets.choice(runs))  # at random, so that hosts probably merge different runs

    def _merge(self, run: Sequence[Bundle]) -> None:
        """Write one bundle with the pages of ``run``, if it fits the limit. Each bundle in ``run`` continues
        the one before it."""
        try:
            last = self.origin(run[-1])
            form = self._forms.of(last.pages)
            if form is None:  # another thread has forgotten the pages' key
                return
            if len(last.pages.keys) < KEY_BYTES * sum(each.pages for each in run):
                raise BundleError("the origin has fewer chunks than the bundles")
            with self._lock:
                oldest_at = self.index.oldest_at(run)
            bundle, head = merged_bundle(run, last, oldest_at, form.seal_origin)
        except NoObjectError:  # another host has deleted it since the last listing
            self._discard(run[-1])
            return
        except BundleError:
            self._damaged(run[-1])
            return
        with self._under_way(bundle.nbytes):
            if self._excess <= 0:  # otherwise a later call merges, when deletions have made room
                self._write_merged(run, bundle, head)

    def _write_merged(self, run: Sequence[Bundle], bundle: Bundle, head: bytes) -> None:
        """Write ``bundle``, which has all pages of ``run`` behind the bytes ``head``."""
        pages = []
        for part in run:
            try:
                data = self.bucket.read(
                    f"{_BUNDLES}/{part.name}", part.offset(0), part.nbytes - part.offset(0)
                )
            except NoObjectError:
                self._discard(part)
                return
            if not _is_whole(part, data):
                self._damaged(part)
                self.bucket.delete([f"{_BUNDLES}/{part.name}"])
                return
            pages.append(data)
        self.bucket.write(f"{_BUNDLES}/{bundle.name}", b"".join([head, *pages]))
        with self._lock:
            self.index.add(bundle)
            self._uses[bundle.name] += max(self._uses[part.name] for part in run)
        self._options.tell(o.Counted({"merged_objects": len(run)}))

    # -- uses ----------------------------------------------------------------------------------------

    def _write_uses(self) -> None:
        """Write this host's numbers of uses to the bucket, if there were new uses."""
        with self._lock:
            total = self._uses.total()
            data = encode_uses(self._uses)
        if total != self._written_uses:
            self.bucket.write(self._uses_name, data)
            self._written_uses = total

    def _read_uses(self) -> Mapping[str, float]:
        """Read the numbers of uses that other hosts have written, and delete files that no longer count. A
        file that cannot be read does not count."""
        listed = islice(self.bucket.list(_USES), _MOST_LISTED_FILES)
        files = sorted(listed, key=lambda each: each.written_at, reverse=True)
        for each in files:
            self.index.note_time(each.written_at)
        now = self.index.now
        counted = [each for each in files[:_MOST_USE_FILES] if now - each.written_at < _USE_ENDS_S]
        if self._options.most_bytes and len(counted) < len(files):
            self.bucket.delete([each.path for each in files[len(counted) :]])
        total: dict[str, float] = {}
        for each, uses in zip(counted, self._readers.map(self._read_use_file, counted), strict=True):
            weight = 0.5 ** ((now - each.written_at) / _USE_HALVES_S)
            for name, count in uses.items():
                total[name] = total.get(name, 0.0) + weight * count
        return total

    def _read_use_file(self, file: Listed) -> Mapping[str, int]:
        if file.path == self._uses_name or file.nbytes > _USES_BYTES:
            return {}
        try:
            return decode_uses(bytes(self.bucket.read(file.path, 0, _USES_BYTES)))
        except (NoObjectError, msgspec.MsgspecError):
            self._options.tell(o.Counted({"damaged_objects": 1}))
            return {}


def _last(each: Listed) -> str:
    return each.path.rpartition("/")[2]


def _is_whole(bundle: Bundle, data: memoryview) -> bool:
    """Return whether ``data`` has all pages of a bundle, unchanged."""
    size = bundle.object_bytes
    return len(data) == bundle.pages * size and all(
        is_intact(data[at * size : (at + 1) * size], bundle.page_name(at)) for at in range(bundle.pages)
    )


def _ranges(places: Sequence[BundlePlace | None], into: Sequence[Memory]) -> Iterator[_BundleRange]:
    """Yield the ranges of bundles to read: consecutive pages of a bundle, about 2 MiB each."""
    current: _BundleRange | None = None
    for number, place in enumerate(places):
        fits = place is not None and place.bundle.object_bytes == into[number][1]
        if (
            current is not None
            and place is not None
            and fits
            and place.bundle is current.bundle
            and place.at == current.at + len(current.into)
            and current.nbytes + place.bundle.object_bytes <= _RANGE_BYTES
        ):
            current.into.append(number)
            continue
        if current is not None:
            yield current
        current = _BundleRange(place.bundle, place.at, [number]) if place is not None and fits else None
    if current is not None:
        yield current


def open_shared_store(options: SharedStoreOptions) -> SharedStore:
    return BundleStore(options)
