"""The worker's program over the driver of the tests: the rank's pages are on a device of its own.

float32 is computed by the CPU's attention over the device's memory, which is the host's, and float16 by the
CUDA kernels on the executor.
"""

from __future__ import annotations

from tests.engine.device import FakeDevice
from tests.engine.test_cuda_attention import cuda_memory
from tierstore.tiers.hbm import PagePool
from tierstore_engine.config import ModelConfig
from tierstore_engine.loaded import make_memory
from tierstore_engine.model import Memory
from tierstore_engine.ranks import member, pools, worker


def memory_on_device(pool: PagePool, config: ModelConfig) -> Memory:
    """Return the memory of a layer group whose pages are on a device of the tests."""
    if config.dtype == "float16":
        return cuda_memory(pool, config)
    pool.device, there = "cpu", pool.device
    try:
        return make_memory(pool, config)
    finally:
        pool.device = there


def device(index: int) -> FakeDevice:
    return FakeDevice(1, beside=index)


if __name__ == "__main__":
    member.make_memory = memory_on_device  # type: ignore[attr-defined]
    pools.CudaDevice = device  # type: ignore[assignment,misc]
    worker.main()
