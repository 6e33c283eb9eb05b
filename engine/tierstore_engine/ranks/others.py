"""The processes of the other ranks, as rank 0 sees them.

A rank may die or hang while rank 0 waits for it in a sum. A thread of rank 0 therefore pings all ranks. If a
rank has ended or does not answer, the thread notes the reason and kills all ranks. The sum then fails, and
the step raises :class:`~tierstore_engine.errors.RankLostError`. Pages of that step are never saved, because
the engine saves pages after the step has returned.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import TypeVar

import torch

from tierstore.tiers.hbm import PagePool
from tierstore_engine.errors import RankLostError
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.ranks.messages import (
    FromRank,
    RankFailed,
    RankLoaded,
    RankPing,
    RankReady,
    RankSetup,
    ToRank,
)
from tierstore_engine.ranks.pools import pools_of
from tierstore_engine.ranks.share import RankPlace, device_of
from tierstore_engine.tokenizer import ByteTokenizer

T = TypeVar("T")

_PING_S = 1.0
_SILENT_S = 8.0
"""A rank that does not answer for this long counts as hanging. Ranks answer during a step, too."""
_LOADING_S = 60.0  # the limit until a rank is ready, while it reads weights, connects NCCL and builds kernels
_START_S = 600.0  # the limit until a process answers for the first time, while it imports libraries
_REASON_S = 2.0  # a failed step waits at most this long for the watcher's thread to find the reason


class Others:
    """All ranks except rank 0, and their processes. The constructor starts them."""

    def __init__(self, model: LoadedModel, pools: Sequence[PagePool], meeting: str) -> None:
        """``meeting`` is the folder of the files through which all ranks connect."""
        assert model.divided is not None
        count = model.divided.ranks
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connections: dict[Connection[ToRank, FromRank], int] = {}  # the index of the process
        self._sending = threading.Lock()
        self._lost: str | None = None  # the reason why the ranks have ended; set once, when a rank is lost
        self._found = threading.Event()  # set when a rank is lost
        self._loaded = threading.Event()  # set when all ranks are loaded, or one is lost
        self._closing = False
        self.when_lost: Callable[[], None] | None = None
        """Called once by the watcher's thread when a rank is lost, so that rank 0 does not wait for it."""
        _all.add(self)
        self._former_threads = torch.get_num_threads()
        threads = max((os.cpu_count() or 1) // count, 1)
        torch.set_num_threads(min(self._former_threads, threads))
        for rank in range(1, count):
            place = RankPlace.of(rank, heads=model.divided.heads, parts=model.divided.parts)
            device = device_of(model.divided.device, rank)
            self._start(
                RankSetup(
                    opened=replace(model.divided, tokenizer=ByteTokenizer(), folder=None, device=device),
                    place=place,
                    seed=model.seed,
                    files=model.files,
                    weights_fd=None if model.shared is None else model.shared.fd,
                    pools=pools_of(pools, place.heads.rank, place.tokens.rank),
                    part_large_pages=pools[0].large_pages.part_size,
                    meeting=meeting,
                    threads=threads,
                )
            )
        self._watcher = threading.Thread(target=self._watch, name="tierstore-ranks", daemon=True)
        self._watcher.start()

    @staticmethod
    def spawn(module: str, arguments: Sequence[str], pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
        """Start ``python -m module``, which inherits ``pass_fds``. Replace it to start all ranks in another
        way."""
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, pass_fds=pass_fds, stdin=subprocess.DEVNULL)

    def _start(self, setup: RankSetup) -> None:
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno(), *setup.fds]
        # Ignore SIGINT, which a terminal sends to all processes. Rank 0 ends the other ranks in order.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = self.spawn("tierstore_engine.ranks.worker", [str(fds[0])], fds)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        theirs.close()
        connection: Connection[ToRank, FromRank] = Connection(ours.detach())
        self._connections[connection] = len(self.processes)
        self.processes.append(process)
        connection.send(setup)

    def send(self, message: ToRank) -> None:
        """Send a message to each rank. Ignore a rank that has ended, because the watcher's thread detects
        this."""
        with self._sending:
            self._send(message)

    def _send(self, message: ToRank) -> None:
        for connection in self._connections:
            with suppress(OSError):
                connection.send(message)

    def wait_loaded(self) -> None:
        """Block until all ranks have their weights. Raises :class:`RankLostError`."""
        if not self._loaded.wait(_START_S):
            self._lose(f"a rank did not start within {_START_S:g} s")
        self.check()

    def unless_lost(self, work: Callable[[], T]) -> T:
        """Return ``work()``, which a thread computes. Raise :class:`RankLostError` if a rank is lost before
        the work ends, because the work may wait for this rank for ever."""
        done: Future[T] = Future()
        ended: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def compute() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001  # raised below
                done.set_exception(error)
            ended.put(True)

        self.when_lost = lambda: ended.put(False)
        self.check()
        threading.Thread(target=compute, name="tierstore-ranks-work", daemon=True).start()
        if not ended.get():
            self.check()
        self.when_lost = None
        return done.result()

    def check(self) -> None:
        """Raise :class:`RankLostError` if a rank is lost."""
        if self._lost is not None:
            raise RankLostError(f"{self._lost}: restart the engine")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context for work that all ranks do together. If rank 0 gets an error in this context,
        either a rank was lost, or all ranks are ended, because they are no longer at the same point of the
        work. Raises :class:`RankLostError`."""
        self.check()
        try:
            yield
            self.check()  # results that were computed with a lost rank are wrong
        except BaseException as error:
            if not self._found.wait(_REASON_S):
                self._lose(f"rank 0 failed in a step: {type(error).__name__}: {error}")
            if isinstance(error, RankLostError) or not isinstance(error, Exception):
                raise
            raise RankLostError(f"{self._lost}: restart the engine") from error

    def close(self) -> None:
        """End all ranks."""
        self._closing = True
        self._kill()
        self._watcher.join()
        for process in self.processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        torch.set_num_threads(self._former_threads)

    # -- the watcher -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        heard = dict.fromkeys(self._connections, time.monotonic())
        limits = dict.fromkeys(self._connections, _START_S)
        loading, starting = set(self._connections), set(self._connections)
        pinged = 0.0
        while self._lost is None and not self._closing:
            for connection in wait(list(heard), timeout=_PING_S / 2):
                assert isinstance(connection, Connection)
                message = self._receive(connection)
                if isinstance(message, RankLoaded):
                    loading.discard(connection)
                if isinstance(message, RankReady):
                    starting.discard(connection)
                heard[connection] = time.monotonic()
                limits[connection] = _LOADING_S if connection in starting else _SILENT_S
            if not loading:
                self._loaded.set()
            now = time.monotonic()
            for connection, limit in limits.items():
                if now - heard[connection] > limit:
                    self._lose(f"{self._name(connection)} has not answered for {limit:g} s")
            # Do not wait for a thread that is sending, because it may wait for a rank that hangs.
            if now - pinged > _PING_S and self._sending.acquire(blocking=False):
                try:
                    self._send(RankPing())
                finally:
                    self._sending.release()
                pinged = now

    def _receive(self, connection: Connection[ToRank, FromRank]) -> FromRank | None:
        """Receive a message. Receive a message. Return None if the rank has ended."""
        try:
            message = connection.recv()
        except (EOFError, OSError):
            if not self._closing:
                status = self.processes[self._connections[connection]].wait()
                how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
                self._lose(f"{self._name(connection)} {how}")
            return None
        if isinstance(message, RankFailed):
            self._lose(f"{self._name(connection)} failed: {message.why}")
        return message

    def _name(self, connection: Connection[ToRank, FromRank]) -> str:
        return f"rank {self._connections[connection] + 1} of {len(self.processes) + 1}"

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        self._kill()
        self._found.set()
        called, self.when_lost = self.when_lost, None
        if called is not None:
            called()
        self._loaded.set()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()


def _let_go_after_fork() -> None:
    # A child process of this rank would share the sockets, and the other ranks would run as long as that
    # child lives.
    for others in list(_all):
        for connection in others._connections:
            connection.close()


_all: weakref.WeakSet[Others] = weakref.WeakSet()
os.register_at_fork(after_in_child=_let_go_after_fork)
