"""The environment variable ``TIERSTORE``, which chooses an engine's daemon, and the daemon that ``auto``
starts.

``auto`` means the daemon at this user's default address. If no daemon listens at that address, the engine
starts one and waits until it listens. An address means the daemon at that address. ``off`` (or no variable)
means that the engine uses no daemon.

The started daemon outlives the engine. The daemon is not a descendant of the engine's process, because SGLang
kills all its descendants when it ends. The daemon has its own session, so signals to the engine's terminal or
process group do not reach it. If several engines start at the same time, the one that gets a lock on a file
beside the socket starts the daemon. The daemon inherits the lock, so no engine starts another daemon while
this one lives.
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
_DISK_SHARE = 2  # at most 1/2 of the disk's free space plus the stored pages
_LOOK_S = 0.02

# A process runs this code and ends, so that the daemon is no descendant of the engine. argv[1] is the lock's
# descriptor.
_LAUNCHER = """
import subprocess, sys
daemon = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=2, stderr=2,
                          pass_fds=[int(sys.argv[1])], start_new_session=True)
print(daemon.pid)
"""


@dataclass(frozen=True, slots=True)
class ChosenStore:
    """The address of the daemon that an engine uses, and its state for the engine's log, for example "it was
    running"."""

    url: str
    state: str


def checked_choice(value: str) -> str:
    """Return ``auto``, ``off``, or an address with its path made absolute. Raise :class:`UsageError` for any
    other value."""
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
    """Return the daemon that ``value``, the content of the variable, chooses. For ``auto``, start the daemon
    if none listens.

    Waits up to ``CONNECT_S`` seconds for a started daemon. If it needs longer, the engine connects later.
    Raises :class:`~tierstore.errors.TierStoreError` for ``off``, for a wrong value, and if no daemon can be
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
    """Return the daemon at the address in ``settings``. Start it if no daemon listens."""
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
        with suppress(BlockingIOError):  # raised while another engine or the started daemon has the lock
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
    """A daemon that this process has started. The output of the daemon begins at byte ``start`` of the file
    ``log``."""

    pid: str
    log: Path
    start: int

    def __str__(self) -> str:
        return f"process {self.pid}, log {self.log}"

    def last_line(self) -> str:
        """Return the last line of the daemon's output and the path of its log."""
        lines = self.log.read_bytes()[self.start :].decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it gave no reason")
        return f"{printable(last)} (log: {self.log})"


def _start(settings: Settings, lock: PathLock) -> StartedDaemon:
    """Start a daemon, which inherits ``lock``."""
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
    """Return options for sizes that the environment does not set. The sizes are the defaults of ``tierstore
    serve``, limited to a share of this machine's memory and disk. Unlike ``tierstore serve``, the daemon has
    a disk tier by default, so that pages survive the daemon."""
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
    """Return the directory ``tierstore`` in the base directory that ``variable`` names. Raise
    :class:`StoreUnavailableError` if the variable is unset and the user has no home directory."""
    try:
        return Path(os.environ.get(variable) or Path.home() / below_home) / "tierstore"
    except RuntimeError as error:
        raise StoreUnavailableError(f"this user has no home directory: set {variable}") from error


def _starts_elsewhere(path: Path) -> bool:
    """Return whether another process, for example a ``tierstore serve``, has locked the socket but does not
    listen yet."""
    try:
        PathLock(Path(f"{path}.lock")).release()
    except BlockingIOError:
        return True
    return False
