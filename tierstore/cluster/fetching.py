"""Fetch pages from the shared store into a daemon: read them into staging memory, compare, save."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import tierstore
from tierstore import copying
from tierstore.cluster import orders as o
from tierstore.cluster.forms import ObjectForm, ObjectForms
from tierstore.cluster.objects import HEADER_BYTES, PageObject, page_objects
from tierstore.cluster.shared_store import NOT_THERE, Memory, SharedStore
from tierstore.cluster.staging import StagingMemory
from tierstore.errors import TierStoreError
from tierstore.keys import KEY_BYTES, TOKEN_BYTES, Identity, PageKey, Prompt
from tierstore.spec import KVSpec
from tierstore.store import Store
from tierstore.store.buffers import PageSource, copied_frames

LOOKUP_S = 2.0
_SAVE_S = 5.0
_MOST_STORES = 8
_MOST_IDENTITIES = 512  # limit for one connection, because the daemon keeps all identities of a connection


class Fetcher:
    """Fetches pages from the shared store into the daemon behind ``stores``, through the memory ``staging``.
    Thread-safe."""

    def __init__(
        self, shared: SharedStore, staging: StagingMemory, stores: DaemonStores, forms: ObjectForms
    ) -> None:
        self._shared = shared
        self._staging = staging
        self._stores = stores
        self._forms = forms

    def fetch(self, pages: o.PromptPages, first: int, count: int, wait_s: float, counts: Counter[str]) -> int:
        """Fetch chunks ``first … first + count`` within ``wait_s`` seconds. Return the number of consecutive
        chunks that have arrived. Count successes and errors in ``counts``. Raise :class:`TierStoreError` if
        the shared store or the daemon does not answer."""
        ends = time.monotonic() + wait_s
        form = self._forms.of(pages)
        objects = objects_of(pages, form)[first : first + count] if form is not None else []
        done = 0
        while done < len(objects) and time.monotonic() < ends:
            part = objects[done : done + self._staging.objects_in_a_lane(objects[0].nbytes)]
            came = self.fetch_part(pages, first + done, part, ends, counts)
            done += came
            if came < len(part):
                break
        return done

    def fetch_part(
        self,
        pages: o.PromptPages,
        first: int,
        part: Sequence[PageObject],
        ends: float,
        counts: Counter[str],
    ) -> int:
        """Fetch the chunks from ``first`` on that are stored as the objects ``part``. Return the number of
        consecutive chunks that have arrived."""
        form = self._forms.of(pages)
        with self._staging.lane(room_of(part), max(ends - time.monotonic(), 0)) as lane:
            if lane is None or form is None:
                return 0
            places = lane.places(part)
            sizes = self._shared.get([each.name for each in part], places)
            came = [size == each.nbytes for size, each in zip(sizes, part, strict=True)]
            if not all(size in (each.nbytes, NOT_THERE) for size, each in zip(sizes, part, strict=True)):
                lane.sound = False
                counts["poisoned_lanes"] += 1
            leading = [*came, False].index(False)
            source = _Staged(places[:leading], form.open(places[:leading], part[:leading]))
            good = source.pages
            if good < leading:
                counts["damaged_pages"] += 1
                self._shared.remove(part[good].name)
            if good:
                prompt, start = prompt_of(pages, first, good)
                saved = self._stores.of(pages).save_from(prompt, source, good, first=start)
                with suppress(TimeoutError):
                    saved.wait(max(ends - time.monotonic(), 0) + _SAVE_S)
                saved.cancel()
                good = min(saved.wait() // pages.chunk_tokens, good)
                counts["fetched_pages"] += good
                counts["fetched_bytes"] += good * pages.page_bytes
            return good


class DaemonStores:
    """Connections to the daemon at ``url``, one for each layout of pages. For a daemon at ``tcp://``,
    ``keys`` and ``server_key`` are key files as in :func:`tierstore.connect`."""

    def __init__(self, url: str, keys: Path | None = None, server_key: Path | None = None) -> None:
        self._url = url
        self._keys = keys, server_key
        self._lock = threading.Lock()
        self._stores: OrderedDict[str, tuple[Store, set[bytes]]] = OrderedDict()

    def of(self, pages: o.PromptPages) -> Store:
        """Return the store for these pages. Raise :class:`TierStoreError` if the daemon does not answer, and
        for pages whose size does not fit their layout."""
        identity = Identity(**pages.identity)
        spec = KVSpec.parse(identity.layout)
        if spec.page_bytes != pages.page_bytes:
            raise TierStoreError(f"pages of {pages.page_bytes} bytes do not have the size of their layout")
        with self._lock:
            store, identities = self._stores.get(identity.layout, (None, set()))
            if store is not None and len(identities) >= _MOST_IDENTITIES:
                store.close()
                store, identities = None, set()
            if store is None:
                keys, server_key = self._keys
                store = tierstore.connect(
                    self._url,
                    spec,
                    identity=identity,
                    lookup_s=LOOKUP_S,
                    verify=True,
                    keys=keys,
                    server_key=server_key,
                )
            identities.add(identity.digest)
            self._stores[identity.layout] = store, identities
            self._stores.move_to_end(identity.layout)
            while len(self._stores) > _MOST_STORES:
                self._stores.popitem(last=False)[1][0].close()
        if not store.wait_connected(LOOKUP_S):
            raise TierStoreError("the daemon does not answer")
        return store

    def close(self) -> None:
        with self._lock:
            while self._stores:
                self._stores.popitem()[1][0].close()


class _Staged(PageSource):
    """Pages that have arrived in a lane of staging memory, as the source of a save."""

    def __init__(self, places: Sequence[Memory], checksums: Sequence[int]) -> None:
        self._places = places
        self._checksums = checksums  # checksums of the leading pages that match their objects

    @property
    def pages(self) -> int:
        """The number of leading pages that match their objects. Only these pages may be saved."""
        return len(self._checksums)

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> list[int | None]:
        """Copy pages. The result is None for a page that was changed after its check."""
        copies = [(address, self._places[position][0] + HEADER_BYTES) for position, address in pages]
        copied = copying.copy_and_hash(copies, page_bytes)
        expected = [self._checksums[position] for position, _ in pages]
        return [one if one == other else None for one, other in zip(copied, expected, strict=True)]

    def frames(
        self, positions: Sequence[int], page_bytes: int
    ) -> tuple[list[memoryview], Sequence[int | None]]:
        return copied_frames(self, positions, page_bytes)


def objects_of(pages: o.PromptPages, form: ObjectForm) -> list[PageObject]:
    """Return the objects of all chunks of a prompt."""
    prompt, _ = prompt_of(pages, 0, len(pages.keys) // KEY_BYTES)
    return page_objects(
        prompt.identity.digest,
        pages.page_bytes,
        pages.chunk_tokens,
        prompt.keys,
        list(prompt.chunks()),
        secret=form.secret,
        named=pages.named,
    )


def prompt_of(pages: o.PromptPages, first: int, count: int) -> tuple[Prompt, int]:
    """Return a prompt that ends with these chunks, and the position of the first of these chunks in the
    prompt. A prompt of chained chunks also has all earlier chunks; a prompt of named chunks has only
    these."""
    start, make = 0, Prompt.with_keys
    if pages.named:
        start, make = first, partial(Prompt.with_names, pages_before=pages.depth + first)
    width = pages.chunk_tokens * TOKEN_BYTES
    tokens = pages.tokens[start * width : (first + count) * width]
    keys = [PageKey(pages.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]) for at in range(start, first + count)]
    return make(Identity(**pages.identity), tokens, keys, chunk_tokens=pages.chunk_tokens), first - start


def room_of(objects: Sequence[PageObject]) -> int:
    """Return the bytes that objects of equal size need in a lane of staging memory."""
    return -(-objects[0].nbytes // 64) * 64 * len(objects)
