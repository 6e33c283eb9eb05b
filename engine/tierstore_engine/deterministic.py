"""The same bits for a token in every step: ``--deterministic``.

By default, the last bits of a token's logits and of its KV depend on the step that computes it. A matrix
product of more rows sums in another order, and attention of a longer span has other blocks. Now and then this
changes a greedy answer: by a cache hit, by other requests, or by preemption.

With ``--deterministic``, a token's logits depend on the tokens before it only:

- The compiled part computes all products (:func:`~tierstore_engine.products.same_bits`) and all attention
  (:mod:`~tierstore_engine.attention.in_place`). Positions alone decide the order of their sums. Attention
  reads all keys and values from pages, as they are stored.
- Everything else treats rows one by one. torch computes the same bits for a row if it uses the same
  instructions for all numbers of it. So rows are padded to whole vectors
  (:func:`~tierstore_engine.pointwise.each`), and torch works in one thread.

Pages that were computed so have an identity of their own, with the libraries and the processor that decided
their bits. A deterministic request uses no others.
"""

from __future__ import annotations

from dataclasses import replace

from tierstore import native
from tierstore.errors import UsageError
from tierstore_engine.attention.in_place import knows
from tierstore_engine.config import ModelConfig
from tierstore_engine.products import arithmetic
from tierstore_engine.states import MOST_ROWS


def with_same_bits(config: ModelConfig, device: str) -> ModelConfig:
    """Return the model with ``--deterministic``. Raises :class:`UsageError` for a model or a device whose
    numbers depend on the step."""
    if device != "cpu":
        raise UsageError(
            "--deterministic computes on a CPU only, because cuBLAS sums a product of other rows in another "
            "order: add --device cpu"
        )
    if native.DECODE is None:
        raise UsageError(
            "--deterministic needs tierstore's compiled part: install a C compiler, then tierstore again"
        )
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
    return replace(config, arithmetic=arithmetic())
