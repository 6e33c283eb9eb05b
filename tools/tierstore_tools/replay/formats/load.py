"""From a path to a trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tierstore.errors import UsageError
from tierstore_tools.replay.formats import jsonl, lengths, weka
from tierstore_tools.replay.formats.lengths import LengthsTrace
from tierstore_tools.replay.formats.lines import NOT_JSON, Complaints, Progress, lines, whole
from tierstore_tools.replay.packed import PackedTrace, RawRequest

FORMATS = ("mooncake", "bailian", "weka", "csv")

_KNOWN = "known are Mooncake and Bailian JSONL, WEKA sessions, and CSV with lengths"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A trace, its format's name, and what could not be read of the file."""

    trace: PackedTrace | LengthsTrace
    format: str
    complaints: Complaints


def load(
    path: Path,
    *,
    format_name: str = "auto",
    block_tokens: int | None = None,
    session_gap_s: float = 0.0,
    progress: Progress = lambda _: None,
) -> Loaded:
    """Read a trace, once. ``block_tokens`` replaces the format's own; ``session_gap_s`` is the time between
    the starts of two WEKA sessions. Raises :class:`UsageError` for a file that is not there, not a trace, or
    too damaged to be one."""
    if format_name not in ("auto", *FORMATS):
        raise UsageError(f"no trace format {format_name!r} (there are: auto, {', '.join(FORMATS)})")
    if not path.exists():
        raise UsageError(f"there is no trace {path}")
    if format_name == "auto":
        format_name = detect(path)
    complaints = Complaints()
    if format_name == "csv":
        measured = lengths.read_lengths(path, complaints, progress)
        complaints.check(path, format_name)
        return Loaded(measured, format_name, complaints)
    trace = PackedTrace(block_tokens or _block_tokens(path, format_name))
    for request in _requests(path, format_name, session_gap_s, complaints, progress):
        trace.append(request)
    complaints.check(path, format_name)
    trace.close()
    return Loaded(trace, format_name, complaints)


def _requests(
    path: Path, format_name: str, session_gap_s: float, complaints: Complaints, progress: Progress
) -> Iterator[RawRequest]:
    if format_name == "mooncake":
        return jsonl.read_mooncake(path, complaints, progress)
    if format_name == "bailian":
        return jsonl.read_bailian(path, complaints, progress)
    return weka.read_weka(path, complaints, progress, session_gap_s=session_gap_s)


def _block_tokens(path: Path, format_name: str) -> int:
    if format_name == "weka":
        return weka.block_tokens_of(path)
    return jsonl.BAILIAN_BLOCK_TOKENS if format_name == "bailian" else jsonl.MOONCAKE_BLOCK_TOKENS


def detect(path: Path) -> str:
    """The format by what is in the file. Raises :class:`UsageError` when it is none of ours."""
    if path.is_dir():
        return "weka"
    first = next(lines(path), None)
    if first is None:
        raise UsageError(f"{path} has no requests")
    if not first.text.startswith((b"{", b"[")):
        if lengths.is_lengths(first.text):
            return "csv"
        raise UsageError(f"{path.name}:{first.number}: not a trace ({_KNOWN})")
    try:
        fields: Any = msgspec.json.decode(first.text)
    except NOT_JSON:
        return _detect_whole(path)
    if isinstance(fields, list):
        return _detect_whole(path)
    if "requests" in fields:
        return "weka"
    if "hash_ids" not in fields:
        raise UsageError(
            f"{path.name}:{first.number}: no hash_ids, so nothing is known of what repeats ({_KNOWN})"
        )
    return "bailian" if "chat_id" in fields else "mooncake"


def _detect_whole(path: Path) -> str:
    """For a first line that is not one JSON object: the file may be a single document, or its first line is
    damaged."""
    try:
        document: Any = msgspec.json.decode(whole(path))
    except NOT_JSON:
        return _detect_later(path)
    if isinstance(document, list) and document:
        document = document[0]
    if isinstance(document, dict) and "requests" in document:
        return "weka"
    raise UsageError(f"{path} is JSON, but not a trace ({_KNOWN})")


def _detect_later(path: Path) -> str:
    for line, _ in zip(lines(path), range(10), strict=False):
        try:
            fields: Any = msgspec.json.decode(line.text)
        except NOT_JSON:
            continue
        if isinstance(fields, dict):
            if "requests" in fields:
                return "weka"
            if "hash_ids" in fields:
                return "bailian" if "chat_id" in fields else "mooncake"
    raise UsageError(f"{path} is neither a JSON document nor JSON lines ({_KNOWN})")
