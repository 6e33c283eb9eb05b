"""The agent: a process beside the daemon that uses the shared store. ``python -m tierstore.cluster.agent
FD``.

The agent is an ordinary client of the daemon. To *fetch* pages, it makes the shared store write them to
staging memory, compares each page with its expected header, and saves the pages that match. To *publish*
pages, it looks them up in the daemon, copies them to staging memory, and makes the shared store read them
from there. One agent fetches and another agent publishes, so that a hanging put delays no fetch.

The agent ends when the daemon closes the socket, or when too much staging memory is unusable. It always ends
with ``os._exit``, because the library's own shutdown takes a second or crashes.
"""

from __future__ import annotations

import array
import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from tierstore.cluster import orders as o
from tierstore.cluster.fetching import LOOKUP_S, DaemonStores, Fetcher, objects_of, prompt_of, room_of
from tierstore.cluster.forms import ObjectForm, ObjectForms, PlainForm
from tierstore.cluster.objects import PageObject
from tierstore.cluster.promised import PromisedPages, PromisedPrompt
from tierstore.cluster.recent import Recent
from tierstore.cluster.shared_store import (
    Memory,
    SharedStore,
    SharedStoreOptions,
    open_shared_store,
)
from tierstore.cluster.staging import StagingMemory
from tierstore.errors import SharedStoreError, TierStoreError, UsageError
from tierstore.types import Forgettable
from tierstore.wire.framing import LENGTH

_QUEUED_PAGES = 256  # most pages that wait to be published; further pages are dropped
_MOST_NAMES = 2048  # most names in one request
_KNOWN_NAMES = 1 << 16
_KNOWN_S = 30.0
_LANE_WAIT_S = 5.0
_WORN_OUT = 3
_UNNAMED = PlainForm()  # names pages in the queue that have no sharing key yet


class Agent:
    """Carries out the daemon's orders. Thread-safe: calls to the shared store, which may hang, run on
    separate threads."""

    def __init__(self, begin: o.Begin, shared: SharedStore, tell: Tell) -> None:
        self._daemon = begin.daemon
        self._bytes_per_s = begin.bytes_per_s
        self._shared = shared
        self._tell = tell
        self._staging = StagingMemory(begin.staging_bytes)
        self._stores = DaemonStores(begin.daemon)
        self._forms = ObjectForms(begin.secret, shared.keys)
        self._fetcher = Fetcher(shared, self._staging, self._stores, self._forms)
        self._known: Recent[str] = Recent(_KNOWN_S, _KNOWN_NAMES)  # names in the shared store
        self._known_lock = threading.Lock()
        self._lookers = ThreadPoolExecutor(2, "tierstore-look")
        self._fetchers = ThreadPoolExecutor(2, "tierstore-fetch")
        self._forgetter = ThreadPoolExecutor(1, "tierstore-forget")
        self._promised = PromisedPages(self._there, self._fetch_promised, self._promised_ended)
        self._publishing = PublishQueue(_QUEUED_PAGES)
        threading.Thread(target=self._publish_all, name="tierstore-publish", daemon=True).start()

    def do(self, order: o.Look | o.FetchOrder | o.Stop | o.Publish | o.DeleteKeys | o.Resume) -> None:
        """Start to carry out an order."""
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
            case o.DeleteKeys():
                self._forgetter.submit(self._forget, order)
            case o.Resume() if self._shared.keys is not None:
                self._shared.keys.resume(order.id)

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
        """Count an error in the block and end the block. An error that the daemon caused is counted as
        ``failed``. The thread continues, so the order is answered."""
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

    # -- forgetting ----------------------------------------------------------------------------------

    def _forget(self, order: o.DeleteKeys) -> None:
        keys, failed = self._shared.keys, ""
        what = Forgettable(order.tenant, order.model)
        deleted = 0
        try:
            if keys is not None:
                deleted = keys.forget(
                    order.id, lambda scope: what.covers(*scope.names) or scope.names in order.scopes
                )
        except SharedStoreError as error:
            failed = str(error)
        self._tell(o.KeysDeleted(order.id, deleted, failed))

    # -- looking and fetching ------------------------------------------------------------------------

    def _look(self, order: o.Look) -> o.Looked:
        form = self._forms.of(order.pages)
        if form is None:
            return o.Looked(order.id, 0)
        objects = objects_of(order.pages, form)
        if not order.pages.named:
            objects = objects[order.first : order.first + _MOST_NAMES]
            there = self._shared.exists([each.name for each in objects]) if objects else []
            return o.Looked(order.id, [*there, False].index(False))
        there = self._there([each.name for each in objects])
        places = array.array("I", [at for at, known in enumerate(there) if known])
        return o.Looked(order.id, len(places), places.tobytes())

    def _fetch(self, order: o.FetchOrder, counts: Counter[str]) -> int:
        came = self._fetcher.fetch(order.pages, order.first, order.count, order.wait_s, counts)
        form = self._forms.of(order.pages) if came else None
        if form is not None:
            self._note_known(objects_of(order.pages, form)[order.first : order.first + came])
        return came

    # -- promised pages ------------------------------------------------------------------------------

    def _expect(self, order: o.FetchOrder) -> None:
        form = self._forms.of(order.pages)
        if form is None:
            self._tell(o.FetchDone(order.id, 0))
            return
        objects = objects_of(order.pages, form)[order.first : order.first + order.count]
        self._promised.add(order, objects)

    def _there(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether the shared store has it; False for all names if the store does not
        answer."""
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
                came = self._fetcher.fetch_part(order.pages, order.first + done, part, promised.ends, counts)
                self._note_known(part[:came])
        self._count(counts)
        return came

    def _promised_ended(self, promised: PromisedPrompt) -> None:
        self._tell(o.FetchDone(promised.order.id, promised.done))

    # -- publishing ----------------------------------------------------------------------------------

    def _queue(self, order: o.Publish) -> None:
        """Queue those pages of a prompt that are not queued yet. While a prompt is computed, the daemon sends
        an order after each step."""
        # Without a sharing key, no page is in the shared store. The publishing thread makes the key.
        form = self._forms.of(order.pages) or _UNNAMED
        names = [each.name for each in objects_of(order.pages, form)[: order.count]]
        self._shared.used(names)
        with self._known_lock:
            missing = {name for name in names if name not in self._known}
        dropped = self._publishing.add(order, names, missing)
        if dropped:
            self._count(Counter(dropped_pages=dropped))

    def _publish_all(self) -> None:
        while True:
            waiting = self._publishing.take()
            counts: Counter[str] = Counter()
            with self._noting(counts, "failed_loads"):
                self._publish(waiting.order.pages, waiting.order.count, counts)
            self._publishing.done(waiting)
            self._count(counts)

    def _publish(self, pages: o.PromptPages, count: int, counts: Counter[str]) -> None:
        form = self._forms.of(pages, make=True)
        if form is None:
            return
        objects = objects_of(pages, form)[:count]
        there = []
        for start in range(0, len(objects), _MOST_NAMES):
            there += self._shared.exists([each.name for each in objects[start : start + _MOST_NAMES]])
        self._note_known([each for each, known in zip(objects, there, strict=True) if known])
        missing = [each for each, known in zip(objects, there, strict=True) if not known]
        if not missing:
            return
        store = self._stores.of(pages)
        with store.lookup(prompt_of(pages, 0, count)[0]) as hit:
            # A hit on named pages has positions, and any other hit has the leading pages.
            held = [objects[at] for at in hit.positions or range(hit.tokens // pages.chunk_tokens)]
            wanted = {each.name for each in missing}
            for first, run in _runs(held, wanted, self._staging):
                began = time.monotonic()
                with self._staging.lane(room_of(run), _LANE_WAIT_S) as lane:
                    if lane is None:
                        return
                    places = lane.places(run)
                    target = _Outgoing(first, places, run, form)
                    loaded = store.load_to(
                        hit, target, first=first, count=len(run), keep=True, deadline_s=LOOKUP_S
                    ).wait()
                    ready = max(loaded.tokens // pages.chunk_tokens - first, 0)
                    run, places = run[:ready], places[:ready]
                    if not ready:
                        return
                    put = self._shared.put([each.name for each in run], places, _origin(pages, objects, run))
                self._note_known([each for each, done in zip(run, put, strict=True) if done])
                counts["published_pages"] += sum(put)
                counts["published_bytes"] += sum(put) * pages.page_bytes
                counts["refused_pages"] += len(put) - sum(put)
                if self._bytes_per_s:
                    left_s = room_of(run) / self._bytes_per_s - (time.monotonic() - began)
                    time.sleep(max(left_s, 0))

    def _note_known(self, objects: Sequence[PageObject]) -> None:
        with self._known_lock:
            for each in objects:
                self._known.note(each.name)


class _Outgoing:
    """A lane of staging memory as the target of a hit's pages from ``first`` on. Each page is written behind
    its header."""

    def __init__(
        self, first: int, places: Sequence[Memory], objects: Sequence[PageObject], form: ObjectForm
    ) -> None:
        self._first = first
        self._form = form
        self._to = list(zip(places, objects, strict=True))

    def write(self, pages: Sequence[tuple[int, int]]) -> None:
        targets = [(self._to[position - self._first], address) for position, address in pages]
        self._form.write([(place, address, each) for (place, each), address in targets])


def _runs(
    held: Sequence[PageObject], wanted: Collection[str], staging: StagingMemory
) -> list[tuple[int, list[PageObject]]]:
    """Divide the ``wanted`` pages of a hit into runs of consecutive pages. Return each run with its position
    in the hit. ``held`` has all pages of the hit. Each run fits one lane of the staging memory."""
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


def _origin(pages: o.PromptPages, objects: Sequence[PageObject], run: Sequence[PageObject]) -> o.Origin:
    places = {each.name: at for at, each in enumerate(objects)}
    chunks = [places[each.name] for each in run]
    return o.Origin.of(pages, chunks, objects[chunks[0] - 1].name if chunks[0] else "")


@dataclass(slots=True, eq=False)
class WaitingPrompt:
    """A prompt to publish: its pages with these ``names``. ``uses`` counts later orders with some of these
    pages."""

    order: o.Publish
    names: set[str]
    uses: int = 0


class PublishQueue:
    """Prompts to publish, with at most ``most`` pages in total. The prompt with most uses is published first,
    and among equals the oldest. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()  # guards the fields below
        self._waiting: list[WaitingPrompt] = []
        self._queued: set[str] = set()  # page names of prompts that wait or are being published

    def add(self, order: o.Publish, names: Sequence[str], missing: set[str]) -> int:
        """Add the ``missing`` pages of an order that are not queued yet, and count a use of each waiting
        prompt that has some of its pages. ``names`` has all pages of the order. Return the number of pages
        that were dropped because the queue is full."""
        with self._changed:
            for each in self._waiting:
                each.uses += not each.names.isdisjoint(names)
            new = missing - self._queued
            if not new:
                return 0
            if self._queued and len(self._queued) + len(new) > self._most:
                return len(new)
            self._queued |= new
            self._waiting.append(WaitingPrompt(order, new))
            self._changed.notify()
            return 0

    def take(self) -> WaitingPrompt:
        """Wait for a prompt and return it. Call :meth:`done` after it was published."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            first = max(self._waiting, key=lambda each: each.uses)
            self._waiting.remove(first)
            return first

    def done(self, prompt: WaitingPrompt) -> None:
        with self._changed:
            self._queued -= prompt.names


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
    options = SharedStoreOptions(
        begin.url,
        begin.protocol,
        begin.devices,
        begin.host,
        begin.most_bytes,
        begin.lifetime_s,
        begin.keys_url,
        begin.sharing_key,
        begin.held,
        tell,
    )
    try:
        shared = open_shared_store(options)
    except TierStoreError as error:
        tell(o.Away(str(error), isinstance(error, UsageError)))
        os._exit(1)
    tell(o.Ready(shared.transport, shared.trouble))
    return Agent(begin, shared, tell)


if __name__ == "__main__":
    main()
