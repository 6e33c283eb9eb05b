"""Tensors between the host and a device without anybody waiting.

A copy from or to ordinary memory waits for all that is on the device's stream, so what goes either way here
is pinned by torch, which keeps such memory for the next time.
"""

from __future__ import annotations

import torch


def to_device(host: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """``host`` on ``device``, in the order of its current stream. It may be changed or dropped at once, for
    what is copied is a copy already; on the CPU it is the very tensor."""
    if torch.device(device).type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in host memory, once its device's stream has been waited for; on the CPU the very tensor.

    For a moment only: torch notes the stream with the pinned memory and comes back to it when that is freed,
    so it must not outlive the stream. What is kept has to be copied."""
    return tensor.to("cpu", non_blocking=True)
