"""The daemon's log: one line each on stderr, for people or as JSON.

Messages hold names that clients chose, so they are escaped: a line end in a name begins no line of the log.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import msgspec

from tierstore.printable import printable


class JsonLines(logging.Formatter):
    """One JSON object a line: ``time``, ``level``, ``logger``, ``message``; a traceback is in ``error``."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage()),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class PlainLines(logging.Formatter):
    """``time level message``; a traceback follows, indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"    {printable(line)}" for line in lines)


def configure(level: str, format: str) -> None:
    """Let everything of this package be logged to stderr. May be called again."""
    logger = logging.getLogger("tierstore")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if format == "json" else PlainLines())
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
