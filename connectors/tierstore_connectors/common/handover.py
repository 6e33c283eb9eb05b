"""The hand-over of a prompt from the engine that computes it to the engine that continues it, in vLLM's
format.

A proxy asks the first engine for one token, with ``kv_transfer_params`` ``{"do_remote_decode": true}``. It
copies the ``kv_transfer_params`` of the answer into the request for the second engine. Pages are found by
prompt, so the answer contains no addresses, and no page is reserved. The answer only says how many tokens are
being saved, and how long waiting for them may take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierstore.errors import UsageError
from tierstore.types import Promise


@dataclass(frozen=True, slots=True)
class Role:
    """Whether an engine loads pages from the store that it shares with others, and saves pages to it."""

    loads: bool
    saves: bool

    @classmethod
    def parse(cls, name: str) -> Role:
        """Return the role of one of vLLM's names. Raises :class:`UsageError` for another name."""
        role = _ROLES.get(name)
        if role is None:
            raise UsageError(f"kv_role must be one of {', '.join(_ROLES)}, got {name!r}")
        return role


_ROLES: Mapping[str, Role] = {
    "kv_both": Role(loads=True, saves=True),
    "kv_producer": Role(loads=False, saves=True),
    "kv_consumer": Role(loads=True, saves=False),
}
BOTH = _ROLES["kv_both"]


def answer(promise: Promise) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` that the engine which has computed a prompt answers."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "tierstore": {"tokens": promise.tokens, "until_s": promise.until_s},
    }
