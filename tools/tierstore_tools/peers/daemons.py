"""Start and kill the daemons of the peers, at loopback or a unix socket."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import TierStoreError, UsageError
from tierstore.testing.processes import free_port
from tierstore_tools.processes import listens
from tierstore_tools.vllm.daemon import ServeProcess

_START_S = 180.0
_END_S = 30.0
_LOOK_S = 0.05
_LOG_TAIL_LINES = 3


@dataclass(frozen=True, slots=True)
class PeerRoom:
    """The resources of a daemon: bytes of memory, and with ``durable`` also a disk."""

    memory_bytes: int
    durable: bool
    directory: Path


@dataclass(frozen=True, slots=True)
class CachePeer:
    """A peer. ``python`` has its packages, and runs its client and its daemon (if that is a Python
    program)."""

    name: str
    python: Path


class PeerDaemon:
    """One peer's processes, not started yet. Its client connects to ``address``."""

    address: str

    def start(self) -> None:
        """Start the processes and wait until they answer. Raises :class:`TierStoreError`."""
        raise NotImplementedError

    def pids(self) -> list[int]:
        raise NotImplementedError

    def kill(self) -> None:
        """Kill the processes with SIGKILL. Idempotent."""
        raise NotImplementedError

    def close(self) -> None:
        """Kill the processes and remove their files."""
        raise NotImplementedError


class TierstoreDaemon(PeerDaemon):
    def __init__(self, peer: CachePeer, room: PeerRoom) -> None:
        self._process = ServeProcess(
            room.directory,
            host_bytes=room.memory_bytes,
            disk_bytes=4 * room.memory_bytes,
            disk=room.durable,
        )
        self.address = self._process.url

    def start(self) -> None:
        self._process.start()

    def pids(self) -> list[int]:
        return [] if self._process.process is None else [self._process.process.pid]

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.close()


class _Processes(PeerDaemon):
    """Programs that are ready when a condition holds."""

    def __init__(self, room: PeerRoom) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="peer-", dir=room.directory))
        self._running: list[subprocess.Popen[bytes]] = []

    def pids(self) -> list[int]:
        return [process.pid for process in self._running]

    def kill(self) -> None:
        for process in self._running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_END_S)
        self._running = []

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _run(
        self, command: Sequence[str], ready: Callable[[], bool], environment: Mapping[str, str] | None = None
    ) -> None:
        log = self._directory / "log"
        with open(log, "ab") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self._directory,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self._running.append(process)
        ends = time.monotonic() + _START_S
        while not ready():
            if process.poll() is not None or time.monotonic() > ends:
                last = log.read_text(errors="replace").strip().splitlines()[-_LOG_TAIL_LINES:]
                raise TierStoreError(f"{command[0]} does not start: {' | '.join(last) or 'no output'}")
            time.sleep(_LOOK_S)


class RedisDaemon(_Processes):
    """Redis without snapshots. If durable, it has an append-only file that is synced every second."""

    def __init__(self, peer: CachePeer, room: PeerRoom) -> None:
        super().__init__(room)
        self._socket_directory = Path(
            tempfile.mkdtemp(prefix="peer-", dir="/tmp")
        )  # a socket's path is short
        self.address = str(self._socket_directory / "s")
        self._command = [
            *("redis-server", "--port", "0", "--unixsocket", self.address, "--save", ""),
            *("--maxmemory", str(room.memory_bytes), "--maxmemory-policy", "allkeys-lru"),
            *("--appendonly", "yes" if room.durable else "no", "--appendfsync", "everysec"),
            *("--dir", str(self._directory)),
        ]

    def start(self) -> None:
        self._run(self._command, self._answers)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._socket_directory, ignore_errors=True)

    def _answers(self) -> bool:
        """Return whether Redis answers PONG, which it does after it has read its file."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(self.address)
                probe.sendall(b"PING\r\n")
                return probe.recv(16).startswith(b"+PONG")
            except OSError:
                return False


class LMCacheDaemon(_Processes):
    """LMCache's server with its defaults. If durable, it has its ``fs`` adapter."""

    def __init__(self, peer: CachePeer, room: PeerRoom) -> None:
        super().__init__(room)
        self._port, http = free_port(), free_port()
        self.address = f"127.0.0.1:{self._port}"
        gigabytes = room.memory_bytes / (1 << 30)
        self._command = [
            *(str(peer.python), "-c", "from lmcache.cli.main import main; main()", "server"),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--http-host", "127.0.0.1", "--http-port", str(http)),
            *("--l1-size-gb", f"{gigabytes:g}", "--eviction-policy", "LRU", "--disable-observability"),
        ]
        if room.durable:
            adapter = {"type": "fs", "base_path": str(self._directory / "l2")}
            self._command += ["--l2-adapter", json.dumps(adapter)]

    def start(self) -> None:
        quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
        self._run(self._command, lambda: listens(self._port), quiet)


class MooncakeDaemon(_Processes):
    """A Mooncake master, and a client that lends its memory."""

    def __init__(self, peer: CachePeer, room: PeerRoom) -> None:
        super().__init__(room)
        self._port, self._metrics, self._lender = free_port(), free_port(), free_port()
        self.address = f"127.0.0.1:{self._port}"
        self._programs = peer.python.parent
        self._memory_bytes = room.memory_bytes

    def start(self) -> None:
        master = [
            *(str(self._programs / "mooncake_master"), "--rpc_address=127.0.0.1"),
            *(f"--rpc_port={self._port}", "--metrics_host=127.0.0.1", f"--metrics_port={self._metrics}"),
        ]
        self._run(master, lambda: listens(self._port), MOONCAKE_ENVIRONMENT)
        lender = [
            *(str(self._programs / "mooncake_client"), "--host=127.0.0.1", f"--port={self._lender}"),
            *(f"--global_segment_size={self._memory_bytes}", f"--master_server_address={self.address}"),
            *("--metadata_server=P2PHANDSHAKE", "--protocol=tcp"),
        ]
        self._run(lender, lambda: listens(self._lender), MOONCAKE_ENVIRONMENT)


MOONCAKE_ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # with these two it is faster than with its defaults
    "MC_TCP_SLICE_SIZE": str(1 << 20),
}

DAEMONS: dict[str, Callable[[CachePeer, PeerRoom], PeerDaemon]] = {
    "tierstore": TierstoreDaemon,
    "lmcache": LMCacheDaemon,
    "redis": RedisDaemon,
    "mooncake": MooncakeDaemon,
}


_PACKAGES = {"tierstore": "tierstore", "lmcache": "lmcache", "redis": "redis", "mooncake": "mooncake"}


def why_not(peer: CachePeer) -> str | None:
    """Return why a peer is not available here; None if it is. Raises :class:`UsageError` if its Python cannot
    be run."""
    package = _PACKAGES[peer.name]
    if peer.name == "redis" and shutil.which("redis-server") is None:
        return "there is no redis-server (apt-get install redis-server)"
    if (
        _ask(peer, f"import importlib.util; print(importlib.util.find_spec({package!r}) is not None)")
        == "True"
    ):
        return None
    return f"{package} is not installed for {peer.python} (--{peer.name}-python)"


def version(peer: CachePeer) -> str:
    """Return the version of a peer's package, for Redis that of ``redis-server``."""
    if peer.name == "redis":
        said = subprocess.run(
            ["redis-server", "--version"], capture_output=True, text=True, check=False
        ).stdout
        return said.partition("v=")[2].partition(" ")[0]
    name = _PACKAGES[peer.name]  # the distribution's name begins with it
    program = (
        "from importlib.metadata import distributions; "
        f"print(*{{d.version for d in distributions() if d.metadata['Name'].startswith({name!r})}})"
    )
    return _ask(peer, program)


def _ask(peer: CachePeer, program: str) -> str:
    try:
        done = subprocess.run([peer.python, "-c", program], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(f"--{peer.name}-python: {peer.python} cannot be run: {error.strerror}") from error
    return done.stdout.strip()
