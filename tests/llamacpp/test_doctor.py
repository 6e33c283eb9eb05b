"""``tierstore doctor --llamacpp`` with a real llama-server."""

from __future__ import annotations

import pytest

from tests.llamacpp.conftest import MISSING

if MISSING:
    pytest.skip("no llama.cpp here; make test-llamacpp", allow_module_level=True)

import json
import subprocess
import sys


def checks(*options):
    done = subprocess.run(
        [sys.executable, "-m", "tierstore.cli", "doctor", "--llamacpp", "--json", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_a_server_that_can_be_used(models, server, daemon):
    llama = server(models())
    found = checks("--llama-server", llama.url, "--connect", daemon.url)
    assert found["llama-server"]["status"] == "ok"
    assert str(llama.slots) in found["llama-server"]["found"]
    assert found["tierstore llama"]["status"] == "ok"


def test_a_server_that_cannot_be_used(models, server, daemon):
    llama = server(models(), "--context-shift")
    found = checks("--llama-server", llama.url, "--connect", daemon.url)["llama-server"]
    assert found["status"] == "fail"
    assert "--context-shift" in found["found"]
    llama.kill()
    assert "cannot be seen" in checks("--llama-server", llama.url)["llama-server"]["found"]
