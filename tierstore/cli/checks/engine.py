"""Checks of an engine that is installed in this environment, and of the daemon that the engine will use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.cli.checks.check import Check, fail, numbers, ok, warn
from tierstore.daemon.arena import is_listening
from tierstore.daemon.background import AUTO, OFF, VARIABLE, checked_choice
from tierstore.daemon.settings import default_listen
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.units import GIB, KIB, format_size

if TYPE_CHECKING:
    from tierstore.daemon.stats import DaemonStats

_IMPORT_S = 180.0
_REASON_CHARACTERS = 300
_LEAST_ARENA = 2 * GIB
_TOKEN_BYTES = 128 * KIB  # a token of an 8B Llama in bfloat16: 32 layers with 8 KV heads of size 128


def checks(url: str) -> Iterator[Check]:
    """Check whether the daemon at ``url`` answers, and whether its tiers are large enough."""
    from tierstore.cli.operator import Operator

    if url.startswith("tcp://"):
        yield warn("daemon", url, "not checked over tcp: use tierstore stats --connect with your keys")
        return
    try:
        with Operator(url) as operator:
            stats = operator.stats()
    except StoreUnavailableError as error:
        yield fail("daemon", str(error), f"tierstore serve --listen {url} --disk DIR")
        return
    yield ok("daemon", f"pid {stats.pid} at {url}")
    yield _arena(stats)
    disk = stats.store.tiers.get("disk")
    if disk is None:
        advice = "start the daemon with --disk DIR, so that pages survive a restart"
        yield warn("daemon's disk", "none", advice)
    else:
        yield ok("daemon's disk", format_size(disk.capacity_bytes), capacity_bytes=disk.capacity_bytes)


def plug_in_checks(engine: str, group: str) -> Iterator[Check]:
    """Check whether an engine that loads the entry points of ``group`` finds tierstore's plug-in, and whether
    the variable ``TIERSTORE`` is set, valid, and chooses a running daemon."""
    found = [each.value for each in metadata.entry_points(group=group, name="tierstore")]
    if found:
        yield ok("plug-in", f"{engine} finds {found[0]}")
    else:
        advice = f"pip install tierstore in the environment of {engine}: {VARIABLE} does nothing here"
        yield warn("plug-in", f"no entry point in {group}", advice)
    value = os.environ.get(VARIABLE, "")
    if value in ("", OFF):
        yield ok(VARIABLE, f"{value or 'not set'}: the plug-in does nothing")
        return
    try:
        url = checked_choice(value)
    except UsageError as error:
        yield fail(VARIABLE, str(error), f"export {VARIABLE}=auto")
        return
    if url == AUTO:
        url = default_listen()
    reached = url.startswith("ipc://") and is_listening(Path(url.removeprefix("ipc://")))
    if url.startswith("tcp://"):
        yield warn(VARIABLE, url, "not checked over tcp, and the plug-in has no keys: use the flags")
    elif reached:
        yield ok(VARIABLE, f"{value}: a daemon listens at {url}")
    elif value == AUTO:
        yield ok(VARIABLE, f"auto: no daemon listens at {url}, the engine starts one")
    else:
        yield fail(VARIABLE, f"no daemon listens at {url}", f"tierstore serve --listen {url} --disk DIR")


def _arena(stats: DaemonStats) -> Check:
    capacity = stats.store.tiers["host"].capacity_bytes
    tokens = capacity // _TOKEN_BYTES
    found = f"{format_size(capacity)}: about {tokens:,} tokens of an 8B Llama in bfloat16"
    if capacity < _LEAST_ARENA:
        advice = "all loads and saves go through the arena: start the daemon with --host-bytes 8GiB or more"
        return warn("daemon's arena", found, advice, capacity_bytes=capacity)
    return ok("daemon's arena", found, capacity_bytes=capacity)


def version_check(
    engine: str,
    version: str | None,
    oldest: tuple[int, ...],
    newest: tuple[int, ...],
    *,
    absent: str,
    old: str,
    new: str,
) -> Check:
    """Check an engine's version. The advice is ``absent`` if the engine is not installed, ``old`` if its
    version is below ``oldest``, and ``new`` if it is above ``newest``."""
    if version is None:
        return fail(engine, "not installed here", absent)
    found = numbers(version, len(oldest))
    if found < oldest:
        return fail(engine, version, old)
    return warn(engine, version, new) if found > newest else ok(engine, version)


def dotted(version: tuple[int, ...]) -> str:
    """Return a version as text, such as ``0.5.20``."""
    return ".".join(map(str, version))


def probe(
    what: str, engine: str, program: str, config: Mapping[str, Any], *, installed: bool, good: str
) -> Check:
    """Check that the Python code ``program``, which imports the engine, runs without an error. The argument
    of ``program`` is ``config`` as JSON. If ``program`` fails, its last line on stderr is the reason."""
    if not installed:
        return warn(what, "not tested", f"{engine} is not installed here")
    command = [sys.executable, "-c", program, json.dumps(config)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        return warn(
            what,
            f"the import of {engine} took over {_IMPORT_S:.0f} s",
            f"check whether {engine} itself starts",
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason printed"])[-1]
        advice = f"fix this error; `python -c 'import {engine.lower()}'` shows whether {engine} itself works"
        return fail(what, last[:_REASON_CHARACTERS], advice)
    return ok(what, good)
