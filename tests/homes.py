"""A user's directories, in which ``TIERSTORE=auto`` starts daemons, and the plug-ins of this checkout."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import tierstore
from tierstore import KVSpec
from tierstore.cli.operator import Operator
from tierstore.daemon.arena import is_listening
from tierstore.daemon.stats import DaemonStats

_ROOT = Path(__file__).parents[1]
_WAIT_S = 120.0


class Home:
    """The directories of a user. ``variables`` are for the environment of engines."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="ts", dir="/tmp"))  # a socket's path must be short
        self.socket = self.path / "run" / "tierstore.sock"
        self.url = f"ipc://{self.socket}"
        self.disk = self.path / "cache" / "tierstore" / "kv"
        self.log = self.path / "state" / "tierstore" / "daemon.log"
        self.variables = {
            "XDG_RUNTIME_DIR": f"{self.path}/run",
            "XDG_CACHE_HOME": f"{self.path}/cache",
            "XDG_STATE_HOME": f"{self.path}/state",
            "TIERSTORE_HOST_BYTES": "64MiB",
        }

    def stats(self) -> DaemonStats:
        """What the daemon says, as soon as it listens."""
        until(lambda: is_listening(self.socket))
        with Operator(self.url) as operator:
            return operator.stats()

    def flush(self) -> None:
        """Wait until all pages that were saved are on disk."""
        with tierstore.connect(self.url, KVSpec.opaque(4096, chunk_tokens=8)) as store:
            assert store.wait_connected(_WAIT_S)
            assert store.flush(_WAIT_S)

    def daemons(self) -> list[int]:
        """All processes that serve in these directories, ready or not."""
        found = []
        own = f"XDG_STATE_HOME={self.variables['XDG_STATE_HOME']}"
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                words, variables = (
                    (each / name).read_bytes().decode(errors="replace").split("\0")
                    for name in ("cmdline", "environ")
                )
                if words[1:4] == ["-m", "tierstore.cli", "serve"] and own in variables:
                    found.append(int(each.name))
        return found

    def kill(self) -> None:
        """Kill all daemons with SIGKILL, and wait until they are gone."""
        for pid in self.daemons():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self.daemons() and not is_listening(self.socket))

    def remove(self) -> None:
        """Kill its daemons and remove its directories."""
        self.kill()
        shutil.rmtree(self.path, ignore_errors=True)


def until(condition: Callable[[], object]) -> None:
    """Wait until it holds."""
    ends = time.monotonic() + _WAIT_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def plug_ins() -> dict[tuple[str, str], str]:
    """The engines' entry points in pyproject.toml: their values by group and name."""
    found = {}
    for group, names in re.findall(
        r'^\[project\.entry-points\."(.*)"\]\n((?:\w+ = ".*"\n)+)',
        (_ROOT / "pyproject.toml").read_text(),
        re.M,
    ):
        found.update({(group, name): value for name, value in re.findall(r'(\w+) = "(.*)"', names)})
    return found


def install_plug_ins(folder: Path) -> str:
    """Write the metadata of an installed tierstore with this checkout's entry points. Returns a PYTHONPATH
    that begins with it: an environment with an older installation finds this one first."""
    metadata = folder / "tierstore-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tierstore\nVersion: 0.1.0\n")
    text = "".join(f"[{group}]\n{name} = {value}\n" for (group, name), value in plug_ins().items())
    (metadata / "entry_points.txt").write_text(text)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
