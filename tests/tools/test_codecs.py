"""``tierstore-bench codec`` says something of each way to keep pages."""

from __future__ import annotations

import json
import math

import pytest

from tierstore.errors import UsageError
from tierstore_tools import codecs


def test_a_small_run(tmp_path):
    rows = codecs.run(
        "tiny",
        256,
        dtype="bfloat16",
        text=None,
        rounds=1,
        json=str(tmp_path / "out.json"),
        store=tmp_path,
        hit_tokens=640,
    )
    assert {row.way for row in rows} >= {"copy", "lz4", "zstd -1, bytes shuffled", "tierstore lossless"}
    assert all(row.ratio > 0.9 and math.isfinite(row.decode_gb_per_s) for row in rows)
    assert all(row.exact for row in rows)
    document = json.loads((tmp_path / "out.json").read_text())
    assert len(document["rows"]) == len(rows)
    assert document["entropy_ratio"] > 1.2
    assert [(hit["codec"], hit["exact"]) for hit in document["hits"]] == [
        ("none", True),
        ("lossless", True),
        ("zstd", True),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]


def test_a_document_without_a_page_is_refused():
    with pytest.raises(UsageError, match="give --tokens at least that"):
        codecs.run("tiny", 10, dtype=None, text=None, rounds=1, json=None)
