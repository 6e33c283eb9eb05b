"""Read published traces into one shape.

:func:`load` detects the format from the content, reads the file once, and counts unreadable entries.

**Damage.** An unreadable line is left out and counted, and the first one is reported as ``file:line: error``:
a truncated download does not cost a run. A gzip file that ends early is read up to its end. If more than a
tenth of the lines (or sessions) is unreadable, the file probably has another format and is refused.

**Mooncake** (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0)::

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …, 2353]}

``timestamp`` in ms, ids of 512 tokens, remapped from hashes over the whole prefix. No conversations.

**Bailian** (https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0)::

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132,
     "type": "text", "turn": 2, "hash_ids": [1089, 1090, …]}

``timestamp`` in seconds, ids of 16 tokens. The parent of a chat is the turn before it, or -1 for the first
turn.

**Lengths**: CSV files with the lengths of prompts and nothing of their content, such as the Azure LLM
inference traces (https://github.com/Azure/AzurePublicDataset: ``TIMESTAMP,ContextTokens,GeneratedTokens``) or
BurstGPT. Columns are separated by commas, semicolons (then numbers may have decimal commas) or tabs. Without
ids the reuse is unknown: such a trace only shows how fast pages come in.

**WEKA**: sessions of coding agents, one JSON object per conversation
(https://github.com/callanjfox/kv-cache-tester, Apache-2.0)::

    {"id": "f64a8d4c-12d", "block_size": 64, "hash_id_scope": "local", "tool_tokens": 11899, …, "requests": [
      {"t": 0.0, "type": "s", "model": "…", "in": 25259, "out": 86, "hash_ids": [1, 2, 3, …],
       "input_types": ["text"], "output_types": ["text"], "stop": "tool_use",
       "think_time": 0.4, "api_time": 2.1},
      {"t": 31.5, "type": "subagent", "agent_id": "…", "requests": [ … ]}]}

The reader accepts a file with one such object, a file with an array of them or with one per line, and a
folder of such files. The description leaves some points open. The reader decides these points as follows:

- Ids are local to a session (``hash_id_scope`` ``local``, also if it is missing), and shared by its subagents
  and models. With ``global`` they are shared by all sessions.
- A session has times since its own start. All sessions start at once, unless ``session_gap_s`` separates
  their starts.
- A subagent's times are relative to the time of its marker if one of them is earlier than that, else to the
  session's start. In the published sessions they are relative to the marker.
- A subagent is a session of its own.
- ``hash_ids`` has whole blocks only, so the tokens after the last whole block belong to no prompt.
"""

from __future__ import annotations

import csv
import datetime
import io
import os
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from tierstore.errors import UsageError
from tierstore_tools.replay.trace import RawRequest, Trace

FORMATS = ("mooncake", "bailian", "weka", "csv")

_KNOWN = "known: Mooncake and Bailian JSONL, WEKA sessions, CSV with lengths"


@dataclass(frozen=True, slots=True)
class LoadedTrace:
    """A trace, its format, and the unreadable entries of the file."""

    trace: Trace | LengthsTrace
    format: str
    complaints: Complaints


def load(
    path: Path,
    *,
    format_name: str = "auto",
    block_tokens: int | None = None,
    session_gap_s: float = 0.0,
    progress: Progress = lambda _: None,
) -> LoadedTrace:
    """Read a trace once. ``block_tokens`` replaces the block size of the format. ``session_gap_s`` is the
    time between the starts of two WEKA sessions. Raises :class:`UsageError` for a missing file, another kind
    of file, or a file that is too damaged."""
    if format_name not in ("auto", *FORMATS):
        raise UsageError(f"unknown trace format {format_name!r} (known: auto, {', '.join(FORMATS)})")
    if not path.exists():
        raise UsageError(f"there is no trace {path}")
    if format_name == "auto":
        format_name = detect(path)
    complaints = Complaints()
    if format_name == "csv":
        measured = read_lengths(path, complaints, progress)
        complaints.check(path, format_name)
        return LoadedTrace(measured, format_name, complaints)
    trace = Trace(block_tokens or _block_tokens(path, format_name))
    for request in _requests(path, format_name, session_gap_s, complaints, progress):
        trace.append(request)
    complaints.check(path, format_name)
    trace.close()
    return LoadedTrace(trace, format_name, complaints)


def _requests(
    path: Path, format_name: str, session_gap_s: float, complaints: Complaints, progress: Progress
) -> Iterator[RawRequest]:
    if format_name == "mooncake":
        return read_mooncake(path, complaints, progress)
    if format_name == "bailian":
        return read_bailian(path, complaints, progress)
    return read_weka(path, complaints, progress, session_gap_s=session_gap_s)


def _block_tokens(path: Path, format_name: str) -> int:
    if format_name == "weka":
        return block_tokens_of(path)
    return BAILIAN_BLOCK_TOKENS if format_name == "bailian" else MOONCAKE_BLOCK_TOKENS


def detect(path: Path) -> str:
    """Return the format, from the content of the file. Raises :class:`UsageError` for other content."""
    if path.is_dir():
        return "weka"
    first = next(lines(path), None)
    if first is None:
        raise UsageError(f"{path} has no requests")
    if not first.text.startswith((b"{", b"[")):
        if is_lengths(first.text):
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
            f"{path.name}:{first.number}: no hash_ids, so repeated tokens are unknown ({_KNOWN})"
        )
    return "bailian" if "chat_id" in fields else "mooncake"


def _detect_whole(path: Path) -> str:
    """Detect the format of a file whose first line is not a JSON object: it may be a single document, or the
    line is damaged."""
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


# -- bytes and lines -----------------------------------------------------------------------------------

Progress = Callable[[float], None]  # called with the share that is done, 0 to 1

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of decoding foreign bytes. RecursionError is for values that are nested too deeply."""

_MOST_UNREADABLE = 0.1
_GZIP = b"\x1f\x8b"
_GZIP_WBITS = 31  # zlib's value for a gzip header
_CHUNK_BYTES = 1 << 16
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class TextLine:
    """One line without its line end. ``number`` counts from 1."""

    number: int
    text: bytes


class Complaints:
    """The number of unreadable entries, and a description of the first one."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""
        self.read = 0  # readable requests

    def add(self, path: Path, line: int | None, what: object) -> None:
        """Count an error in a line, or in the whole file if the line is None."""
        self.count += 1
        if not self.first:
            where = path.name if line is None else f"{path.name}:{line}"
            self.first = f"{where}: {what}"

    def check(self, path: Path, format_name: str) -> None:
        """Raise :class:`UsageError` if too many entries of a trace of ``format_name`` are unreadable."""
        if self.count and self.count > _MOST_UNREADABLE * (self.count + self.read):
            raise UsageError(
                f"{path} is not a {format_name} trace: {self.count} of {self.count + self.read} "
                f"entries are unreadable, first {self.first}"
            )
        if not self.read:
            raise UsageError(f"{path} has no requests")


def lines(
    path: Path, progress: Progress = lambda _: None, complaints: Complaints | None = None
) -> Iterator[TextLine]:
    """Yield the lines of a file that are not blank; the file may be gzipped. The damage of a gzip file goes
    to ``complaints``. Raises :class:`UsageError` if the file cannot be read."""
    try:
        with path.open("rb") as file:
            size = max(1, os.fstat(file.fileno()).st_size)
            unpacked = _Unpacked(file)
            for number, text in enumerate(io.BufferedReader(unpacked, _CHUNK_BYTES), 1):
                if number % 256 == 1:
                    progress(min(1.0, file.tell() / size))
                stripped = (text.removeprefix(_BYTE_ORDER_MARK) if number == 1 else text).strip()
                if stripped and not (unpacked.damage and not text.endswith(b"\n")):
                    yield TextLine(number, stripped)
            if unpacked.damage and complaints is not None:
                complaints.add(path, None, unpacked.damage)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def whole(path: Path) -> bytes:
    """Return all bytes of a file, unpacked. Raises :class:`UsageError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return io.BufferedReader(_Unpacked(file), _CHUNK_BYTES).read().removeprefix(_BYTE_ORDER_MARK)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from error


class _Unpacked(io.RawIOBase):
    """The bytes of a file, unpacked if it is gzipped, up to its first damage. (``gzip`` would raise and keep
    the unpacked bytes.)"""

    def __init__(self, file: io.BufferedReader) -> None:
        self.damage = ""
        self._file = file
        self._inflate = zlib.decompressobj(_GZIP_WBITS) if file.peek(2)[:2] == _GZIP else None
        self._packed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._inflate is None:
            return self._file.readinto(buffer)
        while not self.damage:
            if self._inflate.eof:  # another member may follow
                self._packed = (self._inflate.unused_data or self._file.read(_CHUNK_BYTES)).lstrip(b"\0")
                if not self._packed:
                    return 0
                self._inflate = zlib.decompressobj(_GZIP_WBITS)
            self._packed = self._packed or self._file.read(_CHUNK_BYTES)
            if not self._packed:
                self.damage = "the gzip file ends early"
                return 0
            try:
                unpacked = self._inflate.decompress(self._packed, len(buffer))
            except zlib.error as error:
                self.damage = f"the gzip file is damaged: {error}"
                return 0
            self._packed = self._inflate.unconsumed_tail
            if unpacked:
                buffer[: len(unpacked)] = unpacked
                return len(unpacked)
        return 0


# -- Mooncake and Bailian ------------------------------------------------------------------------------

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16

Tokens = Annotated[float, msgspec.Meta(ge=0, le=1e12)]  # some files write 6758.0


_Line = TypeVar("_Line", bound=msgspec.Struct)


class _Mooncake(msgspec.Struct):
    hash_ids: list[int | str]
    input_length: Tokens | None = None
    output_length: Tokens | None = None
    timestamp: float | None = None
    session_id: int | str | None = None  # missing in the published traces; other tools add it


class _Bailian(msgspec.Struct):
    hash_ids: list[int | str]
    chat_id: int | str
    input_length: Tokens | None = None
    output_length: Tokens | None = None
    timestamp: float | None = None
    parent_chat_id: int | str | None = None


def read_mooncake(path: Path, complaints: Complaints, progress: Progress) -> Iterator[RawRequest]:
    """Yield the requests of a Mooncake trace, in the file's order."""
    for each in _read(_Mooncake, path, complaints, progress):
        yield RawRequest(
            None if each.timestamp is None else each.timestamp / 1e3,
            each.hash_ids,
            _whole(each.input_length),
            _whole(each.output_length) or 0,
            session=None if each.session_id is None else str(each.session_id),
        )


def read_bailian(path: Path, complaints: Complaints, progress: Progress) -> Iterator[RawRequest]:
    """Yield the requests of a Bailian trace, in the file's order. The session is the first chat of the
    chain."""
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
    """Yield the decoded lines of a file, and count the others."""
    decoder = msgspec.json.Decoder(kind)
    for line in lines(path, progress, complaints):
        try:
            each = decoder.decode(line.text)
        except NOT_JSON as error:
            complaints.add(path, line.number, error)
            continue
        complaints.read += 1
        yield each


# -- lengths -------------------------------------------------------------------------------------------

_TIME = ("timestamp", "arrivedat", "arrivaltime", "arrivaltimestamp", "time", "starttime")
_INPUT = (
    "contexttokens",
    "requesttokens",
    "inputlength",
    "inputtokens",
    "prompttokens",
    "numprefilltokens",
)
_OUTPUT = (
    "generatedtokens",
    "responsetokens",
    "outputlength",
    "outputtokens",
    "completiontokens",
    "numdecodetokens",
)
_MOST_TOKENS = 1e12
_FRACTION = re.compile(r"(\.\d{6})\d+")  # Azure writes seven digits; Python reads six


class LengthsTrace:
    """Times in seconds (None if the file has none), and lengths of prompts and answers, in the file's
    order."""

    def __init__(self) -> None:
        self.timestamps_s: array[float] | None = array("d")
        self.inputs = array("q")
        self.outputs = array("q")

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and answers."""
        return sum(self.inputs) + sum(self.outputs)

    @property
    def span_s(self) -> float | None:
        """Seconds from the first request to the last. None without times, or if all requests have the same
        time."""
        if not self.timestamps_s:
            return None
        return max(self.timestamps_s) - min(self.timestamps_s) or None


def is_lengths(header: bytes) -> bool:
    """Return whether a first line names the columns of lengths."""
    try:
        _Columns.of(header.decode("utf-8"))
    except (UsageError, UnicodeDecodeError, csv.Error):
        return False
    return True


def read_lengths(path: Path, complaints: Complaints, progress: Progress) -> LengthsTrace:
    """Read a file of lengths. Raises :class:`UsageError` if the first line does not name the columns."""
    trace = LengthsTrace()
    columns: _Columns | None = None
    for line in lines(path, progress, complaints):
        try:
            text = line.text.decode("utf-8")
            if columns is None:
                columns = _Columns.of(text)
                if columns.time is None:
                    trace.timestamps_s = None
                continue
            columns.read(text, trace)
        except (ValueError, IndexError, csv.Error) as error:
            complaints.add(path, line.number, error if str(error) else type(error).__name__)
            continue
        complaints.read += 1
    return trace


class _Columns:
    """The columns of a file of lengths."""

    def __init__(self, delimiter: str, time: int | None, prompt: int, answer: int | None) -> None:
        self._delimiter = delimiter
        self.time = time
        self._prompt = prompt
        self._answer = answer

    @classmethod
    def of(cls, header: str) -> _Columns:
        for delimiter in ",;\t":
            fields = next(csv.reader([header], delimiter=delimiter))
            names = [re.sub(r"[^a-z]", "", name.lower()) for name in fields]
            prompt = _first(names, _INPUT)
            if prompt is not None:
                return cls(delimiter, _first(names, _TIME), prompt, _first(names, _OUTPUT))
        raise UsageError(f"no column of prompt lengths in {header!r} (such as ContextTokens)")

    def read(self, text: str, trace: LengthsTrace) -> None:
        """Add a line to ``trace``. Raises ValueError or IndexError, without a change, for another kind of
        line."""
        row = next(csv.reader([text], delimiter=self._delimiter))
        if self._delimiter == ";":
            row = [each.replace(",", ".") for each in row]
        prompt = _tokens(row[self._prompt])
        answer = 0 if self._answer is None else _tokens(row[self._answer].strip() or "0")
        if trace.timestamps_s is not None and self.time is not None:
            trace.timestamps_s.append(_seconds(row[self.time]))
        trace.inputs.append(prompt)
        trace.outputs.append(answer)


def _first(names: Sequence[str], wanted: Sequence[str]) -> int | None:
    return next((names.index(name) for name in wanted if name in names), None)


def _tokens(text: str) -> int:
    count = float(text)
    if not 0 <= count <= _MOST_TOKENS:
        raise ValueError(f"{text} is not a number of tokens")
    return int(count)


def _seconds(text: str) -> float:
    """Parse a number of seconds, or a date and time."""
    try:
        return float(text)
    except ValueError:
        stamp = datetime.datetime.fromisoformat(_FRACTION.sub(r"\1", text.strip()))
    if stamp.tzinfo is None:
        stamp = stamp.replace(tzinfo=datetime.timezone.utc)
    return stamp.timestamp()


# -- WEKA ----------------------------------------------------------------------------------------------

WEKA_BLOCK_TOKENS = 64
_SUBAGENT = "subagent"


class _WekaRequest(msgspec.Struct):
    """A request, or the marker of a subagent with its requests."""

    t: float = 0.0
    type: str = "n"
    input_tokens: Tokens | None = msgspec.field(name="in", default=None)
    output_tokens: Tokens | None = msgspec.field(name="out", default=None)
    hash_ids: list[int | str] | None = None
    stop: str | None = None
    agent_id: int | str | None = None
    requests: list[_WekaRequest] = msgspec.field(default_factory=list)


class _WekaSession(msgspec.Struct):
    requests: list[_WekaRequest]
    id: int | str | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1)] = WEKA_BLOCK_TOKENS
    hash_id_scope: str = "local"


def block_tokens_of(path: Path) -> int:
    """Return the block size of the first session. Raises :class:`UsageError` if no session is readable."""
    complaints = Complaints()
    for _, _, session in _sessions(path, complaints, lambda _: None):
        return session.block_size
    first = f", first {complaints.first}" if complaints.count else ""
    raise UsageError(f"{path} has no readable session{first}")


def read_weka(
    path: Path, complaints: Complaints, progress: Progress, *, session_gap_s: float = 0.0
) -> Iterator[RawRequest]:
    """Yield the requests of all sessions, one session after the other. The caller sorts their times."""
    block_tokens: int | None = None
    for number, (file, line, session) in enumerate(_sessions(path, complaints, progress)):
        block_tokens = block_tokens or session.block_size
        if session.block_size != block_tokens:
            complaints.add(file, line, f"blocks of {session.block_size} tokens, others have {block_tokens}")
            continue
        yield from _Reader(number, session, number * session_gap_s, complaints, file, line).requests()


class _Reader:
    """Reads one session and its subagents."""

    def __init__(
        self,
        number: int,
        session: _WekaSession,
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
        self, requests: Sequence[_WekaRequest], name: str, start_s: float, relative: bool
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


def _counts_from_markers(requests: Sequence[_WekaRequest]) -> bool:
    """Return whether the times inside subagents start at their marker."""
    markers = [each for each in requests if each.type == _SUBAGENT]
    return any(inner.t < marker.t for marker in markers for inner in marker.requests)


_Found = tuple[Path, int | None, _WekaSession]  # the line, if the file has one session per line


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
        decoder = msgspec.json.Decoder(_WekaSession)
        for line in lines(path, progress, complaints):
            try:
                yield path, line.number, decoder.decode(line.text)
            except NOT_JSON as error:
                complaints.add(path, line.number, error)
        return
    try:
        text = whole(path)
        if text.lstrip().startswith(b"["):
            for session in msgspec.json.decode(text, type=list[_WekaSession]):
                yield path, None, session
        else:
            yield path, None, msgspec.json.decode(text, type=_WekaSession)
    except NOT_JSON as error:
        complaints.add(path, None, error)


def _is_one_per_line(path: Path) -> bool:
    """Return whether the first line is a whole object and a second line follows."""
    first: TextLine | None = None
    for line in lines(path):
        if first is not None:
            return first.text.startswith(b"{") and first.text.endswith(b"}")
        first = line
    return False
