"""A CUDA driver without a GPU, which does everything asynchronous as badly as it may: see ``driver.cc``."""

from tests.engine.device.driver import ONE_OF_EACH, SCHEDULES, FakeDevice, missing

__all__ = ["ONE_OF_EACH", "SCHEDULES", "FakeDevice", "missing"]
