"""Attention over paged KV: one interface, one backend per kind of device."""

from __future__ import annotations

import torch

from tierstore.spec import LayerKind
from tierstore.tiers.device_overflow import DeviceOverflowPool
from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import Attention, pages_on_device
from tierstore_engine.config import ModelConfig
from tierstore_engine.errors import ModelError


def make_attention(pool: PagePool, config: ModelConfig) -> Attention:
    """Return the backend for the layer group and the device of ``pool``. Raises :class:`ModelError` if there
    is none, or if it cannot compute this model or cannot be loaded."""
    if pool.device == "cpu":
        from tierstore_engine.attention.cpu import CpuAttention

        return CpuAttention(pool, config)
    if torch.device(pool.device).type == "cuda":
        from tierstore_engine.attention.cuda import CudaAttention
        from tierstore_engine.attention.cuda_latents import CudaLatentAttention
        from tierstore_engine.attention.push_down import PushDownAttention
        from tierstore_engine.kernels.cupy_launcher import CupyLauncher

        [group] = pool.spec.groups
        kind = CudaLatentAttention if group.kind is LayerKind.MLA_LATENT else CudaAttention
        launcher = CupyLauncher(pool.device)  # imported first, because its error says what is missing
        device = kind(pages_on_device(pool), pool.spec, config, launcher)
        return PushDownAttention(pool, config, device) if isinstance(pool, DeviceOverflowPool) else device
    raise ModelError(f"no attention backend for device {pool.device!r} in this version: use cpu")
