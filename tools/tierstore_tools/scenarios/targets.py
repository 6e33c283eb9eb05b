"""The measured servers: start, restart, end. All listen at loopback.

A target has a server. A target with a store also has a daemon, which outlives the server. After a restart of
the server, pages are in the daemon's host tier. After a restart of both, they are on disk. All targets have
the same KV capacity in tokens and the same number of threads, and compute in float32.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tierstore.errors import TierStoreError, UsageError
from tierstore.spec import KVSpec
from tierstore.testing.processes import free_port
from tierstore_tools.processes import listens
from tierstore_tools.vllm.daemon import ServeProcess
from tierstore_tools.vllm.engine import ENVIRONMENT, connector_options

STORED = "+store"
OURS, VLLM, TRANSFORMERS = "ours", "vllm", "transformers"
KNOWN = (OURS, OURS + STORED, VLLM, VLLM + STORED, TRANSFORMERS)
_START_S = 300.0
_END_S = 60.0
_LOOK_S = 0.05
_LOG_TAIL_LINES = 5
_SERVER = "from tierstore_engine.cli import main; main()"
_PAGE_TOKENS = 64  # tokens of a page of the bundled engine, and of a block of vLLM


@dataclass(frozen=True, slots=True)
class ServerRoom:
    """The resources of every target: KV for ``pool_tokens`` tokens, prompts with their answers up to
    ``max_tokens``, ``threads``, and the bytes of a daemon's tiers."""

    pool_tokens: int
    max_tokens: int
    threads: int
    host_bytes: int
    disk_bytes: int

    def __post_init__(self) -> None:
        if self.max_tokens > self.pool_tokens:
            raise UsageError(f"--pool-tokens must be at least --tokens, got {self.pool_tokens}")

    @property
    def rows(self) -> int:
        """Rows of a static batch. Each row reserves KV for the longest request."""
        return max(self.pool_tokens // self.max_tokens, 1)


class Target:
    """A server to measure at ``url``. This class is for a server that is already running, and neither starts
    nor ends it. A ``restartable`` target has a daemon, and can be restarted with the daemon or without it."""

    def __init__(self, name: str, url: str, *, restartable: bool = False) -> None:
        self.name = name
        self.url = url
        self.restartable = restartable

    def pids(self) -> tuple[int, ...]:
        """Return the processes that were started for this target."""
        return ()

    def start(self) -> None:
        """Start the server. Raises :class:`TierStoreError` if it does not start."""

    def restart(self, *, daemon: bool) -> None:
        """Restart the server, with ``daemon`` also its daemon."""
        raise AssertionError("this server was not started here")

    def close(self) -> None:
        """End the server and remove its files. Idempotent."""


class Started(Target):
    """A server that ``command`` starts, with the store of ``daemon``, or without a store if that is None."""

    def __init__(
        self,
        name: str,
        port: int,
        command: list[str],
        *,
        threads: int,
        daemon: ServeProcess | None,
        scratch: Path,
    ) -> None:
        super().__init__(name, f"http://127.0.0.1:{port}", restartable=daemon is not None)
        self._port = port
        self._command = command
        self._threads = threads
        self._daemon = daemon
        self._log: IO[bytes] = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115  # closed in close
        self._process: subprocess.Popen[bytes] | None = None

    def pids(self) -> tuple[int, ...]:
        found = [] if self._process is None else [self._process.pid]
        if self._daemon is not None and self._daemon.process is not None:
            found.append(self._daemon.process.pid)
        return tuple(found)

    def start(self) -> None:
        if self._daemon is not None:
            self._daemon.start()
        self._start_server()

    def restart(self, *, daemon: bool) -> None:
        self._end_server()
        if self._daemon is not None:
            self._daemon.wait_written()
            if daemon:
                self._daemon.restart()
        self._start_server()

    def close(self) -> None:
        self._end_server()
        if self._daemon is not None:
            self._daemon.close()
        self._log.close()

    def _start_server(self) -> None:
        self._process = launch(self._command, self._log, self._threads)
        ends = time.monotonic() + _START_S
        while not listens(self._port):
            if self._process.poll() is not None or time.monotonic() > ends:
                raise TierStoreError(f"{self.name} does not start: {self._last_words()}")
            time.sleep(_LOOK_S)

    def _end_server(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its child processes
        self._process.wait(_END_S)
        self._process = None

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " | ".join(lines[-_LOG_TAIL_LINES:]) or "no output"


def launch(command: list[str], log: IO[bytes], threads: int) -> subprocess.Popen[bytes]:
    """Start a server's process, the leader of a process group. It writes to ``log``."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=_environment(threads),
        start_new_session=True,
    )


@dataclass(frozen=True, slots=True)
class Left:
    """A target without results, and the reason."""

    name: str
    why: str


class Workshop:
    """Makes targets that serve the checkpoint in ``model``. ``vllm`` is a Python that has vLLM."""

    def __init__(self, model: Path, room: ServerRoom, scratch: Path, vllm: Path | None) -> None:
        self._model = model
        self._room = room
        self._scratch = scratch
        self._vllm = vllm

    @staticmethod
    def why_not(name: str, vllm: Path | None) -> str | None:
        """Return why ``name`` is not available here; None if it is. Raises :class:`UsageError` for an unknown
        name, and if ``vllm`` cannot be run."""
        if name not in KNOWN:
            raise UsageError(f"unknown target {name!r} (known: {', '.join(KNOWN)}; or --url)")
        base = name.removesuffix(STORED)
        if base == VLLM:
            if vllm is None:
                return "--vllm-python names no environment with vLLM"
            return _cannot_import(vllm, ["vllm", *(["tierstore_connectors"] if base != name else [])])
        wanted = ["starlette", "uvicorn", *(["transformers"] if base == TRANSFORMERS else [])]
        missing = [package for package in wanted if importlib.util.find_spec(package) is None]
        return f"{missing[0]} is not installed (pip install 'tierstore[bench]')" if missing else None

    def make(self, name: str) -> Target:
        """Return the target ``name``, not started."""
        port, daemon = free_port(), None
        if name.endswith(STORED):
            room = self._room
            daemon = ServeProcess(self._scratch, host_bytes=room.host_bytes, disk_bytes=room.disk_bytes)
        commands = {OURS: self._ours, VLLM: self._vllm_serve, TRANSFORMERS: self._transformers}
        command = commands[name.removesuffix(STORED)](port, None if daemon is None else daemon.url)
        return Started(name, port, command, threads=self._room.threads, daemon=daemon, scratch=self._scratch)

    def _ours(self, port: int, store: str | None) -> list[str]:
        spec = _spec(self._model)
        pages = -(-self._room.pool_tokens // spec.chunk_tokens)
        return [
            *(sys.executable, "-c", _SERVER, "serve", f"--model={self._model}", f"--port={port}"),
            *("--device=cpu", f"--hbm-bytes={pages * spec.page_bytes}"),
            *(() if store is None else (f"--store={store}",)),
        ]

    def _vllm_serve(self, port: int, store: str | None) -> list[str]:
        room = self._room
        return [
            *(str(self._vllm), "-m", "vllm.entrypoints.openai.api_server", f"--model={self._model}"),
            *("--host=127.0.0.1", f"--port={port}", "--dtype=float32", "--enforce-eager", "--seed=0"),
            *(f"--max-model-len={room.max_tokens}", f"--max-num-batched-tokens={room.max_tokens}"),
            *(f"--block-size={_PAGE_TOKENS}", "--enable-prompt-tokens-details"),
            f"--num-gpu-blocks-override={-(-room.pool_tokens // _PAGE_TOKENS)}",
            *(() if store is None else ("--kv-transfer-config", json.dumps(connector_options(store)))),
        ]

    def _transformers(self, port: int, _: str | None) -> list[str]:
        return [
            *(sys.executable, "-m", "tierstore_tools.scenarios.static_batches", str(self._model)),
            *("--port", str(port), "--batch", str(self._room.rows)),
            *("--max-tokens", str(self._room.max_tokens)),
        ]


def reserved_tokens(metrics: str) -> float | None:
    """Return the tokens of a server's reserved KV, read from its metrics; None if they are not there."""
    found: dict[str, float] = dict(_values(metrics))
    if "static_batches_kv_slots" in found:
        return found["static_batches_kv_slots"]
    if "tierstore_engine_pages" in found:
        pages = found["tierstore_engine_pages"] - found["tierstore_engine_available_pages"]
        return pages * _PAGE_TOKENS
    size = re.search(r'kv_cache_size_tokens="(\d+)"', metrics)
    if size is not None and "vllm:kv_cache_usage_perc" in found:
        return found["vllm:kv_cache_usage_perc"] * float(size[1])
    return None


def _values(metrics: str) -> Iterable[tuple[str, float]]:
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not name.startswith("#"):
            with suppress(ValueError):
                yield name.partition("{")[0], float(value)


def _spec(model: Path) -> KVSpec:
    from tierstore_engine.build import open_model

    return open_model(str(model), device="cpu").config.kv_spec()


def _cannot_import(python: Path, packages: list[str]) -> str | None:
    found = "import importlib.util, sys; sys.exit(any(not importlib.util.find_spec(p) for p in sys.argv[1:]))"
    try:
        done = subprocess.run(
            [python, "-c", found, *packages], env=_environment(1), capture_output=True, check=False
        )
    except OSError as error:
        raise UsageError(f"--vllm-python: {python} cannot be run: {error.strerror}") from error
    return f"{python} lacks {' or '.join(packages)}" if done.returncode else None


def _environment(threads: int) -> dict[str, str]:
    # By default vLLM binds its threads to cores and leaves out one core. These settings stop it, because the
    # other targets do neither.
    given = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {**ENVIRONMENT, **os.environ, **given}
