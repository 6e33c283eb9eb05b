from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tierstore_tools.cli import app, main


def test_what_lookups_and_notes_take_is_shown_and_written(tmp_path):
    out = tmp_path / "curve.json"
    arguments = ["curve", "--tokens", "640,6400", "--seconds", "0.2", "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    short, long = json.loads(out.read_text())["lengths"]
    assert [short["tokens"], long["tokens"]] == [640, 6400]
    assert 0 < short["lookup_us"] < long["lookup_us"]
    for cost in (short, long):
        assert cost["calm_share"] == pytest.approx(cost["calm_note_us"] / cost["lookup_us"])
        assert 0 < cost["thread_share"] < 1
        assert 0 <= cost["left_out"] < 1


@pytest.mark.parametrize(
    ("tokens", "says"), [("a,640", "--tokens takes numbers"), ("640,5", "at least one page")]
)
def test_lengths_that_are_none_are_one_clear_line(monkeypatch, capfd, tokens, says):
    monkeypatch.setattr("sys.argv", ["tierstore-bench", "curve", "--tokens", tokens])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("tierstore-bench: ")
    assert says in line
