"""The hand-over from the engine that computes a prompt to the one that goes on with it, in vLLM's words.

A proxy asks the first for one token, with ``kv_transfer_params`` ``{"do_remote_decode": true}``, and puts
those of its answer into the second one's request, unchanged. Pages are found by prompt, so nothing says where
they are and nothing is held for anybody: the answer only says how many are on their way, and how long waiting
for them may take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierstore.errors import UsageError
from tierstore.types import Promise


@dataclass(frozen=True, slots=True)
class Role:
    """Whether an engine takes pages out of the store that it shares with others, and puts any in."""

    loads: bool
    saves: bool

    @classmethod
    def parse(cls, name: str) -> Role:
        """One of vLLM's names. Raises :class:`UsageError`."""
        role = _ROLES.get(name)
        if role is None:
            raise UsageError(f"kv_role is one of {', '.join(_ROLES)}, not {name!r}")
        return role


_ROLES: Mapping[str, Role] = {
    "kv_both": Role(loads=True, saves=True),
    "kv_producer": Role(loads=False, saves=True),
    "kv_consumer": Role(loads=True, saves=False),
}
BOTH = _ROLES["kv_both"]


def answer(promise: Promise) -> dict[str, Any]:
    """What the engine that has computed a prompt answers."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "tierstore": {"tokens": promise.tokens, "until_s": promise.until_s},
    }
