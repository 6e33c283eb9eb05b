"""Small traces as files, in the formats they are published in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def mooncake_line(ids: Sequence[int], *, at_ms: float | None = 0, output: int = 7) -> dict[str, object]:
    line: dict[str, object] = {"input_length": 512 * len(ids), "output_length": output, "hash_ids": list(ids)}
    return line if at_ms is None else {"timestamp": at_ms, **line}


def write_lines(path: Path, lines: Sequence[object]) -> Path:
    """One JSON document per line; bytes and strings go in as they are."""
    with path.open("wb") as file:
        for line in lines:
            if isinstance(line, str):
                line = line.encode()
            file.write(line if isinstance(line, bytes) else json.dumps(line).encode())
            file.write(b"\n")
    return path


def turn(t: float, ids: Sequence[int], *, stop: str = "", block: int = 64) -> dict[str, object]:
    """A request of a WEKA session, with a few tokens after its last whole block."""
    return {
        "t": t,
        "type": "s",
        "model": "m",
        "in": block * len(ids) + 5,
        "out": 9,
        "hash_ids": list(ids),
        "input_types": ["text"],
        "output_types": ["text"],
        "stop": stop,
        "think_time": 0.5,
        "api_time": 1.5,
    }


def subagent(t: float, turns: Sequence[object]) -> dict[str, object]:
    return {"t": t, "type": "subagent", "agent_id": "a1", "duration_ms": 5000, "requests": list(turns)}


def session(name: str, requests: Sequence[object], **fields: object) -> dict[str, object]:
    head = {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local", "tool_tokens": 1}
    return {**head, "system_tokens": 1, "requests": list(requests), **fields}
