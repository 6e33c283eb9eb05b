from __future__ import annotations

import json

from typer.testing import CliRunner

from tierstore_tools.cli import app


def test_what_lookups_and_notes_take_is_shown_and_written(tmp_path):
    out = tmp_path / "curve.json"
    arguments = ["curve", "--tokens", "640,6400", "--seconds", "0.2", "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    short, long = json.loads(out.read_text())["lengths"]
    assert [short["tokens"], long["tokens"]] == [640, 6400]
    assert 0 < short["note_us"] < short["lookup_us"] < long["lookup_us"]
    assert short["note_share"] == short["note_us"] / short["lookup_us"]
    assert 0 <= short["left_out"] < 1
