"""Read and write the KV in a pool's pages for attention on the CPU, as floats or quantised."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from tierstore.spec import SCALE_BYTES, KVSpec, LayerGroup, LayerKind
from tierstore_engine.config import ModelConfig
from tierstore_engine.kv_format import quantise


def heads_of(group: LayerGroup, config: ModelConfig) -> range:
    """Return the number of KV heads in a page: all heads of the model, or those of one rank."""
    if group.kind is LayerKind.MLA_LATENT:
        return range(1)
    return range(config.first_kv_head, config.first_kv_head + config.kv_heads)


class KVPages(ABC):
    """The vectors of ``head_dim`` numbers in a pool's pages, addressed by (layer, plane, page, head, token).
    Plane 0 is K and plane 1 is V. Latents have plane 0 only."""

    @abstractmethod
    def put(
        self, layer: int, plane: int, pages: torch.Tensor, offsets: torch.Tensor, new: torch.Tensor
    ) -> None:
        """Write ``new [tokens, kv_heads, head_dim]``: token ``i`` to page ``pages[i]`` at ``offsets[i]``."""

    @abstractmethod
    def gather(self, layer: int, pages: torch.Tensor, out: torch.Tensor) -> None:
        """Read whole pages in a row into ``out`` (float32, ``[planes, kv_heads, tokens, head_dim]``)."""


def kv_pages(
    memory: torch.Tensor,
    spec: KVSpec,
    config: ModelConfig,
    *,
    gathered: int,
    start_of: Callable[[int], int] | None = None,
) -> KVPages:
    """Return the pages in ``memory`` (uint8 ``[pages, bytes]``) in the format of ``config``. At most
    ``gathered`` pages are read at once. ``start_of`` returns the first byte of a layer (None: as in whole
    pages of ``spec``)."""
    starts = start_of or (lambda layer: spec.layer(layer).start)
    if config.kv.quantised:
        return _QuantisedPages(memory, spec, config, starts)
    return _FloatPages(memory, spec, config, starts, gathered)


class _FloatPages(KVPages):
    def __init__(
        self,
        memory: torch.Tensor,
        spec: KVSpec,
        config: ModelConfig,
        start_of: Callable[[int], int],
        gathered: int,
    ) -> None:
        dtype: torch.dtype = getattr(torch, config.dtype)
        chunk = spec.chunk_tokens
        [group] = spec.groups
        shape = (group.planes, group.kv_heads, chunk, group.head_dim)
        rows, stride = memory.view(dtype), math.prod(shape)
        starts = {layer: start_of(layer) // dtype.itemsize for layer in group.layers}
        heads = heads_of(group, config)
        self._kv = {
            layer: rows[:, at : at + stride].view(len(rows), *shape)[:, :, heads.start : heads.stop]
            for layer, at in starts.items()
        }
        self._buffer: torch.Tensor | None = None  # a buffer to read pages that are not float32
        if dtype is not torch.float32:
            width = gathered * chunk
            self._buffer = torch.empty((group.planes, len(heads), width, group.head_dim), dtype=dtype)

    def put(
        self, layer: int, plane: int, pages: torch.Tensor, offsets: torch.Tensor, new: torch.Tensor
    ) -> None:
        self._kv[layer][:, plane][pages, :, offsets] = new

    def gather(self, layer: int, pages: torch.Tensor, out: torch.Tensor) -> None:
        target = out if self._buffer is None else self._buffer[:, :, : out.shape[2]]
        for plane in range(len(out)):
            for head in range(out.shape[1]):
                rows = target[plane, head].view(len(pages), -1, out.shape[-1])
                torch.index_select(self._kv[layer][:, plane, head], 0, pages, out=rows)
        if target is not out:
            out.copy_(target)


class _QuantisedPages(KVPages):
    def __init__(
        self, memory: torch.Tensor, spec: KVSpec, config: ModelConfig, start_of: Callable[[int], int]
    ) -> None:
        self._format = config.kv
        self._spec = spec
        self._start_of = start_of
        [group] = spec.groups
        self._heads = heads = heads_of(group, config)
        self._memory = memory
        planes = itertools.product(group.layers if config.kv.ranges else (), range(group.planes))
        self._static = {plane: config.kv.static_scales(*plane)[heads.start : heads.stop] for plane in planes}

    def put(
        self, layer: int, plane: int, pages: torch.Tensor, offsets: torch.Tensor, new: torch.Tensor
    ) -> None:
        code, static = self._format.codes[plane], self._static.get((layer, plane))
        if static is None:
            codes, scales = quantise(new, code)
            self._scales(layer, plane)[pages, :, offsets] = scales
        else:
            codes = code.encode(new.float() / static.unsqueeze(-1))
        self._codes(layer, plane)[pages, :, offsets] = codes

    def gather(self, layer: int, pages: torch.Tensor, out: torch.Tensor) -> None:
        for plane, code in enumerate(self._format.codes[: len(out)]):
            held, static = self._codes(layer, plane), self._static.get((layer, plane))
            # one page at a time, so that decoded data stays in the processor's cache
            for head in range(len(self._heads)):
                numbers = code.decode(held[:, head].index_select(0, pages))
                if static is None:
                    scales = self._scales(layer, plane)[:, head].index_select(0, pages)
                    scale = scales.float().unsqueeze(-1)
                else:
                    scale = static[head]
                torch.mul(numbers, scale, out=out[plane, head].view(numbers.shape))

    def _codes(self, layer: int, plane: int) -> torch.Tensor:
        """Return the codes, uint8 ``[num_pages, kv_heads, chunk_tokens, bytes]``."""
        first = self._spec.tile(layer, plane, self._heads.start)
        page, tile, chunk = self._memory.stride(0), first.nbytes, self._spec.chunk_tokens
        shape = (len(self._memory), len(self._heads), chunk, tile // chunk)
        return self._memory.as_strided(shape, (page, tile, tile // chunk, 1), self._moved(layer, first.start))

    def _scales(self, layer: int, plane: int) -> torch.Tensor:
        """Return the scales, bfloat16 ``[num_pages, kv_heads, chunk_tokens]``."""
        memory, chunk = self._memory.view(torch.bfloat16), self._spec.chunk_tokens
        first = self._spec.scales(layer, plane, self._heads.start)
        start = self._moved(layer, first.start) // SCALE_BYTES
        shape = (len(memory), len(self._heads), chunk)
        return memory.as_strided(shape, (memory.stride(0), chunk, 1), start)

    def _moved(self, layer: int, start: int) -> int:
        """Return the offset in this memory of byte ``start`` of a whole page."""
        return start - self._spec.layer(layer).start + self._start_of(layer)
