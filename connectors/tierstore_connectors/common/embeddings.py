"""Embeddings as pages of a store."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tierstore.errors import UsageError
from tierstore.keys import Identity, Prompt
from tierstore.spec import KVSpec


@dataclass(frozen=True, slots=True)
class EmbeddingKey:
    """The identity, content and rows of an embedding. ``content`` hashes the processor's output (SHA-256)."""

    identity: Identity
    content: bytes
    rows: int

    @property
    def spec(self) -> KVSpec:
        return KVSpec.parse(self.identity.layout)

    @property
    def prompt(self) -> Prompt:
        """The key of the embedding's pages, as a prompt for the methods of a store."""
        return Prompt.of_input(self.identity, self.content, self.rows, chunk_tokens=self.spec.chunk_tokens)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.spec.groups[0].head_dim

    @property
    def dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.spec.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


def pages_of(embedding: torch.Tensor, key: EmbeddingKey) -> torch.Tensor:
    """Return the pages of an embedding in host memory; the last page is padded with zeros. Raise
    :class:`~tierstore.errors.UsageError` if the tensor's shape or dtype differs from the key's."""
    found = tuple(embedding.shape), embedding.dtype
    if found != (key.shape, key.dtype):
        raise UsageError(
            f"the encoder returned {found[1]} of shape {found[0]}, not {key.dtype} of shape {key.shape}: "
            "the embedding is not stored"
        )
    data = embedding.detach().contiguous().view(torch.uint8).reshape(-1).cpu()
    spec = key.spec
    pages = torch.zeros(-(-key.rows // spec.chunk_tokens), spec.page_bytes, dtype=torch.uint8)
    pages.reshape(-1)[: len(data)] = data
    return pages


def embedding_of(pages: torch.Tensor, key: EmbeddingKey) -> torch.Tensor:
    """Return the embedding that ``pages`` hold."""
    rows, width = key.shape
    data = pages.reshape(-1)[: rows * width * key.dtype.itemsize]
    return data.view(key.dtype).reshape(rows, width)
