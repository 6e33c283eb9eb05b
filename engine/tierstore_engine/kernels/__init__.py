"""The engine's CUDA kernels: their text, and what turns it into something that can be launched."""

from pathlib import Path

KERNEL_DIR = Path(__file__).parent
"""The folder of the ``.cu`` and ``.cuh`` files."""
