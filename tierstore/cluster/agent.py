"""The agent: a process beside the daemon that uses the shared store. ``python -m tierstore.cluster.agent
FD``.

It is an ordinary client of the daemon. To *fetch* pages, it makes the shared store write them to staging
memory, compares each with the expected header, and saves those that match. To *publish* pages, it looks them
up, copies them to staging memory, and makes the shared store read them there. One agent fetches and another
publishes, so that a hanging put delays no fetch.

The agent ends when the daemon closes the socket, or when too much staging memory is unusable. It always ends
with ``os._exit``, because the library's own shutdown takes a second or crashes.
"""

from __future__ import annotations

import array
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import msgspec

import tierstore
from tierstore import copying
from tierstore.cluster import orders as o
from tierstore.cluster.objects import HEADER_BYTES, PageObject, page_objects
from tierstore.cluster.promised import PromisedPages, PromisedPrompt
from tierstore.cluster.recent import Recent
from tierstore.cluster.shared_store import (
    NOT_THERE,
    Memory,
    SharedStore,
    SharedStoreError,
    SharedStoreOptions,
    open_shared_store,
)
from tierstore.cluster.staging import StagingLane, StagingMemory
from tierstore.errors import TierStoreError, UsageError
from tierstore.keys import KEY_BYTES, TOKEN_BYTES, Identity, PageKey, Prompt
from tierstore.spec import KVSpec
from tierstore.store import Store
from tierstore.store.buffers import PageSource, copied_frames
from tierstore.wire.framing import LENGTH

_QUEUED_PAGES = 256  # pages to publish; more are dropped
_MOST_NAMES = 2048  # in one request
_KNOWN_NAMES = 1 << 16
_KNOWN_S = 30.0
_MOST_STORES = 8
_MOST_IDENTITIES = 512  # for one connection to the daemon, which keeps them all
_LOOKUP_S = 2.0
_LANE_WAIT_S = 5.0
_SAVE_S = 5.0
_WORN_OUT = 3


class Agent:
    """Carries out orders. Thread-safe: threads that may hang make the calls to the shared store."""

    def __init__(self, begin: o.Begin, shared: SharedStore, tell: Tell) -> None:
        self._daemon = begin.daemon
        self._secret = begin.secret
        self._bytes_per_s = begin.bytes_per_s
        self._shared = shared
        self._tell = tell
        self._staging = StagingMemory(begin.staging_bytes)
        self._stores = AgentStores(begin.daemon)
        self._known: Recent[str] = Recent(_KNOWN_S, _KNOWN_NAMES)  # names in the shared store
        self._queued: set[str] = set()  # names of pages to publish
        self._known_lock = threading.Lock()  # guards both
        self._lookers = ThreadPoolExecutor(2, "tierstore-look")
        self._fetchers = ThreadPoolExecutor(2, "tierstore-fetch")
        self._promised = PromisedPages(self._there, self._fetch_promised, self._promised_ended)
        self._publishing: queue.Queue[tuple[o.PromptPages, int, set[str]]] = queue.Queue()
        threading.Thread(target=self._publish_all, name="tierstore-publish", daemon=True).start()

    def do(self, order: o.Look | o.FetchOrder | o.Stop | o.Publish) -> None:
        """Start an order."""
        match order:
            case o.Look():
                self._lookers.submit(self._answer, order)
            case o.FetchOrder():
                if order.promised:
                    self._expect(order)
                else:
                    self._fetchers.submit(self._answer, order)
            case o.Stop():
                self._promised.stop(order.id)
            case o.Publish():
                self._queue(order)

    def _answer(self, order: o.Look | o.FetchOrder) -> None:
        counts: Counter[str] = Counter()
        answer = o.Looked(order.id, 0) if isinstance(order, o.Look) else o.FetchDone(order.id, 0)
        with self._noting(counts, "failed_saves"):
            if isinstance(order, o.Look):
                answer = self._look(order)
            else:
                answer.chunks = self._fetch(order, counts)
        self._tell(answer)
        self._count(counts)

    def _count(self, counts: Counter[str]) -> None:
        if counts:
            self._tell(o.Counted(dict(counts)))
        if self._staging.worn_out:
            os._exit(_WORN_OUT)

    @contextmanager
    def _noting(self, counts: Counter[str], failed: str) -> Iterator[None]:
        """Count errors in the block, as ``failed`` if the daemon caused them, and end the block. The thread
        continues, and the order is answered."""
        try:
            yield
        except SharedStoreError:
            counts["failed_calls"] += 1
        except TierStoreError:
            counts[failed] += 1
        except Exception as error:  # noqa: BLE001  # reported to the daemon
            counts["unforeseen_errors"] += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(where.filename)}:{where.lineno}"
            self._tell(o.Failed(f"{type(error).__name__}: {error} ({place})"))

    # -- looking and fetching ------------------------------------------------------------------------

    def _look(self, order: o.Look) -> o.Looked:
        objects = _objects(order.pages, self._secret)
        if not order.pages.named:
            objects = objects[order.first : order.first + _MOST_NAMES]
            there = self._shared.exists([each.name for each in objects]) if objects else []
            return o.Looked(order.id, [*there, False].index(False))
        there = self._there([each.name for each in objects])
        places = array.array("I", [at for at, known in enumerate(there) if known])
        return o.Looked(order.id, len(places), places.tobytes())

    def _fetch(self, order: o.FetchOrder, counts: Counter[str]) -> int:
        """Fetch chunks. Return how many have arrived, without a gap."""
        ends = time.monotonic() + order.wait_s
        objects = _objects(order.pages, self._secret)[order.first : order.first + order.count]
        done = 0
        while done < len(objects) and time.monotonic() < ends:
            part = objects[done : done + self._staging.objects_in_a_lane(objects[0].nbytes)]
            came = self._fetch_part(order.pages, order.first + done, part, ends, counts)
            done += came
            if came < len(part):
                break
        return done

    def _fetch_part(
        self,
        pages: o.PromptPages,
        first: int,
        part: Sequence[PageObject],
        ends: float,
        counts: Counter[str],
    ) -> int:
        """Fetch chunks ``first …``, which are the objects ``part``. Return how many have arrived, without a
        gap."""
        with self._staging.lane(_room(part), max(ends - time.monotonic(), 0)) as lane:
            if lane is None:
                return 0
            places = lane.places(part)
            sizes = self._shared.get([each.name for each in part], places)
            came = [size == each.nbytes for size, each in zip(sizes, part, strict=True)]
            if not all(size in (each.nbytes, NOT_THERE) for size, each in zip(sizes, part, strict=True)):
                lane.sound = False
                counts["poisoned_lanes"] += 1
            leading = [*came, False].index(False)
            source = _Staged(lane, places[:leading], pages.page_bytes)
            good = source.right(part, self._secret)
            if good < leading:
                counts["damaged_pages"] += 1
                self._shared.remove(part[good].name)
            if good:
                prompt, start = _prompt(pages, first, good)
                saved = self._stores.of(pages).save_from(prompt, source, good, first=start)
                with suppress(TimeoutError):
                    saved.wait(max(ends - time.monotonic(), 0) + _SAVE_S)
                saved.cancel()
                good = min(saved.wait() // pages.chunk_tokens, good)
                self._note_known(part[:good])
                counts["fetched_pages"] += good
                counts["fetched_bytes"] += good * pages.page_bytes
            return good

    # -- promised pages ------------------------------------------------------------------------------

    def _expect(self, order: o.FetchOrder) -> None:
        objects = _objects(order.pages, self._secret)[order.first : order.first + order.count]
        self._promised.add(order, objects)

    def _there(self, names: Sequence[str]) -> list[bool]:
        """Return which of these names the shared store has; none if it does not answer."""
        there: list[bool] = []
        counts: Counter[str] = Counter()
        with self._noting(counts, "failed_calls"):
            for start in range(0, len(names), _MOST_NAMES):
                there += self._shared.exists(names[start : start + _MOST_NAMES])
        if counts:
            self._count(counts)
        return [*there, *[False] * (len(names) - len(there))]

    def _fetch_promised(self, promised: PromisedPrompt) -> int:
        order, done = promised.order, promised.done
        counts: Counter[str] = Counter()
        came = 0
        with self._noting(counts, "failed_saves"):
            part = promised.objects[done : done + self._staging.objects_in_a_lane(promised.objects[0].nbytes)]
            there = self._shared.exists([each.name for each in part])
            part = part[: [*there, False].index(False)]
            if part:
                came = self._fetch_part(order.pages, order.first + done, part, promised.ends, counts)
        self._count(counts)
        return came

    def _promised_ended(self, promised: PromisedPrompt) -> None:
        self._tell(o.FetchDone(promised.order.id, promised.done))

    # -- publishing ----------------------------------------------------------------------------------

    def _queue(self, order: o.Publish) -> None:
        """Queue the pages of a prompt, each once: a prompt that is being computed is reported after each
        step."""
        names = {each.name for each in _objects(order.pages, self._secret)[: order.count]}
        with self._known_lock:
            new = {name for name in names - self._queued if name not in self._known}
            full = bool(self._queued) and len(self._queued) + len(new) > _QUEUED_PAGES
            if not full:
                self._queued |= new
        if full:
            self._count(Counter(dropped_pages=len(new)))
        elif new:
            self._publishing.put((order.pages, order.count, new))

    def _publish_all(self) -> None:
        while True:
            pages, count, queued = self._publishing.get()
            counts: Counter[str] = Counter()
            with self._noting(counts, "failed_loads"):
                self._publish(pages, count, counts)
            with self._known_lock:
                self._queued -= queued
            self._count(counts)

    def _publish(self, pages: o.PromptPages, count: int, counts: Counter[str]) -> None:
        objects = _objects(pages, self._secret)[:count]
        there = []
        for start in range(0, len(objects), _MOST_NAMES):
            there += self._shared.exists([each.name for each in objects[start : start + _MOST_NAMES]])
        self._note_known([each for each, known in zip(objects, there, strict=True) if known])
        missing = [each for each, known in zip(objects, there, strict=True) if not known]
        if not missing:
            return
        store = self._stores.of(pages)
        with store.lookup(_prompt(pages, 0, count)[0]) as hit:
            # Only hits of named pages have positions. The others have the leading pages.
            held = [objects[at] for at in hit.positions or range(hit.tokens // pages.chunk_tokens)]
            wanted = {each.name for each in missing}
            for first, run in _runs(held, wanted, self._staging):
                began = time.monotonic()
                with self._staging.lane(_room(run), _LANE_WAIT_S) as lane:
                    if lane is None:
                        return
                    places = lane.places(run)
                    target = _Outgoing(lane, first, places, run, self._secret)
                    loaded = store.load_to(
                        hit, target, first=first, count=len(run), keep=True, deadline_s=_LOOKUP_S
                    ).wait()
                    ready = max(loaded.tokens // pages.chunk_tokens - first, 0)
                    run, places = run[:ready], places[:ready]
                    if not ready:
                        return
                    put = self._shared.put([each.name for each in run], places)
                self._note_known([each for each, done in zip(run, put, strict=True) if done])
                counts["published_pages"] += sum(put)
                counts["published_bytes"] += sum(put) * pages.page_bytes
                counts["refused_pages"] += len(put) - sum(put)
                if self._bytes_per_s:
                    left_s = _room(run) / self._bytes_per_s - (time.monotonic() - began)
                    time.sleep(max(left_s, 0))

    def _note_known(self, objects: Sequence[PageObject]) -> None:
        with self._known_lock:
            for each in objects:
                self._known.note(each.name)


class AgentStores:
    """Connections to the daemon, one for each layout."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._stores: OrderedDict[str, tuple[Store, set[bytes]]] = OrderedDict()

    def of(self, pages: o.PromptPages) -> Store:
        """Return the store for these pages. Raise :class:`TierStoreError` if there is none."""
        identity = Identity(**pages.identity)
        with self._lock:
            store, identities = self._stores.get(identity.layout, (None, set()))
            if store is not None and len(identities) >= _MOST_IDENTITIES:
                store.close()
                store, identities = None, set()
            if store is None:
                spec = KVSpec.parse(identity.layout)
                store = tierstore.connect(self._url, spec, identity=identity, lookup_s=_LOOKUP_S, verify=True)
            identities.add(identity.digest)
            self._stores[identity.layout] = store, identities
            self._stores.move_to_end(identity.layout)
            while len(self._stores) > _MOST_STORES:
                self._stores.popitem(last=False)[1][0].close()
        if not store.wait_connected(_LOOKUP_S):
            raise TierStoreError("the daemon does not answer")
        return store


class _Staged(PageSource):
    """Pages that have arrived in a lane, as the source of a save."""

    def __init__(self, lane: StagingLane, places: Sequence[Memory], page_bytes: int) -> None:
        self._lane = lane
        self._places = places
        self._page_bytes = page_bytes
        self._checksums: list[int] = []

    def right(self, objects: Sequence[PageObject], secret: bytes) -> int:
        """Return how many leading pages match their objects. Only these may be saved."""
        addresses = [address + HEADER_BYTES for address, _ in self._places]
        self._checksums = copying.hash_all(addresses, self._page_bytes)
        for at, (place, checksum) in enumerate(zip(self._places, self._checksums, strict=True)):
            if self._lane.header(place) != objects[at].header(checksum, secret=secret):
                return at
        return len(self._places)

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> list[int | None]:
        """Copy pages. A page that has changed since :meth:`right` is not stored."""
        copies = [(address, self._places[position][0] + HEADER_BYTES) for position, address in pages]
        copied = copying.copy_and_hash(copies, page_bytes)
        expected = [self._checksums[position] for position, _ in pages]
        return [one if one == other else None for one, other in zip(copied, expected, strict=True)]

    def frames(
        self, positions: Sequence[int], page_bytes: int
    ) -> tuple[list[memoryview], Sequence[int | None]]:
        return copied_frames(self, positions, page_bytes)


class _Outgoing:
    """A lane as the target of a hit's pages from ``first`` on, each behind its header."""

    def __init__(
        self,
        lane: StagingLane,
        first: int,
        places: Sequence[Memory],
        objects: Sequence[PageObject],
        secret: bytes,
    ) -> None:
        self._lane = lane
        self._first = first
        self._secret = secret
        self._to = list(zip(places, objects, strict=True))

    def write(self, pages: Sequence[tuple[int, int]]) -> None:
        targets = [self._to[position - self._first] for position, _ in pages]
        copies = [
            (place[0] + HEADER_BYTES, address)
            for (place, _), (_, address) in zip(targets, pages, strict=True)
        ]
        checksums = copying.copy_and_hash(copies, targets[0][1].page_bytes)
        for (place, each), checksum in zip(targets, checksums, strict=True):
            self._lane.write_header(place, each.header(checksum, secret=self._secret))


def _objects(pages: o.PromptPages, secret: bytes) -> list[PageObject]:
    prompt, _ = _prompt(pages, 0, len(pages.keys) // KEY_BYTES)
    return page_objects(
        prompt.identity.digest,
        pages.page_bytes,
        pages.chunk_tokens,
        prompt.keys,
        list(prompt.chunks()),
        secret=secret,
        named=pages.named,
    )


def _prompt(pages: o.PromptPages, first: int, count: int) -> tuple[Prompt, int]:
    """Return a prompt that ends with these chunks, and the position of the first of them in it. The prompt of
    a chain begins with its earlier chunks. A prompt of named chunks has only these."""
    start, make = 0, Prompt.with_keys
    if pages.named:
        start, make = first, partial(Prompt.with_names, pages_before=pages.depth + first)
    width = pages.chunk_tokens * TOKEN_BYTES
    tokens = pages.tokens[start * width : (first + count) * width]
    keys = [PageKey(pages.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]) for at in range(start, first + count)]
    return make(Identity(**pages.identity), tokens, keys, chunk_tokens=pages.chunk_tokens), first - start


def _room(objects: Sequence[PageObject]) -> int:
    return -(-objects[0].nbytes // 64) * 64 * len(objects)


def _runs(
    held: Sequence[PageObject], wanted: Collection[str], staging: StagingMemory
) -> list[tuple[int, list[PageObject]]]:
    """Divide the ``wanted`` pages of a hit into runs of consecutive pages. Return each run with its position
    in the hit. ``held`` has all pages of the hit. A run fits one lane of the staging memory."""
    runs: list[tuple[int, list[PageObject]]] = []
    for at, each in enumerate(held):
        if each.name not in wanted:
            continue
        first, run = runs[-1] if runs else (0, [])
        if run and first + len(run) == at and len(run) < staging.objects_in_a_lane(each.nbytes):
            run.append(each)
        else:
            runs.append((at, [each]))
    return runs


# -- the process -----------------------------------------------------------------------------------------


class Tell:
    """Sends messages to the daemon. Thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def __call__(self, order: o.ToDaemon) -> None:
        body = msgspec.msgpack.encode(order)
        with self._lock:
            try:
                self._connection.sendall(LENGTH.pack(len(body)) + body)
            except OSError:
                os._exit(0)  # the daemon is gone


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    tell = Tell(connection)
    decoder = msgspec.msgpack.Decoder(o.ToAgent)
    agent: Agent | None = None
    with connection.makefile("rb") as stream:
        while head := stream.read(LENGTH.size):
            (length,) = LENGTH.unpack(head)
            order = decoder.decode(stream.read(length))
            if isinstance(order, o.Begin):
                agent = _begin(order, tell)
            elif agent is not None:
                agent.do(order)
    os._exit(0)


def _begin(begin: o.Begin, tell: Tell) -> Agent:
    options = SharedStoreOptions(begin.url, begin.protocol, begin.devices, begin.host)
    try:
        shared = open_shared_store(options)
        shared.exists(["ts1:"])  # the first call takes longer than a lookup waits
    except TierStoreError as error:
        tell(o.Away(str(error), isinstance(error, UsageError)))
        os._exit(1)
    tell(o.Ready(shared.transport))
    return Agent(begin, shared, tell)


if __name__ == "__main__":
    main()
