"""Copy tensors between the host and a device without waiting.

A copy from or to ordinary memory waits for everything on the device's stream. These copies therefore use
memory that torch pins and reuses.
"""

from __future__ import annotations

import torch


def to_device(host: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """Return ``host`` on ``device``, in the order of its current stream; on the CPU the same tensor. The
    caller may change or drop ``host`` at once, because pinning has copied it."""
    if torch.device(device).type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in host memory; on the CPU the same tensor. Its data is valid after a wait for its
    device's stream.

    Keep the result for a short time only. Torch stores the stream with the pinned memory and uses it when the
    memory is freed, so the result must not outlive the stream. Copy data that you keep longer.
    """
    return tensor.to("cpu", non_blocking=True)
