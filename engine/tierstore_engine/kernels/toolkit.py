"""Find NVIDIA's run-time compiler and headers.

The places are, in order: NVIDIA's Python packages (CUDA 13 has one folder, CUDA 12 one per component), then
the toolkit at ``CUDA_HOME``, ``CUDA_PATH`` or ``/usr/local/cuda``. Several toolkits may be installed, because
torch installs its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierstore.extras import install
from tierstore_engine.errors import KernelError

_INSTALL = (
    f"{install('cuda13')}. It installs nvidia-cuda-nvrtc, nvidia-cuda-runtime and CuPy. Drivers before 580 "
    "need the extra cuda12 instead"
)


@dataclass(frozen=True, slots=True)
class Toolkit:
    """``library`` is NVRTC. ``include`` is the folder with ``cuda_fp16.h`` and its includes."""

    library: Path
    include: Path


def find_toolkit(*, newest: int | None = None) -> Toolkit:
    """Return the first complete toolkit whose major version is at most ``newest``, the driver's version: a
    driver does not load the output of a newer compiler. Raises :class:`KernelError` with the package to
    install."""
    found = [
        (library, include)
        for libraries, include in _places()
        for library in sorted(libraries.glob("libnvrtc.so*"))[:1]
        if newest is None or _major(library) <= newest
    ]
    if not found:
        limit = f" for a driver of CUDA {newest}" if newest is not None else ""
        raise KernelError(f"NVRTC{limit}, which compiles the CUDA kernels, was not found: {_INSTALL}")
    for library, include in found:
        if (include / "cuda_fp16.h").exists():
            return Toolkit(library, include)
    raise KernelError(f"the CUDA headers (cuda_fp16.h) were not found: {_INSTALL}")


def _places() -> Iterator[tuple[Path, Path]]:
    """Yield the folders of libraries and of headers of each possible toolkit."""
    spec = importlib.util.find_spec("nvidia")
    for root in map(Path, (spec.submodule_search_locations if spec else None) or ()):
        yield root / "cu13" / "lib", root / "cu13" / "include"
        yield root / "cuda_nvrtc" / "lib", root / "cuda_runtime" / "include"
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield Path(home) / "lib64", Path(home) / "include"


def _major(library: Path) -> int:
    """Return 13 for ``libnvrtc.so.13``, after following links; 0 if the name has no version."""
    version = re.search(r"\.so\.(\d+)", library.resolve().name)
    return int(version[1]) if version else 0
