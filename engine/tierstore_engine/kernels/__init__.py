"""The engine's CUDA kernels: their source text, and the code that compiles and launches them."""

from pathlib import Path

KERNEL_DIR = Path(__file__).parent
"""The folder of the ``.cu`` and ``.cuh`` files."""
