"""What a user can set: ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config`` for an engine, and
``kv_transfer_params: {"tierstore": {…}}`` for a request."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tierstore.daemon.settings import default_listen
from tierstore.errors import UsageError
from tierstore.types import HANDOVER_S, MOST_HANDOVER_S, Promise
from tierstore_connectors.common.options import checked_options


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """``store`` is the daemon's address, ``keys`` and ``server_key`` are the files for ``tcp://``.
    ``namespace`` keeps engines apart that nothing else tells apart, and names weights that nothing else
    identifies. ``model_name`` is what the daemon's KV events call the model (empty: as vLLM serves it).

    ``chunk_tokens``: how many tokens a page holds (0: as few blocks as make 64 tokens). ``lookup_s`` is the
    longest a request waits to learn what the daemon has, ``prefetch_s`` the longest it waits for the disk,
    and ``load_s`` for its blocks. ``fence_s`` is the longest that a step waits for saves which read blocks
    that it is going to write; then they are given up. ``ahead``: how many waiting requests are looked up
    before vLLM asks for them. ``threads`` copy, in each worker. ``handover_s`` is the longest that an engine
    which goes on with a prompt of this one waits for its pages. ``hash_weights`` is "whole", or "sample"
    where reading all weight files once takes too long.
    """

    store: str = field(default_factory=default_listen)
    keys: str | None = None
    server_key: str | None = None
    namespace: str = ""
    model_name: str = ""
    chunk_tokens: int = 0
    lookup_s: float = 0.25
    prefetch_s: float = 2.0
    load_s: float = 10.0
    fence_s: float = 0.01
    ahead: int = 32
    threads: int = 2
    handover_s: float = HANDOVER_S
    hash_weights: str = "whole"

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> VllmSettings:
        """Raises :class:`UsageError` for an unknown key or a wrong value."""
        settings = cls(**checked_options("kv_connector_extra_config", cls, extra))
        if settings.handover_s > MOST_HANDOVER_S:
            raise UsageError(
                f"kv_connector_extra_config: handover_s is {MOST_HANDOVER_S:g} seconds at most, not "
                f"{settings.handover_s:g}"
            )
        if settings.hash_weights not in ("whole", "sample"):
            raise UsageError(
                'kv_connector_extra_config: hash_weights must be "whole" or "sample", got '
                f"{settings.hash_weights!r}"
            )
        return settings


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """``pin``: keep the prompt until a person unpins it. ``ttl_s`` and ``priority`` are hints for the policy.
    ``no_save``: what this request computes is not stored (it may still be served from the cache).
    ``hands_over``: another engine goes on with the prompt. ``promise``: another engine has computed that much
    of it (:mod:`tierstore_connectors.common.handover`)."""

    pin: bool = False
    no_save: bool = False
    ttl_s: float | None = None
    priority: int = 0
    hands_over: bool = False
    promise: Promise | None = None

    @classmethod
    def parse(
        cls, params: Mapping[str, Any] | None, *, prompt_tokens: int
    ) -> tuple[RequestOptions, str | None]:
        """Return the options, and what was wrong with them. They may come from an end user: what is not
        understood is left out, and is no reason to fail a request."""
        if not params:
            return cls(), None
        asked = params.get("tierstore")
        if asked is None:
            asked = {}
        if not isinstance(asked, Mapping):
            return cls(), f"kv_transfer_params.tierstore is {type(asked).__name__}, not an object"
        wrong = sorted(str(name) for name in set(asked) - _KNOWN)
        values: dict[str, Any] = {"hands_over": params.get("do_remote_decode") is True}
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
        if params.get("do_remote_prefill") is True and "tokens" in asked:
            try:
                promise = Promise(asked["tokens"], asked.get("until_s", HANDOVER_S))
                if promise.tokens > prompt_tokens:
                    wrong.append("tokens (more than the prompt has)")
                elif promise.tokens:
                    values["promise"] = promise
            except UsageError:
                wrong.append("tokens or until_s")
        problem = f"kv_transfer_params.tierstore: {', '.join(wrong)} not understood" if wrong else None
        return cls(**values), problem


_KNOWN = {"pin", "no_save", "ttl_s", "priority", "tokens", "until_s"}


def _is_number(value: object) -> bool:
    # An int may be beyond all floats, which math.isfinite() takes for an error.
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    )
