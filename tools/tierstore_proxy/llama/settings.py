"""The settings of ``tierstore llama``, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from tierstore.errors import UsageError
from tierstore.wire.local_address import is_loopback
from tierstore_connectors.llamacpp.blocks import BlockSettings
from tierstore_proxy.settings import checked_url, host_and_port


@dataclass(frozen=True)
class LlamaSettings:
    """The settings of the proxy before a llama-server. Raises :class:`UsageError` for invalid values."""

    url: str
    blocks: BlockSettings
    listen: str = "127.0.0.1:8090"
    api_key: str | None = None
    save: bool = True
    max_body_bytes: int = 64 << 20
    max_requests: int = 1024
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url("url", self.url))
        host, _ = self.address
        if self.api_key == "":
            raise UsageError("api_key must not be empty; leave it out if llama-server has none")
        if self.api_key is None and not is_loopback(host):
            raise UsageError(
                f"other machines can reach {host}: give llama-server's --api-key, or listen at 127.0.0.1"
            )
        if not is_loopback(self.server_address[0]):
            raise UsageError(f"url must be on this host, got {self.url!r}: slots are files that both open")
        if self.max_body_bytes < 1024 or self.max_requests < 1 or not self.drain_s >= 0:
            raise UsageError("max_body_bytes must be at least 1 KiB, max_requests 1, and drain_s 0")

    @property
    def address(self) -> tuple[str, int]:
        """Return the host and port to listen at."""
        return host_and_port(self.listen)

    @property
    def server_address(self) -> tuple[str, int]:
        """Return the host and port of llama-server."""
        parts = urlsplit(self.url)
        return str(parts.hostname), parts.port or 80

    @property
    def max_queued_tokens(self) -> int:
        """Return the limit for prompt tokens: none, because llama-server has its own queue."""
        return 1 << 62
