"""Facts that make the pages of engines differ: weight files, configurations, processors."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tierstore.keys import Identity

WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors"})
COMMIT = re.compile(r"[0-9a-f]{40}")


def words(text: str) -> frozenset[str]:
    """Return the names in a text, which are separated by white space."""
    return frozenset(text.split())


def digest(values: Sequence[object]) -> str:
    """Return one digest of all ``values``."""
    return hashlib.sha256(msgspec.json.encode(values)).hexdigest()[:32]


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those ``packages`` that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def host_device() -> str:
    """Return the processor's architecture and a digest of its instruction set, by which CPU attention kernels
    choose their layout."""
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
    """Return ``value`` as JSON in a fixed order. Values of other types than JSON's become text."""
    if isinstance(value, dict):
        # transformers writes its version and the path of the files into these fields.
        skipped = {"transformers_version", "_name_or_path"}
        return {str(key): plain(each) for key, each in sorted(value.items(), key=str) if key not in skipped}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def under_epoch(identity: Identity, epoch: str) -> Identity:
    """Return ``identity`` with ``epoch`` as a part: pages saved in one epoch are not found in another."""
    return replace(identity, revision=f"{identity.revision}+{epoch}") if epoch else identity
