"""The programs while they start: SIGTERM, closed streams, other programs' variables."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.homes import install_plug_ins

PROGRAM = "import sys; from tierstore_start import {0}; sys.argv[0] = '{0}'; {0}()"


def start(program, *arguments, **options):
    return subprocess.Popen([sys.executable, "-c", PROGRAM.format(program), *arguments], **options)


def has_handler(pid, number):
    caught = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")
    )
    return int(caught.split()[1], 16) >> (number - 1) & 1


@pytest.mark.parametrize(
    ("program", "arguments", "code"),
    [
        ("tierstore", ["serve", "--host-bytes=4MiB"], 0),
        ("engine", ["serve", "--model", "tiny"], 0),
        ("proxy", ["--decode", "http://127.0.0.1:9"], 0),
        ("bench", ["longctx"], 143),
        ("tierstore", ["stats"], 143),
    ],
)
def test_sigterm_ends_a_program_that_has_imported_nothing_yet(tmp_path, program, arguments, code):
    """Process 1 of a container loses it without a handler: so that comes first."""
    process = start(program, *arguments, env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)})
    while not has_handler(process.pid, signal.SIGTERM):
        assert process.poll() is None
        time.sleep(0.001)
    loaded = Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == code
    assert "zmq" not in loaded
    assert "numpy" not in loaded


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&-"])
@pytest.mark.parametrize("arguments", ["--version", "stats --connect ipc:///nowhere/ü"])
def test_a_stream_that_is_closed_is_no_traceback(closed, arguments):
    program = PROGRAM.format("tierstore")
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {arguments} {closed}', sys.executable, program],
        capture_output=True,
        text=True,
    )
    assert done.returncode == (arguments != "--version")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_locale_cannot_write_is_escaped(encoding):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format("tierstore"), "stats", "--connect", "ipc:///nowhere/模型"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert rb"\u6a21" in done.stderr


def test_a_directory_whose_name_the_locale_cannot_read(tmp_path):
    """The daemon and fsck work in it: a path is bytes."""
    directory = tmp_path / "größe-模型"
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    options = ["--listen", f"ipc://{directory}/s", "--disk", f"{directory}/kv", "--disk-bytes=4MiB"]
    directory.mkdir()
    serving = start(
        "tierstore", "serve", "--host-bytes=4MiB", *options, env=os.environ | plain, stderr=subprocess.PIPE
    )
    while not (directory / "s.arena").exists():
        assert serving.poll() is None, serving.stderr.read()
        time.sleep(0.01)
    serving.send_signal(signal.SIGTERM)
    said = serving.communicate(timeout=60)[1]
    assert serving.returncode == 0, said
    assert b"Traceback" not in said
    checked = subprocess.run(
        [sys.executable, "-c", PROGRAM.format("tierstore"), "fsck", f"{directory}/kv"],
        capture_output=True,
        env=os.environ | plain,
    )
    assert checked.returncode == 0, checked.stderr


def test_the_plug_ins_of_engines_import_nothing_without_the_variable(tmp_path):
    """They are loaded by every engine of the environment, with a store or without."""
    program = (
        "import os, signal, sys, __future__; from importlib.metadata import entry_points;"
        "groups = ('vllm.general_plugins', 'sglang.srt.plugins');"
        "found = [each for group in groups for each in entry_points(group=group, name='tierstore')];"
        "before = set(sys.modules);"
        "[each.load()() for each in found];"
        "print(len(found), sorted(set(sys.modules) - before))"
    )
    path = {"PYTHONPATH": install_plug_ins(tmp_path / "installed")}
    for value in (None, "", "off"):
        variables = {name: text for name, text in os.environ.items() if name != "TIERSTORE"} | path
        if value is not None:
            variables["TIERSTORE"] = value
        done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("2 ['tierstore_start']\n", "")


def test_run_gives_a_command_the_variable():
    show = [sys.executable, "-c", "import os, sys; print(os.environ['TIERSTORE'], *sys.argv[1:])", "--store"]
    for given, options, seen in [
        (None, [], "auto"),
        (None, ["--store", "tcp://127.0.0.1:7000"], "tcp://127.0.0.1:7000"),
        ("off", [], "off"),
        ("off", ["--store=auto", "--"], "auto"),
    ]:
        variables = {name: text for name, text in os.environ.items() if name != "TIERSTORE"}
        variables |= {"TIERSTORE": given} if given is not None else {}
        process = start("tierstore", "run", *options, *show, env=variables, stdout=subprocess.PIPE, text=True)
        assert process.communicate(timeout=60)[0] == f"{seen} --store\n"
        assert process.returncode == 0


def test_run_names_a_program_that_the_system_cannot_start(tmp_path):
    program = tmp_path / "script"
    program.write_text("no first line with an interpreter\n")
    program.chmod(0o700)
    process = start("tierstore", "run", "--", str(program), stderr=subprocess.PIPE, text=True)
    assert process.communicate(timeout=60)[1] == f"tierstore: cannot run {program}: Exec format error\n"
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give a command: tierstore run -- vllm serve MODEL"),
        (["--", "no-such-program"], 1, "there is no program 'no-such-program': check its name and PATH"),
        (["--store=on", "--", "true"], 2, "TIERSTORE must be auto, off or the address of a daemon"),
    ],
)
def test_run_says_what_is_wrong_in_one_line(arguments, code, message):
    process = start("tierstore", "run", *arguments, stderr=subprocess.PIPE, text=True)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert message in errors
    assert errors.count("\n") == 1
