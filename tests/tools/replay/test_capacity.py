from __future__ import annotations

import pytest

from tierstore.errors import UsageError
from tierstore.spec import KVSpec
from tierstore_tools.replay.capacity import parse_capacities, parse_capacity

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=64, dtype="float16")  # 512 bytes per token


def blocks(text: str, *, unique_blocks: int | None = 182_790, spec: KVSpec | None = SPEC) -> list[int]:
    return [
        each.blocks(block_tokens=512, unique_blocks=unique_blocks, spec=spec)
        for each in parse_capacities(text)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5859blocks", [5859]),
        ("1block", [1]),
        ("3000000tokens", [5859]),
        ("3Mtokens", [5859]),
        ("3M", [5859]),
        ("3M,50M", [5859, 97656]),
        ("3M,50Mtokens", [5859, 97656]),
        ("10%", [18279]),
        ("1,5,10%", [1827, 9139, 18279]),
        ("1.5GiB", [6144]),
        ("1GB", [3814]),
        ("1610612736bytes", [6144]),
        ("0.0001%", [1]),
        ("10kblocks, 2%, 256KiB", [10_000, 3655, 1]),
    ],
)
def test_people_write_capacities_in_many_ways(text, expected):
    assert blocks(text) == expected


@pytest.mark.parametrize("text", ["", "3M,,5M", "8G%x", "-5blocks", "1e3blocks", "nan", "blocks", "5 lines"])
def test_what_is_no_capacity_is_named(text):
    with pytest.raises(UsageError, match="not a capacity"):
        parse_capacities(text)


def test_units_need_what_they_are_counted_in():
    with pytest.raises(UsageError, match="--model"):
        blocks("8GiB", spec=None)
    with pytest.raises(UsageError, match="hash_ids"):
        blocks("10%", unique_blocks=None)
    with pytest.raises(UsageError, match="less than one block of 512 tokens"):
        blocks("511tokens")
    with pytest.raises(UsageError, match="less than one block of 512 tokens"):
        blocks("0%")


def test_a_single_capacity_is_not_a_list():
    with pytest.raises(UsageError, match="not a capacity"):
        parse_capacity("1GiB,2GiB")
