"""The identity of a transformers model's pages, which covers everything that can change KV.

Two processes share pages only if all of these are equal:

- the configuration, with RoPE, context and quantisation,
- the model's class and attention implementation,
- the versions of the packages that transformers computes with, and the processor or GPU,
- the page layout, and the weights.

The weights are identified by all bytes of the files in the model's folder, or by the commit of a model from
the hub. A sample of every weight in memory is hashed as well, because a program may change a model after
loading it (merged adapters, training, ``torchao``). Without files and commit, all bytes of the weights in
memory are hashed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore_connectors.common.contents import contents, default_cache, model_files
from tierstore_connectors.common.facts import COMMIT, digest, host_device, installed_versions, plain

_COMPUTES = (
    "torch",
    "transformers",
    "triton",
    "kernels",
    "flash-attn",
    "flash-linear-attention",
    "causal-conv1d",
    "mamba-ssm",
    "bitsandbytes",
    "torchao",
)
_SAMPLES = 64  # the number of values that are read of each weight
_BY_LENGTH = frozenset({"dynamic", "longrope"})


def identity_of(model: Any, spec: KVSpec, *, namespace: str, sampled: bool) -> Identity:
    """Return the identity of the pages of ``model``. ``sampled`` reads only samples of large files. Raise
    :class:`UsageError` for weights that cannot be read, and for RoPE that depends on the prompt's length."""
    config = plain(model.config.to_dict())
    if kind := next(_by_length(config), None):
        raise UsageError(
            f"TierStoreCache does not support RoPE of type {kind!r}: keys depend on the prompt's length"
        )
    folder = Path(str(model.config._name_or_path or ""))
    commit = getattr(model.config, "_commit_hash", None)
    try:
        if str(model.config._name_or_path or "") and folder.is_dir():
            revision = contents(model_files(folder), remembered=default_cache(), sampled=sampled).digest
        elif commit is not None and COMMIT.fullmatch(commit):
            revision = commit
        else:
            revision = ""
        weights = _in_memory(model, whole=not revision)
    except (OSError, RuntimeError, TypeError, NotImplementedError) as error:
        raise UsageError(f"TierStoreCache cannot identify the model's weights: {error}") from error
    return Identity.of(
        spec,
        model=digest(
            [
                "transformers",
                f"{type(model).__module__}.{type(model).__qualname__}",
                config,
                str(getattr(model.config, "_attn_implementation", None)),
                str(getattr(model.config, "_experts_implementation", None)),
                installed_versions(_COMPUTES),
                _device(model),
                torch.get_float32_matmul_precision(),
            ]
        ),
        revision=digest([revision, weights]),
        tenant=namespace,
    )


def weights_mark(model: Any) -> int:
    """Return a number that changes when a parameter is replaced or changed in place. (Changes through
    ``.data`` are not detected.)"""
    return hash(tuple((id(each), 0 if each.is_inference() else each._version) for each in model.parameters()))


def _by_length(value: Any) -> Iterator[str]:
    """Yield the RoPE types in a configuration with which a token's keys depend on the prompt's length."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            if name in ("rope_type", "type") and each in _BY_LENGTH:
                yield each
            yield from _by_length(each)


def _in_memory(model: Any, *, whole: bool) -> str:
    """Return a digest of the model's weights and buffers: of all their bytes, or of a sample of each
    tensor."""
    found = hashlib.sha256()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.device.type == "meta":  # offloaded; identified by the files
            continue
        flat = tensor.detach().reshape(-1)
        if not whole:
            flat = flat[:: max(flat.numel() // _SAMPLES, 1)]
        found.update(flat.cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _device(model: Any) -> str:
    device = model.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {host_device()}"
