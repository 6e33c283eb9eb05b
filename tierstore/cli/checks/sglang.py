"""SGLang, its storage backend in this environment, and the daemon it will ask: ``tierstore doctor --sglang``.

The backend is loaded by a process of its own, since that imports SGLang, which takes seconds and may fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from tierstore.arguments import json_object
from tierstore.cli.checks.check import Check, fail, ok, warn
from tierstore.cli.checks.daemon import checks as daemon_checks
from tierstore.cli.checks.daemon import numbers
from tierstore.daemon.settings import default_listen

OLDEST, TRIED = (0, 5, 20), (0, 5, 23)
_MODULE, _CLASS = "tierstore_connectors.sglang.backend", "TierStoreHiCache"
_PREFIX = "hicache_storage_pass_prefix_keys"
_IMPORT_S = 180.0

# What SGLang does with the config, in a process that may fail. Its last line on stderr is the reason.
_PROBE = """
import importlib, json, sys
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
config = json.loads(sys.argv[1])
found = getattr(importlib.import_module(config["module_path"]), config["class_name"])
if not issubclass(found, HiCacheStorage):
    sys.exit(f"{found.__name__} is no HiCacheStorage")
if config["module_path"].startswith("tierstore_connectors.sglang"):
    from tierstore_connectors.sglang.config import Settings
    Settings.parse(config)
"""


def checks(url: str | None, extra: str | None) -> Iterator[Check]:
    """``url`` is the daemon's address (None: this user's), ``extra`` the JSON that SGLang is started with
    (None: what is :func:`proposed`). Takes seconds where SGLang is installed.

    Raises :class:`UsageError` for a config that is no JSON object, and for an address that is none.
    """
    config = proposed(url) if extra is None else json_object("--extra-config", extra)
    version = installed_version()
    yield _version(version)
    yield from _config(config)
    yield _backend(config, installed=version is not None)
    yield from daemon_checks(url or config.get("store") or default_listen())


def installed_version() -> str | None:
    """SGLang's version, without importing it."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def proposed(url: str | None) -> dict[str, Any]:
    """What to give SGLang as ``--hicache-storage-backend-extra-config``."""
    config: dict[str, Any] = {
        "backend_name": "tierstore",
        "module_path": _MODULE,
        "class_name": _CLASS,
        "interface_v1": 1,
        _PREFIX: True,
    }
    return config if url is None else {**config, "store": url}


def _version(version: str | None) -> Check:
    if version is None:
        advice = "install tierstore into the environment (or image) that SGLang runs in, and ask again there"
        return fail("sglang", "not installed here", advice)
    oldest, tried = (".".join(map(str, each)) for each in (OLDEST, TRIED))
    if numbers(version, 3) < OLDEST:
        return fail("sglang", version, f"its page names leave salts out: use {oldest} or newer")
    if numbers(version, 3) > TRIED:
        return warn("sglang", version, f"newer than what this was tried with ({tried}): try it first")
    return ok("sglang", version)


def _config(config: Mapping[str, Any]) -> Iterator[Check]:
    named = (config.get("module_path"), config.get("class_name"))
    if named != (_MODULE, _CLASS):
        advice = f'set "module_path": "{_MODULE}" and "class_name": "{_CLASS}"'
        yield fail("extra config", f"{named[0]}:{named[1]}", advice)
    if config.get("interface_v1") != 1:
        advice = 'set "interface_v1": 1, or SGLang hands over no pages and nothing is kept'
        yield fail("interface_v1", str(config.get("interface_v1")), advice)
    else:
        yield ok("interface_v1", "1")
    if config.get(_PREFIX) is not True:
        advice = f'set "{_PREFIX}": true, so that a full tier loses prompts from their end'
        yield warn(_PREFIX, str(config.get(_PREFIX)), advice)
    else:
        yield ok(_PREFIX, "true")


def _backend(config: Mapping[str, Any], *, installed: bool) -> Check:
    name = "sglang backend"
    if not installed:
        return warn(name, "not tried", "there is no SGLang here")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, json.dumps(config)],
            capture_output=True,
            text=True,
            timeout=_IMPORT_S,
        )
    except subprocess.TimeoutExpired:
        return fail(name, f"no answer in {_IMPORT_S:.0f} s", "import sglang by hand, and see where it hangs")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return fail(name, reason[:200], "this is what SGLang would say when it starts")
    return ok(name, f"{config.get('module_path')}:{config.get('class_name')} loads")
