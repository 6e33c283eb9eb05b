"""Make the groups of a worker from the KV tensors that vLLM registers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tierstore_connectors.common.facts import host_device
from tierstore_connectors.vllm.copies import GroupBlockCopies, HostBlocks
from tierstore_connectors.vllm.groups import CacheGroup, Groups
from tierstore_connectors.vllm.identity import model_digest, page_identity
from tierstore_connectors.vllm.layout import PageLayout, TensorShape, UnsupportedError, page_layout
from tierstore_connectors.vllm.orders import GroupShard, Rank
from tierstore_connectors.vllm.sharing import BlocksOf, SharedModel, host_blocks
from tierstore_connectors.vllm.worker import WorkerGroup


def register_groups(
    config: Any,
    version: str,
    namespace: str,
    revision: str,
    groups: Groups,
    num_blocks: int,
    caches: Mapping[str, Any],
    rank: Rank,
    shared: SharedModel | None = None,
) -> dict[int, WorkerGroup]:
    """Return the KV cache groups with layers on this worker, by number.

    ``config`` is a ``VllmConfig`` and ``version`` vLLM's version. ``revision`` identifies the weights.
    ``caches`` has the KV tensors by layer name. ``shared`` makes the groups if engines share pages. Raise
    :class:`UnsupportedError` for a configuration or tensors that cannot be stored, and
    :class:`~tierstore.errors.UsageError` for KV that cannot be shared.
    """
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise UnsupportedError(
            "context parallelism is not supported: it spreads a block's tokens over workers"
        )
    tensors = {name: tensor for name, tensor in caches.items() if isinstance(tensor, torch.Tensor)}
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) != 1 or len(tensors) != len(caches):
        raise UnsupportedError(f"KV caches must be tensors on one device, got {sorted(map(str, devices))}")
    device = devices.pop()
    model = model_digest(
        config, version, _backends(config, groups), _device_name(device), namespace, os.environ
    )
    blocks_on, shared_blocks = _blocks_on(device)
    kept = {}
    for group in groups.groups:
        own = _own(group, tensors)
        if not own:
            continue  # all layers of the group are in other pipeline stages
        shapes = [_shape(name, tensor) for name, tensor in own.items()]
        layout = page_layout(shapes, num_blocks=num_blocks, blocks=groups.blocks_per_page(group))
        if shared is not None:
            # Layers with different block tables may use the same memory, so all layers are needed here.
            every = {name: tensors[name] for name in group.layers if name in tensors}
            kernels = _kernels(config, every)
            kept[group.number] = shared.worker_group(group, layout, every, kernels, shared_blocks)
            continue
        identity = page_identity(
            layout,
            chunk_tokens=groups.chunk_tokens,
            model=model,
            revision=revision,
            shard=rank.shard(groups.label(group)),
            meaning=group.meaning,
        )
        pages = GroupShard(group.number, identity, layout.page_bytes, group.rule)
        kept[group.number] = WorkerGroup(pages, layout, blocks_on(layout, list(own.values())))
    return kept


def _own(group: CacheGroup, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a group's tensors on this worker by layer name, each once even if several layers share it."""
    own: dict[str, torch.Tensor] = {}
    seen: set[object] = set()
    for name in group.layers:
        tensor = tensors.get(name)
        if tensor is None:
            continue  # the layer is in another pipeline stage
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in seen:
            seen.add(place)
            own[name] = tensor
    return own


def _shape(name: str, tensor: torch.Tensor) -> TensorShape:
    size = tensor.element_size()
    strides = tuple(stride * size for stride in tensor.stride())
    return TensorShape(name, tensor.data_ptr(), tuple(tensor.shape), strides, size, str(tensor.dtype))


def _blocks_on(
    device: torch.device,
) -> tuple[Callable[[PageLayout, Sequence[torch.Tensor]], GroupBlockCopies], BlocksOf]:
    """Return two functions that make a group's block copies on ``device``: for vLLM's own pages, and for
    pages that engines share."""
    if device.type == "cpu":
        return (lambda layout, tensors: HostBlocks(layout)), host_blocks
    if device.type == "cuda" and torch.version.hip is None:
        from tierstore_connectors.vllm.cuda import CudaBlocks

        on_device = CudaBlocks(device)
        return on_device.blocks, on_device.shared_blocks
    kind = "ROCm" if device.type == "cuda" else device.type
    raise UnsupportedError(f"KV caches on {kind} are not supported")


def _backends(config: Any, groups: Groups) -> list[str]:
    """Return the attention backends of the stored layers, which define the order of bytes in a block."""
    layers = config.compilation_config.static_forward_context
    names = set()
    for group in groups.groups:
        for name in group.layers:
            if name in layers:
                backend = layers[name].get_attn_backend()
                names.add(f"{backend.__module__}.{backend.__qualname__}")
    if not names:
        raise UnsupportedError("no stored layer has a known attention backend")
    return sorted(names)


def _kernels(config: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the name of each layer's attention backend. On a CPU the name of the chosen kernels follows in
    brackets."""
    layers = config.compilation_config.static_forward_context
    found = {}
    for name in names:
        backend, kernels = layers[name].get_attn_backend().get_name(), vars(layers[name]).get("isa")
        found[name] = f"{backend}({kernels})" if kernels else str(backend)
    return found


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return host_device()
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device.type}-sm{major}{minor}"
