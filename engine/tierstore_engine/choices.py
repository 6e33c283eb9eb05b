"""Measure short work on a device, and keep measured choices for later processes.

A choice between two ways to compute may change the last bits of a result. Every process on a machine must
therefore make the same choice: the first process measures, and the others read its result. The file's name
covers everything that the choice depends on. Deleting the file makes the next process measure again.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

ROUND_S = 0.01
MOST_CALLS = 200

log = logging.getLogger(__name__)


def kept_choice(
    name: str, facts: Mapping[str, Any], measure: Callable[[], Any], *, folder: Path | None = None
) -> Any:
    """Return the outcome (JSON) of ``measure()`` for these facts. It is measured now, or was measured earlier
    by any process.

    Raises the errors of ``measure``. If the folder cannot be written, this is logged, and every process
    measures for itself.
    """
    folder = folder or default_folder()
    described = {"name": name, **facts}
    digest = xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())
    file = folder / f"{name}-{digest}.json"
    try:
        return json.loads(file.read_text())["choice"]
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("cannot read %s (%s): measuring again", file, error)
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged (%s): measuring again", file, error)
        file.unlink(missing_ok=True)
    return _keep(file, {"facts": described, "choice": measure()})["choice"]


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierstore" / "choices"


def _keep(file: Path, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write the document atomically, and return it. If another process has written one first, return that
    one."""
    scratch = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(document, indent=2))
        try:
            os.link(scratch, file)
        except FileExistsError:
            found: Mapping[str, Any] = json.loads(file.read_text())
            return found
        finally:
            scratch.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        log.warning("cannot write %s (%s): the next process will measure again", file, error)
    return document


def per_call(seconds_of: Callable[[int], float], repetitions: int) -> float:
    """Return the seconds of one call. ``seconds_of(n)`` measures ``n`` calls in a row.

    The device waits for the launch of the first call, and launches overlap with computing afterwards. The
    number of calls in a round is chosen so that they take about ``ROUND_S``. The result is the median of
    ``repetitions`` rounds. The first call of all is not counted, because libraries initialize themselves in
    it.
    """
    seconds_of(1)
    once = max(seconds_of(1), ROUND_S / MOST_CALLS)
    calls = max(round(ROUND_S / once), 1)
    return statistics.median(seconds_of(calls) for _ in range(repetitions)) / calls
