"""The user's settings in SGLang's ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tierstore.daemon.settings import default_listen
from tierstore_connectors.common.options import checked_options

PREFIX_KEYS = "hicache_storage_pass_prefix_keys"

# Keys in the same JSON object that are SGLang's own settings.
_OF_SGLANG = frozenset(
    {"backend_name", "module_path", "class_name", "interface_v1", "allocator", "tp_lcm_size"}
    | {"prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"}
    | {PREFIX_KEYS}
)


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """The settings of an engine's storage backend.

    - ``store``: the daemon's address. ``keys``, ``server_key``: key files for ``tcp://``.
    - ``namespace``: engines with different namespaces share no pages. The namespace also identifies the
      version of weights without local files and without a commit.
    - ``lookup_s``, ``load_s``, ``save_s``: the most seconds that a lookup, a read and a write may take. After
      this time a read or write ends with the pages copied so far.
    - ``threads``: copying threads.
    - ``hash_weights``: ``whole`` hashes the model's files completely, ``sample`` only samples of large files.
    - ``share_engines``: keep pages in the layout that all engines share
      (:mod:`tierstore_connectors.sglang.sharing`).
    - ``explain``: count missed tokens by reason, and log the reasons of each lookup.
    """

    store: str = field(default_factory=default_listen)
    keys: str | None = None
    server_key: str | None = None
    namespace: str = ""
    lookup_s: float = 0.5
    load_s: float = 10.0
    save_s: float = 10.0
    threads: int = 2
    hash_weights: str = "whole"
    explain: bool = False
    share_engines: bool = False

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> SglangSettings:
        """Return the settings in ``extra``. Raise :class:`~tierstore.errors.UsageError` for an unknown key or
        an invalid value."""
        ours = {name: value for name, value in (extra or {}).items() if name not in _OF_SGLANG}
        return cls(**checked_options("hicache-storage-backend-extra-config", cls, ours))
