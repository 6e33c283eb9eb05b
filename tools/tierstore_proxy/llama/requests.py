"""The requests whose prompts can be restored, and the changes made to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tierstore_proxy.prompts import token_ids

COMPLETIONS = frozenset({"completion", "completions", "v1/completions"})
CHATS = frozenset({"chat/completions", "v1/chat/completions"})

# With one of these fields, the KV of a prompt depends on more than its tokens, or several slots compute the
# prompt.
_UNSUITED = ("image_data", "lora", "n_cache_reuse")
_COUNTS = ("n", "n_cmpl", "best_of")


@dataclass(frozen=True)
class LlamaRequest:
    """A request for a completion of one prompt: its ``tokens``, or else its ``text`` or ``chat`` body, from
    which llama-server makes tokens. ``slot`` is the slot that the client asks for."""

    body: bytes
    tokens: npt.NDArray[np.uint32] | None
    text: str | None
    slot: int | None

    @classmethod
    def parse(cls, path: str, body: bytes) -> LlamaRequest | None:
        """Parse a request to ``path``. None if its prompt cannot be restored: llama-server answers it
        alone."""
        if path not in COMPLETIONS and path not in CHATS:
            return None
        try:
            fields = msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if any(fields.get(name) for name in _UNSUITED) or fields.get("cache_prompt") is False:
            return None
        if any(fields.get(name) not in (None, 1) for name in _COUNTS):
            return None
        slot = fields.get("id_slot", -1)
        if not isinstance(slot, int) or isinstance(slot, bool):
            return None
        wanted = slot if slot >= 0 else None
        if path in CHATS:
            return cls(body, None, None, wanted) if _only_text(fields.get("messages")) else None
        prompt = fields.get("prompt")
        tokens = None if isinstance(prompt, str) else token_ids(prompt)
        if tokens is None and not isinstance(prompt, str):
            return None
        return cls(body, tokens, prompt if isinstance(prompt, str) else None, wanted)

    def sent_to(self, slot: int) -> bytes:
        """Return the body for a slot. Only the slot's number is added, so all else stays as it came."""
        if self.slot is not None:
            return self.body
        fields = self.body.rstrip()
        number = b'"id_slot":%d}' % slot
        if b'"id_slot"' in fields:  # -1: the client accepts any slot
            return msgspec.json.encode({**msgspec.json.decode(self.body), "id_slot": slot})
        return fields[:-1] + b"," + number


def moves_cells(path: str, query: Mapping[str, str], body: bytes) -> bool:
    """Return whether a request may leave KV in a slot that does not belong to the slot's tokens: a client's
    own restored file, or cells moved to other positions."""
    if path.startswith("slots/"):
        return query.get("action") == "restore"
    if b"n_cache_reuse" not in body and b"\\u" not in body:
        return False
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(fields, dict) and bool(fields.get("n_cache_reuse"))


def _only_text(messages: object) -> bool:
    """Return whether a chat has messages of text only. Tokens do not say which image or sound a chat has."""
    if not isinstance(messages, list) or not messages:
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else 0
        parts = content if isinstance(content, list) else []
        if not (content is None or isinstance(content, str | list)):
            return False
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
            return False
    return True
