"""A CUDA driver without a GPU, which does everything asynchronous as badly as it may: see ``driver.cc``."""

from tests.engine.device.driver import SCHEDULES, FakeDevice, missing

__all__ = ["SCHEDULES", "FakeDevice", "missing"]
