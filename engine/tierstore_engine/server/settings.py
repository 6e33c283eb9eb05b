"""The server's settings: few, frozen, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import UsageError
from tierstore.types import HANDOVER_S, MOST_HANDOVER_S
from tierstore.units import KIB, MIB
from tierstore.wire.local_address import is_loopback

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class ServerSettings:
    """Where to listen, whom to serve and how much of it at a time. Raises :class:`UsageError`.

    ``model_name`` is what clients call the model. ``generation_config`` ``auto`` takes sampling defaults from
    the model's ``generation_config.json``; ``none`` takes OpenAI's. With ``api_key`` everything under ``/v1``
    wants it; without one only loopback addresses are served. ``operator_key`` is wanted for what changes the
    server for all (``POST /pool``): where clients have a key, it is another one, and without it nobody may.
    ``max_requests`` HTTP requests are worked on or wait at a time, with ``max_queued_tokens`` prompt tokens
    among them (a single one may have more); beyond that clients are told to come back. A request may have a
    body of ``max_body_bytes``, ``max_choices`` continuations (prompts times ``n`` or ``best_of``) of
    ``max_new_tokens`` tokens each, and take ``request_s`` seconds. One whose first token cannot be there
    within ``ttft_slo_s`` seconds, or its own, is refused at once. SIGTERM waits ``drain_s`` seconds for what
    is under way. An engine that goes on with a prompt of this one may wait ``handover_s`` seconds for its
    pages.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    operator_key: str | None = None
    chat_template: Path | None = None
    generation_config: str = AUTO
    max_body_bytes: int = 4 * MIB
    max_requests: int = 512
    max_queued_tokens: int = 4_000_000
    max_choices: int = 128
    max_new_tokens: int = 4096
    request_s: float = 600.0
    ttft_slo_s: float | None = None
    drain_s: float = 30.0
    handover_s: float = HANDOVER_S

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise UsageError(f"port must lie between 0 (any free one) and 65535, not {self.port}")
        if self.generation_config not in (AUTO, NONE):
            raise UsageError(f"generation_config must be auto or none, got {self.generation_config!r}")
        if self.api_key == "":
            raise UsageError("an api key must not be empty; leave it out to serve without one")
        if self.operator_key == "":
            raise UsageError("an operator key must not be empty; leave it out to have none")
        if self.operator_key is not None and self.operator_key == self.api_key:
            raise UsageError("the operator key is the clients' api key: give another one")
        if self.api_key is None and not is_loopback(self.host):
            raise UsageError(
                f"{self.host} is reached from other machines: give an --api-key, or listen at 127.0.0.1"
            )
        if self.max_body_bytes < KIB:
            raise UsageError(f"max_body_bytes must be at least 1 KiB, not {self.max_body_bytes} bytes")
        for name in ("max_requests", "max_queued_tokens", "max_choices", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.ttft_slo_s is not None and not self.ttft_slo_s > 0:
            raise UsageError(f"ttft_slo_s must be positive, not {self.ttft_slo_s}; leave it out for none")
        if self.request_s <= 0 or self.drain_s < 0:
            raise UsageError("request_s must be positive, and drain_s must not be negative")
        if not 0 <= self.handover_s <= MOST_HANDOVER_S:
            raise UsageError(
                f"handover_s must lie between 0 and {MOST_HANDOVER_S:g} seconds, not {self.handover_s:g}"
            )
