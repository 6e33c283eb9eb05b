"""Pages that vLLM shares with other engines: the addresses of K and V in vLLM's blocks.

vLLM registers one tensor per layer, ``[blocks, kv_heads, tokens, 2 × head_dim]``, with any strides
(``layout.py``). The attention backend decides the order of numbers within one head of a block. Sharing is
refused for all attention backends except these:

- ``CPU_ATTN`` with its portable kernels stores K as ``[head_dim, tokens]``, then V as ``[tokens, head_dim]``
  (csrc/cpu/cpu_attn_vec.hpp, vLLM 0.32). The ``CPU_ATTN`` kernels for AMX and NEON use other orders, and are
  refused.
- ``FLASH_ATTN`` and ``TRITON_ATTN`` store for each token its K, then its V.

vLLM may divide a block into smaller blocks for a kernel. The tensor's first dimension then counts the smaller
blocks, ``pieces`` for each block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from tierstore.groups import GroupRule
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore_connectors.common.shared_pages import (
    BlockConverter,
    EngineBlocks,
    PagePart,
    PartSource,
    Vectors,
    part_of_rank,
    parts_of,
    sources,
)
from tierstore_connectors.common.sharing import refusal, shared_identity
from tierstore_connectors.vllm.config import VllmSettings
from tierstore_connectors.vllm.copies import GroupBlockCopies, InHostMemory
from tierstore_connectors.vllm.groups import CacheGroup
from tierstore_connectors.vllm.layout import PageLayout
from tierstore_connectors.vllm.orders import NULL_BLOCK, GroupShard, Rank
from tierstore_connectors.vllm.worker import LoadSource, WorkerGroup

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_TRANSPOSED = frozenset({"vec", "vec16"})  # CPU_ATTN's kernels that only transpose K
_FORMATS = ("auto", "safetensors", "hf")  # load formats whose weights the files' digest identifies
_BY_TOKEN = frozenset({"FLASH_ATTN", "TRITON_ATTN"})


def model_identity(config: Any, settings: VllmSettings, chunk_tokens: int) -> Identity:
    """Return the shared identity of the whole model. ``config`` is a ``VllmConfig``. Hash the weight files,
    unless their digests are cached. Raise :class:`~tierstore.errors.UsageError` if the model's pages cannot
    be shared."""
    _require_plain(config)
    model = config.model_config
    return shared_identity(
        Path(str(model.model)),
        dtype=str(model.dtype).removeprefix("torch."),
        chunk_tokens=chunk_tokens,
        namespace=settings.namespace,
        sampled=settings.hash_weights == "sample",
    )


def _require_plain(config: Any) -> None:
    """Raise :class:`~tierstore.errors.UsageError` if options of vLLM change the arithmetic of the model in
    its files."""
    model, cache = config.model_config, config.cache_config
    given = {
        "--quantization": model.quantization,
        "--hf-overrides": model.hf_overrides or None,
        "--hf-config-path": model.hf_config_path,
        "--config-format": None if model.config_format in ("auto", "hf") else model.config_format,
        "--lora": config.lora_config,
        "--speculative-config": config.speculative_config,
        "--kv-cache-dtype": None if cache.cache_dtype == "auto" else cache.cache_dtype,
        "--load-format": None if config.load_config.load_format in _FORMATS else config.load_config,
        "a multimodal model": model.is_multimodal_model or None,
        "a pooling model": None if model.runner_type == "generate" else model.runner_type,
    }
    if changes := [name for name, value in given.items() if value is not None]:
        raise refusal(f"{', '.join(changes)} may change KV")


class SharedBlocks(BlockConverter, InHostMemory):
    """The KV blocks of a group in host memory, for pages that engines share."""


BlocksOf: TypeAlias = (
    "Callable[[str, EngineBlocks, PartSource, Mapping[int, torch.Tensor]], GroupBlockCopies]"
)
"""A function that returns the copies between the blocks of tensors (by layer) and pages of a layout."""


def host_blocks(
    layout: str, blocks: EngineBlocks, source: PartSource, tensors: Mapping[int, torch.Tensor]
) -> SharedBlocks:
    """Return the copies for KV tensors in host memory (a :data:`BlocksOf`)."""
    return SharedBlocks(layout, blocks, source, skipped=NULL_BLOCK)


class SharedModel:
    """Makes the groups of a worker for pages that engines share. ``model`` is the identity of the whole
    model, ``layers`` the model's number of layers, and ``sizes`` the setting ``share_sizes``."""

    def __init__(self, model: Identity, layers: int, rank: Rank, sizes: Sequence[tuple[int, int]]) -> None:
        self.model = model
        self._layers = layers
        self._rank = rank
        own = (rank.tensors, rank.pipelines)
        self._sizes = [size for size in dict.fromkeys(sizes) if size != own]

    def worker_group(
        self,
        group: CacheGroup,
        layout: PageLayout,
        tensors: Mapping[str, torch.Tensor],
        backends: Mapping[str, str],
        blocks_of: BlocksOf = host_blocks,
    ) -> WorkerGroup:
        """Return a group of this worker. ``tensors`` are the group's KV tensors by layer name, and
        ``backends`` the names of the layers' attention backends, with the kernels in brackets. Raise
        :class:`~tierstore.errors.UsageError` for KV that cannot be shared."""
        numbers = {name: layer_number(name) for name in tensors}
        whole = self._whole(group, [layer_number(name) for name in group.layers])
        spec = KVSpec.parse(whole.layout)
        [kept] = spec.groups
        for name, tensor in tensors.items():
            if str(tensor.dtype) != f"torch.{spec.dtype}":
                raise refusal(f"KV of {name} is in {tensor.dtype}, but the model is in {spec.dtype}")
        by_layer = {numbers[name]: tensor for name, tensor in tensors.items()}
        blocks = engine_blocks(
            by_layer,
            {numbers[name]: backends[name] for name in tensors},
            num_blocks=layout.num_blocks,
            heads=len(self._part(kept.kv_heads, kept.layers).heads(kept.kv_heads)),
            head_dim=kept.head_dim,
            tables=[[layer_number(name) for name in each.layers] for each in group.members],
        )
        own = self._part(kept.kv_heads, sorted(blocks.layers))
        every = range(len(own.heads(kept.kv_heads)))

        def source(part: PartSource) -> LoadSource:
            identity = part.part.identity(whole)
            page_bytes = KVSpec.parse(identity.layout).page_bytes
            pages = GroupShard(group.number, identity, page_bytes, group.rule)
            return LoadSource(pages, blocks_of(identity.layout, blocks, part, by_layer))

        pages = source(PartSource(own, every, every))
        others = tuple(
            tuple(
                source(each)
                for each in sources(
                    own,
                    parts_of(*size, self._layers, kv_heads=kept.kv_heads, layers=kept.layers),
                    kv_heads=kept.kv_heads,
                )
            )
            for size in self._sizes
        )
        return WorkerGroup(pages.pages, layout, pages.blocks, others)

    def _whole(self, group: CacheGroup, layers: Sequence[int]) -> Identity:
        """Return the identity of pages with all heads and layers of a group. ``layers`` are the layer numbers
        of the group in vLLM."""
        for identity in self.model.groups:
            [kept] = KVSpec.parse(identity.layout).groups
            if set(kept.layers) >= set(layers) and GroupRule.of(kept) == group.rule:
                mine = kept.layers if self._rank.pipelines == 1 else layers
                if set(mine) == set(layers):
                    return identity
        raise refusal(f"vLLM has a KV cache group of the layers {sorted(layers)}, but shared pages have none")

    def _part(self, kv_heads: int, layers: Sequence[int]) -> PagePart:
        rank = self._rank
        return part_of_rank(
            rank.tensor,
            rank.tensors,
            kv_heads=kv_heads,
            layers=layers,
            stage=rank.pipeline,
            stages=rank.pipelines,
        )


def layer_number(name: str) -> int:
    """Return the layer's index in the model, from its name in vLLM.

    >>> layer_number("model.layers.12.self_attn.attn")
    12
    """
    found = _LAYER.search(name)
    if found is None:
        raise refusal(f"the layer {name!r} has no number")
    return int(found[1])


def engine_blocks(
    tensors: Mapping[int, torch.Tensor],
    backends: Mapping[int, str],
    *,
    num_blocks: int,
    heads: int,
    head_dim: int,
    tables: Sequence[Sequence[int]] = (),
) -> EngineBlocks:
    """Return the addresses and strides of K and V in tensors ``[blocks, heads, tokens, 2 × head_dim]``, by
    layer. ``backends`` has a name for each layer, for example ``FLASH_ATTN`` or ``CPU_ATTN(vec)``. ``tables``
    has the layers of each block table, if there are several. Raise :class:`~tierstore.errors.UsageError` for
    an unknown backend or shape."""
    layers: dict[int, Sequence[Vectors]] = {}
    shapes = set()
    for layer, tensor in tensors.items():
        if tensor.dim() != 4 or tensor.shape[1] != heads or tensor.shape[3] != 2 * head_dim:
            raise refusal(
                f"KV of layer {layer} has shape {tuple(tensor.shape)}, not [blocks, {heads}, tokens, "
                f"{2 * head_dim}]"
            )
        shapes.add((tensor.shape[0], tensor.shape[2], tensor.element_size()))
        layers[layer] = _vectors(tensor, backends[layer], head_dim)
    if len(shapes) != 1 or (blocks := shapes.pop())[0] % num_blocks:
        raise refusal("the layers of a group have blocks of different sizes")
    return EngineBlocks(layers, blocks[1], blocks[2], blocks[0] // num_blocks, tables)


def _vectors(tensor: torch.Tensor, backend: str, head_dim: int) -> tuple[Vectors, Vectors]:
    """Return the addresses and strides of K and V of one layer."""
    item, tokens = tensor.element_size(), tensor.shape[2]
    block, head, token, last = (stride * item for stride in tensor.stride())
    address, width = tensor.data_ptr(), head_dim * item
    name, _, kernels = backend.rstrip(")").partition("(")
    if name in _BY_TOKEN and last == item:
        return (
            Vectors(address, block, head, token, item),
            Vectors(address + width, block, head, token, item),
        )
    if name == "CPU_ATTN" and kernels in _TRANSPOSED and token == 2 * width and last == item:
        return (
            Vectors(address, block, head, item, tokens * item),
            Vectors(address + tokens * width, block, head, width, item),
        )
    raise refusal(f"the order of K and V in blocks of {backend} is not known")
