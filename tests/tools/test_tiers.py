from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest

from tierstore.errors import UsageError
from tierstore_tools import tiers

DISK_OPS = [("disk", op) for op in ("put", "save", "get", "scatter")]
OPS = [*((tier, op) for tier in ("host", "hbm") for op in ("put", "get")), *DISK_OPS]


def test_every_tier_is_measured_beside_its_limit(tmp_path):
    result = tiers.run(tmp_path, [64 << 10, 1 << 20], total_bytes=8 << 20, rounds=1)
    assert [(row.tier, row.op) for row in result.rows] == OPS * 2
    beside = {}
    for row in result.rows:
        beside.setdefault(row.limit, []).append(row.gb_per_s / row.limit_fraction)
        assert row.us_per_page == pytest.approx(row.page_bytes / row.gb_per_s / 1e3)
    medians = {name: pytest.approx(statistics.median(limits)) for name, limits in beside.items()}
    assert {name: result.limits[name] for name in beside} == medians
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1000, 0, 1 << 30])
def test_page_sizes_that_cannot_be_measured_are_refused(tmp_path, size):
    with pytest.raises(UsageError, match="page size"):
        tiers.run(tmp_path, [size], total_bytes=1 << 20, rounds=1)


def test_the_command_prints_a_table_and_one_json_document(tmp_path):
    options = ["--page-bytes", "128KiB", "--total", "2MiB", "--rounds", "1", "--dir", str(tmp_path), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tierstore_tools.cli", "tiers", *options],
        capture_output=True,
        text=True,
        check=True,
    )
    document = json.loads(done.stdout)
    assert set(document) == {"machine", "limits", "rows"}
    assert set(document["rows"][0]) >= {
        "tier",
        "op",
        "page_bytes",
        "gb_per_s",
        "us_per_page",
        "limit_fraction",
    }
    assert "of limit" in done.stderr
