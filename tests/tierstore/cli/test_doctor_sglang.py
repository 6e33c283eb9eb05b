"""``tierstore doctor --sglang``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.tierstore.cli.test_operations import run
from tierstore.cli.checks import Status, engine, sglang, vllm
from tierstore.cli.checks.sglang import proposed
from tierstore.daemon.arena import is_listening
from tierstore.errors import UsageError


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed here")
def test_without_sglang_it_fails_and_says_what_to_start(short_directory):
    url = f"ipc://{short_directory}/s"
    code, out, err = run("doctor", "--sglang", "--connect", url, "--json")
    document = json.loads(out)
    checks = {check["name"]: check for check in document["checks"]}
    assert (code, err) == (1, "")
    assert checks["sglang"]["status"] == "fail"
    assert checks["sglang backend"]["status"] == "warn"
    assert f"tierstore serve --listen {url}" in checks["daemon"]["advice"]
    assert document["extra_config"] == proposed(url)
    _, out, _ = run("doctor", "--sglang", "--connect", url)
    assert json.loads(out.splitlines()[-1].partition("extra-config ")[2].strip("'")) == proposed(url)


@pytest.mark.parametrize(
    ("version", "status"),
    [("0.5.19", Status.FAIL), ("0.5.20", Status.OK), ("0.5.23.post1", Status.OK), ("0.6.0", Status.WARN)],
)
def test_the_version_decides(version, status, monkeypatch):
    monkeypatch.setattr(sglang, "installed", lambda *packages: version)
    monkeypatch.setattr(engine, "_IMPORT_S", 0.001)
    found = {check.name: check for check in sglang.checks("ipc:///nowhere/s", None)}
    assert found["sglang"].status is status


def test_what_nothing_is_kept_with_is_said(short_directory):
    config = {"module_path": "elsewhere", "class_name": "Other", "store": f"ipc://{short_directory}/s"}
    found = {check.name: check for check in sglang.checks(None, json.dumps(config))}
    assert found["extra config"].status is Status.FAIL
    assert found["interface_v1"].status is Status.FAIL
    assert found["hicache_storage_pass_prefix_keys"].status is Status.WARN
    assert str(short_directory) in found["daemon"].advice


def test_the_plug_in_and_its_variable(make_daemon, monkeypatch):
    daemon = make_daemon(host_bytes=64 << 20)
    found_when_listening(daemon.url)

    def found(value, group="sglang.srt.plugins"):
        if value is None:
            monkeypatch.delenv("TIERSTORE", raising=False)
        else:
            monkeypatch.setenv("TIERSTORE", value)
        return {check.name: check for check in engine.plug_in_checks("SGLang", group)}

    nowhere = daemon.url + "-elsewhere"
    monkeypatch.setenv("TIERSTORE_LISTEN", nowhere)
    cases = {
        None: (Status.OK, "not set"),
        "off": (Status.OK, "off"),
        "on": (Status.FAIL, "must be auto, off or the address"),
        "auto": (Status.OK, "the engine starts one"),
        daemon.url: (Status.OK, f"a daemon listens at {daemon.url}"),
        nowhere: (Status.FAIL, "no daemon listens"),
        "tcp://127.0.0.1:1": (Status.WARN, "tcp://127.0.0.1:1"),
    }
    for value, (status, text) in cases.items():
        check = found(value)["TIERSTORE"]
        assert (check.status, text in check.found) == (status, True), check
    missing = found(None, "tierstore.no-such-group")["plug-in"]
    assert missing.status is Status.WARN
    assert "pip install" in missing.advice
    assert "TIERSTORE" in {check.name for check in sglang.checks(daemon.url, None)}
    assert "TIERSTORE" in {check.name for check in vllm.checks(daemon.url, None)}


def found_when_listening(url):
    while not is_listening(Path(url.removeprefix("ipc://"))):
        pass


@pytest.mark.parametrize("extra", ["{", "[]", "[" * 100_000], ids=["open", "array", "deep"])
def test_what_is_no_config_is_a_clear_error(extra):
    with pytest.raises(UsageError, match="--extra-config"):
        list(sglang.checks(None, extra))
