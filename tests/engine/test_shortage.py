"""A device whose memory runs out while something is computed."""

from __future__ import annotations

import pytest
import torch

from tests.engine.device import FakeDevice, missing
from tierstore.spec import KVSpec
from tierstore.tiers.device import DeviceMemoryError
from tierstore.tiers.device_pool import DevicePool
from tierstore_engine.device import shortage_explained
from tierstore_engine.settings import EngineSettings

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no device to test with: {missing()}")

SPEC = KVSpec.uniform(layers=2, kv_heads=2, head_dim=32, dtype="float16", chunk_tokens=64)


def test_it_says_what_to_change() -> None:
    pool = DevicePool(SPEC, 4, FakeDevice(total_bytes=1 << 20))
    settings = EngineSettings(prefill_chunk=256, max_sequences=8)
    numbers = (  # the driver's total counts what earlier tests have left
        r"up to 263 tokens: 896 KiB of its [\d.]+ MiB are free, "
        r"and the page pool has 128 KiB\. Give it fewer pages"
    )
    with (
        pytest.raises(DeviceMemoryError, match=f"cuda:0 .*{numbers}") as caught,
        shortage_explained(pool, settings),
    ):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "2.00 GiB" in str(caught.value.__cause__)


def test_other_errors_stay_as_they_are() -> None:
    pool = DevicePool(SPEC, 4, FakeDevice())
    with pytest.raises(RuntimeError, match="illegal address"), shortage_explained(pool, EngineSettings()):
        raise RuntimeError("illegal address")
