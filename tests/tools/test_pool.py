"""`tierstore-bench pool`: the books of three pools over the same made-up requests."""

import json

import pytest

from tierstore.errors import UsageError
from tierstore.sizing import PRESETS
from tierstore_tools.pool import needed_bytes, run, spec_of

SMALL = {
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "sliding_window": 256,
    "sliding_window_pattern": 6,
    "dtype": "float16",
}


def test_what_a_token_attends_is_what_is_needed():
    spec = spec_of(SMALL, chunk_tokens=64)
    vector = 2 * 32 * 2
    assert needed_bytes(spec, 1000) == vector * (1000 + 5 * 255)


def test_two_levels_waste_least(tmp_path):
    target, plot = tmp_path / "pool.json", tmp_path / "pool.png"
    run(
        {"small": SMALL, "dense": PRESETS["qwen2.5-0.5b"]},
        nbytes=48 << 20,
        longest=2048,
        chunk_tokens=16,
        steps=40,
        seed=2,
        policies=("two-level", "one-size", "contiguous"),
        json=str(target),
        plot=plot,
    )
    document = json.loads(target.read_text())
    waste = {(each["model"], each["policy"]): each["waste"] for each in document["results"]}
    for model in ("small", "dense"):
        assert 0 <= waste[model, "two-level"] <= waste[model, "one-size"] + 0.01
        assert waste[model, "one-size"] < waste[model, "contiguous"]
    assert 2 * waste["small", "two-level"] < waste["small", "one-size"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_simulated_is_refused(tmp_path):
    spec = {"nbytes": 1 << 20, "longest": 4096, "chunk_tokens": 16, "steps": 20, "seed": 1}
    with pytest.raises(UsageError, match="no pool 'paged'"):
        run({"small": SMALL}, **spec, policies=["paged"], json=None, plot=None)
    with pytest.raises(UsageError, match="no room"):
        run({"small": SMALL}, **spec, policies=["contiguous"], json=None, plot=None)
