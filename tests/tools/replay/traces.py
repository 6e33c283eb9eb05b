"""The published trace that the tests replay: a slice of it."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path

from tierstore_tools.replay.trace import TraceRequest

SLICE = Path(__file__).parents[2] / "data" / "mooncake" / "conversation_2000.jsonl.gz"


@functools.cache
def conversation() -> tuple[TraceRequest, ...]:
    """The first 2,000 requests of Mooncake's conversation trace, in blocks of 512 tokens."""
    with gzip.open(SLICE, "rt") as lines:
        return tuple(
            TraceRequest(
                line["timestamp"] / 1e3, line["hash_ids"], line["input_length"], line["output_length"]
            )
            for line in map(json.loads, lines)
        )
