"""The benchmark itself, small: it is the project's end-to-end test."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CASES = ["store_off", "cold", "hbm", "host", "disk", "tail"]


def bench(*arguments, cwd):
    command = [sys.executable, "-m", "tierstore_tools.cli", "longctx", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_every_hit_equals_the_cold_run(tmp_path):
    done = bench(
        *("--model", "tiny", "--tokens", "3000", "--prefill-chunk", "512", "--sweep", "500"),
        *("--json", "out.json", "--plot", "out.png"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert [row["case"] for row in document["rows"]] == CASES
    rows = {row["case"]: row for row in document["rows"]}
    assert all(row["identical"] for row in rows.values())
    assert rows["store_off"]["max_logit_diff"] == 0
    assert [rows[case]["reused_tokens"] for case in CASES] == [0, 0, 2999, 2999, 2999, 3031]
    assert rows["disk"]["pages_identical"]
    assert rows["disk"]["moved_bytes"] == rows["host"]["moved_bytes"] > 0
    assert document["sweep"][0]["prompt_tokens"] == 500
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png"]


def test_a_prompt_that_ends_with_a_page(tmp_path):
    """Its last token, and so its last page, every run computes for itself."""
    result = bench(*("--model", "tiny", "--tokens", "1024", "--json", "out.json"), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = {row["case"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert all(row["identical"] for row in rows.values())
    assert all(row["slowest_ttft_s"] >= row["ttft_s"] for row in rows.values())


def test_a_hit_that_ends_where_a_prefill_chunk_ended_gives_the_very_same_logits(tmp_path):
    # 2049 tokens: 2048 are reused, which is where the cold run's last chunk began.
    done = bench(
        *("--model", "tiny", "--tokens", "2049", "--prefill-chunk", "512", "--json", "out.json"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    for case in ("hbm", "host", "disk"):
        assert rows[case]["reused_tokens"] == 2048
        assert rows[case]["max_logit_diff"] == 0


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (["--model", "huge"], "presets", 2),
        (["--model", "tiny", "--tokens", "100000"], "allows 8192", 2),
        (["--tokens", "5"], "too few", 2),
        (["--prompt-file", "missing.txt"], "missing.txt", 2),
        (["--store", "missing"], "missing is not a directory", 2),
        (["--sweep", "a,b"], "--sweep", 2),
        (["--json", "missing/out.json", "--model", "tiny"], "no such directory", 2),
        (["--device", "tpu"], "unknown device", 2),
    ],
)
def test_bad_usage_is_one_clear_line_and_leaves_nothing_behind(tmp_path, arguments, says, code):
    done = bench(*arguments, cwd=tmp_path)
    assert done.returncode == code
    last = [line for line in done.stderr.splitlines() if line.startswith("tierstore-bench:")]
    assert len(last) == 1
    assert says in last[0]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
