"""What a client says of its pages before it can speak of any, and the daemon keeps."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tierstore.daemon import protocol
from tierstore.keys import Identity


@dataclass(frozen=True, slots=True)
class Registration:
    """An identity that pages are kept under, and what they look like. In the daemon the identity has the
    tenant that the client's key stands for."""

    identity: Identity
    page_bytes: int
    chunk_tokens: int

    def message(self) -> protocol.Register:
        return protocol.Register(0, asdict(self.identity), self.page_bytes, self.chunk_tokens)
