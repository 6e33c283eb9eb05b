"""``tierstore doctor --vllm``. What needs a vLLM to say is in tests/vllm."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.tierstore.cli.test_operations import run
from tierstore.cli.checks import Status, vllm
from tierstore.cli.checks.vllm import proposed
from tierstore.errors import UsageError


def found(url=None, flags=None):
    return {check.name: check for check in vllm.checks(url, None if flags is None else json.dumps(flags))}


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_fails_and_says_what_to_start(short_directory):
    url = f"ipc://{short_directory}/s"
    code, out, err = run("doctor", "--vllm", "--connect", url, "--json")
    document = json.loads(out)
    checks = {check["name"]: check for check in document["checks"]}
    assert (code, err) == (1, "")
    assert checks["vllm"]["status"] == "fail"
    assert checks["vllm connector"]["status"] == "warn"
    assert checks["daemon"]["status"] == "fail"
    assert f"tierstore serve --listen {url}" in checks["daemon"]["advice"]
    assert all(check["advice"] for check in checks.values() if check["status"] != "ok")
    assert document["kv_transfer_config"] == proposed(url)


def test_the_flags_for_vllm_are_on_one_line_and_pass_the_doctors_own_checks(short_directory):
    url = f"ipc://{short_directory}/s"
    _, out, _ = run("doctor", "--vllm", "--connect", url)
    flags = out.splitlines()[-1].partition("--kv-transfer-config ")[2].strip("'")
    assert json.loads(flags) == proposed(url)
    checks = found(flags=json.loads(flags))
    assert checks["kv_role"].status is Status.OK
    assert checks["kv_load_failure_policy"].status is Status.OK
    assert checks["chunk_tokens"].status is Status.OK
    assert url in checks["daemon"].found


def test_what_vllm_accepts_and_does_otherwise_than_one_thinks():
    flags = {"kv_role": "kv_client", "kv_connector_extra_config": {"chunk_tokens": 100}}
    checks = found("ipc:///nowhere/s", flags)
    assert checks["kv_role"].status is Status.FAIL
    assert checks["chunk_tokens"].status is Status.FAIL
    # The connector sets the policy itself, whatever is given.
    assert checks["kv_load_failure_policy"].status is Status.OK


@pytest.mark.parametrize(
    ("role", "meaning"),
    [("kv_both", "saves and loads"), ("kv_producer", "does not load"), ("kv_consumer", "does not save")],
)
def test_what_a_role_means(role, meaning):
    check = found("ipc:///nowhere/s", {"kv_role": role})["kv_role"]
    assert (check.status, meaning in check.found) == (Status.OK, True)


def test_inside_of_vllms_multiconnector_the_policy_is_for_the_user_to_set():
    ours = {**proposed("ipc:///nowhere/inside"), "kv_role": "kv_consumer"}
    flags = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other"}, ours]},
    }
    checks = found(flags=flags)
    assert checks["kv_load_failure_policy"].status is Status.WARN
    assert '"recompute"' in checks["kv_load_failure_policy"].advice
    assert checks["kv_role"].found.startswith("kv_consumer")
    assert "/nowhere/inside" in checks["daemon"].found
    flags["kv_load_failure_policy"] = "recompute"
    assert found(flags=flags)["kv_load_failure_policy"].status is Status.OK


@pytest.mark.parametrize("flags", ["{", "[]", '{"kv_connector_extra_config": 1}'])
def test_flags_that_are_no_object_are_bad_usage(flags):
    with pytest.raises(UsageError, match="--kv-transfer-config"):
        list(vllm.checks(None, flags))


def test_options_that_go_with_vllm_are_refused_without_it():
    code, out, err = run("doctor", "--connect", "ipc:///nowhere/s")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--vllm" in err


def test_the_daemon_is_asked_and_its_sizes_judged(make_daemon):
    daemon = make_daemon(host_bytes=64 << 20)
    checks = found_when_up(daemon.url)
    assert checks["daemon"].status is Status.OK
    assert checks["daemon's arena"].status is Status.WARN
    assert checks["daemon's arena"].figures == {"capacity_bytes": 64 << 20}
    assert "512 tokens" in checks["daemon's arena"].found
    assert checks["daemon's disk"].figures == {"capacity_bytes": 256 << 20}


def found_when_up(url):
    while (checks := found(url))["daemon"].status is not Status.OK:
        pass
    return checks


@pytest.mark.parametrize(
    ("version", "status"),
    [
        (None, Status.FAIL),
        ("0.22.1", Status.FAIL),
        ("0.23.0", Status.OK),
        ("0.32.0+cpu", Status.OK),
        ("0.33.1", Status.OK),
        ("0.34.0rc1", Status.WARN),
        ("1.0", Status.WARN),
    ],
)
def test_versions(version, status):
    assert vllm._version(version).status is status


def test_before_fixed_hashes_the_seed_matters(monkeypatch):
    monkeypatch.setattr(vllm, "installed", lambda *packages: "0.28.0")
    monkeypatch.setattr(vllm, "probe", lambda what, *_, **__: vllm.ok(what, ""))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert found()["PYTHONHASHSEED"].status is Status.WARN
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert found()["PYTHONHASHSEED"].status is Status.OK
    monkeypatch.setattr(vllm, "installed", lambda *packages: "0.32.0")
    assert "PYTHONHASHSEED" not in found()
