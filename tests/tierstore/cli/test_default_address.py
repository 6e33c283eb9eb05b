"""Another user takes the place where this user's daemon would listen. Needs root, to be two users."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import tierstore
from tests.daemons import SPEC
from tests.tierstore.cli.commands import TOKENS, command
from tierstore.keys import Identity

OTHER_UID = 65534
needs_two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user as well")

# Makes a directory and listens there, as another user. Says what it was told when its stdin ends.
IMPOSTOR = f"""
import os, sys
from tests.tierstore.daemon.client.fake_daemon import FakeDaemon
os.setresgid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
os.setresuid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
os.umask(0)
os.mkdir(sys.argv[1], 0o777)
daemon = FakeDaemon(sys.argv[1] + "/tierstore.sock")
print("listening", flush=True)
sys.stdin.read()
daemon.close()
print(daemon.received)
"""


@pytest.fixture
def shared():
    """A directory like /tmp: everybody may make things in it."""
    with tempfile.TemporaryDirectory(prefix="ts") as path:
        os.chmod(path, 0o1777)
        yield Path(path)


@pytest.fixture
def warnings():
    """What this package logs."""
    records = queue.SimpleQueue()
    handler = logging.handlers.QueueHandler(records)
    logger = logging.getLogger("tierstore")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


class Impostor:
    def __init__(self, directory):
        self.process = subprocess.Popen(
            [sys.executable, "-c", IMPOSTOR, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        assert self.process.stdout.readline() == "listening\n"

    def heard(self):
        """All messages that it was sent. Ends it."""
        return json.loads(self.process.communicate(timeout=30)[0])


@pytest.fixture
def impostor(shared):
    started = Impostor(shared / "run")
    yield started
    started.process.kill()
    started.process.communicate()


def run(runtime_directory, *arguments):
    """(exit code, stdout, stderr)."""
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"XDG_RUNTIME_DIR": str(runtime_directory)},
    )
    return done.returncode, done.stdout, done.stderr


@needs_two_users
@pytest.mark.parametrize("where", ["by default", "named"])
def test_another_users_daemon_is_told_nothing_by_the_command_line(shared, impostor, where):
    named = ("--connect", f"ipc://{shared}/run/tierstore.sock") if where == "named" else ()
    runtime_directory = shared / "elsewhere" if named else shared / "run"
    code, out, err = run(runtime_directory, "stats", *named)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"belongs to uid {OTHER_UID}" in err
    assert impostor.heard() == []


@needs_two_users
@pytest.mark.parametrize("where", ["by default", "named"])
def test_another_users_daemon_is_told_nothing_by_an_engine(shared, impostor, where, monkeypatch, warnings):
    if where == "by default":
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared / "run"))
    with tierstore.connect(
        f"ipc://{shared}/run/tierstore.sock", SPEC, identity=Identity.of(SPEC, model="m"), wait_s=0
    ) as store:
        assert f"belongs to uid {OTHER_UID}" in warnings.get(timeout=30).getMessage()
        assert not store.wait_connected(0.5)  # it tries again
        assert store.lookup(TOKENS).tokens == 0
    assert warnings.empty()  # and warns once
    assert impostor.heard() == []


@needs_two_users
def test_a_daemon_does_not_listen_in_another_users_directory(shared, impostor):
    code, out, err = run(shared / "run", "serve", "--host-bytes", "4MiB")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"it belongs to uid {OTHER_UID}" in err
    assert not (shared / "run" / "tierstore.sock").exists()


@pytest.mark.parametrize("verb", [("serve", "--host-bytes", "4MiB"), ("stats",)])
def test_a_directory_that_others_can_write_to_is_not_the_default_place(shared, verb):
    (shared / "run").mkdir()
    (shared / "run").chmod(0o777)
    code, out, err = run(shared / "run", *verb)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "other users can write to it (mode 777" in err
    assert os.listdir(shared / "run") == []


@pytest.mark.parametrize("verb", [("serve", "--host-bytes", "4MiB"), ("stats",)])
def test_a_link_is_not_the_default_place(shared, verb):
    (shared / "mine").mkdir(0o700)
    (shared / "run").symlink_to(shared / "mine")
    code, out, err = run(shared / "run", *verb)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "it is no directory" in err
    assert os.listdir(shared / "mine") == []
