"""A lock between processes, and what removes or replaces its file meanwhile."""

import os
import subprocess
import sys

import pytest

from tierstore.locks import PathLock

_TRY = """
import sys
from pathlib import Path
from tierstore.locks import PathLock
try:
    PathLock(Path(sys.argv[1]))
except BlockingIOError:
    print("taken")
else:
    print("free")
"""


def _other_process_finds(path) -> str:
    return subprocess.run(
        [sys.executable, "-c", _TRY, str(path)], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_one_process_at_a_time_has_a_lock(tmp_path, kind):
    path = tmp_path / "lock"
    if kind == "directory":
        path.mkdir()
    lock = PathLock(path)
    assert lock.current()
    assert _other_process_finds(path) == "taken"
    lock.release()
    assert _other_process_finds(path) == "free"


def test_a_lock_file_that_was_removed_or_replaced_is_not_current(tmp_path):
    path = tmp_path / "lock"
    lock = PathLock(path)
    path.unlink()
    assert not lock.current()
    other = PathLock(path)  # a new file of the same name
    assert other.current()
    assert not lock.current()
    lock.release()
    other.release()


@pytest.mark.parametrize("there", [True, False])
def test_a_symbolic_link_is_not_followed(tmp_path, there):
    target = tmp_path / "target"
    if there:
        target.write_text("mine")
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        PathLock(tmp_path / "lock")
    assert target.exists() == there


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(OSError, match="no regular file"):
        PathLock(tmp_path / "lock")
