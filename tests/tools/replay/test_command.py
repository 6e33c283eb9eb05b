from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from typer.testing import CliRunner

from tests.tools.replay.written import mooncake_line, session, turn, write_lines
from tierstore.policy import POLICIES
from tierstore_tools import cli
from tierstore_tools.replay.formats import load
from tierstore_tools.replay.policies import POLICY_NAMES
from tierstore_tools.replay.simulator import simulate


@pytest.fixture
def trace(tmp_path) -> Path:
    """Two hundred prompts over forty beginnings."""
    chance = random.Random(3)
    lines = []
    for at in range(200):
        user = chance.randint(0, 39)
        lines.append(
            mooncake_line([0, *(100 * user + each for each in range(1, chance.randint(2, 9)))], at_ms=at)
        )
    return write_lines(tmp_path / "trace.jsonl", lines)


def replay(*arguments: object) -> dict[str, object]:
    result = CliRunner().invoke(cli.app, ["replay", *map(str, arguments), "--json", "-"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(monkeypatch, capsys, *arguments: object) -> str:
    """The one line that a person sees."""
    monkeypatch.setattr(sys, "argv", ["tierstore-bench", "replay", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tierstore-bench: ")]
    assert (exit_.value.code, len(lines)) == (2, 1)
    return lines[0]


def test_the_document_has_a_row_per_policy_and_capacity(trace):
    document = replay("--trace", trace, "--policy", "lru,default", "--capacity", "30blocks,50%,20480tokens")
    assert document["requests"] == 200
    assert document["unique_blocks"] == len({each for one in load(trace).trace for each in one.blocks})
    assert document["unfinished"] == 0
    assert 0 < document["ideal"] < 1
    rows = document["rows"]
    half = document["unique_blocks"] // 2
    asked = [(policy, blocks) for policy in ("lru", "default") for blocks in (30, half, 40)]
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == asked
    for row in rows:
        simulated = simulate(load(trace).trace, row["policy"], row["capacity_blocks"])
        assert row["hit_rate"] == simulated.hit_rate
        assert row["capacity_tokens"] == 512 * row["capacity_blocks"]
        assert row["hints"] == "none"


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_replay_leaves_what_it_had(trace, tmp_path, jobs):
    out = tmp_path / "out.json"
    capacities = ",".join(f"{blocks}blocks" for blocks in range(2, 2000))
    asked = ["replay", "--trace", trace, "--policy", "lru", "--capacity", capacities, "--jobs", jobs]
    command = [sys.executable, "-m", "tierstore_tools.cli", *map(str, asked), "--json", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        lines = iter(running.stderr.readline, "")
        told = next((line for line in lines if "blocks: hit rate" in line), "")
        next(lines)  # by now the first one is in the document
        running.kill()
    assert told.startswith("lru, ")
    document = json.loads(out.read_text())
    assert document["unfinished"] == 1998 - len(document["rows"]) > 0
    row = document["rows"][0]
    assert row["hit_rate"] == simulate(load(trace).trace, "lru", row["capacity_blocks"]).hit_rate


def test_processes_come_to_the_same_result(trace):
    asked = ("--trace", trace, "--policy", "lru,default", "--capacity", "10,20,40%")
    assert replay(*asked, "--jobs", 2) == replay(*asked, "--jobs", 1)


def test_all_policies_can_be_named(trace):
    names = POLICY_NAMES
    assert set(names) >= set(POLICIES)
    rows = replay("--trace", trace, "--policy", ",".join(names), "--capacity", "40blocks")["rows"]
    assert [row["policy"] for row in rows] == list(names)


def test_the_help_names_them_all():
    told = CliRunner().invoke(cli.app, ["replay", "--help"]).stdout
    named = told.split("Comma-separated: lru", 1)[1].split("[default", 1)[0]
    assert {"lru", *re.findall(r"[a-z0-9]+", named)} == set(POLICY_NAMES)


def test_hints_stand_above_the_figures(trace):
    asked = ["replay", "--trace", str(trace), "--policy", "lru", "--capacity", "9blocks"]
    assert (
        "hit rate, hints oracle:0.9" in CliRunner().invoke(cli.app, [*asked, "--hints", "oracle:0.9"]).stdout
    )
    assert "hints" not in CliRunner().invoke(cli.app, asked).stdout


def test_the_picture_and_the_document_are_written(trace, tmp_path):
    plot, out = tmp_path / "plot.png", tmp_path / "out.json"
    asked = [
        "replay",
        "--trace",
        str(trace),
        "--policy",
        "lru,default",
        "--capacity",
        "10,50%",
        "--model",
        "tiny",
    ]
    result = CliRunner().invoke(cli.app, [*asked, "--plot", str(plot), "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert json.loads(out.read_text())["token_bytes"] == 512
    assert "34 MiB" in result.stdout
    assert "0." in result.stdout


def test_the_picture_is_in_the_unit_of_the_tables(trace, tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    for model, unit in ((("--model", "tiny"), "MiB"), ((), "k")):
        plot = tmp_path / "plot.svg"
        replay("--trace", trace, "--policy", "lru", "--capacity", "5,10,100%", "--plot", plot, *model)
        ticks = re.findall(rf">(\d+) {unit}<", plot.read_text())
        assert len(ticks) > 1
        assert unit != "MiB" or all(int(tick).bit_count() == 1 for tick in ticks)


def test_bytes_are_counted_in_a_model_of_a_folder(trace, tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 128, "torch_dtype": "float16"}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    document = replay(
        "--trace", trace, "--capacity", "16MiB", "--model", tmp_path / "model", "--policy", "lru"
    )
    assert document["token_bytes"] == 1024
    assert document["rows"][0]["capacity_blocks"] == 32


def test_through_the_tiers(tmp_path):
    turns = [turn(10.0 * number, range(5 + number), stop="tool_use") for number in range(20)]
    path = write_lines(tmp_path / "sessions.jsonl", [session(name, turns) for name in "abcd"])
    document = replay(
        *("--trace", path, "--policy", "lru", "--model", "tiny", "--hints", "inferred"),
        *("--hbm", "16blocks", "--host", "40%", "--disk", "1GiB", "--prefill-tokens-per-s", 1000),
        *("--host-gb-per-s", 1, "--disk-read-gb-per-s", 0.1, "--disk-write-gb-per-s", 0.1),
    )
    assert document["rows"] == []
    assert [row["prefetch"] for row in document["tiers"]] == [False, True]
    for row in document["tiers"]:
        assert row["hit_tokens"]["hbm"] + row["hit_tokens"]["host"] + row["hit_tokens"]["disk"] > 0
        assert row["ttft"]["p50_s"] < row["recompute_ttft"]["p50_s"]
        assert row["hints"] == "inferred"


def test_hints_that_cannot_be_inferred_are_told(trace):
    asked = [
        "replay",
        "--trace",
        str(trace),
        "--policy",
        "lru",
        "--capacity",
        "9blocks",
        "--hints",
        "inferred",
    ]
    result = CliRunner().invoke(cli.app, asked)
    assert result.exit_code == 0, result.output
    assert "no hint was inferred" in result.stderr


@pytest.mark.parametrize("right", [0, 0.5, 1])
def test_an_oracle_is_right_as_often_as_asked(trace, right):
    hints = f"oracle:{right}"
    asked = ("--trace", trace, "--policy", "lru,hinted,belady", "--capacity", "40blocks", "--hints", hints)
    lru, hinted, belady = replay(*asked)["rows"]
    assert (lru["hints"], hinted["hints"], belady["hints"]) == (hints, hints, "none")
    assert lru["hit_rate"] <= belady["hit_rate"]
    if right == 1:
        assert lru["hit_rate"] < hinted["hit_rate"] <= belady["hit_rate"]
    if right == 0:
        assert hinted["hit_rate"] < lru["hit_rate"]


def test_a_csv_of_lengths_says_how_long_a_page_stays(tmp_path):
    path = tmp_path / "lengths.csv"
    rows = "".join(f"{second},900,100\n" for second in range(11))
    path.write_text("timestamp,input_tokens,output_tokens\n" + rows)
    document = replay("--trace", path, "--capacity", "64ktokens")
    assert (document["requests"], document["tokens"], document["ideal"]) == (11, 11_000, None)
    row = document["rows"][0]
    assert row["hit_rate"] is None
    assert row["turnover_s"] == pytest.approx(64_000 / 1_100)


def test_damage_is_told_and_does_not_cost_the_run(trace):
    with trace.open("a") as file:
        file.write('{"timestamp": 5, "inp')
    result = CliRunner().invoke(cli.app, ["replay", "--trace", str(trace), "--policy", "lru"])
    assert result.exit_code == 0, result.output
    assert "left out 1 unreadable entries, first trace.jsonl:201: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "lru,nonesuch"], "unknown policy 'nonesuch' (known: "),
        (["--policy", ""], "unknown policy ''"),
        (["--capacity", "8GiB"], "8GiB is in bytes: --model must say"),
        (["--capacity", "8 bananas"], "not a capacity: '8 bananas'"),
        (["--capacity", "10tokens"], "10tokens is less than one block of 512 tokens"),
        (["--model", "gpt-17"], "'gpt-17' is neither a preset"),
        (["--hints", "wrong"], "--hints takes none, oracle:P (such as oracle:0.9) or inferred, got 'wrong'"),
        (["--format", "parquet"], "unknown trace format 'parquet'"),
        (["--format", "bailian"], "is not a bailian trace"),
        (["--plot", "/nonexistent/p.png"], "cannot write /nonexistent/p.png"),
        (["--host", "1GiB"], "--model must say how many bytes a token takes"),
        (["--disk", "1GiB"], "pages reach the disk through the host tier"),
        (
            ["--host", "1GiB", "--model", "tiny"],
            "a bandwidth is missing: --tiers with a file, or --host-gb-per-s",
        ),
        (["--host", "1GiB", "--model", "tiny", "--host-gb-per-s", 5], "the speed of prefill is missing"),
        (["--host", "1GiB", "--model", "tiny", "--host-gb-per-s", 0], "more than 0, got 0"),
        (["--host", "1GiB", "--plot", "p.png"], "--plot draws hit rates by capacity"),
        (["--host", "1GiB", "--prefetch", "maybe"], "--prefetch takes both, off or on"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_one_line(monkeypatch, capsys, trace, arguments, says):
    assert says in refused(monkeypatch, capsys, "--trace", trace, *arguments)


def test_a_missing_or_empty_trace_is_refused(monkeypatch, capsys, tmp_path):
    assert "there is no trace" in refused(monkeypatch, capsys, "--trace", tmp_path / "missing")
    path = write_lines(tmp_path / "empty prompts.jsonl", [mooncake_line([]), mooncake_line([])])
    assert "no block in any prompt" in refused(monkeypatch, capsys, "--trace", path)
    csv = tmp_path / "lengths.csv"
    csv.write_text("input_tokens\n5\n")
    assert "needs a trace with hash_ids" in refused(monkeypatch, capsys, "--trace", csv)
    assert "no hash_ids: --plot" in refused(
        monkeypatch, capsys, "--trace", csv, "--capacity", "1Mtokens", "--plot", tmp_path / "p.png"
    )
