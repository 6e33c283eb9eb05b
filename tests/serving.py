"""Daemons of engines' tests: with a disk and a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tierstore_tools.vllm.daemon import ServeProcess


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., ServeProcess]]:
    """``make_daemon(host_bytes=…, …)``: a running daemon with a disk, gone at the end of the test."""
    daemons: list[ServeProcess] = []

    def make(**options: Any) -> ServeProcess:
        daemons.append(ServeProcess(tmp_path, **options))
        return daemons[-1].start()

    yield make
    for daemon in daemons:
        daemon.close()
