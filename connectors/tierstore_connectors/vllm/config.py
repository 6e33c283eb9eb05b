"""The user's settings for vLLM's connectors.

An engine's settings are ``kv_connector_extra_config`` of ``--kv-transfer-config`` and
``ec_connector_extra_config`` of ``--ec-transfer-config``. A request's options are in its
``kv_transfer_params: {"tierstore": {…}}``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import tierstore
from tierstore import KVSpec, Store
from tierstore.daemon.settings import default_listen
from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.types import HANDOVER_S, MOST_HANDOVER_S, Promise
from tierstore_connectors.common.options import checked_options

S = TypeVar("S", bound="EncoderSettings")


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """The settings of the connector for embeddings, which the connector for KV has as well.

    - ``store``: the daemon's address. ``keys``, ``server_key``: key files for ``tcp://``.
    - ``namespace``: engines with different namespaces share no pages. The namespace also identifies the
      version of weights without local files and without a commit.
    - ``model_name``: the model's name in the daemon's KV events. Empty means vLLM's served name.
    - ``lookup_s``, ``load_s``: the most seconds that a request waits for a lookup and for a load.
    - ``threads``: copying threads per process.
    - ``hash_weights``: "whole" hashes weight files completely, "sample" only samples of them.
    """

    where: ClassVar[str] = "ec_connector_extra_config"
    """The name of these settings in vLLM's configuration."""

    store: str = field(default_factory=default_listen)
    keys: str | None = None
    server_key: str | None = None
    namespace: str = ""
    model_name: str = ""
    lookup_s: float = 0.25
    load_s: float = 2.0
    threads: int = 2
    hash_weights: str = "whole"

    @classmethod
    def parse(cls: type[S], extra: Mapping[str, Any]) -> S:
        """Return the settings in ``extra``. Raise :class:`UsageError` for an unknown key or an invalid
        value."""
        return cls(**checked_options(cls.where, cls, extra))

    def connect(self, identity: Identity, spec: KVSpec, *, threads: int | None = None, **more: Any) -> Store:
        """Return a store at the daemon for pages of ``identity``, which connects in the background.
        ``threads`` overrides ``self.threads``. ``more`` are arguments of :func:`tierstore.connect`, whose
        errors this method raises."""
        return tierstore.connect(
            self.store,
            spec,
            identity=identity,
            lookup_s=self.lookup_s,
            mover_threads=self.threads if threads is None else threads,
            keys=self.keys,
            server_key=self.server_key,
            model_name=self.model_name,
            wait_s=0,
            **more,
        )

    def named(self: S, config: Any) -> S:
        """Return these settings; an empty model name is replaced by the served name in vLLM's ``config``."""
        return replace(self, model_name=self.model_name or str(config.model_config.served_model_name or ""))


@dataclass(frozen=True, slots=True)
class VllmSettings(EncoderSettings):
    """The settings of the connector for KV: the settings of :class:`EncoderSettings`, and the following.

    - ``chunk_tokens``: tokens per page. 0 means the smallest number of blocks with at least 64 tokens.
    - ``prefetch_s``: the most seconds that a request waits for pages from disk. ``load_s``: the most seconds
      that loading a request's blocks may take.
    - ``fence_s``: the most seconds that a step waits for saves of blocks that the step overwrites. Slower
      saves are dropped.
    - ``ahead``: how many waiting requests are looked up before vLLM schedules them.
    - ``handover_s``: the most seconds that a decode engine may wait for the pages of a prompt that this
      engine hands over.
    - ``explain``: count missed tokens by reason, and log the reasons of each request.
    - ``share_engines``: share pages with the bundled engine and with vLLM engines of any parallelism
      (:mod:`tierstore_connectors.common.sharing`).
    - ``share_sizes``: with ``share_engines``, the parallelism of other engines whose pages are looked up as
      well: a list of TPxPP, separated by commas. Each size costs one more lookup for each prompt.
    """

    where: ClassVar[str] = "kv_connector_extra_config"

    load_s: float = 10.0
    chunk_tokens: int = 0
    prefetch_s: float = 2.0
    fence_s: float = 0.01
    ahead: int = 32
    handover_s: float = HANDOVER_S
    explain: bool = False
    share_engines: bool = False
    share_sizes: str = "1x1"

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Return ``share_sizes`` as pairs (tensor-parallel ranks, pipeline stages)."""
        found = [_SIZE.fullmatch(size.strip()) for size in self.share_sizes.split(",")]
        if None in found:
            raise UsageError(
                f"{self.where}: share_sizes must be a list like 1x1,4x2 (ranks of tensor parallelism x "
                f"pipeline stages), got {self.share_sizes!r}"
            )
        return [(int(size[1]), int(size[2])) for size in found if size is not None]

    def __post_init__(self) -> None:
        if self.share_engines:
            _ = self.sizes  # raises for an invalid size
        if self.handover_s > MOST_HANDOVER_S:
            raise UsageError(
                f"{self.where}: handover_s must be at most {MOST_HANDOVER_S:g} seconds, got "
                f"{self.handover_s:g}"
            )


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one request.

    - ``pin``: keep the prompt until an operator unpins it. ``ttl_s``, ``priority``: hints for eviction.
    - ``no_save``: store nothing that this request computes. The request may still load stored pages.
    - ``hands_over``: another engine continues the prompt.
    - ``promise``: the promise of another engine to save the beginning of the prompt
      (:mod:`tierstore_connectors.common.handover`).
    """

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
        """Return the options, and a message about invalid options or None.

        Options may come from an end user, so invalid options are ignored and do not fail the request.
        """
        if not params:
            return cls(), None
        asked = params.get("tierstore")
        if asked is None:
            asked = {}
        if not isinstance(asked, Mapping):
            return cls(), f"kv_transfer_params.tierstore is {type(asked).__name__}, not an object"
        wrong = sorted(str(name) for name in set(asked) - {*_VALID, "tokens", "until_s"})
        values: dict[str, Any] = {"hands_over": params.get("do_remote_decode") is True}
        for name, is_valid in _VALID.items():
            if name in asked and is_valid(asked[name]):
                values[name] = asked[name]
            elif name in asked:
                wrong.append(name)
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


_SIZE = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})")


def _is_number(value: object) -> bool:
    # math.isfinite() raises for an int that is larger than any float.
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    )


_VALID: Mapping[str, Callable[[Any], bool]] = {
    "pin": lambda value: isinstance(value, bool),
    "no_save": lambda value: isinstance(value, bool),
    "ttl_s": lambda value: value is None or (_is_number(value) and value >= 0),
    "priority": lambda value: isinstance(value, int) and not isinstance(value, bool) and -100 <= value <= 100,
}
"""The options of a request that are set directly, with the checks of their values."""
