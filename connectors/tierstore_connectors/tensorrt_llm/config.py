"""The user's settings. TensorRT-LLM passes none to a connector, so they are in two variables of the
environment: ``TIERSTORE``, as for other engines, and ``TENSORRT_LLM_TIERSTORE`` with a JSON object. (Names
that begin with ``TIERSTORE_`` are the daemon's settings.)"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from tierstore.arguments import json_object
from tierstore.daemon.background import OFF, VARIABLE, chosen_store
from tierstore.daemon.settings import default_listen
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.spec import DEFAULT_CHUNK_TOKENS
from tierstore_connectors.common.options import checked_options

SETTINGS_VARIABLE = "TENSORRT_LLM_TIERSTORE"


@dataclass(frozen=True, slots=True)
class TensorrtLlmSettings:
    """The settings of an engine's connector.

    - ``namespace``: separates engines that nothing else separates.
    - ``chunk_tokens``: tokens of a page, rounded up to whole blocks.
    - ``lookup_s``, ``load_s``: the longest that the engine waits for the daemon's answer and for a prompt's
      pages. It computes nothing meanwhile.
    - ``keys``, ``server_key``: key files for ``tcp://``.
    - ``hash_weights``: "whole", or "sample" if reading all weight files once takes too long.
    """

    namespace: str = ""
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    lookup_s: float = 0.25
    load_s: float = 2.0
    keys: str | None = None
    server_key: str | None = None
    hash_weights: str = "whole"

    @classmethod
    def load(cls) -> TensorrtLlmSettings:
        """Return the settings in the environment. Raises :class:`UsageError` for an unknown key or an invalid
        value."""
        given = json_object(SETTINGS_VARIABLE, os.environ.get(SETTINGS_VARIABLE, "") or "{}")
        found = cls(**checked_options(SETTINGS_VARIABLE, cls, given))
        if found.hash_weights not in ("whole", "sample"):
            raise UsageError(
                f'{SETTINGS_VARIABLE}: hash_weights must be "whole" or "sample", got {found.hash_weights!r}'
            )
        if found.chunk_tokens < 1:
            raise UsageError(f"{SETTINGS_VARIABLE}: chunk_tokens must be at least 1")
        return found


def daemon_url(log: logging.Logger) -> str | None:
    """Return the daemon's address, and start it for ``TIERSTORE=auto``. Return None for ``off``, and if it
    cannot be started. Raises :class:`UsageError` for a wrong value."""
    value = os.environ.get(VARIABLE)
    if value is None:
        return default_listen()
    if value in ("", OFF):
        return None
    try:
        return chosen_store(value).url
    except StoreUnavailableError as error:
        log.warning("tierstore: the engine runs without the cache: %s", error)
        return None
