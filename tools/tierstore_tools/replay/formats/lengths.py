"""CSV files with the lengths of prompts and nothing of their content, such as the Azure LLM inference traces
(https://github.com/Azure/AzurePublicDataset: ``TIMESTAMP,ContextTokens,GeneratedTokens``) or BurstGPT.

Without ids nobody can say what would have been reused. Such a trace sizes a tier only from one side: how
fast pages come in, and so how long a page stays until newer ones take its place.
"""

from __future__ import annotations

import csv
import datetime
import re
from array import array
from collections.abc import Sequence
from pathlib import Path

from tierstore.errors import UsageError
from tierstore_tools.replay.formats.lines import Complaints, Progress, lines

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
    """Times (seconds, None where the file has none), prompt and answer lengths of all requests, in the
    file's order."""

    def __init__(self) -> None:
        self.timestamps_s: array[float] | None = array("d")
        self.inputs = array("q")
        self.outputs = array("q")

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def tokens(self) -> int:
        """Of all prompts and answers."""
        return sum(self.inputs) + sum(self.outputs)

    @property
    def span_s(self) -> float | None:
        """From the first request to the last; None without times, or where it is no time at all."""
        if not self.timestamps_s:
            return None
        return max(self.timestamps_s) - min(self.timestamps_s) or None


def is_lengths(header: bytes) -> bool:
    """Whether a first line names the columns of such a file."""
    try:
        _Columns.of(header.decode("utf-8"))
    except (UsageError, UnicodeDecodeError):
        return False
    return True


def read_lengths(path: Path, complaints: Complaints, progress: Progress) -> LengthsTrace:
    """Raises :class:`UsageError` when the first line does not name the columns."""
    trace = LengthsTrace()
    columns: _Columns | None = None
    for line in lines(path, progress):
        try:
            text = line.text.decode("utf-8")
            if columns is None:
                columns = _Columns.of(text)
                if columns.time is None:
                    trace.timestamps_s = None
                continue
            columns.read(next(csv.reader([text])), trace)
        except (ValueError, IndexError) as error:
            complaints.add(path, line.number, error if str(error) else type(error).__name__)
            continue
        complaints.read += 1
    return trace


class _Columns:
    """Where the numbers are."""

    def __init__(self, time: int | None, prompt: int, answer: int | None) -> None:
        self.time = time
        self._prompt = prompt
        self._answer = answer

    @classmethod
    def of(cls, header: str) -> _Columns:
        names = [re.sub(r"[^a-z]", "", name.lower()) for name in next(csv.reader([header]))]
        prompt = _first(names, _INPUT)
        if prompt is None:
            raise UsageError(f"no column of prompt lengths in {header!r} (such as ContextTokens)")
        return cls(_first(names, _TIME), prompt, _first(names, _OUTPUT))

    def read(self, row: Sequence[str], trace: LengthsTrace) -> None:
        """Raises ValueError or IndexError, and leaves the trace as it was, when the row does not fit."""
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
    """A number of seconds, or a date and time."""
    try:
        return float(text)
    except ValueError:
        stamp = datetime.datetime.fromisoformat(_FRACTION.sub(r"\1", text.strip()))
    if stamp.tzinfo is None:
        stamp = stamp.replace(tzinfo=datetime.timezone.utc)
    return stamp.timestamp()
