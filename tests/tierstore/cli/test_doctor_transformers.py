"""``tierstore doctor --transformers``."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.tierstore.cli.test_operations import run
from tierstore.cli.checks import Status, engine, transformers


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed here"
)
def test_the_cache_is_tried():
    code, out, err = run("doctor", "--transformers", "--json")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert err == ""
    assert checks["transformers"]["status"] in ("ok", "warn")
    assert checks["TierStoreCache"]["status"] == "ok"
    assert "daemon" not in checks
    assert code == int(any(check["status"] == "fail" for check in checks.values()))


@pytest.mark.parametrize(
    ("version", "status"),
    [(None, Status.FAIL), ("4.56.0", Status.FAIL), ("5.24.0", Status.OK), ("6.0.0.dev0", Status.WARN)],
)
def test_the_version_decides(version, status, monkeypatch):
    monkeypatch.setattr(transformers, "installed", lambda _: version)
    monkeypatch.setattr(engine, "_IMPORT_S", 0.001)
    found = {check.name: check for check in transformers.checks(None)}
    assert found["transformers"].status is status


def test_a_cache_that_fails_is_reported(monkeypatch):
    monkeypatch.setattr(transformers, "installed", lambda _: "5.24.0")
    monkeypatch.setattr(transformers, "_PROBE", "import sys; sys.exit('no such thing')")
    found = {check.name: check for check in transformers.checks(None)}
    assert (found["TierStoreCache"].status, found["TierStoreCache"].found) == (Status.FAIL, "no such thing")


def test_a_daemon_is_checked_if_it_is_named(short_directory, monkeypatch):
    monkeypatch.setattr(transformers, "installed", lambda _: None)
    found = {check.name: check for check in transformers.checks(f"ipc://{short_directory}/s")}
    assert found["daemon"].status is Status.FAIL
