"""The daemon's side of its agents: start agents, send orders, count events, and kill agents that hang.

Everything runs on the daemon's event loop, and no call waits for an agent longer than its time limit. Errors
are misses: the result is 0 chunks.
"""

from __future__ import annotations

import array
import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from tierstore.cluster import orders as o
from tierstore.cluster.recent import Recent
from tierstore.cluster.shared_keys import check_keys_url
from tierstore.cluster.shared_store import check_url, is_object_store, read_secret
from tierstore.core.prompts import PromptView
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.planner import CLUSTER, TierRate
from tierstore.stats import ClusterStats
from tierstore.tiers.disk.keyring import Scope
from tierstore.types import ForgetReceipt, Forgettable
from tierstore.units import GIB
from tierstore.wire.framing import LENGTH

_log = logging.getLogger(__name__)


_DEFAULT_BYTES = 100 * GIB  # limit of an object store
_OVERDUE_S = 5.0  # an agent whose answer is this late is killed
_CHECK_S = 0.5
_BACK_OFF_S = (0.1, 5.0)  # shortest and longest delay before an agent is restarted
_LIVED_S = 2.0  # an agent that ran for at least this long is restarted after the shortest delay
_HOPELESS_S = 60.0  # delay of a restart that cannot work until an operator installs software
_ABSENT_S = 2.0  # a missing page is not asked for again during this time
_PUBLISHED_S = 60.0  # a published prompt is not reported again during this time
_REMEMBERED = 1 << 14
_MOST_UNREAD_BYTES = 16 << 20  # limit of the bytes that an agent has not read
_LATE = 3  # if this many answers to lookups are late within …
_LATE_WITHIN_S = 10.0
_PAUSE_S = (5.0, 60.0)  # … lookups do not ask for this long: at first the shortest, then up to the longest
_MOST_PROMISED = 1024  # limit of promised prompts of all clients (64 for each client) …
_MOST_PROMISED_TOKENS = 16 << 20  # … and of their tokens, because the agent keeps their ids and names
_RATE_SHARE = 0.3  # weight of the newest measurement in the mean

_FORGET_S = 30.0  # longest wait for the deletion of keys
_FORGET_AGAIN_S = 5.0

_Found: TypeAlias = "o.Looked | o.FetchDone"


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options of the shared store: its ``url``, a file with the ``secret``, and ``look_s``, the longest time
    that a lookup waits for the shared store. ``most_bytes`` and ``lifetime_s`` limit the bytes and the age of
    objects in an object store (0: 100 GiB, and any age). ``sealed`` pages are encrypted; they need an object
    store, and a bucket for their keys at ``keys_url``. Raises :class:`UsageError` for values that cannot
    work."""

    url: str
    protocol: str = "tcp"
    devices: str = ""
    host: str = ""
    secret: Path | None = None
    publish: str = "reused"
    min_tokens: int = 1024
    look_s: float = 0.003
    staging_bytes: int = 128 << 20
    bytes_per_s: int = 0
    most_bytes: int = 0
    lifetime_s: float = 0.0
    sealed: bool = False
    keys_url: str = ""

    def __post_init__(self) -> None:
        check_url(self.url)
        if self.sealed:
            self._check_sealed()
        elif self.keys_url:
            raise UsageError("cluster_keys has the keys of encrypted pages: give disk_key, too")
        if is_object_store(self.url):
            if self.protocol != "tcp" or self.devices or self.host:
                raise UsageError(
                    "cluster_protocol, cluster_devices and cluster_host are for Mooncake: leave them out "
                    "with an object store"
                )
        elif self.most_bytes or self.lifetime_s:
            raise UsageError(
                "cluster_bytes and cluster_days are limits of an object store: leave them out with Mooncake, "
                "whose lenders give its size"
            )

    def _check_sealed(self) -> None:
        if not is_object_store(self.url):
            raise UsageError(
                "disk_key with cluster needs an object store: pages in Mooncake's memory are not encrypted, "
                "so leave one of the two out"
            )
        if not self.keys_url:
            raise UsageError(
                "disk_key with cluster needs cluster_keys: an address in another bucket, for the keys of the "
                "pages"
            )
        if self.secret is not None:
            raise UsageError(
                "cluster_secret adds nothing to disk_key, which encrypts pages and hides their names: "
                "leave it out"
            )
        check_keys_url(self.url, self.keys_url)


@dataclass(frozen=True, slots=True)
class SealedHost:
    """This host's keys and pages, for agents whose pages are sealed (encrypted). All functions may block.
    ``forget`` and ``keep`` raise :class:`StoreUnavailableError` or :class:`OSError` if the disk fails."""

    sharing_key: Callable[[], bytes | None]  # returns the key that decrypts shared keys; None if locked
    forget: Callable[[Forgettable], object]  # forgets here the pages that another host has forgotten
    held: Callable[[], bytes]  # returns the bytes that the last ``keep`` has stored
    keep: Callable[[bytes], None]  # stores bytes on disk


class Cluster:
    """The daemon's access to the shared store. Call :meth:`start` and :meth:`stop` on the event loop.
    ``daemon`` is the address at which agents connect to the daemon."""

    def __init__(self, options: ClusterOptions, daemon: str) -> None:
        self._options = options
        self._counts: Counter[str] = Counter()
        secret = read_secret(options.secret)
        begin = o.Begin(
            daemon,
            options.url,
            options.protocol,
            options.devices,
            options.host,
            secret,
            options.staging_bytes // 2,
            options.bytes_per_s,
            options.most_bytes or _DEFAULT_BYTES,
            options.lifetime_s,
            options.keys_url,
        )
        self._logged = ""  # the problem that was logged last
        self._begin = begin
        self._getter = _Agent(self._first, self._counts, self._log, self._noticed)
        self._putter = _Agent(self._first, self._counts, self._log, self._noticed)
        self._host: SealedHost | None = None
        self._held: o.HeldKeys = []
        self._forgetting: set[asyncio.Task[None]] = set()
        self._absent: Recent[tuple[bytes, bytes]] = Recent(_ABSENT_S, _REMEMBERED)
        self._published: Recent[tuple[bytes, bytes, int]] = Recent(_PUBLISHED_S, _REMEMBERED)
        self._fetching: dict[tuple[bytes, bytes], asyncio.Future[_Found]] = {}
        self._promised = 0  # number of promised prompts …
        self._promised_tokens = 0  # … and of their tokens
        self._late: list[float] = []
        self._paused_until = 0.0
        self._pause_s = _PAUSE_S[0]
        self._bytes_per_s = 0.0
        self._latency_s = 0.0

    @property
    def sealed(self) -> bool:
        """Whether pages in the shared store are encrypted."""
        return self._options.sealed

    def start(self, host: SealedHost | None = None) -> None:
        """Start the agents. Encrypted pages need ``host``. If its keyring is locked, no agent starts."""
        self._host = host
        if host is not None and host.sharing_key() is None:
            self._getter.trouble = "the disk key does not open the keyring"
            return
        if host is not None:
            self._held = _decoded(host.held())
        for agent in (self._getter, self._putter):
            agent.start()
        if not self._options.secret and not self.sealed:
            _log.info(
                "cluster: without cluster_secret, every host that reaches the shared store can read and "
                "replace its pages"
            )

    async def stop(self) -> None:
        for task in self._forgetting:
            task.cancel()
        for agent in (self._getter, self._putter):
            await agent.stop()

    # -- forgetting ----------------------------------------------------------------------------------

    async def forget(
        self, what: Forgettable, scopes: Iterable[Scope], here: Awaitable[ForgetReceipt]
    ) -> ForgetReceipt:
        """Delete the shared keys that ``what`` covers and the keys of ``scopes``, while ``here`` forgets the
        pages of this host. No agent makes or uses such a key until both have ended. Raise
        :class:`StoreUnavailableError` if some keys may still exist."""
        asked: list[tuple[_Agent, int, asyncio.Future[Any]]] = []
        for agent in (self._getter, self._putter):
            order = o.DeleteKeys(0, what.tenant, what.model, [(each.tenant, each.model) for each in scopes])
            answer = agent.ask(partial(_numbered, order), _FORGET_S)
            if answer is not None:
                asked.append((agent, order.id, answer))
        try:
            receipt = await here
            if asked:
                await asyncio.wait({answer for _, _, answer in asked}, timeout=_FORGET_S)
        finally:
            for agent, number, _ in asked:
                agent.tell(o.Resume(number))
        answers = [answer.result() for _, _, answer in asked if answer.done()]
        done = [each for each in answers if isinstance(each, o.KeysDeleted)]
        failed = next((each.failed for each in done if each.failed), "")
        if failed or not asked or len(done) < len(asked):
            raise StoreUnavailableError(
                "this host has forgotten, but the keys of pages in the shared store may still be there "
                f"({failed or 'an agent does not answer'}): forget again"
            )
        return replace(receipt, shared_keys=max(each.keys for each in done))

    def _first(self) -> o.Begin:
        """Return the first message to an agent. The sharing key is read anew, so that it never stays in
        memory that could be swapped to disk."""
        key = self._host.sharing_key() if self._host is not None else None
        return msgspec.structs.replace(self._begin, sharing_key=key or b"", held=self._held)

    def _noticed(self, agent: _Agent, order: o.Vanished | o.KeysHeld) -> None:
        if self._host is None:
            return
        if isinstance(order, o.Vanished):
            work = self._forget_here(self._host, agent, order)
        else:
            self._held = order.held
            work = self._keep(self._host)
        task = asyncio.get_running_loop().create_task(work)
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _keep(self, host: SealedHost) -> None:
        """Write to disk which shared keys exist."""
        try:
            await asyncio.to_thread(host.keep, msgspec.msgpack.encode(self._held))
        except OSError as error:
            self._counts["failed_notes"] += 1
            _log.warning("cluster: the shared keys cannot be noted: %s", error)

    async def _forget_here(self, host: SealedHost, agent: _Agent, order: o.Vanished) -> None:
        """Forget the tenant and model that another host has forgotten."""
        while True:
            try:
                await asyncio.to_thread(host.forget, Forgettable(order.tenant, order.model))
                break
            except StoreUnavailableError as error:
                _log.warning("cluster: another host has forgotten pages: %s", error)
                await asyncio.sleep(_FORGET_AGAIN_S)
        self._counts["forgets_elsewhere"] += 1
        agent.tell(o.Resume(order.id))

    def _log(self, trouble: str) -> None:
        """Log a problem once, even if both agents report it, or report it again."""
        if trouble and trouble != self._logged:
            self._logged = trouble
            _log.warning("cluster: %s", trouble)

    @property
    def pids(self) -> set[int]:
        """The process ids of the running agents."""
        return {agent.pid for agent in (self._getter, self._putter) if agent.pid}

    def rates(self) -> Mapping[str, TierRate]:
        """Return the measured rate of fetching from the shared store; empty before the first measurement."""
        return {CLUSTER: TierRate(self._bytes_per_s, self._latency_s, 0.0)} if self._bytes_per_s else {}

    def stats(self) -> ClusterStats:
        return ClusterStats(
            url=self._options.url,
            online=self._getter.ready and not self._getter.trouble,
            trouble=self._getter.trouble or self._putter.trouble,
            transport=self._getter.transport,
            bytes_per_s=self._bytes_per_s,
            counts=dict(self._counts),
        )

    # -- asking --------------------------------------------------------------------------------------

    async def look(self, view: PromptView, first: int) -> int:
        """Return how many chunks behind the first ``first`` chunks the shared store probably has. Waits at
        most ``look_s`` seconds."""
        left = (view.whole_chunks - first) * view.chunk_tokens
        looked = await self._look(view, first, left)
        return min(looked.chunks, view.whole_chunks - first) if looked is not None else 0

    async def look_for(self, view: PromptView, gain: int) -> Sequence[int]:
        """Return the positions of the named chunks that the shared store probably has. ``gain`` is the number
        of tokens that these chunks save a prompt. Waits at most ``look_s`` seconds."""
        looked = await self._look(view, 0, gain) if view.whole_chunks else None
        if not isinstance(looked, o.Looked) or len(looked.there) % 4:
            return ()
        return [at for at in array.array("I", looked.there) if at < view.whole_chunks]

    async def _look(self, view: PromptView, first: int, tokens: int) -> _Found | None:
        """Ask the shared store. Return None without an answer, or if it is not worth asking."""
        now = time.monotonic()
        if not self._shares(view) or tokens < max(self._options.min_tokens, 1) or now < self._paused_until:
            return None
        key = _key(view, first)
        if key in self._absent:
            return None
        looked = self._getter.ask(lambda number: o.Look(number, _pages(view), first), self._options.look_s)
        if looked is None:
            return None
        done, _ = await asyncio.wait({looked}, timeout=self._options.look_s)
        if not done:
            self._note_late(now)
            return None
        self._pause_s = _PAUSE_S[0]
        self._counts["looks"] += 1
        answer: _Found = looked.result()
        if answer.chunks > 0:
            return answer
        self._absent.note(key)
        return None

    def _note_late(self, now: float) -> None:
        self._counts["late_looks"] += 1
        self._late = [at for at in self._late if at > now - _LATE_WITHIN_S] + [now]
        if len(self._late) >= _LATE:
            self._paused_until = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _PAUSE_S[1])
            self._late.clear()

    async def fetch_remote(self, view: PromptView, first: int, count: int, wait_s: float) -> int:
        """Fetch chunks ``first … first + count`` into host memory. Return the number of consecutive chunks
        that are known to have arrived within ``wait_s`` seconds."""
        count = min(count, view.whole_chunks - first)
        if not self._shares(view) or count <= 0:
            return 0
        key = _key(view, first)
        fetching = self._fetching.get(key)
        if fetching is None:
            began = time.monotonic()
            fetching = self._getter.ask(
                lambda number: o.FetchOrder(number, _pages(view), first, count, wait_s), wait_s
            )
            if fetching is None:
                return 0
            self._fetching[key] = fetching

            def note(ended: asyncio.Future[_Found]) -> None:
                self._fetching.pop(key, None)
                nbytes = ended.result().chunks * view.registration.page_bytes
                if nbytes:
                    self._measure(nbytes, time.monotonic() - began)

            fetching.add_done_callback(note)
        done, _ = await asyncio.wait({fetching}, timeout=wait_s)
        if not done:
            self._counts["late_brings"] += 1
            return 0
        return fetching.result().chunks

    def expect(self, view: PromptView, first: int, count: int, wait_s: float) -> Callable[[], None]:
        """Fetch promised chunks ``first … first + count`` while another host publishes them, for at most
        ``wait_s`` seconds. Return a function that cancels this."""
        count = min(count, view.whole_chunks - first)
        agent = self._getter
        if not self._shares(view) or count <= 0:
            return _nothing
        tokens = view.whole_chunks * view.chunk_tokens
        if self._promised and (
            self._promised >= _MOST_PROMISED or self._promised_tokens + tokens > _MOST_PROMISED_TOKENS
        ):
            self._counts["refused_promises"] += 1
            return _nothing
        numbers: list[int] = []

        def order(number: int) -> o.FetchOrder:
            numbers.append(number)
            return o.FetchOrder(number, _pages(view), first, count, wait_s, promised=True)

        fetching = agent.ask(order, wait_s)
        if fetching is None:
            return _nothing
        self._promised += 1
        self._promised_tokens += tokens

        def note(_: asyncio.Future[_Found]) -> None:
            self._promised -= 1
            self._promised_tokens -= tokens
            self._counts["promised_fetches"] += 1

        fetching.add_done_callback(note)

        def stop() -> None:
            if not fetching.done():
                agent.tell(o.Stop(numbers[0]))

        return stop

    def _measure(self, nbytes: int, seconds: float) -> None:
        rate = nbytes / max(seconds, 1e-6)
        self._bytes_per_s += (_RATE_SHARE if self._bytes_per_s else 1.0) * (rate - self._bytes_per_s)

    def publishes(self, view: PromptView, *, elsewhere: bool) -> bool:
        """Return whether to call :meth:`committed` for the pages of a prompt. ``elsewhere`` says that an
        engine on another host will request these pages."""
        wanted = self._options.publish == "all" or (elsewhere and self._options.publish != "none")
        return wanted and self._shares(view)

    # -- telling -------------------------------------------------------------------------------------

    def used(self, view: PromptView, chunks: int) -> None:
        """Publish the first ``chunks`` chunks of a prompt again after a use, because they may have left the
        shared store."""
        if self._options.publish != "none":
            self._publish(view, chunks)

    def committed(self, view: PromptView, chunks: int) -> None:
        """Publish the first ``chunks`` chunks of a prompt, which are stored here (of named chunks, perhaps
        not all); see :meth:`publishes`."""
        self._publish(view, chunks)

    def _publish(self, view: PromptView, chunks: int) -> None:
        if chunks <= 0 or not self._shares(view):
            return
        # The key includes the agent's pid, because a restarted agent has an empty queue.
        key = (*_key(view, chunks - 1), self._putter.pid)
        if key not in self._published and self._putter.tell(o.Publish(_pages(view, chunks), chunks)):
            self._published.note(key)

    def _shares(self, view: PromptView) -> bool:
        return self.sealed or not view.registration.identity.tenant


def _nothing() -> None:
    """Do nothing: there is no fetch to cancel."""


def _decoded(held: bytes) -> o.HeldKeys:
    try:
        return msgspec.msgpack.decode(held, type=o.HeldKeys) if held else []
    except msgspec.MsgspecError:
        _log.warning("cluster: the note of shared keys is damaged: forgets of other hosts may be missed")
        return []


def _numbered(order: o.DeleteKeys, number: int) -> o.DeleteKeys:
    order.id = number
    return order


def _key(view: PromptView, chunk: int) -> tuple[bytes, bytes]:
    """Return the identity's digest, and the key of a chunk of the prompt."""
    return view.registration.identity.digest, view.key_up_to(chunk)


def _pages(view: PromptView, chunks: int | None = None) -> o.PromptPages:
    whole = view.whole()
    count = len(whole.keys) if chunks is None else chunks
    return o.PromptPages(
        asdict(whole.identity),
        view.registration.page_bytes,
        view.chunk_tokens,
        b"".join(whole.keys[:count]),
        whole.token_bytes[: count * view.chunk_tokens * 4],
        view.named,
        view.depth,
    )


@dataclass(slots=True)
class _Asked:
    answer: asyncio.Future[Any]
    overdue_at: float


@dataclass(slots=True, eq=False)
class _Agent:
    """One agent: a process that is restarted when it ends."""

    begin: Callable[[], o.Begin]
    counts: Counter[str]
    log: Callable[[str], None]
    noticed: Callable[[_Agent, o.Vanished | o.KeysHeld], None]
    ready: bool = False
    transport: str = ""
    trouble: str = "starting"
    pid: int = 0
    _asked: dict[int, _Asked] = field(default_factory=dict)
    _next: int = 1
    _writer: asyncio.StreamWriter | None = None
    _running: asyncio.Task[None] | None = None
    _hopeless: bool = False
    _failure: str = ""  # the error that was logged last

    def start(self) -> None:
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    def ask(
        self, order: Callable[[int], o.Look | o.FetchOrder | o.DeleteKeys], wait_s: float
    ) -> asyncio.Future[Any] | None:
        """Send an order and return its answer, which has 0 chunks if the agent ends before it answers. Return
        None if no order can be sent."""
        number = self._next
        if not self.tell(order(number)):
            return None
        self._next += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = _Asked(answer, time.monotonic() + wait_s + _OVERDUE_S)
        return answer

    def tell(self, order: o.ToAgent) -> bool:
        """Send a message. Return False if no agent can read it now."""
        if not self.ready or self._writer is None:
            return False
        if self._writer.transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
            self.counts["unread_orders"] += 1
            return False
        self._write(self._writer, order)
        return True

    def _write(self, writer: asyncio.StreamWriter, order: o.ToAgent) -> None:
        body = msgspec.msgpack.encode(order)
        writer.write(LENGTH.pack(len(body)) + body)

    async def _run(self) -> None:
        back_off_s = _BACK_OFF_S[0]
        while True:
            began = time.monotonic()
            try:
                await self._live()
            except OSError as error:  # the system has no process or descriptor left; it may have one later
                self.trouble = f"cannot start its agent: {error.strerror}"
            self.counts["agent_ends"] += 1
            if time.monotonic() - began > _LIVED_S:
                back_off_s = _BACK_OFF_S[0]
            await asyncio.sleep(_HOPELESS_S if self._hopeless else back_off_s)
            back_off_s = min(back_off_s * 2, _BACK_OFF_S[1])

    async def _live(self) -> None:
        """Run the agent's process until it ends."""
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", "tierstore.cluster.agent", str(number)]
            try:
                process = subprocess.Popen(
                    command,
                    pass_fds=[number],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours)
        self.pid = process.pid
        watch = asyncio.get_running_loop().create_task(self._watch(process))
        try:
            self._writer = writer
            self._write(writer, self.begin())
            await self._listen(reader)
        finally:
            self.ready, self.pid, self._writer = False, 0, None
            self.trouble = self.trouble or "its agent has ended"
            watch.cancel()
            writer.close()
            process.kill()
            await asyncio.to_thread(process.wait)  # a driver may delay its end
            for number, asked in self._asked.items():
                if not asked.answer.done():
                    asked.answer.set_result(o.FetchDone(number, 0))
            self._asked.clear()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        decoder = msgspec.msgpack.Decoder(o.ToDaemon)
        while True:
            try:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                order = decoder.decode(await reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
                return
            match order:
                case o.Ready():
                    self.ready, self.transport, self._hopeless = True, order.transport, False
                    self._note_trouble(order.trouble)
                case o.Away():
                    self._note_trouble(order.message)
                    self._hopeless = order.hopeless
                case o.Trouble():
                    self._note_trouble(order.message)
                case o.Looked() | o.FetchDone() | o.KeysDeleted():
                    asked = self._asked.pop(order.id, None)
                    if asked is not None and not asked.answer.done():
                        if not isinstance(order, o.KeysDeleted):
                            order.chunks = max(order.chunks, 0)
                        asked.answer.set_result(order)
                case o.Vanished() | o.KeysHeld():
                    self.noticed(self, order)
                case o.Counted():
                    self.counts.update(order.counts)
                case o.Failed():
                    if order.message != self._failure:  # a repeated error is logged once
                        _log.error("cluster: an agent had an error and continues: %s", order.message)
                    self._failure = order.message

    def _note_trouble(self, message: str) -> None:
        self.log(message)
        self.trouble = message

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the process if an answer is overdue."""
        while True:
            await asyncio.sleep(_CHECK_S)
            now = time.monotonic()
            if any(asked.overdue_at < now for asked in self._asked.values()):
                self.counts["agent_kills"] += 1
                self.trouble = "its agent hung and was killed"
                process.kill()
                return
