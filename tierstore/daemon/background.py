"""The variable ``TIERSTORE``, which gives an engine its store, and the daemon that ``auto`` starts.

``auto`` is the daemon at this user's default address. If none listens there, one is started, and the engine
continues when it listens. An address is the daemon at that address, and ``off`` (or no variable) is none.

The started daemon outlives the engine. It is no descendant of the engine, because SGLang kills all of its
descendants when it ends. It has its own session, so a signal to the engine's terminal or process group does
not reach it. A lock file beside the socket lets one of many engines start it. The daemon inherits the lock
and keeps it, so no engine starts another one while it lives. The kernel releases it when the daemon ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tierstore.client.handshake import Address
from tierstore.daemon.arena import is_listening
from tierstore.daemon.settings import Settings
from tierstore.defaults import CONNECT_S
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.locks import PathLock
from tierstore.machine import disk_bytes, memory_bytes
from tierstore.printable import printable
from tierstore.wire.local_address import require_own_directory

VARIABLE = "TIERSTORE"
AUTO, OFF = "auto", "off"

_MEMORY_SHARE = 4  # at most 1/4 of the memory of the machine or container
_DISK_SHARE = 2  # at most 1/2 of the disk's free space and present pages
_LOOK_S = 0.02

# Starts the daemon and ends, so that the daemon is no descendant of the engine. argv[1] is the descriptor of
# the lock.
_LAUNCHER = """
import subprocess, sys
daemon = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=2, stderr=2,
                          pass_fds=[int(sys.argv[1])], start_new_session=True)
print(daemon.pid)
"""


@dataclass(frozen=True, slots=True)
class ChosenStore:
    """The daemon that an engine uses. ``state`` is for the engine's log, such as "it was running"."""

    url: str
    state: str


def checked_choice(value: str) -> str:
    """Return a value of the variable, an address with an absolute path. Raise :class:`UsageError` if it is
    neither ``auto`` nor ``off`` nor an address."""
    if value in (AUTO, OFF):
        return value
    try:
        return Address.parse(value).url
    except UsageError as error:
        raise UsageError(
            f"{VARIABLE} must be auto, off or the address of a daemon (ipc://PATH or tcp://HOST:PORT), got "
            f"{value!r}"
        ) from error


def chosen_store(value: str) -> ChosenStore:
    """Return the daemon that the variable's ``value`` stands for; ``auto`` starts it if necessary.

    Waits up to ``CONNECT_S`` seconds for a started daemon. If it needs longer, the engine connects later.
    Raises :class:`~tierstore.errors.TierStoreError` for ``off`` or a wrong value, and if the daemon cannot be
    started.
    """
    choice = checked_choice(value)
    if choice == OFF:
        raise UsageError(f"{VARIABLE} is off")
    if choice != AUTO:
        return ChosenStore(choice, "the address was given")
    try:
        return _own_daemon(Settings.load())
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        raise StoreUnavailableError(f"cannot start a daemon: {where}{error.strerror or error}") from error


def _own_daemon(settings: Settings) -> ChosenStore:
    """Return the daemon that ``settings`` (from the environment) describe. Start it if none listens."""
    url = checked_choice(settings.listen[0])
    if not url.startswith("ipc://"):
        raise UsageError(f"{VARIABLE}=auto needs an ipc:// address first in TIERSTORE_LISTEN, got {url}")
    path = Path(url.removeprefix("ipc://"))
    path.parent.mkdir(mode=0o700, exist_ok=True)
    require_own_directory(path)
    ends = time.monotonic() + CONNECT_S
    started: StartedDaemon | None = None
    while not is_listening(path):
        if time.monotonic() >= ends:
            return ChosenStore(
                url, f"it is starting as {started}" if started else "another process starts it"
            )
        with suppress(BlockingIOError):  # the daemon that was started has the lock
            lock = PathLock(Path(f"{path}.start"))
            try:
                if started is None:
                    started = _start(settings, lock)
                elif not is_listening(path) and not _starts_elsewhere(path):
                    raise StoreUnavailableError(f"the daemon has ended: {started.last_line()}")
            finally:
                lock.release()
        time.sleep(_LOOK_S)
    return ChosenStore(url, f"it was started as {started}" if started else "it was running")


@dataclass(frozen=True, slots=True)
class StartedDaemon:
    """A daemon that this process has started. Its output begins at byte ``start`` of the file ``log``."""

    pid: str
    log: Path
    start: int

    def __str__(self) -> str:
        return f"process {self.pid}, log {self.log}"

    def last_line(self) -> str:
        """Return the last line of its output, and where the output is."""
        lines = self.log.read_bytes()[self.start :].decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it gave no reason")
        return f"{printable(last)} (log: {self.log})"


def _start(settings: Settings, lock: PathLock) -> StartedDaemon:
    """Start a daemon that keeps ``lock``."""
    log = _base("XDG_STATE_HOME", ".local/state") / "daemon.log"
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(log, "ab") as output:
        start = output.seek(0, os.SEEK_END)
        command = [sys.executable, "-m", "tierstore.cli", "serve", *_default_sizes(settings)]
        launched = subprocess.run(
            [sys.executable, "-c", _LAUNCHER, str(lock.fd), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            pass_fds=[lock.fd],
            check=False,
        )
    return StartedDaemon(launched.stdout.decode().strip(), log, start)


def _default_sizes(settings: Settings) -> list[str]:
    """Return options for the sizes that the environment does not set: those of ``tierstore serve``, but no
    more than this machine has, and a disk, so that pages survive the daemon."""
    options = []
    memory = memory_bytes().total
    if "TIERSTORE_HOST_BYTES" not in os.environ and memory:
        options.append(f"--host-bytes={min(settings.host_bytes, memory // _MEMORY_SHARE)}")
    disk = settings.disk
    if "TIERSTORE_DISK" not in os.environ:
        disk = _base("XDG_CACHE_HOME", ".cache") / "kv"
        options.append(f"--disk={disk}")
    if disk is not None and "TIERSTORE_DISK_BYTES" not in os.environ:
        disk.mkdir(mode=0o700, parents=True, exist_ok=True)
        options.append(f"--disk-bytes={min(settings.disk_bytes, disk_bytes(disk) // _DISK_SHARE)}")
    return options


def _base(variable: str, below_home: str) -> Path:
    """Return this project's directory in one of the user's base directories. Raise
    :class:`StoreUnavailableError` if the user has none."""
    try:
        return Path(os.environ.get(variable) or Path.home() / below_home) / "tierstore"
    except RuntimeError as error:
        raise StoreUnavailableError(f"this user has no home directory: set {variable}") from error


def _starts_elsewhere(path: Path) -> bool:
    """Return whether a daemon that was started in another way holds the socket's lock, and does not listen
    yet."""
    try:
        PathLock(Path(f"{path}.lock")).release()
    except BlockingIOError:
        return True
    return False
