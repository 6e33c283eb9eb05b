"""The daemon's side of its agents: starts them, gives them orders, counts, and kills those that hang.

Everything runs on the daemon's event loop, and nothing here waits for an agent longer than it was told to.
What goes wrong is a miss: whoever asks gets 0 chunks."""

from __future__ import annotations

import array
import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from tierstore.cluster import orders as o
from tierstore.cluster.recent import Recent
from tierstore.cluster.shared_store import check_url
from tierstore.core.prompts import PromptView
from tierstore.errors import UsageError
from tierstore.planner import CLUSTER, TierRate
from tierstore.stats import ClusterStats
from tierstore.wire.framing import LENGTH

_log = logging.getLogger(__name__)


_OVERDUE_S = 5.0  # after which an agent that has not answered is killed
_CHECK_S = 0.5
_BACK_OFF_S = (0.1, 5.0)
_LIVED_S = 2.0  # after such a life the next one begins without much delay
_HOPELESS_S = 60.0  # between two trials of what cannot work, until somebody installs something
_ABSENT_S = 2.0  # for which a page that was not there is not asked for again
_PUBLISHED_S = 60.0  # for which a prompt that was published is not told of again
_REMEMBERED = 1 << 14
_MOST_UNREAD_BYTES = 16 << 20  # that an agent has not read
_LATE = 3  # looks that came late, in …
_LATE_WITHIN_S = 10.0
_PAUSE_S = (5.0, 60.0)  # … stop the looking for so long
_MOST_PROMISED = 1024  # prompts whose pages are waited for at a time, of all clients; each has 64 at most …
_MOST_PROMISED_TOKENS = 16 << 20  # … and their tokens: the agent keeps their ids and names
_RATE_SHARE = 0.3  # of the newest measurement

_Found: TypeAlias = "o.Looked | o.FetchDone"


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """``url`` is the shared store's; ``secret`` a file; ``look_s`` what a lookup waits for the shared store.
    Raises :class:`UsageError` for what cannot be."""

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

    def __post_init__(self) -> None:
        check_url(self.url)

    def read_secret(self) -> bytes:
        if self.secret is None:
            return b""
        try:
            secret = self.secret.read_bytes().strip()
        except OSError as error:
            raise UsageError(f"cannot read the cluster's secret: {error}") from error
        if not 16 <= len(secret) <= 64:
            raise UsageError(f"the cluster's secret has {len(secret)} bytes: give 16 to 64")
        return secret


class Cluster:
    """What the daemon asks of the shared store. :meth:`start` and :meth:`stop` it on the event loop.
    ``daemon`` is an address at which agents reach the daemon."""

    def __init__(self, options: ClusterOptions, daemon: str) -> None:
        self._options = options
        self._counts: Counter[str] = Counter()
        secret = options.read_secret()
        begin = o.Begin(
            daemon,
            options.url,
            options.protocol,
            options.devices,
            options.host,
            secret,
            options.staging_bytes // 2,
            options.bytes_per_s,
        )
        self._getter = _Agent(begin, self._counts)
        self._putter = _Agent(begin, self._counts)
        self._absent: Recent[tuple[bytes, bytes]] = Recent(_ABSENT_S, _REMEMBERED)
        self._published: Recent[tuple[bytes, bytes, int]] = Recent(_PUBLISHED_S, _REMEMBERED)
        self._fetching: dict[tuple[bytes, bytes], asyncio.Future[_Found]] = {}
        self._promised = 0  # prompts that are waited for …
        self._promised_tokens = 0  # … and their tokens
        self._late: list[float] = []
        self._paused_until = 0.0
        self._pause_s = _PAUSE_S[0]
        self._bytes_per_s = 0.0
        self._latency_s = 0.0

    def start(self) -> None:
        for agent in (self._getter, self._putter):
            agent.start()
        if not self._options.secret:
            _log.info("cluster: whoever reaches the shared store's ports can read and replace its pages")

    async def stop(self) -> None:
        for agent in (self._getter, self._putter):
            await agent.stop()

    @property
    def pids(self) -> set[int]:
        """Of the agents that run."""
        return {agent.pid for agent in (self._getter, self._putter) if agent.pid}

    def rates(self) -> Mapping[str, TierRate]:
        """What bytes of the shared store cost, as far as that was measured."""
        return {CLUSTER: TierRate(self._bytes_per_s, self._latency_s, 0.0)} if self._bytes_per_s else {}

    def stats(self) -> ClusterStats:
        return ClusterStats(
            url=self._options.url,
            online=self._getter.ready,
            trouble=self._getter.trouble or self._putter.trouble,
            transport=self._getter.transport,
            bytes_per_s=self._bytes_per_s,
            counts=dict(self._counts),
        )

    # -- asking --------------------------------------------------------------------------------------

    async def look(self, view: PromptView, first: int) -> int:
        """How many chunks behind the first ``first`` the shared store seems to have. Waits ``look_s`` at
        most."""
        left = (view.whole_chunks - first) * view.chunk_tokens
        looked = await self._look(view, first, left)
        return min(looked.chunks, view.whole_chunks - first) if looked is not None else 0

    async def look_for(self, view: PromptView, gain: int) -> Sequence[int]:
        """Which of these named chunks the shared store seems to have, where a prompt gains ``gain`` tokens by
        them. Waits ``look_s`` at most."""
        looked = await self._look(view, 0, gain) if view.whole_chunks else None
        if not isinstance(looked, o.Looked) or len(looked.there) % 4:
            return ()
        return [at for at in array.array("I", looked.there) if at < view.whole_chunks]

    async def _look(self, view: PromptView, first: int, tokens: int) -> _Found | None:
        """None where it is not worth it, where there is no answer, or nothing."""
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
        if looked.result().chunks > 0:
            return looked.result()
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
        """Have chunks ``first … first + count`` come into host memory; how many came in ``wait_s`` seconds,
        one behind the other, as far as is known."""
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
        """Somebody has promised chunks ``first … first + count``: have them come as they are published on
        another host, in ``wait_s`` seconds. Call the result when they are not wanted any more."""
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
        """Whether :meth:`committed` is to be told of a prompt's pages. ``elsewhere``: another host's engine
        is going to ask for them."""
        wanted = self._options.publish == "all" or (elsewhere and self._options.publish != "none")
        return wanted and self._shares(view)

    # -- telling -------------------------------------------------------------------------------------

    def used(self, view: PromptView, chunks: int) -> None:
        """The first ``chunks`` of a prompt have been asked for again, and may have left the shared store."""
        if self._options.publish != "none":
            self._publish(view, chunks)

    def committed(self, view: PromptView, chunks: int) -> None:
        """The first ``chunks`` of a prompt are here (of named ones, some of them), and others are to have
        them: see :meth:`publishes`."""
        self._publish(view, chunks)

    def _publish(self, view: PromptView, chunks: int) -> None:
        if chunks <= 0 or not self._shares(view):
            return
        # By one agent: its queue ends with it.
        key = (*_key(view, chunks - 1), self._putter.pid)
        if key not in self._published and self._putter.tell(o.Publish(_pages(view, chunks), chunks)):
            self._published.note(key)

    def _shares(self, view: PromptView) -> bool:
        return not view.registration.identity.tenant


def _nothing() -> None:
    """There is nothing to end."""


def _key(view: PromptView, chunk: int) -> tuple[bytes, bytes]:
    """What a prompt up to one of its chunks is known by."""
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
    answer: asyncio.Future[_Found]
    overdue_at: float


@dataclass(slots=True, eq=False)
class _Agent:
    """One agent: a process that is started again whenever it ends."""

    begin: o.Begin
    counts: Counter[str]
    ready: bool = False
    transport: str = ""
    trouble: str = "starting"
    pid: int = 0
    _asked: dict[int, _Asked] = field(default_factory=dict)
    _next: int = 1
    _writer: asyncio.StreamWriter | None = None
    _running: asyncio.Task[None] | None = None
    _hopeless: bool = False
    _failure: str = ""  # that was told of last

    def start(self) -> None:
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    def ask(
        self, order: Callable[[int], o.Look | o.FetchOrder], wait_s: float
    ) -> asyncio.Future[_Found] | None:
        """The answer, no chunks if the agent ends before; None where it cannot be asked."""
        number = self._next
        if not self.tell(order(number)):
            return None
        self._next += 1
        answer: asyncio.Future[_Found] = asyncio.get_running_loop().create_future()
        self._asked[number] = _Asked(answer, time.monotonic() + wait_s + _OVERDUE_S)
        return answer

    def tell(self, order: o.ToAgent) -> bool:
        """Say something; False where nobody listens."""
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
            except OSError as error:  # no process, no descriptor: later there may be
                self.trouble = f"its agent cannot be started: {error.strerror}"
            self.counts["agent_ends"] += 1
            if time.monotonic() - began > _LIVED_S:
                back_off_s = _BACK_OFF_S[0]
            await asyncio.sleep(_HOPELESS_S if self._hopeless else back_off_s)
            back_off_s = min(back_off_s * 2, _BACK_OFF_S[1])

    async def _live(self) -> None:
        """One life of an agent."""
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
            self._write(writer, self.begin)
            await self._listen(reader)
        finally:
            self.ready, self.pid, self._writer = False, 0, None
            self.trouble = self.trouble or "its agent has ended"
            watch.cancel()
            writer.close()
            process.kill()
            await asyncio.to_thread(process.wait)  # a driver may keep it for a while
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
                    self.ready, self.transport, self.trouble = True, order.transport, ""
                    self._hopeless = False
                case o.Away():
                    if self.trouble != order.message:
                        _log.warning("cluster: %s", order.message)
                    self.trouble, self._hopeless = order.message, order.hopeless
                case o.Looked() | o.FetchDone():
                    asked = self._asked.pop(order.id, None)
                    if asked is not None and not asked.answer.done():
                        order.chunks = max(order.chunks, 0)
                        asked.answer.set_result(order)
                case o.Counted():
                    self.counts.update(order.counts)
                case o.Failed():
                    if order.message != self._failure:  # the same again and again is told once
                        _log.error("cluster: an agent goes on after an error: %s", order.message)
                    self._failure = order.message

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Kill it when an answer is overdue."""
        while True:
            await asyncio.sleep(_CHECK_S)
            now = time.monotonic()
            if any(asked.overdue_at < now for asked in self._asked.values()):
                self.counts["agent_kills"] += 1
                self.trouble = "its agent hung and was killed"
                process.kill()
                return
