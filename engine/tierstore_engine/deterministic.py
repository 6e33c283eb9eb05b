"""The same bits for a token in every step: ``--deterministic``.

By default, the last bits of a token's logits and of its KV depend on the step that computes it. A matrix
product of more rows sums in another order, and attention of a longer span has other blocks. A cache hit,
other requests or a preemption can therefore change a greedy answer now and then.

With ``--deterministic``, a token's logits depend only on the tokens before it. This is how:

- Positions alone decide the order of sums in products and in attention. Attention reads all keys and values
  from pages, as they are stored. On the CPU the compiled part computes both
  (:func:`~tierstore_engine.products.same_bits`, :mod:`~tierstore_engine.attention.in_place`), on a GPU our
  kernels do (:mod:`~tierstore_engine.kernels.products`, :mod:`~tierstore_engine.attention.cuda`).
- All other operations treat each row separately. On the CPU torch computes the same bits for a row if it uses
  the same instructions for all its numbers. Rows are therefore padded to whole vectors
  (:func:`~tierstore_engine.pointwise.each`), and torch uses one thread. On a GPU torch's operations on single
  numbers, and on the few scores of a router, do not depend on the number of rows. Torch's sums over long rows
  do depend on it, so our kernels must compute the norms.

Pages that were computed in this way have their own identity, which includes the libraries and the processor.
A deterministic request uses no other pages.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tierstore import native
from tierstore.errors import UsageError
from tierstore_engine.attention.in_place import knows
from tierstore_engine.config import ModelConfig
from tierstore_engine.kernels.catalog import KERNEL_DTYPES
from tierstore_engine.kernels.cubins import source_digest
from tierstore_engine.products import arithmetic
from tierstore_engine.states import MOST_ROWS


def with_same_bits(config: ModelConfig, device: str) -> ModelConfig:
    """Return the model's configuration with ``--deterministic``. Raises :class:`UsageError` for a model or a
    device whose numbers depend on the step."""
    if device == "cpu":
        _check_cpu(config)
        return replace(config, arithmetic=arithmetic())
    check_gpu(config)
    major, minor = torch.cuda.get_device_capability(device)
    libraries = f"torch {torch.__version__} CUDA {torch.version.cuda}"
    return replace(config, arithmetic=f"{libraries}, sm_{major}{minor}, kernels {source_digest()}")


def _check_cpu(config: ModelConfig) -> None:
    if native.DECODE is None:
        raise UsageError(
            "--deterministic needs tierstore's compiled part: install a C compiler, then tierstore again"
        )
    if config.cross is not None:
        raise UsageError("--deterministic does not work with cross attention")
    if config.dtype not in ("float32", "bfloat16"):
        raise UsageError(f"--deterministic computes in float32 or bfloat16, not {config.dtype}: give --dtype")
    if config.recurrent is not None and config.recurrent.matrices[1] > MOST_ROWS:
        raise UsageError(
            f"--deterministic takes recurrent states with matrices of at most {MOST_ROWS} rows, not "
            f"{config.recurrent.matrices[1]}"
        )
    for number, group in enumerate(config.groups):
        if number not in config.states and not knows(config, group):
            raise UsageError(
                f"--deterministic takes heads of at most 1,024 numbers, got {group.head_dim}: leave it out"
            )


def check_gpu(config: ModelConfig) -> None:
    """Raise :class:`UsageError` for a model whose numbers depend on the step on a GPU."""
    if config.dtype not in KERNEL_DTYPES:
        raise UsageError(
            f"--deterministic computes in {' or '.join(KERNEL_DTYPES)} on a GPU, not {config.dtype}: give "
            "--dtype"
        )
    latent = config.latent
    normed = [config.hidden_size, *((latent.rank, latent.query_rank or 8) if latent is not None else ())]
    others = config.norm != "rms" or config.centred_norms or config.unit_qk
    refused = {
        "recurrent states": bool(config.states),
        "norms other than RMSNorm with plain weights": others,
        "norms over widths that are not multiples of 8": any(width % 8 for width in normed),
    }
    for what, given in refused.items():
        if given:
            raise UsageError(f"--deterministic takes no {what} on a GPU: add --device cpu")
