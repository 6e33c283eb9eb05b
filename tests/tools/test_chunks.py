"""What the size of a chunk does to a store."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tierstore.errors import UsageError
from tierstore_tools import chunks
from tierstore_tools.cli import app

TRACE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [1, 2]},
    {"timestamp": 1, "input_length": 1500, "output_length": 1, "hash_ids": [1, 2, 3]},
    {"timestamp": 2, "input_length": 1500, "output_length": 1, "hash_ids": [1, 2, 4]},
    {"timestamp": 3, "input_length": 1500, "output_length": 1, "hash_ids": [1, 2, 4]},
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    return path


def test_larger_chunks_find_less_and_waste_more(trace, tmp_path):
    out = tmp_path / "chunks.json"
    result = CliRunner().invoke(app, ["chunks", str(trace), "--tokens", "16,64,256", "--json", str(out)])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    rows = document["chunks"]
    assert (document["prompts"], document["tokens"]) == (4, 5500)
    assert [row["chunk_tokens"] for row in rows] == [16, 64, 256]
    assert [row["copy_bytes"] for row in rows] == [16 << 17, 64 << 17, 256 << 17]
    prompts = chunks._prompts(trace, 4)
    parted = next(at for at in range(1024, 1500) if prompts[1][at] != prompts[2][at])
    shared = [0, 1000, parted, 1500]
    for row in rows:
        size = row["chunk_tokens"]
        assert row["hits"] == pytest.approx(sum(shared) / 5500)
        assert row["whole_hits"] == pytest.approx(sum(each // size * size for each in shared) / 5500)
        new = [-(-len(prompt) // size) - held // size for prompt, held in zip(prompts, shared, strict=True)]
        new[3] = 0  # its partial page is there, too
        assert row["pages"] == sum(new)
        lengths = [(len(prompt), count) for prompt, count in zip(prompts, new, strict=True) if count]
        tokens = sum(count * size - -length % size for length, count in lengths)
        assert row["empty"] == pytest.approx(1 - tokens / (sum(new) * size))
        assert 0 < row["lookup_us"] <= row["slow_lookup_us"]


def test_prompts_of_a_block_part_somewhere_within_it(trace):
    first, second, third, again = chunks._prompts(trace, 4)
    assert (first == second[:1000]).all()
    assert (third == again).all()
    assert (second[:1024] == third[:1024]).all()
    assert (second[1024:] != third[1024:]).any()


def test_what_cannot_be_measured_is_refused(trace, tmp_path):
    with pytest.raises(UsageError, match="no model"):
        chunks.run(trace, [16], requests=1, model="none", json=None)
    empty = tmp_path / "empty.jsonl"
    line = {"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}
    empty.write_text(json.dumps(line) + "\n")
    with pytest.raises(UsageError):
        chunks.run(empty, [16], requests=1, model="llama-3-8b", json=None)
