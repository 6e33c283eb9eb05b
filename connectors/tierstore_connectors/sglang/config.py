"""What a user can set in SGLang's ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tierstore.daemon.settings import default_listen
from tierstore.errors import UsageError
from tierstore_connectors.common.options import checked_options

# SGLang's own keys, which a backend is given, too.
_OF_SGLANG = frozenset(
    {"backend_name", "module_path", "class_name", "interface_v1", "allocator", "tp_lcm_size"}
    | {"prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"}
    | {"hicache_storage_pass_prefix_keys"}
)


WHOLE, SAMPLE = "whole", "sample"


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """``store`` is the daemon's address, ``keys`` and ``server_key`` are the files for ``tcp://``.
    ``namespace`` keeps engines apart that nothing else tells apart, and names weights that nothing else
    identifies.

    ``lookup_s`` is the longest that a query waits for the daemon, ``load_s`` a read and ``save_s`` a write:
    then it has what has come by then. ``threads`` copy. ``hash_weights`` is ``whole`` or ``sample``: how much
    of the model's large files tells weights apart.
    """

    store: str = field(default_factory=default_listen)
    keys: str | None = None
    server_key: str | None = None
    namespace: str = ""
    lookup_s: float = 0.5
    load_s: float = 10.0
    save_s: float = 10.0
    threads: int = 2
    hash_weights: str = WHOLE

    def __post_init__(self) -> None:
        if self.hash_weights not in (WHOLE, SAMPLE):
            raise UsageError(f"hash_weights must be {WHOLE!r} or {SAMPLE!r}, got {self.hash_weights!r}")

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> SglangSettings:
        """Raises :class:`~tierstore.errors.UsageError` for an unknown key or a wrong value."""
        ours = {name: value for name, value in (extra or {}).items() if name not in _OF_SGLANG}
        return cls(**checked_options("hicache-storage-backend-extra-config", cls, ours))
