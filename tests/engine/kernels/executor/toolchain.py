"""What executing kernels needs of the machine: g++ and NVIDIA's headers."""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import cache
from pathlib import Path

SCHEDULES = (0, 1, 2, 3)
"""The seeds that differ in kind (see ``executor.h``); larger ones repeat 1, 2, 3 with other random
numbers."""

FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-march=native",
    "-w",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
)
FUSED = ("-ffp-contract=fast", "-fexpensive-optimizations")
"""Further flags: products are fused with sums, as CUDA's compiler does, if the processor can."""
RACES = ("-fsanitize=thread", "-g1")
"""Further flags: accesses are watched, and reports have lines."""
TRAPS = (
    "-fsanitize=alignment,signed-integer-overflow",
    "-fsanitize-undefined-trap-on-error",
    "-ftrivial-auto-var-init=pattern",
)


def compiler() -> str:
    return os.environ.get("CXX", "g++")


@cache
def cuda_include() -> Path | None:
    """The folder with ``cuda_fp16.h``, from NVIDIA's packages (CUDA 13's layout or 12's)."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else None
    for root in roots or ():
        for folder in ("cu13/include", "cuda_runtime/include"):
            if (Path(root) / folder / "cuda_fp16.h").exists():
                return Path(root) / folder
    return None


@cache
def missing_tools() -> str | None:
    """Why kernels cannot be executed here, or None."""
    if shutil.which(compiler()) is None:
        return f"no C++ compiler: install {compiler()} (or set CXX)"
    if cuda_include() is None:
        return "no CUDA headers: pip install nvidia-cuda-runtime nvidia-cuda-crt"
    return None
