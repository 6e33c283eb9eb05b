"""What nobody means, said on the command line or by the environment: one line, and nothing has changed."""

from __future__ import annotations

import re
import tempfile

import pytest

import tierstore
from tests.forked import Forked
from tests.small_store import SPEC, pages_of
from tests.tierstore.cli.commands import PAGES, TOKENS, Reporting, run
from tierstore.keys import Identity

KUBERNETES = {  # what it puts into containers for Services named tierstore and tierstore-metrics
    "TIERSTORE_SERVICE_HOST": "10.96.0.17",
    "TIERSTORE_SERVICE_PORT": "7700",
    "TIERSTORE_SERVICE_PORT_STORE": "7700",
    "TIERSTORE_PORT": "tcp://10.96.0.17:7700",
    "TIERSTORE_PORT_7700_TCP": "tcp://10.96.0.17:7700",
    "TIERSTORE_PORT_7700_TCP_PROTO": "tcp",
    "TIERSTORE_PORT_7700_TCP_PORT": "7700",
    "TIERSTORE_PORT_7700_TCP_ADDR": "10.96.0.17",
    "TIERSTORE_METRICS_SERVICE_HOST": "10.96.0.18",
    "TIERSTORE_METRICS_SERVICE_PORT": "9464",
    "TIERSTORE_METRICS_PORT": "tcp://10.96.0.18:9464",
    "TIERSTORE_METRICS_PORT_9464_TCP": "tcp://10.96.0.18:9464",
}


def refused(found):
    """The one line of bad usage."""
    code, out, err = found
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host-bytes", "9" * 400], "is more than 1048576 TiB"),
        (["--host-bytes", "9" * 5000 + "GiB"], "is more than 1048576 TiB"),
        (["--disk-bytes", "2000000TiB"], "is more than 1048576 TiB"),
        (["--listen", ""], "listen is empty"),
        (["--listen", "ipc:///run/a/s", "--listen", ""], "a part between commas is empty"),
        (["--listen", "ipc:///run/a/s,,ipc:///run/b/s"], "a part between commas is empty"),
        (["--quotas", "=5"], "a size has no name"),
        (["--quotas", "a=5,=6"], "a size has no name"),
        (["--quotas", "a=5,a=6"], "one name has two sizes"),
    ],
)
def test_senseless_settings(flags, message):
    err = refused(run("serve", *flags))
    assert message in err
    assert len(err) < 400


@pytest.mark.parametrize("text", [f"host_bytes = {'9' * 5000}", f"listen = {'[' * 5000}"])
def test_senseless_files(tmp_path, text):
    file = tmp_path / "tierstore.toml"
    file.write_text(text)
    assert "is not TOML" in refused(run("serve", "--config", file))


def test_kubernetes_services_are_no_settings(directory, monkeypatch):
    """Each of them alone, and all together; what a person has misspelt is still said."""
    for environment in (KUBERNETES, {"TIERSTORE_PORT": "7700"}):
        with monkeypatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            process = Reporting("serve", "--host-bytes", "4MiB", "--listen", f"ipc://{directory}/s")
        first = process.said.readline()
        process.close()
        assert ("listening at" in first) == (environment is KUBERNETES), first
    assert "the nearest is 'metrics_port'" in first


def test_evicting_more_than_there_is(daemon):
    where = ("--connect", daemon.url)
    assert run("evict", "host", "--pages", 10**23, *where) == (0, f"{PAGES} pages have left host\n", "")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deep.json", b"[" * 100_000),
        ("long.json", b"[" + b"9" * 5000 + b"]"),
        ("empty.npy", b""),
        ("zip.npy", b"PK\x03\x04"),
        ("deep.npy", b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535),
        (
            "huge.npy",
            b"\x93NUMPY\x01\x00\x5e\x00{'descr': '<i8', 'fortran_order': False, 'shape': (%s,)}"
            % (b"9" * 40),
        ),
    ],
)
def test_prompts_that_are_none(daemon, tmp_path, name, content):
    file = tmp_path / name
    file.write_bytes(content)
    err = refused(run("pin", file, "--connect", daemon.url))
    assert "holds no token ids" in err


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "kv"
    with tierstore.open(path, SPEC, identity=Identity.of(SPEC, model="m"), disk_bytes=16 << 20) as store:
        store.save(TOKENS, pages_of(TOKENS)).wait(10)
        assert store.flush(10)
    return path


def run_into_full(*arguments):
    """(exit code, stderr) with a stdout that takes nothing."""
    with open("/dev/full", "w") as full, tempfile.TemporaryFile("w+") as err:
        streams = (0, full.fileno(), err.fileno())
        code = Forked("tierstore.cli", [str(argument) for argument in arguments], streams).wait(60)
        err.seek(0)
        return code, err.read()


FULL = (1, "tierstore: the system refuses: No space left on device\n")


@pytest.mark.parametrize("verb", [("stats", "--json"), ("stats",), ("top",), ("evict", "host")])
def test_a_stdout_that_is_full(daemon, verb):
    assert run_into_full(*verb, "--connect", daemon.url) == FULL


@pytest.mark.parametrize("flags", [("--json",), ()])
def test_a_stdout_that_is_full_for_a_store(store, flags):
    assert run_into_full("ls", store, *flags) == FULL
    assert run_into_full("fsck", store, *flags) == FULL
    assert run_into_full("--help") == run_into_full("--version") == FULL


def test_a_capacity_that_this_machine_does_not_have_is_one_line_in_the_log(directory):
    listen = ("--listen", f"ipc://{directory}/s")

    def log(*flags):
        """Up to the last line of the start."""
        process = Reporting("serve", *listen, *flags)
        lines = []
        try:
            while not any("serves" in line for line in lines):
                lines.append(process.said.readline())
                assert lines[-1]
            process.terminate()
            return [*lines, *process.said.readlines()]
        finally:
            process.close()

    def warnings(lines):
        return [line for line in lines if "this machine has less" in line]

    large = ("--disk", f"{directory}/disk", "--disk-bytes", "1000TiB", "--page-bytes", "1GiB")
    [line] = warnings(log("--host-bytes", "2TiB", *large))
    line = line.partition("WARNING")[2]
    assert re.search(r": host_bytes 2 TiB, memory \d.*; disk_bytes 1000 TiB, room at .*/disk \d", line)
    small = ("--disk", f"{directory}/small", "--disk-bytes", "64MiB")
    assert warnings(log("--host-bytes", "4MiB", *small)) == []
