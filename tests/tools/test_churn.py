from __future__ import annotations

import json

from typer.testing import CliRunner

from tierstore_tools.cli import app


def test_a_day_is_shown_and_written(tmp_path):
    out = tmp_path / "churn.json"
    arguments = ["churn", "--capacity", "96MiB", "--times", "1.5", "--dir", str(tmp_path), "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert len(document["tenths"]) == 10
    assert document["over_capacity"] is False
    assert document["most_taken_bytes"] <= document["capacity_bytes"]
    assert document["least_utilisation"] > 0.5
    assert not list(tmp_path.glob("tierstore-churn-*"))


def test_a_cap_for_a_handful_of_pages_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["churn", "--capacity", "8MiB", "--dir", str(tmp_path)])
    assert result.exit_code != 0
