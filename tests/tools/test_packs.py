"""``tierstore-bench packs`` says something of each case."""

from __future__ import annotations

import json
import math

from tierstore_tools import packs


def test_a_small_run(tmp_path):
    rows = packs.run(tmp_path, 4 << 20, rounds=2, json=str(tmp_path / "out.json"))
    assert [row.case for row in rows] == [
        "plain write",
        "plain read",
        *(f"{case}, {hash}" for hash in ("blake3", "sha256") for case in ("export", "verify", "import")),
    ]
    assert all(row.gb_per_s > 0 and math.isfinite(row.of_plain) for row in rows)
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["rows"][2]["case"] == "export, blake3"
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
