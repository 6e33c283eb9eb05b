"""What the scheduler's half knows of one request, from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tierstore.keys import PageKey
from tierstore_connectors.vllm.groups import Groups
from tierstore_connectors.vllm.keys import chunk_keys, secret_of
from tierstore_connectors.vllm.probe import Probe
from tierstore_connectors.vllm.wishes import Wishes


@dataclass(slots=True, eq=False)
class Tracked:
    """``held`` tokens are in the store as far as the probe has found; ``local`` are those that vLLM has
    itself. ``known`` chunks have been told to the workers, ``saved`` need not be saved (any more). ``loads``
    have been promised. ``stale``: some of its KV was computed before everything was forgotten, and nothing of
    it may be saved."""

    request: Any  # vLLM's
    wishes: Wishes
    secret: bytes
    keys: list[PageKey] = field(default_factory=list)
    probe: Probe | None = None
    probed: bool = False
    answer: int | None = None
    answered_at: float = 0.0
    held: int = 0
    local: int = 0
    known: int = 0
    saved: int = 0
    loads: int = 0
    stale: bool = False
    loading: tuple[int, int] | None = None  # from chunk, to chunk

    @classmethod
    def of(cls, request: Any) -> tuple[Tracked, str | None]:
        """And what is wrong with what the request asks of the cache."""
        wishes, problem = Wishes.parse(request.kv_transfer_params)
        lora = request.lora_request
        adapter = () if lora is None else (lora.lora_name, lora.lora_path)
        return cls(request, wishes, secret_of(adapter, request.cache_salt)), problem

    def update_keys(self, groups: Groups) -> int:
        """Have a key for each chunk that vLLM has hashed; how many there are."""
        per_chunk = groups.chunk_tokens // groups.hash_tokens
        hashes = self.request.block_hashes
        if len(hashes) // per_chunk > len(self.keys):
            self.keys += chunk_keys(hashes, self.secret, per_chunk, len(self.keys))
        return len(self.keys)

    def release(self) -> None:
        """Let go of what was found."""
        if self.probe is not None:
            self.probe.release()
        self.probe = None
        self.probed = False
        self.answer = None
