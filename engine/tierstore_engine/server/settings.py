"""The server's settings, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tierstore.command_line import size_option
from tierstore.errors import UsageError
from tierstore.types import HANDOVER_S, MOST_HANDOVER_S
from tierstore.units import KIB, MIB
from tierstore.wire.local_address import is_loopback

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class ServerSettings:
    """The settings of the HTTP server. Raises :class:`UsageError` for invalid values.

    - ``model_name``: the model's name in the API. The command names it after the model if it is empty.
    - ``api_key``: the key that clients need for everything under ``/v1``. Without a key only loopback
      addresses are served.
    - ``operator_key``: the key for changes to the whole server (``POST /pool``). It must differ from
      ``api_key``. If only ``api_key`` is set, such changes are refused.
    - ``generation_config``: ``auto`` takes sampling defaults from the model's ``generation_config.json``,
      ``none`` takes OpenAI's.
    - ``max_requests``, ``max_queued_tokens``: limits on running and waiting HTTP requests and on their prompt
      tokens. A request that is alone may have more tokens. Further requests get 429.
    - ``max_body_bytes``, ``max_choices``, ``max_new_tokens``, ``request_s``: limits of one request: its body,
      its continuations (prompts times ``n`` or ``best_of``), the tokens of each, and its duration.
    - ``ttft_slo_s``: a request is refused at once if its first token cannot be ready within this time, or
      within the request's own limit.
    - ``drain_s``: how long SIGTERM waits for running requests.
    - ``handover_s``: how long an engine that continues a prompt of this engine may wait for its pages.
    """

    model_name: Annotated[
        str,
        typer.Option(
            "--served-model-name",
            help="Name of the model in the API [default: the folder's or preset's name]",
            show_default=False,
        ),
    ] = ""
    host: Annotated[str, typer.Option(help="Address to listen at; other than loopback needs a key")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(help="Port to listen at; 0 takes any free one")] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients must send", envvar="TIERSTORE_API_KEY", show_envvar=True),
    ] = None
    operator_key: Annotated[
        str | None,
        typer.Option(
            help="Key required for POST /pool. Client keys are rejected",
            envvar="TIERSTORE_OPERATOR_KEY",
            show_envvar=True,
        ),
    ] = None
    chat_template: Annotated[Path | None, typer.Option(help="Jinja template [default: the model's]")] = None
    generation_config: Annotated[
        str,
        typer.Option(help="Sampling defaults: auto (the model's generation_config.json) or none (OpenAI's)"),
    ] = AUTO
    max_body_bytes: Annotated[int, size_option("Largest request body; larger ones get 413")] = 4 * MIB
    max_requests: Annotated[int, typer.Option(help="Running and waiting requests at most; more get 429")] = (
        512
    )
    max_queued_tokens: Annotated[
        int, typer.Option(help="Prompt tokens of these requests at most; more get 429")
    ] = 4_000_000
    max_choices: int = 128
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of one answer at most")] = 4096
    request_s: Annotated[
        float, typer.Option(help="Time limit of one request, in seconds; then it gets 504")
    ] = 600.0
    ttft_slo_s: Annotated[
        float | None,
        typer.Option(
            help="Refuse requests that cannot get their first token within this time", show_default=False
        ),
    ] = None
    drain_s: Annotated[float, typer.Option(help="Seconds that SIGTERM waits for running requests")] = 30.0
    handover_s: Annotated[
        float, typer.Option(help="Seconds that a decoding engine may wait for the pages of a prompt")
    ] = HANDOVER_S

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise UsageError(f"port must be between 0 (any free port) and 65535, got {self.port}")
        if self.generation_config not in (AUTO, NONE):
            raise UsageError(f"generation_config must be auto or none, got {self.generation_config!r}")
        if self.api_key == "":
            raise UsageError("api_key must not be empty; leave it out to serve without a key")
        if self.operator_key == "":
            raise UsageError("operator_key must not be empty; leave it out to disable it")
        if self.operator_key is not None and self.operator_key == self.api_key:
            raise UsageError("operator_key must differ from api_key")
        if self.api_key is None and not is_loopback(self.host):
            raise UsageError(
                f"other machines can reach {self.host}: give an --api-key, or listen at 127.0.0.1"
            )
        if self.max_body_bytes < KIB:
            raise UsageError(f"max_body_bytes must be at least 1 KiB, got {self.max_body_bytes} bytes")
        for name in ("max_requests", "max_queued_tokens", "max_choices", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.ttft_slo_s is not None and not self.ttft_slo_s > 0:
            raise UsageError(f"ttft_slo_s must be positive, got {self.ttft_slo_s}; leave it out for no limit")
        if self.request_s <= 0 or self.drain_s < 0:
            raise UsageError("request_s must be positive, and drain_s must not be negative")
        if not 0 <= self.handover_s <= MOST_HANDOVER_S:
            raise UsageError(
                f"handover_s must be between 0 and {MOST_HANDOVER_S:g} seconds, got {self.handover_s:g}"
            )
