"""Facts that tell engines' pages apart: weight files, configurations, processors."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors"})
COMMIT = re.compile(r"[0-9a-f]{40}")
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each weight file, evenly spaced


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model's folder."""
    return sorted(each for each in folder.iterdir() if each.suffix in WEIGHTS and each.is_file())


def digest_of_files(files: Sequence[Path]) -> str:
    """What identifies weights, wherever they are mounted: names, sizes, times and a sample of the bytes."""
    return digest([*facts(files), *map(_sample, files)])


def facts(files: Iterable[Path]) -> list[object]:
    """Name, size and time of each."""
    status = [(each.name, each.stat()) for each in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in status]


def _sample(file: Path) -> str:
    """A digest of a part of a file: enough to tell a fine-tuned model from its origin."""
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as opened:
        last = max(os.fstat(opened.fileno()).st_size - _SAMPLE_BYTES, 0)
        for at in range(_SAMPLES):
            digest.update(os.pread(opened.fileno(), _SAMPLE_BYTES, last * at // (_SAMPLES - 1)))
    return digest.hexdigest()


def digest(values: Sequence[object]) -> str:
    """One text for all of these."""
    return hashlib.sha256(msgspec.json.encode(values)).hexdigest()[:32]


def host_device() -> str:
    """What stands for this processor: the attention kernels for it choose a layout by its instruction set."""
    flags = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith(("flags", "Features")):
            flags = " ".join(sorted(line.split(":", 1)[1].split()))
            break
    return f"cpu-{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:16]}"


def plain(value: Any) -> Any:
    """``value`` with everything in it that JSON does not know as text, in a fixed order."""
    if isinstance(value, dict):
        # Not what a library wrote there about itself and about where the files are.
        skipped = {"transformers_version", "_name_or_path"}
        return {str(key): plain(each) for key, each in sorted(value.items(), key=str) if key not in skipped}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
