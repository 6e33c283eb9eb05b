"""``TIERSTORE=auto`` with real daemons: one is started, it outlives the engine, and its pages survive."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import tierstore
from tests.daemons import SPEC, TOKENS, load_bytes, pages_of, right_bytes
from tests.homes import Home, until
from tierstore.daemon.background import checked_choice, chosen_store
from tierstore.errors import StoreUnavailableError, TierStoreError, UsageError

ENGINE = "import sys; from tierstore.daemon.background import chosen_store; print(chosen_store('auto').state)"


def engines(home: Home, count: int, **variables: str) -> list[subprocess.CompletedProcess[str]]:
    """Start engines at the same time, and wait for all."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", ENGINE],
            env=os.environ | home.variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for _ in range(count)
    ]
    done = []
    for each in started:
        out, errors = each.communicate(timeout=120)
        done.append(subprocess.CompletedProcess(each.args, each.returncode, out.strip(), errors))
    return done


@pytest.fixture
def home(monkeypatch):
    found = Home()
    for name in list(os.environ):
        if name.startswith("TIERSTORE"):
            monkeypatch.delenv(name)
    for name, value in found.variables.items():
        monkeypatch.setenv(name, value)
    yield found
    found.remove()


def test_eight_engines_start_one_daemon(home: Home) -> None:
    states = [each.stdout for each in engines(home, 8)]
    first = [state for state in states if state.startswith(("it was started", "it is starting"))]
    assert len(first) == 1, states
    assert all(state in (*first, "it was running", "another process starts it") for state in states)
    until(lambda: home.daemons() == [home.stats().pid])
    assert str(home.stats().pid) in first[0]


def test_the_daemon_is_no_part_of_its_engine(home: Home) -> None:
    chosen_store("auto")
    pid = home.stats().pid
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    parent, group, session = (int(each) for each in fields[1:4])
    assert parent != os.getpid()
    assert os.getsid(pid) == session != os.getsid(0)
    assert group != os.getpgid(0)
    open_files = own_files(pid)
    assert len([each for each in open_files if each == f"{home.socket}.start"]) == 1  # it alone has the lock
    assert not [each for each in own_files() if each.endswith(".start")]
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    assert os.readlink(f"/proc/{pid}/fd/1") == os.readlink(f"/proc/{pid}/fd/2") == str(home.log)


def own_files(pid: int | str = "self") -> list[str]:
    """The files that a process has open."""
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed since
            found.append(os.readlink(each))
    return found


def test_pages_survive_kill_9_of_everything(home: Home) -> None:
    store = chosen_store("auto")
    with tierstore.connect(store.url, SPEC, wait_s=60) as client:
        client.save(TOKENS, pages_of(TOKENS)).wait(60)
        assert client.flush(60)
        home.kill()
        again = chosen_store("auto")
        assert again.url == store.url
        assert again.state.startswith(("it was started", "it is starting"))
    with tierstore.connect(store.url, SPEC, wait_s=60) as client:
        hit = client.lookup(TOKENS)
        count, pages = load_bytes(client, hit)
        assert count == len(TOKENS)
        assert right_bytes(TOKENS, count, pages)


def test_an_engine_that_is_killed_while_it_starts_the_daemon_leaves_no_lock(home: Home) -> None:
    process = subprocess.Popen([sys.executable, "-c", ENGINE], env=os.environ | home.variables)
    until(home.daemons)
    process.kill()
    process.wait()
    [state] = [each.stdout for each in engines(home, 1)]
    assert state
    until(lambda: home.daemons() == [home.stats().pid])


def test_a_daemon_that_cannot_start_is_one_line_with_its_reason(home: Home, monkeypatch) -> None:
    monkeypatch.setattr("tierstore.daemon.background.CONNECT_S", 120.0)  # a busy machine needs more than 5 s
    home.disk.parent.mkdir(parents=True)
    home.disk.write_text("a file")
    with pytest.raises(TierStoreError, match=r"cannot start a daemon: .*kv: File exists"):
        chosen_store("auto")
    home.disk.unlink()
    monkeypatch.setenv("TIERSTORE_SERVER_KEY", f"{home.path}/missing.secret")
    with pytest.raises(StoreUnavailableError) as raised:
        chosen_store("auto")
    assert str(raised.value).startswith("the daemon has ended: tierstore: ")
    assert "missing.secret" in str(raised.value)
    assert str(home.log) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not home.daemons()


def test_sizes_are_bounded_by_the_machine_and_set_by_the_environment(home: Home, monkeypatch) -> None:
    monkeypatch.delenv("TIERSTORE_HOST_BYTES")
    monkeypatch.setattr("tierstore.daemon.background.memory_bytes", lambda: Memory(64 << 20))
    monkeypatch.setattr("tierstore.daemon.background.disk_bytes", lambda directory: 512 << 20)
    chosen_store("auto")
    tiers = home.stats().store.tiers
    assert tiers["host"].capacity_bytes == 16 << 20
    assert tiers["disk"].capacity_bytes == 256 << 20
    home.kill()
    monkeypatch.setenv("TIERSTORE_HOST_BYTES", "8MiB")
    monkeypatch.setenv("TIERSTORE_DISK", "")
    chosen_store("auto")
    tiers = home.stats().store.tiers
    assert tiers["host"].capacity_bytes == 8 << 20
    assert "disk" not in tiers


class Memory:
    def __init__(self, total: int) -> None:
        self.total = total


def test_a_socket_directory_of_another_user_is_not_used(home: Home) -> None:
    Path(home.variables["XDG_RUNTIME_DIR"]).mkdir(mode=0o700)
    os.chmod(home.variables["XDG_RUNTIME_DIR"], 0o777)
    with pytest.raises(StoreUnavailableError, match="other users can write to it"):
        chosen_store("auto")
    assert not home.daemons()


@pytest.mark.parametrize(
    "value", ["on", "1", "AUTO", "ipc:", "ipc://", "tcp://host", "http://host:80", "mooncake://h:1"]
)
def test_a_wrong_value_says_what_is_right(value: str) -> None:
    with pytest.raises(UsageError) as raised:
        checked_choice(value)
    assert repr(value) in str(raised.value)
    assert "auto, off or the address of a daemon" in str(raised.value)


def test_an_address_is_used_as_it_is(home: Home, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert chosen_store("ipc://s").url == f"ipc://{tmp_path}/s"  # an engine may change its directory
    assert chosen_store("tcp://127.0.0.1:7000").url == "tcp://127.0.0.1:7000"
    assert not home.daemons()


def test_a_wrong_setting_in_the_environment_is_named(home: Home, monkeypatch) -> None:
    monkeypatch.setenv("TIERSTORE_HOST_BITES", "8GiB")
    with pytest.raises(UsageError, match="TIERSTORE_HOST_BITES: there is no setting"):
        chosen_store("auto")
    monkeypatch.delenv("TIERSTORE_HOST_BITES")
    monkeypatch.setenv("TIERSTORE_LISTEN", "tcp://127.0.0.1:7000")
    with pytest.raises(UsageError, match="needs an ipc:// address first in TIERSTORE_LISTEN"):
        chosen_store("auto")
