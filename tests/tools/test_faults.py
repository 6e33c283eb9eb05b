from __future__ import annotations

import json

import pytest

from tests.campaigns import command, runs
from tests.campaigns.campaign import FAULTS
from tests.forked import run
from tierstore.errors import UsageError
from tierstore_tools import cli

COLUMNS = {"fault", "runs", "wrong_pages", "lost_pages", "over_capacity", "failed_checks", "recovery_s"}


def test_every_fault_is_run_as_often_as_asked(tmp_path):
    """The command prints a table and one JSON document."""
    options = ["--runs", "2", "--seed", "3", "--dir", str(tmp_path), "--json"]
    code, out, err = run("tierstore_tools.cli", "faults", *options)
    document = json.loads(out)
    assert set(document) == {"machine", "seed", "rows", "failures"}
    rows = document["rows"]
    assert all(set(row) == COLUMNS for row in rows)
    assert [row["fault"] for row in rows] == ["kill -9", *FAULTS]
    assert all(row["runs"] == 2 for row in rows)
    assert not any(row["wrong_pages"] or row["lost_pages"] for row in rows)
    assert all(0 < row["recovery_s"] < 60 for row in rows)
    assert list(tmp_path.iterdir()) == []
    assert "durable pages lost" in err
    assert "failed checks" in err
    assert code == 0, err


def test_a_broken_promise_is_an_exit_code(tmp_path, monkeypatch):
    row = runs.FaultRow("torn write", 5, 1, 0, 0, 0, 0.01)
    result = runs.FaultsResult(4, (row,), ("what was done",))
    monkeypatch.setattr(runs, "run", lambda *args, **kwargs: result)
    with pytest.raises(Exception, match=r"after: torn write \(--seed 4 does the same again\)"):
        command.run(tmp_path, runs=5, seed=4, json=None)


def test_without_a_checkout_it_says_that_it_needs_one(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages" / "tierstore_tools" / "cli.py"))
    with pytest.raises(UsageError, match="from a checkout"):
        cli.faults()


def test_a_directory_that_cannot_be_written_is_bad_usage(tmp_path):
    code, _, err = run("tierstore_tools.cli", "faults", "--dir", tmp_path / "not" / "yet")
    assert code == 2
    assert "cannot make" in err
