"""A file of many requests, and the file of their results (docs/batches.md has both formats).

Results are appended as whole lines and synced before the next ones are computed. After an interruption, every
whole line of the file is therefore a valid result, and at most the last line is incomplete. The ``id`` of a
result is a hash of the request's line, so a request that was changed does not get the result of the old one.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import msgspec
import xxhash

from tierstore.errors import UsageError

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
_FIELDS = {"custom_id", "method", "url", "body"}
_MOST_ID = 4096  # characters


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of a batch: the ``body`` of a request to ``url``. ``id`` is its ``custom_id``, or ``line-N``.
    ``error`` says why the line is not a valid request; None if it is valid."""

    id: str
    digest: str
    url: str = TEXT
    body: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def read_batch(file: Path) -> list[BatchLine]:
    """Return the requests of ``file``, one for each line that is not empty.

    A line is a request of OpenAI's batch files, or the body of a request alone. In a file whose name ends
    with ``.txt`` every line is a prompt. Raises :class:`UsageError` for a file that cannot be read, is not
    text, has no request, or has two with the same id.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "batch.jsonl"
    >>> _ = file.write_text('{"prompt": "Hello", "custom_id": "a"}\\n{"messages": []}\\nHello\\n')
    >>> for each in read_batch(file):
    ...     print(each.id, each.url, each.error)
    a /v1/completions None
    line-2 /v1/chat/completions None
    line-3 /v1/completions the line is not JSON
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read the batch {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the batch {file} is not text in UTF-8: {error}") from error
    read = _prompt if file.suffix == ".txt" else _request
    lines: dict[str, int] = {}
    entries = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        entry = read(number, line.strip())
        if entry.id in lines:
            raise UsageError(
                f"lines {lines[entry.id]} and {number} of {file} have the same id {entry.id!r}: "
                "give each request its own custom_id"
            )
        lines[entry.id] = number
        entries.append(entry)
    if not entries:
        raise UsageError(f"the batch {file} has no request")
    return entries


def _prompt(number: int, line: str) -> BatchLine:
    return BatchLine(f"line-{number}", _digest(line), body={"prompt": line})


def _request(number: int, line: str) -> BatchLine:
    name, digest = f"line-{number}", _digest(line)
    try:
        raw = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return BatchLine(name, digest, error="the line is not JSON")
    if not isinstance(raw, dict):
        return BatchLine(name, digest, error="the line is not a JSON object")
    given = raw.get("custom_id", name)
    if not isinstance(given, str) or not 0 < len(given) <= _MOST_ID:
        return BatchLine(name, digest, error=f"custom_id is not a text of 1 to {_MOST_ID} characters")
    if "body" not in raw:
        body = {key: value for key, value in raw.items() if key != "custom_id"}
        return BatchLine(given, digest, CHAT if "messages" in body else TEXT, body)
    url, body = raw.get("url"), raw["body"]
    if unknown := sorted(raw.keys() - _FIELDS):
        return BatchLine(given, digest, error=f"{unknown[0]!r} is no field of a request with a body")
    if raw.get("method", "POST") != "POST":
        return BatchLine(given, digest, error=f"method must be POST, got {raw['method']!r}")
    if url not in (TEXT, CHAT):
        return BatchLine(given, digest, error=f"url must be {TEXT} or {CHAT}, got {url!r}")
    if not isinstance(body, dict):
        return BatchLine(given, digest, error="body is not a JSON object")
    return BatchLine(given, digest, url, body)


def _digest(line: str) -> str:
    return f"batch_req_{xxhash.xxh3_128_hexdigest(line.encode())}"


class BatchResults:
    """The results of a batch, in a file or on a stream. ``done`` are the ids that had a result in the file
    when it was opened, ``failed`` counts those with an error.

    A file belongs to one process at a time, until :meth:`close`.
    """

    def __init__(self, file: Path | None, entries: Iterable[BatchLine], out: TextIO) -> None:
        """Open ``file``, or write to ``out`` if ``file`` is None. An incomplete last line is dropped.

        Raises :class:`UsageError` for a file that cannot be written, that another process writes, or that has
        anything else than results of ``entries``.
        """
        self.done: set[str] = set()
        self.failed = 0
        self._out = out
        self._fd: int | None = None
        if file is not None:
            self._fd = self._open(file)
            try:
                self._resume(file, {entry.id: entry.digest for entry in entries})
            except BaseException:
                self.close()
                raise

    @staticmethod
    def _open(file: Path) -> int:
        try:
            fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"cannot write results to {file}: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise UsageError(f"cannot write results to {file}: it is no file")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise UsageError(f"another process writes results to {file}: wait for its end") from error
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _resume(self, file: Path, digests: Mapping[str, str]) -> None:
        assert self._fd is not None
        whole = 0
        with open(self._fd, "rb", closefd=False) as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                self._note(file, number, line, digests)
        os.ftruncate(self._fd, whole)

    def _note(self, file: Path, number: int, line: bytes, digests: Mapping[str, str]) -> None:
        try:
            result = msgspec.json.decode(line, type=_Result)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"line {number} of {file} is no result: give another --output") from error
        if result.custom_id not in digests:
            raise UsageError(
                f"{file} has the result of {result.custom_id!r}, which the batch does not have: "
                "give another --output"
            )
        if digests[result.custom_id] != result.id:
            raise UsageError(
                f"the request {result.custom_id!r} has changed since {file} got its result: "
                "remove that line, or give another --output"
            )
        self.done.add(result.custom_id)
        self.failed += result.error is not None

    def add(self, results: Iterable[Mapping[str, Any]]) -> None:
        """Append results. The results are on the disk when the call returns. Raises :class:`OSError`."""
        text = b"".join(msgspec.json.encode(result) + b"\n" for result in results)
        if not text:
            return
        if self._fd is None:
            self._out.write(text.decode())
            self._out.flush()
            return
        left = memoryview(text)
        while left:
            left = left[os.write(self._fd, left) :]
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file, so that another process may continue."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class _Result(msgspec.Struct):
    """The fields of a result that identify its request."""

    id: str
    custom_id: str
    error: dict[str, Any] | None = None
