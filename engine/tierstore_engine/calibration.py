"""``calibrate``: measure the ranges of a model's keys and values, and write them for ``--kv-scales``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from tierstore.errors import UsageError
from tierstore.spec import LayerKind
from tierstore.tiers.hbm import COMPLETED, PagePool
from tierstore_engine.attention.base import Span
from tierstore_engine.build import LoadedModel, OpenModel, make_runner, pages_for_tokens
from tierstore_engine.config import ModelConfig
from tierstore_engine.errors import ModelError
from tierstore_engine.kv_format import Ranges
from tierstore_engine.kv_scales import ScaleCalibration
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Step

_STEP_TOKENS = 512


def check_calibration(opened: OpenModel, text: str, out: Path) -> list[int]:
    """Return the tokens of ``text``. Raises :class:`UsageError` before anything is computed."""
    if {group.kind for group in opened.config.groups} != {LayerKind.FULL_ATTENTION}:
        raise UsageError("static scales are for models whose layers all keep every token's keys and values")
    tokens = opened.tokenizer.encode(text)
    if not 0 < len(tokens) <= opened.config.max_positions:
        raise UsageError(
            f"the text has {len(tokens)} tokens: the model takes 1 to {opened.config.max_positions}"
        )
    if not out.absolute().parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no such directory")
    return tokens


def measure_ranges(model: LoadedModel, tokens: Sequence[int]) -> Ranges:
    """Return the largest magnitudes of keys and values while ``model`` (on the CPU, its KV as floats)
    computes ``tokens``. A plane that is all zero has the range 1."""
    config, spec = model.config, model.kv_spec()
    pool = PagePool(spec, pages_for_tokens(spec, len(tokens)))
    runner = make_runner(model, [pool], EngineSettings())
    for start in range(0, len(tokens), _STEP_TOKENS):
        stop = min(start + _STEP_TOKENS, len(tokens))
        span = Span((range(pool.num_pages),), start, stop)
        runner.compute(Step((span,), tokens[start:stop], [stop - start - 1], COMPLETED, spec.chunk_tokens))
    # The rest of the last page is zero: its memory was not used before.
    shape = (pool.num_pages, config.layers, 2, config.kv_heads, -1)
    kv = torch.from_numpy(pool.array).view(getattr(torch, config.dtype)).view(shape).float()
    largest = kv.abs().amax((0, 4))
    if not largest.isfinite().all():
        raise ModelError("the model's keys or values are not finite, so there is no scale for them")
    found = largest.where(largest > 0, 1.0).tolist()
    return tuple(tuple(tuple(heads) for heads in planes) for planes in found)


def write_ranges(config: ModelConfig, ranges: Ranges, out: Path) -> None:
    try:
        out.write_bytes(
            msgspec.json.format(msgspec.json.encode(ScaleCalibration(config.digest(), ranges))) + b"\n"
        )
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from error
