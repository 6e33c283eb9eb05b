"""Run the scripts in benchmarks/: each explains itself, and tiny runs have the figures that they promise."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.forked import run
from tierstore_engine.tokenizer import common_length

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.fixture
def ended(monkeypatch, capsys):
    """Run a script that computes nothing in this process, which has imported most of what it needs."""

    def ended_(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.syspath_prepend(ROOT / "benchmarks")
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
        return end.value.code, *capsys.readouterr()

    return ended_


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_a_script_explains_itself(ended, script):
    code, out, err = ended(script, "--help")
    assert (code, err) == (0, "")
    assert "--json" in out


@pytest.fixture
def measured(tmp_path):
    def measured_(script, *arguments):
        out = tmp_path / "out.json"
        code, _, said = run(str(ROOT / "benchmarks" / script), *arguments, "--json", out)
        assert code == 0, said
        return json.loads(out.read_text())

    return measured_


def test_converted_blocks_come_back(measured):
    small = ("--layers", "2", "--kv-heads", "2", "--tokens", "128", "--rounds", "1")
    rows = measured("sharing.py", *small)["rows"]
    assert {(row["order"], row["dtype"]) for row in rows} == {
        (order, dtype) for order in ("by token", "turned") for dtype in ("float32", "bfloat16")
    }
    assert all(row["exact"] and row["gather_of_memcpy"] > 0 for row in rows)


def test_quality_falls_with_the_bits(measured):
    document = measured("quality.py", "--model", "tiny", "--tokens", "300", "--kv-dtypes", "int8,int4")
    rows = {row["kv_dtype"]: row for row in document["rows"]}
    exact = rows["auto"]
    assert (exact["logit_error"], exact["top1_agreement"], exact["divergence"]) == (0, 1, 0)
    assert 0 < rows["int8"]["logit_error"] < rows["int4"]["logit_error"]
    assert exact["bytes_per_token"] > rows["int8"]["bytes_per_token"] > rows["int4"]["bytes_per_token"]


def test_every_codec_is_exact(measured, tmp_path):
    sizes = ("--model", "tiny", "--tokens", "256", "--dtype", "bfloat16", "--rounds", "1")
    document = measured("codec.py", *sizes, "--store", tmp_path, "--hit-tokens", "640")
    assert {row["way"] for row in document["rows"]} >= {"copy", "lz4", "tierstore lossless", "tierstore zstd"}
    assert all(row["exact"] and row["ratio"] > 0.9 for row in document["rows"])
    assert [(hit["codec"], hit["exact"]) for hit in document["hits"]] == [
        ("none", True),
        ("lossless", True),
        ("zstd", True),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]


def test_embeddings_that_cost_more_are_kept(measured):
    rows = measured("encoder_cost.py", "--capacities", "8GiB", "--turns", "600")["rows"]
    without, with_worth = [row for row in rows if (row["mix"], row["model"]) == ("questions", "gemma-3-4b")]
    assert (without["worth"], with_worth["worth"]) == (0, 6)
    assert with_worth["work_tokens"] < without["work_tokens"]
    assert with_worth["image_share"] < without["image_share"]


def test_a_decode_step_with_and_without_the_compiled_part(measured):
    arguments = ("--model", "tiny", "--past", "20", "--batches", "1,3", "--steps", "2", "--threads", "2")
    document = measured("decode.py", *arguments)
    assert [row["batch"] for row in document["rows"]] == [1, 3]
    assert all(min(row.values()) > 0 for row in document["rows"])


def test_products_and_the_same_bits_beside_torch(measured):
    rows = measured("products.py", "--shapes", "64x96", "--rows", "1,20", "--times", "2")["rows"]
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"]
    assert all(ratio > 0 for row in rows for ratio in row["of_torch"].values())
    found = measured("deterministic.py", "--model", "tiny", "--tokens", "70", "--steps", "2", "--rounds", "1")
    assert min(found["prompt_of_default"], found["step_of_default"]) > 0


def test_pools_of_two_levels_waste_least(measured):
    found = measured("pool_waste.py", "--memory", "8GiB", "--steps", "30", "--embeddings")["rows"]
    waste = {(row["mix"], row["pool"]): row["waste"] for row in found}
    assert pytest.approx(0.796, abs=0.0005) == 1 - (43 * 32 + 6193 * 8) / (6236 * 40)  # of Jenga's paper
    for mix in ("image only", "chat"):
        assert 0 <= waste[mix, "two-level"] < 0.1
        assert min(waste[mix, "one slot"], waste[mix, "one page size"]) > 0.3


def test_the_curve_is_part_of_a_lookup(measured):
    (cost,) = measured("curve.py", "--tokens", "640", "--seconds", "0.2")["costs"]
    assert cost["tokens"] == 640
    assert cost["call_share"] == pytest.approx(cost["call_us"] / cost["lookup_us"])


def test_every_plan_gives_the_same_answer(measured):
    sizes = ("--tokens", "200", "--speeds", "1", "--rounds", "1", "--prefill-chunk", "64")
    (point,) = measured("planner.py", "--model", "tiny", *sizes)["points"]
    assert set(point["ttft_s"]) == {"compute", "load", "one-way", "both-ends"}
    assert point["identical"]


def test_tierstore_names_where_prompts_drift(measured):
    document = measured("drift.py", "--kvlint", "", "--cachelint", "")
    assert document["versions"] == {"kvlint": "not installed", "cachelint": "not installed"}
    assert [case["number"] for case in document["cases"]] == [
        *("1", "2", "3", "4", "5a", "5b", "6", "7", "8", "9", "10")
    ]
    for case in document["cases"]:
        answers = case["answers"]
        if case["field"]:
            assert set(answers) == {"Store.explain"}
            assert answers["Store.explain"]["kind"] == "field"
        else:
            assert set(answers) == {"compared", "explain_cache"}
            assert {(each["kind"], each["distance"]) for each in answers.values()} == {("character", 0)}


@pytest.fixture
def drift(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("drift")


def test_the_place_of_a_drift_is_where_the_prompts_differ(drift):
    for case in drift.cases():
        one, other = drift.rendered(case.first), drift.rendered(case.second)
        if case.field:
            assert one == other
        else:
            assert common_length(one, other) == drift.position(case)


def test_the_output_of_the_linters_is_read(drift):
    """The outputs are those of kvlint 0.1.1 and cachelint 0.1.0a2."""
    cases = {case.number: case for case in drift.cases()}
    letters = models.BPE(
        vocab={name: at for at, name in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]
    )
    tokenizer = Tokenizer(letters)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def kvlint(number, token, *rules):
        tokens = len(tokenizer.encode(drift.rendered(cases[number].second)))
        sims = [{"engine": "vllm"}, {"engine": "sglang"}]
        sims[1]["per_request"] = [{}, {"divergence_token_idx": token, "prompt_tokens": tokens}]
        findings = [{"rule_id": rule, "evidence": "…"} for rule in rules]
        return drift.from_kvlint(cases[number], {"sims": sims, "findings": findings}, tokenizer).cell

    at = drift.position(cases["2"])
    assert kvlint("2", at, "block_straddle", "dynamic_time") == f"token {at}, dynamic_time (exact)"
    assert kvlint("2", at - 2) == f"token {at - 2} (-2)"
    assert kvlint("8", None) == "no place"

    def cachelint(number, first):
        output = f"Prompt status: diverged\nFirst divergence: {first}\nContext differences: none\n"
        return drift.from_cachelint(cases[number], output).cell

    at = cases["2"].character
    assert cachelint("2", f"messages[0].content (text_changed, offset {at})").endswith(f"at {at} (exact)")
    assert cachelint("5b", "messages[4] (inserted)") == "messages[4] inserted (wrong place)"
    assert cachelint("10", "messages[1] (removed)") == "messages[1] removed (message)"
    assert cachelint("8", "none") == "no place"
    refused = "cachelint: error: requests must use the same provider and model\n"
    assert drift.from_cachelint(cases["7"], refused).cell == "no place"


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        ("quality.py", ["--model", "tiny", "--kv-dtypes", "int3"], "unknown KV dtype"),
        ("codec.py", ["--model", "tiny", "--tokens", "10"], "from 64"),
        ("curve.py", ["--tokens", "5"], "at least a page"),
        ("routing.py", ["--routers", "best"], "got best"),
        ("decode.py", ["--batches", "none"], "such as 1,4,16"),
        ("products.py", ["--shapes", "576"], "like 576x1536,896x9728"),
        ("deterministic.py", ["--tokens", "0"], "begin at 1"),
        ("drift.py", ["--kvlint", "/no/such/kvlint"], "names no program"),
    ],
)
def test_bad_usage_is_one_line(ended, script, arguments, says):
    code, _, err = ended(script, *arguments)
    assert code == 2
    (line,) = err.strip().splitlines()
    assert says in line
