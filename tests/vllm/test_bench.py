"""``tierstore-bench vllm`` and ``tierstore doctor --vllm`` where there is a vLLM."""

from __future__ import annotations

import json
import subprocess
import sys

from tierstore.cli.checks import Status, vllm


def test_every_case_is_measured_and_its_answers_are_vllms_own(tmp_path):
    out = tmp_path / "out.json"
    options = (
        "--model",
        "tiny",
        "--tokens",
        "400",
        "--rounds",
        "1",
        "--pairs",
        "2",
        "--options",
        '{"block_size": 32}',
    )
    done = subprocess.run(
        [sys.executable, "-m", "tierstore_tools.cli", "vllm", *options, "--dir", tmp_path, "--json", out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert document["machine"]["vllm"] == vllm.installed_version()
    rows = {row["case"]: row for row in document["rows"]}
    assert list(rows) == ["no_connector", "cold", "host", "disk"]
    assert [row["hit_tokens"] for row in rows.values()] == [0, 0, 384, 384]
    assert all(row["identical"] and row["max_logprob_diff"] <= 1e-5 for row in rows.values())
    assert all(row["ttft_s"] > 0 for row in rows.values())
    assert {document["overhead"][what]["pairs"] for what in ("ttft", "cpu", "throughput")} == {2}
    assert document["skipped"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_the_doctor_lets_vllm_look_for_the_connector(daemon):
    checks = {check.name: check for check in vllm.checks(daemon.url, None)}
    assert checks["vllm"].status is Status.OK
    assert checks["vllm connector"].status is Status.OK
    assert "TierStoreConnector" in checks["vllm connector"].found
    assert checks["daemon"].status is Status.OK
    assert checks["daemon's arena"].status is Status.WARN  # 64 MiB


def test_the_doctor_says_what_the_connector_would_not_take(daemon):
    flags = vllm.proposed(daemon.url)
    flags["kv_connector_extra_config"]["stoer"] = "ipc:///x"
    checks = {check.name: check for check in vllm.checks(daemon.url, json.dumps(flags))}
    assert checks["vllm connector"].status is Status.FAIL
    assert "'stoer'" in checks["vllm connector"].found
