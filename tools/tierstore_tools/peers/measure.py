"""Measure the peers in rounds, and look for the pages that a killed daemon still has.

Each shape of a prompt has daemons of its own, without a disk: saves, loads and lookups are not measured
beside disk writes. Other daemons, with a disk, are killed some seconds after their last save, and started
again.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tierstore_tools
from tierstore.errors import TierStoreError
from tierstore_tools.peers.client import Shape
from tierstore_tools.peers.daemons import DAEMONS, MOONCAKE_ENVIRONMENT, CachePeer, PeerDaemon, PeerRoom
from tierstore_tools.processes import core_seconds, memory_bytes, shared_bytes

Progress = Callable[[str], None]
_ANSWER_S = 300.0
_LOOKUP_PAGE_BYTES = 4096  # pages are small here, because only the lookup is measured
_LOOKUPS = 5  # per prompt and round
_SPARE_BYTES = 256 << 20  # a daemon has twice the saved bytes, and this


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median over rounds, and its range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        """Return the median and the range of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_whole(cls, values: Sequence[float | None]) -> Ratio | None:
        """Return :meth:`of` the values that are not None; None if all are."""
        whole = [value for value in values if value is not None]
        return cls.of(whole) if whole else None


@dataclass(frozen=True, slots=True)
class MoveRow:
    """Saves and loads of one peer, over the rounds that loaded all pages; None if no round did.

    ``…_of_memcpy`` is the speed over that of a memcpy in the same process and round. ``…_ours`` is
    tierstore's speed over the peer's in the same round. Core-seconds are the client's and the daemon's
    together. ``memory_bytes`` is the daemon's memory at the end, shared memory included. ``room_bytes`` was
    its capacity for pages, and ``saved_bytes`` the bytes of all saves. ``wrong`` rounds lost a page or
    changed a byte."""

    peer: str
    page_bytes: int
    saved_bytes: int
    save_gb_per_s: Ratio | None
    load_gb_per_s: Ratio | None
    save_of_memcpy: Ratio | None
    load_of_memcpy: Ratio | None
    save_ours: Ratio | None
    load_ours: Ratio | None
    core_s_per_gb: Ratio | None
    memory_bytes: int
    room_bytes: int
    wrong: int


@dataclass(frozen=True, slots=True)
class LookupRow:
    """Lookups of a saved prompt by a client that sees it for the first time. ``ours`` is tierstore's speed
    over the peer's, by round. ``found`` is the mean share of tokens found: below 1 the times mean nothing."""

    peer: str
    tokens: int
    lookup_ms: Ratio
    ours: Ratio
    found: float


@dataclass(frozen=True, slots=True)
class KillRow:
    """A daemon with a disk after ``kill -9`` and a start: ``left`` is the share of the saved tokens,
    ``wrong`` the number of prompts with a wrong byte, ``start_s`` the duration of the start."""

    peer: str
    saved_bytes: int
    left: float
    wrong: int
    start_s: float


@dataclass(frozen=True, slots=True)
class PeersResult:
    """All rows, and the speed of memcpy by page size."""

    memcpy_gb_per_s: dict[int, Ratio]
    moves: tuple[MoveRow, ...]
    lookups: tuple[LookupRow, ...]
    kills: tuple[KillRow, ...]


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """The measurements to make. ``total_bytes`` is the size of a prompt's pages, ``settle_s`` the time
    between the last save and the kill."""

    page_sizes: tuple[int, ...]
    total_bytes: int
    rounds: int
    lookup_tokens: int
    settle_s: float
    directory: Path


def run(plan: PeerPlan, peers: Sequence[CachePeer], progress: Progress) -> PeersResult:
    """Measure all peers. Raises :class:`TierStoreError` if a daemon does not start or a client ends."""
    memcpy: dict[int, Ratio] = {}
    moves: list[MoveRow] = []
    for page_bytes in plan.page_sizes:
        pages = max(plan.total_bytes // page_bytes, 4) // 4 * 4  # whole chunks of 256 tokens
        with _running(plan, peers, page_bytes, pages, plan.rounds, progress) as running:
            for round_ in range(plan.rounds):
                for each in running:
                    progress(f"{page_bytes >> 10} KiB pages, round {round_ + 1}: {each.peer.name}")
                    each.move(round_)
            memcpy[page_bytes] = Ratio.of([rate for each in running for rate in each.memcpy])
            moves += [_move_row(each, running[0]) for each in running]
    lookups = _lookups(plan, peers, progress)
    kills = tuple(_kill(plan, peer, progress) for peer in peers)
    return PeersResult(memcpy, tuple(moves), lookups, kills)


def try_out(peer: CachePeer, directory: Path) -> str | None:
    """Return why a peer does not work on this machine; None if it saved and loaded a few pages."""
    daemon = DAEMONS[peer.name](peer, PeerRoom(_SPARE_BYTES, False, directory))
    try:
        daemon.start()
        with _Client(peer, Shape(daemon.address, _LOOKUP_PAGE_BYTES, 4), directory) as client:
            client.ask("save", 0)
            client.ask("lookup", 0)
            return None if client.ask("load", 0).right else "a loaded page differs from the saved one"
    except TierStoreError as error:
        return str(error)
    finally:
        daemon.close()


def _lookups(plan: PeerPlan, peers: Sequence[CachePeer], progress: Progress) -> tuple[LookupRow, ...]:
    pages = plan.lookup_tokens // 256 * 4
    with _running(plan, peers, _LOOKUP_PAGE_BYTES, pages, plan.rounds, progress) as running:
        for round_ in range(plan.rounds):
            for each in running:
                progress(f"lookups, round {round_ + 1}: {each.peer.name}")
                each.look(round_)
        ours = running[0].lookups
        return tuple(
            LookupRow(
                each.peer.name,
                each.shape.tokens,
                Ratio.of([1e3 * seconds for seconds in each.lookups]),
                Ratio.of([theirs / own for theirs, own in zip(each.lookups, ours, strict=True)]),
                statistics.fmean(each.found),
            )
            for each in running
        )


def _kill(plan: PeerPlan, peer: CachePeer, progress: Progress) -> KillRow:
    page_bytes = plan.page_sizes[0]
    pages = max(plan.total_bytes // page_bytes, 4) // 4 * 4
    progress(f"kill -9: {peer.name}")
    prompts = range(plan.rounds)
    room = PeerRoom(2 * plan.rounds * pages * page_bytes + _SPARE_BYTES, True, plan.directory)
    daemon = DAEMONS[peer.name](peer, room)
    try:
        daemon.start()
        shape = Shape(daemon.address, page_bytes, pages)
        with _Client(peer, shape, plan.directory) as client:
            for prompt in prompts:
                client.ask("save", prompt)
            time.sleep(plan.settle_s)
            daemon.kill()
        begun = time.perf_counter()
        daemon.start()
        start_s = time.perf_counter() - begun
        left, wrong = 0, 0
        with _Client(peer, shape, plan.directory) as client:
            for prompt in prompts:
                found = client.ask("lookup", prompt).tokens
                left += found
                if found == shape.tokens:
                    wrong += not client.ask("load", prompt).right
    finally:
        daemon.close()
    tokens = plan.rounds * shape.tokens
    return KillRow(peer.name, plan.rounds * shape.nbytes, left / tokens, wrong, start_s)


@dataclass(slots=True)
class _Running:
    """A daemon and its client, and their figures by round. A figure is None if the round lost a page."""

    peer: CachePeer
    shape: Shape
    daemon: PeerDaemon
    client: _Client
    room_bytes: int
    memcpy: list[float] = field(default_factory=list)  # GB/s
    saves: list[float | None] = field(default_factory=list)
    loads: list[float | None] = field(default_factory=list)
    core_s_per_gb: list[float | None] = field(default_factory=list)
    lookups: list[float] = field(default_factory=list)  # seconds
    found: list[float] = field(default_factory=list)
    wrong: int = 0

    def move(self, prompt: int) -> None:
        """Save and load one prompt."""
        gb = self.shape.nbytes / 1e9
        copied = self.client.ask("memcpy", prompt)
        daemon = core_seconds(self.daemon.pids())
        saved = self.client.ask("save", prompt)
        found = self.client.ask("lookup", prompt)
        loaded = self.client.ask("load", prompt)
        daemon = core_seconds(self.daemon.pids()) - daemon
        self.memcpy.append(gb / copied.seconds)
        whole = loaded.right and found.tokens == self.shape.tokens
        self.saves.append(gb / saved.seconds if whole else None)
        self.loads.append(gb / loaded.seconds if whole else None)
        self.core_s_per_gb.append((daemon + saved.cpu_s + loaded.cpu_s) / (2 * gb) if whole else None)
        self.wrong += not whole

    def look(self, prompt: int) -> None:
        """Save one prompt, and look it up several times as a new client."""
        self.client.ask("save", prompt)
        answers = []
        for _ in range(_LOOKUPS):
            self.client.ask("forget", prompt)
            answers.append(self.client.ask("lookup", prompt))
        self.lookups.append(statistics.median(answer.seconds for answer in answers))
        self.found.append(statistics.fmean(answer.tokens / self.shape.tokens for answer in answers))

    def memory_bytes(self) -> int:
        """Return the daemon's memory and the client's shared memory, without the engine's own."""
        shared = shared_bytes([self.client.pid]) - self.client.shared_bytes
        return memory_bytes(self.daemon.pids()) + shared


@contextmanager
def _running(
    plan: PeerPlan, peers: Sequence[CachePeer], page_bytes: int, pages: int, prompts: int, progress: Progress
) -> Iterator[list[_Running]]:
    with ExitStack() as stack:
        running = []
        for peer in peers:
            progress(f"{page_bytes >> 10} KiB pages: starting {peer.name}")
            room = PeerRoom(2 * (prompts + 1) * pages * page_bytes + _SPARE_BYTES, False, plan.directory)
            daemon = DAEMONS[peer.name](peer, room)
            stack.callback(daemon.close)
            daemon.start()
            shape = Shape(daemon.address, page_bytes, pages)
            client = stack.enter_context(_Client(peer, shape, plan.directory))
            for command in ("save", "lookup", "load"):  # one uncounted prompt: connections and memory grow
                client.ask(command, prompts)
            running.append(_Running(peer, shape, daemon, client, room.memory_bytes))
        yield running


def _move_row(each: _Running, ours: _Running) -> MoveRow:
    def ratios(over: Sequence[float | None], under: Sequence[float | None]) -> Ratio | None:
        pairs = zip(over, under, strict=True)
        return Ratio.of_whole([one / other if one and other else None for one, other in pairs])

    return MoveRow(
        each.peer.name,
        each.shape.page_bytes,
        len(each.saves) * each.shape.nbytes,
        Ratio.of_whole(each.saves),
        Ratio.of_whole(each.loads),
        ratios(each.saves, each.memcpy),
        ratios(each.loads, each.memcpy),
        ratios(ours.saves, each.saves),
        ratios(ours.loads, each.loads),
        Ratio.of_whole(each.core_s_per_gb),
        each.memory_bytes(),
        each.room_bytes,
        each.wrong,
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    seconds: float
    cpu_s: float
    tokens: int = 0
    right: bool = False


class _Client:
    """A peer's client, in a process of its own. A context manager."""

    def __init__(self, peer: CachePeer, shape: Shape, directory: Path) -> None:
        self._peer = peer
        # This directory holds tierstore_tools only: the peer's Python must not import our other packages.
        path = directory / "tools"
        path.mkdir(exist_ok=True)
        if not (path / "tierstore_tools").exists():
            (path / "tierstore_tools").symlink_to(Path(tierstore_tools.__file__).parent)
        program = (
            f"import sys; sys.path.insert(0, {str(path)!r}); "
            "from tierstore_tools.peers.client import main; main(*sys.argv[1:])"
        )
        self._log = directory / f"client-{peer.name}"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [peer.python, "-c", program, peer.name, json.dumps(asdict(shape))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **MOONCAKE_ENVIRONMENT, "LMCACHE_TRACK_USAGE": "false"},
            )
        self.pid = self._process.pid
        self.shared_bytes = 0

    def __enter__(self) -> _Client:
        self.shared_bytes = int(json.loads(self._hear())["shared_bytes"])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, command: str, prompt: int) -> _Answer:
        """Send a command and return the answer. Raises :class:`TierStoreError` if the client ended or does
        not answer."""
        assert self._process.stdin is not None, "it was opened with one"
        try:
            self._process.stdin.write(json.dumps([command, prompt]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._died("ended") from error
        return _Answer(**json.loads(self._hear()))

    def _hear(self) -> bytes:
        assert self._process.stdout is not None, "it was opened with one"
        if not select.select([self._process.stdout], [], [], _ANSWER_S)[0]:
            raise self._died(f"did not answer within {_ANSWER_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._died("ended")
        return line

    def _died(self, how: str) -> TierStoreError:
        said = self._log.read_text(errors="replace").strip().splitlines() or ["no output"]
        return TierStoreError(f"the client of {self._peer.name} {how}: {said[-1]}")
