"""Programs in forks of a process that has imported them.

Most of the time that a command or a daemon takes to start goes into imports. A :class:`Forked` process has
these done; its arguments, environment, directory, streams and exit status are those of a fresh one. Tests of
how a program starts begin with a fresh interpreter instead.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib import import_module
from pathlib import Path

_REQUEST_BYTES = 1 << 20
_OUT_OF_THE_WAY = 512  # usually, descriptors from here on have no fixed use
# Imported by programs when they run. Only newer versions of typer have adapters.
_STORE = ("tierstore.backend", "tierstore.client.backend", "tierstore.daemon.daemon", "typer._adapters")
_ENGINE = ("tierstore_engine.build", "tierstore_engine.server.run", "tierstore_connectors.bundled")
_TOOLS = ("tierstore_tools.longctx.command", "matplotlib.pyplot")
_LATER = {
    "tierstore.cli": (*_STORE, "tierstore.tiers.disk.fsck"),
    "tierstore_tools.cli": (*_STORE, *_ENGINE, *_TOOLS, "transformers.models.llama.modeling_llama"),
}
_WITH_TORCH = "tierstore_tools.cli"  # has imported what the engine, examples and benchmarks need


class Forked:
    """``python -m module`` in a fork, with the interface of :class:`subprocess.Popen`. ``module`` may be a
    script's path.

    Example::

        process = Forked("tierstore.daemon", ["--host-bytes=4MiB"])
        process.terminate()
        assert process.wait(30) == 0
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        streams: Sequence[int] = (0, 1, 2),
        cwd: str | os.PathLike[str] = ".",
        *,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """``streams`` become its stdin, stdout and stderr. ``pass_fds`` keep their numbers."""
        numbers = [*range(len(streams)), *pass_fds]
        request = json.dumps([numbers, module, list(arguments), dict(os.environ), os.path.abspath(cwd)])
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            with_torch = module.endswith(".py") or module.startswith(("tierstore_engine", "tierstore_tools"))
            server = _server(_WITH_TORCH if with_torch else module)
            socket.send_fds(server, [request.encode()], [theirs.fileno(), *streams, *pass_fds])
        self.pid = int(self._line.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs. The code of a signal is negative."""
        with suppress(BlockingIOError):
            self._ended(socket.MSG_DONTWAIT)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code."""
        try:
            if self.returncode is None:
                self._line.settimeout(timeout)
            return self._ended()
        except TimeoutError:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0) from None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, flags: int = 0) -> int:
        if self.returncode is None:
            self.returncode = int(self._line.recv(64, flags))
            self._line.close()
        return self.returncode


def spawn(module: str, arguments: Sequence[str], output: int | None = None) -> Forked:
    """Start ``python -m module``, as :meth:`tierstore.testing.processes.DaemonProcess.spawn` does."""
    return Forked(module, arguments, (0, 1, 2) if output is None else (0, output, output))


def run(module: str, *arguments: object, cwd: str | os.PathLike[str] = ".") -> tuple[int, str, str]:
    """Run ``python -m module`` in ``cwd``. Return its exit code, stdout and stderr."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
        streams = [nothing.fileno(), out.fileno(), err.fileno()]
        code = Forked(module, [str(argument) for argument in arguments], streams, cwd).wait()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode())
    return code, texts[0], texts[1]


@cache
def _server(module: str) -> socket.socket:
    """Return a connection to the process that imports ``module``. The workers of a run share it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
    folder = Path(tempfile.gettempdir()) / f"forked-{run}"
    folder.mkdir(mode=0o700, exist_ok=True)
    place = folder / module
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = _connected(place)
        if connection is None:
            _start(module, place)
            connection = _connected(place)
    finally:
        os.close(lock)
    assert connection is not None, f"the server of {module} has ended"
    atexit.register(connection.close)
    return connection


def _connected(place: Path) -> socket.socket | None:
    """Connect to the server at ``place``. Return None if it is not there, or about to end."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with suppress(OSError):
        connection.connect(str(place))
        if connection.recv(1):
            return connection
    connection.close()
    return None


def _start(module: str, place: Path) -> None:
    place.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(place))
        listener.listen(64)
        process = subprocess.Popen([sys.executable, "-m", "tests.forked", module, str(place)], stdin=listener)

    def end() -> None:
        with suppress(subprocess.TimeoutExpired):  # another worker uses it
            process.wait(30)

    atexit.register(end)  # runs after the connection was closed


def _serve(module: str, place: Path) -> None:
    """Fork twice for each request: a child that waits for the program, and the program. End with the last
    connection."""
    for name in _LATER.get(module, _STORE):
        with suppress(ModuleNotFoundError):
            import_module(name)
    with suppress(SystemExit), open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        _become(module, ["--help"], dict(os.environ), os.getcwd())  # imports what any call of it does
    gc.collect()
    gc.freeze()  # collections leave what is shared alone
    listener = socket.socket(fileno=os.dup(0))
    connections: list[socket.socket] = []
    while True:
        for ready in select.select([listener, *connections], [], [])[0]:
            if ready is listener:
                connections.append(listener.accept()[0])
                connections[-1].send(b"+")
                continue
            text, descriptors, _, _ = socket.recv_fds(ready, _REQUEST_BYTES, 16)
            with suppress(
                ChildProcessError
            ):  # `time make test` counts the time of those that were waited for
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not text:
                ready.close()
                connections.remove(ready)
                continue
            if not os.fork():
                for each in (listener, *connections):
                    each.close()
                _run(text, descriptors)
                return
            for descriptor in descriptors:
                os.close(descriptor)
        if not connections:
            place.unlink(missing_ok=True)
            with suppress(OSError):  # another server is there
                place.parent.rmdir()
            return


def _run(text: bytes, descriptors: Sequence[int]) -> None:
    """Be the child that waits, and in its child the program."""
    line = socket.socket(fileno=descriptors[0])
    program = os.fork()
    if program:
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        _wait(line, program)
    line.close()
    numbers, *request = json.loads(text)
    above = max(
        _OUT_OF_THE_WAY, *(number + 1 for number in numbers)
    )  # of no number that is still to be taken
    received = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in descriptors[1:]]
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    for number, descriptor in zip(numbers, received, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # The server's own may think that they can seek.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    _become(*request)


def _wait(line: socket.socket, program: int) -> None:
    """Report the program's pid, and then its exit code. Streams are closed: who reads them waits for their
    end."""
    for stream in (0, 1, 2):
        os.close(stream)
    line.send(str(program).encode())
    _, status = os.waitpid(program, 0)
    with suppress(OSError):  # nobody waits for it
        line.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(module: str, arguments: list[str], environment: dict[str, str], directory: str) -> None:
    """Be the program until its end."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = [module, *arguments]
    if module.endswith(".py"):
        sys.path.insert(0, os.path.dirname(module))
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]))
