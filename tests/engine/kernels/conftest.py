"""Kernel tests run on the CPU executor, or not at all where there is no compiler."""

from __future__ import annotations

import pytest
import torch

from tests.engine.kernels.device import DEVICE
from tests.engine.kernels.executor import guarded, missing_tools
from tierstore_engine.kernels import operations


@pytest.fixture(scope="session")
def executor() -> None:
    """Asked for by every test that executes a kernel."""
    reason = missing_tools() if DEVICE == "executor" else None
    if reason:
        pytest.skip(f"kernels cannot be executed: {reason}")


@pytest.fixture(autouse=True)
def guarded_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels leave for each other is full of NaN, and may not be overrun either."""

    def workspace(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        return torch.from_numpy(guarded(torch.full(shape, torch.nan).numpy()))

    monkeypatch.setattr(operations, "workspace", workspace)
