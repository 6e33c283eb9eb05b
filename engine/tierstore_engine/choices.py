"""What was measured once on a device, kept for the processes that come after.

A choice between two ways of computing may change the last bits of a result, so every process on a machine
must make the same: the first one measures, and the others read. The file's name says all that the choice
depends on; deleting it measures again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

log = logging.getLogger(__name__)


def kept_choice(
    name: str, facts: Mapping[str, Any], measure: Callable[[], Any], *, folder: Path | None = None
) -> Any:
    """The outcome (JSON) of ``measure()`` under these facts, from now or from before. Raises what ``measure``
    raises; a folder that cannot be written costs a measurement each time, and is logged."""
    folder = folder or default_folder()
    described = {"name": name, **facts}
    digest = xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())
    file = folder / f"{name}-{digest}.json"
    try:
        return json.loads(file.read_text())["choice"]
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s cannot be read (%s): measuring again", file, error)
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged (%s): measuring again", file, error)
        file.unlink(missing_ok=True)
    return _keep(file, {"facts": described, "choice": measure()})["choice"]


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierstore" / "choices"


def _keep(file: Path, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write the document, whole. Returns another process's, if that was first."""
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
        log.warning("%s cannot be written (%s): it will be measured again", file, error)
    return document
