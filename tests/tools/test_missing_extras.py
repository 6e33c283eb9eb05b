"""The programs where only the base packages are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRACE = Path(__file__).parents[1] / "data" / "mooncake" / "conversation_2000.jsonl.gz"
EXTRAS = ("torch", "safetensors", "tokenizers", "matplotlib", "psutil", "transformers", "vllm")

# A name that stands for None among the modules is one that cannot be imported.
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(",")))
import tierstore_start
getattr(tierstore_start, sys.argv.pop(1))()
"""


def run(program, *arguments, missing=EXTRAS, cwd=None):
    """(exit code, stdout, stderr) of a program where ``missing`` cannot be imported."""
    entry = program.removeprefix("tierstore-")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, ",".join(missing), entry, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=cwd,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("program", "arguments", "missing", "extra"),
    [
        ("tierstore-engine", ["generate", "--model", "tiny", "--prompt", "x"], EXTRAS, "engine"),
        ("tierstore-engine", ["generate", "--model", "tiny", "--prompt", "x"], ["tokenizers"], "engine"),
        ("tierstore", ["pack", "keygen", "me"], ["cryptography"], "packs"),
        ("tierstore", ["llama"], ["httpx"], "proxy"),
        ("tierstore-proxy", ["--decode", "http://127.0.0.1:1"], ["httpx"], "proxy"),
        ("tierstore-bench", ["longctx", "--tokens", "100"], EXTRAS, "engine"),
        ("tierstore-bench", ["longctx", "--plot", "a.png"], ["matplotlib"], "bench"),
        ("tierstore-bench", ["replay", "--trace", TRACE, "--plot", "a.png"], EXTRAS, "bench"),
        ("tierstore-bench", ["replay", "--trace", TRACE, "--model", "demo"], EXTRAS, "engine"),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_installs_it(
    tmp_path, program, arguments, missing, extra
):
    code, out, err = run(program, *arguments, missing=missing, cwd=tmp_path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"{program}: this needs ")
    assert f"pip install 'tierstore[{extra}]'" in err
    assert os.listdir(tmp_path) == []


def test_a_replay_needs_none_of_them():
    code, out, err = run(
        "tierstore-bench", "replay", "--trace", TRACE, "--policy", "lru", "--capacity", "10%", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["rows"]


def test_what_is_measured_on_is_described_with_the_base_packages_alone():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(sys.argv[1].split(',')))\n"
        "from tierstore_tools import machine; print(machine.describe()['memory_bytes'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ",".join(EXTRAS)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 1 << 28
