"""One request per line: Mooncake's traces and Bailian's.

Mooncake (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0)::

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …, 2353]}

``timestamp`` in ms, ids of 512 tokens, remapped from hashes over the whole prefix. No conversations.

Bailian (https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0)::

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132,
     "type": "text", "turn": 2, "hash_ids": [1089, 1090, …]}

``timestamp`` in seconds, ids of 16 tokens; a chat's parent is the turn before it, -1 for the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from tierstore_tools.replay.formats.lines import NOT_JSON, Complaints, Progress, lines
from tierstore_tools.replay.packed import RawRequest

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16

Tokens = Annotated[float, msgspec.Meta(ge=0, le=1e12)]  # 6758 is also written 6758.0


_Line = TypeVar("_Line", bound=msgspec.Struct)


class _Mooncake(msgspec.Struct):
    hash_ids: list[int | str]
    input_length: Tokens | None = None
    output_length: Tokens | None = None
    timestamp: float | None = None
    session_id: int | str | None = None  # not in the published traces; tools that write the format add it


class _Bailian(msgspec.Struct):
    hash_ids: list[int | str]
    chat_id: int | str
    input_length: Tokens | None = None
    output_length: Tokens | None = None
    timestamp: float | None = None
    parent_chat_id: int | str | None = None


def read_mooncake(path: Path, complaints: Complaints, progress: Progress) -> Iterator[RawRequest]:
    """The requests of a Mooncake trace, in the file's order."""
    for each in _read(_Mooncake, path, complaints, progress):
        yield RawRequest(
            None if each.timestamp is None else each.timestamp / 1e3,
            each.hash_ids,
            _whole(each.input_length),
            _whole(each.output_length) or 0,
            session=None if each.session_id is None else str(each.session_id),
        )


def read_bailian(path: Path, complaints: Complaints, progress: Progress) -> Iterator[RawRequest]:
    """The requests of a Bailian trace, in the file's order. The session is the first chat of the chain."""
    first_of: dict[int | str, int | str] = {}
    for each in _read(_Bailian, path, complaints, progress):
        first = each.chat_id
        if each.parent_chat_id not in (None, -1, "-1"):
            first = first_of.get(each.parent_chat_id, each.parent_chat_id)
        first_of[each.chat_id] = first
        yield RawRequest(
            each.timestamp,
            each.hash_ids,
            _whole(each.input_length),
            _whole(each.output_length) or 0,
            session=str(first),
        )


def _whole(tokens: float | None) -> int | None:
    return None if tokens is None else int(tokens)


def _read(kind: type[_Line], path: Path, complaints: Complaints, progress: Progress) -> Iterator[_Line]:
    """What the file's lines say; of those that say something else, the number is kept."""
    decoder = msgspec.json.Decoder(kind)
    for line in lines(path, progress):
        try:
            each = decoder.decode(line.text)
        except NOT_JSON as error:
            complaints.add(path, line.number, error)
            continue
        complaints.read += 1
        yield each
