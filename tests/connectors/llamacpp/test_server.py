"""A process that listens at a port, and what of it counts."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tierstore.errors import UsageError
from tierstore.gguf import window_of
from tierstore.testing.processes import free_port
from tierstore_connectors.llamacpp.server import LlamaProcess, split_files

_LISTEN = """
import os, socket, time
server = socket.create_server(("127.0.0.1", int(os.environ["TEST_PORT"])))
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def listening(*options, folder=".", environment=None):
    """A process with these arguments, and its port. Python's own arguments are before them."""
    port = free_port()
    popen = subprocess.Popen(
        [sys.executable, "-c", _LISTEN, *options],
        stdout=subprocess.PIPE,
        cwd=folder,
        env={"TEST_PORT": str(port), **(environment or {})},
    )
    try:
        assert popen.stdout.readline() == b"ready\n"
        yield port, popen
    finally:
        popen.kill()
        popen.communicate()


def process_of(port):
    return LlamaProcess.listening_at("127.0.0.1", port)


def test_a_process_is_found_by_its_port(tmp_path):
    with listening("--slot-save-path", "slots", folder=tmp_path) as (port, popen):
        found = process_of(port)
        assert found.pid == popen.pid
        assert found.slot_folder == tmp_path / "slots"
        assert found.alive
        popen.kill()
        popen.wait()
        assert not found.alive


def test_nobody_listens():
    with pytest.raises(UsageError, match="cannot be seen"):
        process_of(free_port())


def test_a_process_without_a_folder_for_slots():
    with listening() as (port, _), pytest.raises(UsageError, match="--slot-save-path"):
        process_of(port).slot_folder  # noqa: B018


def engine(*options, environment=None, folder="."):
    with listening(*options, environment=environment, folder=folder) as (port, _):
        return process_of(port)._counted_arguments() + list(process_of(port).environment)


def test_arguments_count_except_a_list(tmp_path):
    plain = engine("--port", "1")
    for harmless in (("--port", "2"), ("-t", "4"), ("--temp", "-1"), ("-np", "3"), ("-m", "elsewhere.gguf")):
        assert engine(*harmless) == engine("--port", "1")
    for counted in (
        ("-c", "4096"),
        ("--rope-freq-base", "1"),
        ("-ctk", "q8_0"),
        ("--new-flag",),
        ("-fa", "off"),
    ):
        assert engine(*counted) != plain


def test_variables_count_like_arguments():
    given = engine(environment={"LLAMA_ARG_ROPE_FREQ_BASE": "20000"})
    assert ("--rope-freq-base", "20000") in given
    assert engine(environment={"GGML_SCHED": "1"}) != engine(environment={})
    assert engine(environment={"LLAMA_ARG_PORT": "1", "HOME": "/"}) == engine(environment={})


def test_a_named_file_counts_by_its_bytes(tmp_path):
    vector = tmp_path / "vector"
    vector.write_bytes(b"one")
    first = engine("--control-vector", "vector", folder=tmp_path)
    vector.rename(tmp_path / "other")
    assert engine("--control-vector", "other", folder=tmp_path) == first
    (tmp_path / "other").write_bytes(b"two")
    assert engine("--control-vector", "other", folder=tmp_path) != first


@pytest.mark.parametrize("option", ["--context-shift", "--lora", "--swa-full", "--no-slots"])
def test_arguments_that_are_refused(option):
    with listening(option) as (port, _), pytest.raises(UsageError, match=f"{option}, which is not supported"):
        process_of(port).require_supported()


def test_arguments_that_are_switched_off():
    with listening("--cache-reuse", "0", "-gan", "1") as (port, _):
        process_of(port).require_supported()


def test_a_model_that_was_changed_is_refused(tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    time.sleep(0.1)
    with listening(folder=tmp_path) as (port, _):
        process = process_of(port)
        digest = process.weights(Path("model.gguf"))
        assert digest == process.weights(model)
        time.sleep(2.5)  # longer than the start of a process is uncertain
        model.write_bytes(b"changed")
        with pytest.raises(UsageError, match="has changed since llama-server was started"):
            process.weights(model)


def test_the_parts_of_a_split_model():
    names = [file.name for file in split_files(Path("/m/a-00002-of-00003.gguf"))]
    assert names == [f"a-0000{at}-of-00003.gguf" for at in (1, 2, 3)]
    assert split_files(Path("a.gguf")) == [Path("a.gguf")]


def test_a_file_that_is_not_gguf(tmp_path):
    (tmp_path / "a").write_bytes(b"GGUF\x09\0\0\0" + bytes(20))
    (tmp_path / "b").write_bytes(b"GGUF\x03\0\0\0")
    for name in ("a", "b", "c"):
        with pytest.raises(UsageError):
            window_of(tmp_path / name)
