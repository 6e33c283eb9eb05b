"""The hand-over of a prompt from a prefill engine to a decode engine, in vLLM's format.

A proxy requests one token from the prefill engine, with ``kv_transfer_params``
``{"do_remote_decode": true}``. The proxy copies the ``kv_transfer_params`` of the response into its request
to the decode engine. The decode engine finds pages by the prompt, so the response contains no addresses and
reserves no pages. The response says how many tokens the prefill engine is saving, and how long the decode
engine should wait for their pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierstore.errors import UsageError
from tierstore.types import Promise


@dataclass(frozen=True, slots=True)
class Role:
    """Whether an engine loads pages from a store shared with other engines, and saves pages to the store."""

    loads: bool
    saves: bool

    @classmethod
    def parse(cls, name: str) -> Role:
        """Return the role for vLLM's ``kv_role``. Raise :class:`UsageError` for an unknown name."""
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
    """Return the ``kv_transfer_params`` of a prefill engine's response."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "tierstore": {"tokens": promise.tokens, "until_s": promise.until_s},
    }
