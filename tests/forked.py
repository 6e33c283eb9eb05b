"""Commands in forks of one process that has imported them.

Most of a short command's time goes into imports. :func:`run` gives it a process with these done; its
arguments, environment, directory, streams and exit status are those of a fresh one. Tests of how a command
starts begin with a fresh interpreter instead.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib import import_module

_REQUEST_BYTES = 1 << 20
# Imported by commands when they run.
_LATER = (
    "tierstore.backend",
    "tierstore.client.backend",
    "tierstore.daemon.stats",
    "tierstore.tiers.disk.fsck",
)


def run(module: str, *arguments: object) -> tuple[int, str, str]:
    """Run ``python -m module``. Return its exit code, stdout and stderr. The code of a signal is negative."""
    request = [module, [str(argument) for argument in arguments], dict(os.environ), os.getcwd()]
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
        with theirs:
            streams = [nothing.fileno(), out.fileno(), err.fileno()]
            socket.send_fds(_server(module), [json.dumps(request).encode()], [theirs.fileno(), *streams])
        answer = mine.recv(64)
        assert answer, f"the process that imported {module} has ended"
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode())
    return int(answer), texts[0], texts[1]


@cache
def _server(module: str) -> socket.socket:
    """Start the process that imports ``module``. Return the socket that takes its requests."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen([sys.executable, "-m", "tests.forked", module], stdin=theirs)

    def end() -> None:
        mine.close()
        process.wait(30)

    atexit.register(end)
    return mine


def _serve(module: str) -> None:
    """Fork twice for each request: a child that waits for the command, and the command. End when the socket
    is closed."""
    for name in (module, *_LATER):
        import_module(name)
    with suppress(ModuleNotFoundError):
        import_module("typer._adapters")  # of newer versions
    with suppress(SystemExit), open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        _become(module, ["--version"], dict(os.environ), os.getcwd())  # what a first command imports
    requests = socket.socket(fileno=os.dup(0))
    while True:
        text, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 4)
        if not text:
            return
        if os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        requests.close()
        line = socket.socket(fileno=descriptors[0])
        command = os.fork()
        if command:
            _, status = os.waitpid(command, 0)
            line.send(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        line.close()
        for number, descriptor in enumerate(descriptors[1:]):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _become(*json.loads(text))
        return


def _become(module: str, arguments: list[str], environment: dict[str, str], directory: str) -> None:
    """Be the command until its end."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _serve(sys.argv[1])
