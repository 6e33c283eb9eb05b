"""Sessions of coding agents, as WEKA publishes them.

https://github.com/callanjfox/kv-cache-tester (Apache-2.0): one JSON object per conversation::

    {"id": "f64a8d4c-12d", "block_size": 64, "hash_id_scope": "local", "tool_tokens": 11899, …, "requests": [
      {"t": 0.0, "type": "s", "model": "…", "in": 25259, "out": 86, "hash_ids": [1, 2, 3, …],
       "input_types": ["text"], "output_types": ["text"], "stop": "tool_use",
       "think_time": 0.4, "api_time": 2.1},
      {"t": 31.5, "type": "subagent", "agent_id": "…", "requests": [ … ]}]}

Read are: a file with one such object, a file with an array of them or with one per line, and a folder of
such files. What the description leaves open, and how it is read here:

- Ids are local to a session (``hash_id_scope`` ``local``, also where it is missing), and shared by all of its
  subagents and models; with ``global`` they are shared by all sessions.
- A session knows the time since its own start only. All sessions start at once, unless ``session_gap_s``
  puts some time between one start and the next.
- A subagent's times count from its marker in the published sessions, and from the session's start in others:
  the latter when none is earlier than its marker's.
- A subagent is a session of its own.
- ``hash_ids`` has whole blocks only, so the tokens after the last whole block are not part of any prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from tierstore.errors import UsageError
from tierstore_tools.replay.formats.jsonl import Tokens
from tierstore_tools.replay.formats.lines import NOT_JSON, Complaints, Line, Progress, lines, whole
from tierstore_tools.replay.packed import RawRequest

WEKA_BLOCK_TOKENS = 64
_SUBAGENT = "subagent"


class _Request(msgspec.Struct):
    """A request, or the marker of a subagent with requests of its own."""

    t: float = 0.0
    type: str = "n"
    input_tokens: Tokens | None = msgspec.field(name="in", default=None)
    output_tokens: Tokens | None = msgspec.field(name="out", default=None)
    hash_ids: list[int | str] | None = None
    stop: str | None = None
    agent_id: int | str | None = None
    requests: list[_Request] = msgspec.field(default_factory=list)


class _Session(msgspec.Struct):
    requests: list[_Request]
    id: int | str | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1)] = WEKA_BLOCK_TOKENS
    hash_id_scope: str = "local"


def block_tokens_of(path: Path) -> int:
    """The block size of the first session. Raises :class:`UsageError` when there is none to be read."""
    complaints = Complaints()
    for _, _, session in _sessions(path, complaints, lambda _: None):
        return session.block_size
    first = f", first {complaints.first}" if complaints.count else ""
    raise UsageError(f"{path} has no session that can be read{first}")


def read_weka(
    path: Path, complaints: Complaints, progress: Progress, *, session_gap_s: float = 0.0
) -> Iterator[RawRequest]:
    """The requests of all sessions, one session after the other; their times are to be sorted."""
    block_tokens: int | None = None
    for number, (file, line, session) in enumerate(_sessions(path, complaints, progress)):
        block_tokens = block_tokens or session.block_size
        if session.block_size != block_tokens:
            complaints.add(file, line, f"blocks of {session.block_size} tokens, others have {block_tokens}")
            continue
        yield from _Reader(number, session, number * session_gap_s, complaints, file, line).requests()


class _Reader:
    """Walks one session and its subagents."""

    def __init__(
        self,
        number: int,
        session: _Session,
        start_s: float,
        complaints: Complaints,
        file: Path,
        line: int | None,
    ) -> None:
        self._session = session
        self._name = f"{number}:{session.id}"
        self._scope = "" if session.hash_id_scope == "global" else self._name
        self._start_s = start_s
        self._complaints = complaints
        self._file = file
        self._line = line

    def requests(self) -> Iterator[RawRequest]:
        relative = _counts_from_markers(self._session.requests)
        return self._walk(self._session.requests, self._name, self._start_s, relative)

    def _walk(
        self, requests: Sequence[_Request], name: str, start_s: float, relative: bool
    ) -> Iterator[RawRequest]:
        for at, each in enumerate(requests):
            if each.type == _SUBAGENT:
                inner_start_s = start_s + each.t if relative else start_s
                yield from self._walk(each.requests, f"{name}/{each.agent_id or at}", inner_start_s, relative)
            elif each.hash_ids is None:
                self._complaints.add(self._file, self._line, f"request {at} of {name} has no hash_ids")
            else:
                self._complaints.read += 1
                yield RawRequest(
                    start_s + each.t,
                    each.hash_ids,
                    None if each.input_tokens is None else int(each.input_tokens),
                    int(each.output_tokens or 0),
                    session=name,
                    scope=self._scope,
                    stop=each.stop or "",
                )


def _counts_from_markers(requests: Sequence[_Request]) -> bool:
    """Whether the times inside subagents start at their marker."""
    markers = [each for each in requests if each.type == _SUBAGENT]
    return any(inner.t < marker.t for marker in markers for inner in marker.requests)


_Found = tuple[Path, int | None, _Session]  # the line, where the file has one session per line


def _sessions(path: Path, complaints: Complaints, progress: Progress) -> Iterator[_Found]:
    if not path.is_dir():
        yield from _in_file(path, complaints, progress)
        return
    files = sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz", ".jsonl")))
    for number, file in enumerate(files):
        yield from _in_file(file, complaints, lambda _: None)
        progress((number + 1) / len(files))


def _in_file(path: Path, complaints: Complaints, progress: Progress) -> Iterator[_Found]:
    if _is_one_per_line(path):
        decoder = msgspec.json.Decoder(_Session)
        for line in lines(path, progress):
            try:
                yield path, line.number, decoder.decode(line.text)
            except NOT_JSON as error:
                complaints.add(path, line.number, error)
        return
    try:
        text = whole(path)
        if text.lstrip().startswith(b"["):
            for session in msgspec.json.decode(text, type=list[_Session]):
                yield path, None, session
        else:
            yield path, None, msgspec.json.decode(text, type=_Session)
    except NOT_JSON as error:
        complaints.add(path, None, error)


def _is_one_per_line(path: Path) -> bool:
    """Whether a first line is a whole object and a second one follows."""
    first: Line | None = None
    for line in lines(path):
        if first is not None:
            return first.text.startswith(b"{") and first.text.endswith(b"}")
        first = line
    return False
