"""The hand-over from the engine that computes a prompt to the one that goes on with it, in vLLM's words.

A proxy asks the first for one token, with ``kv_transfer_params`` ``{"do_remote_decode": true}``, and puts
those of its answer into the second one's request, unchanged. Pages are found by prompt, so nothing says where
they are and nothing is held for anybody: the answer only says how many are on their way, and how long waiting
for them may take.
"""

from __future__ import annotations

from typing import Any

from tierstore.types import Promise


def answer(promise: Promise) -> dict[str, Any]:
    """What the engine that has computed a prompt answers."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "tierstore": {"tokens": promise.tokens, "until_s": promise.until_s},
    }
