"""The work of one attention call, from its shape: bytes and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one layer, and the bytes of a number."""

    heads: int
    kv_heads: int
    head_dim: int
    number_bytes: int = 2

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token."""
        return 2 * self.kv_heads * self.head_dim * self.number_bytes


LLAMA_3_8B = Heads(32, 8, 128)


def decode_bytes(shape: Heads, batch: int, context: int) -> int:
    """Return the bytes of K and V that one new token of each of ``batch`` sequences reads."""
    return batch * context * shape.token_bytes


def attention_flops(shape: Heads, tokens: int, past: int) -> int:
    """Return the multiplications and additions of causal attention: ``tokens`` queries over all tokens before
    them, a product with K and one with V. Masked pairs do not count."""
    pairs = tokens * past + tokens * (tokens + 1) // 2
    return 4 * shape.heads * shape.head_dim * pairs


def copy_bytes(nbytes: int) -> int:
    """Return the memory traffic of a copy within a device: it reads and writes its size."""
    return 2 * nbytes


def pages_for(tokens: int, page_tokens: int) -> int:
    """Return the number of pages of ``tokens`` tokens."""
    return -(-tokens // page_tokens)
