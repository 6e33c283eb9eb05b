"""Rounds from peer to peer, and what a killed daemon still has.

Each shape of a prompt has daemons of its own, which keep pages in memory only: saves, loads and lookups are
not measured beside a disk at work. What a daemon has after ``kill -9`` is asked with daemons that keep pages
on disk as well, some seconds after their last save.
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
_LOOKUP_PAGE_BYTES = 4096  # as little as may be: only what is found counts
_LOOKUPS = 5  # of each prompt, in each round
_SPARE_BYTES = 256 << 20  # daemons have twice what is saved, and this


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median over rounds, and its range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class MoveRow:
    """Saves and loads of one peer. ``…_of_memcpy`` is the share of what the same process reached in the same
    round by copying, ``…_ours`` how many times as fast ours was, by round; core-seconds are the client's and
    the daemon's together, ``memory_bytes`` what the daemon has in the end, with what it shares,
    of ``room_bytes`` that it was given for pages;
    ``saved_bytes`` is what the peer was given, ``wrong`` the loads with a byte that differs or is missing."""

    peer: str
    page_bytes: int
    saved_bytes: int
    save_gb_per_s: Ratio
    load_gb_per_s: Ratio
    save_of_memcpy: Ratio
    load_of_memcpy: Ratio
    save_ours: Ratio
    load_ours: Ratio
    core_s_per_gb: Ratio
    memory_bytes: int
    room_bytes: int
    wrong: int


@dataclass(frozen=True, slots=True)
class LookupRow:
    """Lookups of a prompt that is there, by a client that sees it for the first time. ``ours`` is how many
    times as fast ours was, by round."""

    peer: str
    tokens: int
    lookup_ms: Ratio
    ours: Ratio
    found: float


@dataclass(frozen=True, slots=True)
class KillRow:
    """What a daemon with a disk had after ``kill -9`` and a start: the share of the tokens, how many prompts
    came back with other bytes, and how long the start took."""

    peer: str
    saved_bytes: int
    left: float
    wrong: int
    start_s: float


@dataclass(frozen=True, slots=True)
class PeersResult:
    memcpy_gb_per_s: dict[int, Ratio]
    moves: tuple[MoveRow, ...]
    lookups: tuple[LookupRow, ...]
    kills: tuple[KillRow, ...]


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """``total_bytes`` is a prompt's pages; ``settle_s`` is between the last save and the kill."""

    page_sizes: tuple[int, ...]
    total_bytes: int
    rounds: int
    lookup_tokens: int
    settle_s: float
    directory: Path


def run(plan: PeerPlan, peers: Sequence[CachePeer], progress: Progress) -> PeersResult:
    """Measure them all. Raises :class:`TierStoreError` when one does not start, or its client ends."""
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
    """Why a peer does not work on this machine; None when a few pages went there and back."""
    daemon = DAEMONS[peer.name](peer, PeerRoom(_SPARE_BYTES, False, directory))
    try:
        daemon.start()
        with _Client(peer, Shape(daemon.address, _LOOKUP_PAGE_BYTES, 4), directory) as client:
            client.ask("save", 0)
            client.ask("lookup", 0)
            return None if client.ask("load", 0).right else "pages came back with other bytes"
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
    """A daemon and its client, and what they came to so far, by round."""

    peer: CachePeer
    shape: Shape
    daemon: PeerDaemon
    client: _Client
    room_bytes: int
    memcpy: list[float] = field(default_factory=list)  # GB/s
    saves: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    core_s_per_gb: list[float] = field(default_factory=list)
    lookups: list[float] = field(default_factory=list)  # seconds
    found: list[float] = field(default_factory=list)
    wrong: int = 0

    def move(self, prompt: int) -> None:
        """One round of a prompt's bytes, there and back."""
        gb = self.shape.nbytes / 1e9
        copied = self.client.ask("memcpy", prompt)
        daemon = core_seconds(self.daemon.pids())
        saved = self.client.ask("save", prompt)
        found = self.client.ask("lookup", prompt)
        loaded = self.client.ask("load", prompt)
        daemon = core_seconds(self.daemon.pids()) - daemon
        self.memcpy.append(gb / copied.seconds)
        self.saves.append(gb / saved.seconds)
        self.loads.append(gb / loaded.seconds)
        self.core_s_per_gb.append((daemon + saved.cpu_s + loaded.cpu_s) / (2 * gb))
        self.wrong += not loaded.right or found.tokens != self.shape.tokens

    def look(self, prompt: int) -> None:
        self.client.ask("save", prompt)
        answers = []
        for _ in range(_LOOKUPS):
            self.client.ask("forget", prompt)
            answers.append(self.client.ask("lookup", prompt))
        self.lookups.append(statistics.median(answer.seconds for answer in answers))
        self.found.append(statistics.fmean(answer.tokens / self.shape.tokens for answer in answers))

    def memory_bytes(self) -> int:
        """What the daemon has, and what the client shares with it, less the engine's own."""
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
            for command in ("save", "lookup", "load"):  # one more prompt, for connections and memory to grow
                client.ask(command, prompts)
            running.append(_Running(peer, shape, daemon, client, room.memory_bytes))
        yield running


def _move_row(each: _Running, ours: _Running) -> MoveRow:
    def ratios(over: Sequence[float], under: Sequence[float]) -> Ratio:
        return Ratio.of([one / other for one, other in zip(over, under, strict=True)])

    return MoveRow(
        each.peer.name,
        each.shape.page_bytes,
        len(each.saves) * each.shape.nbytes,
        Ratio.of(each.saves),
        Ratio.of(each.loads),
        ratios(each.saves, each.memcpy),
        ratios(each.loads, each.memcpy),
        ratios(ours.saves, each.saves),
        ratios(ours.loads, each.loads),
        Ratio.of(each.core_s_per_gb),
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
    """A peer's client, in a process of its own. Use with ``with``."""

    def __init__(self, peer: CachePeer, shape: Shape, directory: Path) -> None:
        self._peer = peer
        # Only these tools are found there besides the peer's own packages.
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
        """Raises :class:`TierStoreError` when it ended, or does not answer."""
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
        said = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        return TierStoreError(f"the client of {self._peer.name} {how}: {said[-1]}")
