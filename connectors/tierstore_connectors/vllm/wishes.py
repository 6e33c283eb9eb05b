"""What a request may ask of the cache: ``kv_transfer_params: {"tierstore": {…}}``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KNOWN = frozenset({"pin", "ttl_s", "no_save", "priority"})


@dataclass(frozen=True, slots=True)
class Wishes:
    """``pin``: keep the prompt until a person unpins it. ``ttl_s`` and ``priority`` are hints for the policy.
    ``no_save``: what this request computes is not stored (it may still be served from the cache)."""

    pin: bool = False
    no_save: bool = False
    ttl_s: float | None = None
    priority: int = 0

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None) -> tuple[Wishes, str | None]:
        """The wishes, and what was wrong with them. They come from whoever sends requests: what is not
        understood is left out, and is no reason to fail a request."""
        asked = params.get("tierstore") if params else None
        if asked is None:
            return cls(), None
        if not isinstance(asked, Mapping):
            return cls(), f"kv_transfer_params.tierstore is {type(asked).__name__}, not an object"
        wrong = sorted(str(name) for name in set(asked) - _KNOWN)
        values: dict[str, Any] = {}
        for name in ("pin", "no_save"):
            value = asked.get(name, False)
            if isinstance(value, bool):
                values[name] = value
            else:
                wrong.append(name)
        ttl_s = asked.get("ttl_s")
        if ttl_s is None or (_is_number(ttl_s) and ttl_s >= 0):
            values["ttl_s"] = ttl_s
        else:
            wrong.append("ttl_s")
        priority = asked.get("priority", 0)
        if isinstance(priority, int) and not isinstance(priority, bool) and -100 <= priority <= 100:
            values["priority"] = priority
        else:
            wrong.append("priority")
        problem = f"kv_transfer_params.tierstore: {', '.join(wrong)} not understood" if wrong else None
        return cls(**values), problem


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
