"""``tierstore doctor --sglang``: checks SGLang, tierstore's storage backend for it, and the daemon.

A separate process loads the storage backend, because this imports SGLang, which takes seconds and may fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tierstore.arguments import json_object
from tierstore.cli.checks.check import Check, fail, installed, ok, warn
from tierstore.cli.checks.engine import checks as daemon_checks
from tierstore.cli.checks.engine import dotted, plug_in_checks, probe, version_check
from tierstore.daemon.settings import default_listen

OLDEST, TRIED = (0, 5, 20), (0, 5, 23)
_MODULE, _CLASS = "tierstore_connectors.sglang.backend", "TierStoreHiCache"
_PREFIX = "hicache_storage_pass_prefix_keys"

# This code loads the storage backend from the config as SGLang does.
_PROBE = """
import importlib, json, sys
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
config = json.loads(sys.argv[1])
found = getattr(importlib.import_module(config["module_path"]), config["class_name"])
if not issubclass(found, HiCacheStorage):
    sys.exit(f"{found.__name__} is not a HiCacheStorage")
if config["module_path"].startswith("tierstore_connectors.sglang"):
    from tierstore_connectors.sglang.config import SglangSettings
    SglangSettings.parse(config)
"""


def checks(url: str | None, extra: str | None) -> Iterator[Check]:
    """Check SGLang, its config and the daemon. Takes seconds if SGLang is installed.

    ``url`` is the daemon's address (None: this user's daemon). ``extra`` is the JSON that SGLang is started
    with (None: the result of :func:`proposed`). Raises :class:`UsageError` if ``extra`` is not a JSON object
    or the address is malformed.
    """
    config = proposed(url) if extra is None else json_object("--extra-config", extra)
    version = installed("sglang")
    yield version_check(
        "sglang",
        version,
        OLDEST,
        TRIED,
        absent="install tierstore in the environment (or image) of SGLang, and run this there",
        old=f"this version's page names ignore cache salts: use {dotted(OLDEST)} or newer",
        new=f"newer than the last tested version ({dotted(TRIED)}): test it first",
    )
    yield from _config(config)
    good = f"{config.get('module_path')}:{config.get('class_name')} loads"
    yield probe("sglang backend", "SGLang", _PROBE, config, installed=version is not None, good=good)
    yield from plug_in_checks("SGLang", "sglang.srt.plugins")
    yield from daemon_checks(url or config.get("store") or default_listen())


def proposed(url: str | None) -> dict[str, Any]:
    """Return a value for SGLang's ``--hicache-storage-backend-extra-config``."""
    config: dict[str, Any] = {
        "backend_name": "tierstore",
        "module_path": _MODULE,
        "class_name": _CLASS,
        "interface_v1": 1,
        _PREFIX: True,
    }
    return config if url is None else {**config, "store": url}


def _config(config: Mapping[str, Any]) -> Iterator[Check]:
    named = (config.get("module_path"), config.get("class_name"))
    if named != (_MODULE, _CLASS):
        advice = f'set "module_path": "{_MODULE}" and "class_name": "{_CLASS}"'
        yield fail("extra config", f"{named[0]}:{named[1]}", advice)
    if config.get("interface_v1") != 1:
        advice = 'set "interface_v1": 1, otherwise SGLang saves no pages'
        yield fail("interface_v1", str(config.get("interface_v1")), advice)
    else:
        yield ok("interface_v1", "1")
    if config.get(_PREFIX) is not True:
        advice = f'set "{_PREFIX}": true, so that a full tier evicts prompts from their end'
        yield warn(_PREFIX, str(config.get(_PREFIX)), advice)
    else:
        yield ok(_PREFIX, "true")
