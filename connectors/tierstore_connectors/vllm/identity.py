"""Under which identity the pages of this engine are kept: everything that vLLM's block hashes do not cover.

Two engines share pages only where all of it is equal: the model's configuration, name and revision, the
dtypes, quantization, the attention backends, vLLM's version (a page's bytes are the backend's affair), the
layout, and which part of the model this worker has. Data parallel ranks compute the same and share.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

import msgspec

from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore_connectors.vllm.layout import PageLayout, UnknownLayoutError


def model_digest(config: Any, version: str, backends: list[str], device: str, namespace: str) -> str:
    """A digest of the model and how it is computed. ``config`` is vLLM's own. Raises
    :class:`UnknownLayoutError` where what is computed is different in each process."""
    model, cache, load = config.model_config, config.cache_config, config.load_config
    if vars(cache).get("calculate_kv_scales", False):
        raise UnknownLayoutError("calculate_kv_scales makes up KV scales at run time: pages cannot be shared")
    load_format = str(load.load_format)
    parts: dict[str, Any] = {
        "model": str(model.model),
        "architectures": sorted(model.hf_config.architectures or ()),
        "hf_config": _plain(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "load_format": load_format,
        "seed": model.seed if load_format == "dummy" else None,  # the weights are made from it
        "vllm": version,
        "backends": backends,
        "device": device,
        "hash": str(cache.prefix_caching_hash_algo),
        "namespace": namespace,
    }
    return hashlib.sha256(msgspec.json.encode(sorted(parts.items()))).hexdigest()[:32]


def revision_of(config: Any) -> str:
    """Of the weights: what the user named, and for a local directory the weight files' names, sizes and
    times, so that other weights under the old name are not served the old pages."""
    model = config.model_config
    named = str(model.revision or "")
    commit = vars(model.hf_config).get("_commit_hash")  # of a checkpoint from the hub, where "main" moves
    if commit:
        named += f"@{commit}"
    directory = Path(str(model.model))
    if not directory.is_dir():
        return named
    files = sorted(
        each for each in directory.iterdir() if each.suffix in {".safetensors", ".bin", ".pt", ".gguf"}
    )
    facts = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    return named + hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]


def page_identity(
    layout: PageLayout, *, chunk_tokens: int, model: str, revision: str, shard: str
) -> Identity:
    """The identity of pages with ``layout``."""
    spec = KVSpec.opaque(layout.page_bytes, chunk_tokens=chunk_tokens)
    return Identity.of(spec, model=model, revision=revision, codec=f"vllm-{layout.digest}", shard=shard)


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


def _plain(value: Any) -> Any:
    """``value`` with everything in it that JSON does not know as text, in a fixed order."""
    if isinstance(value, dict):
        # Not what a library wrote there about itself and about where the files are.
        skipped = {"transformers_version", "_name_or_path"}
        return {str(key): _plain(each) for key, each in sorted(value.items(), key=str) if key not in skipped}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
