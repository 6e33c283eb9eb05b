from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tierstore.errors import UsageError
from tierstore_tools.cli import app, main


def test_what_lookups_and_their_curve_take_is_shown_and_written(tmp_path):
    out = tmp_path / "curve.json"
    arguments = ["curve", "--tokens", "640,6400", "--seconds", "0.2", "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    short, long = json.loads(out.read_text())["costs"]
    assert [short["tokens"], long["tokens"]] == [640, 6400]
    for cost in (short, long):
        assert min(cost["lookup_us"], cost["call_us"], cost["work_us"]) > 0
        assert cost["call_share"] == pytest.approx(cost["call_us"] / cost["lookup_us"])
        assert cost["keeps_up_with"] == pytest.approx(0.05 / (cost["work_us"] / 1e6))


def test_prompts_may_be_those_of_a_trace(tmp_path):
    out, trace = tmp_path / "curve.json", tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [1, 2]},
        {"timestamp": 1, "input_length": 1500, "output_length": 1, "hash_ids": [1, 2, 3]},
        {"timestamp": 2, "input_length": 10, "output_length": 1, "hash_ids": [4]},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["curve", "--trace", str(trace), "--seconds", "0.1", "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (cost,) = json.loads(out.read_text())["costs"]
    assert (cost["prompts"], cost["tokens"]) == ("trace.jsonl", 1250)
    assert cost["lookup_us"] > 0


@pytest.mark.parametrize("text", ["input_length,output_length\n5,5\n", '{"timestamp": 0}\n'])
def test_a_trace_without_prompts_is_refused(tmp_path, text):
    trace = tmp_path / "trace"
    trace.write_text(text)
    result = CliRunner().invoke(app, ["curve", "--trace", str(trace)])
    assert isinstance(result.exception, UsageError)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ("a,640", "--tokens takes numbers"),
        ("", "--tokens takes numbers"),
        ("640,5", "at least one page"),
    ],
)
def test_lengths_that_are_none_are_one_clear_line(monkeypatch, capfd, tokens, says):
    monkeypatch.setattr("sys.argv", ["tierstore-bench", "curve", "--tokens", tokens])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("tierstore-bench: ")
    assert says in line
