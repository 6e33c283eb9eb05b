"""``calibrate``: measure the ranges of a model's keys and values, and write them for ``--kv-scales``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from tierstore.errors import UsageError
from tierstore.tiers.hbm import COMPLETED, PagePool
from tierstore_engine.attention.base import Span
from tierstore_engine.attention.pages import kv_pages
from tierstore_engine.build import make_runner, pools_of_one_sequence
from tierstore_engine.config import ModelConfig
from tierstore_engine.errors import ModelError
from tierstore_engine.kv_format import Ranges
from tierstore_engine.kv_scales import ScaleCalibration, check_scales
from tierstore_engine.loaded import LoadedModel, OpenModel
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Step

_STEP_TOKENS = 512


def check_calibration(opened: OpenModel, text: str, out: Path) -> list[int]:
    """Return the tokens of ``text``. Raises :class:`UsageError` before anything is computed."""
    if not opened.config.attends:
        raise UsageError("static scales are for keys and values: this model keeps only states")
    tokens = opened.tokenizer.encode(text)
    if not 0 < len(tokens) <= opened.config.max_positions:
        raise UsageError(
            f"the text has {len(tokens)} tokens: the model takes 1 to {opened.config.max_positions}"
        )
    if not out.absolute().parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no such directory")
    return tokens


def measure_ranges(model: LoadedModel, tokens: Sequence[int]) -> Ranges:
    """Return the largest magnitudes of keys and values, or latents, of each layer and head while ``model``
    (on the CPU, its KV as floats) computes ``tokens``. If all keys or all values of a head are zero, their
    range is 1.

    Raises :class:`ModelError` for numbers that are not finite.
    """
    check_scales(model.config)
    config, pools = model.config, pools_of_one_sequence(model, len(tokens))
    runner = make_runner(model, pools, EngineSettings())
    tables = tuple(range(pool.num_pages) for pool in pools)
    for start in range(0, len(tokens), _STEP_TOKENS):
        stop = min(start + _STEP_TOKENS, len(tokens))
        span = Span(tables, start, stop)
        runner.compute(
            Step((span,), tokens[start:stop], [stop - start - 1], COMPLETED, pools[0].spec.chunk_tokens)
        )
    found: dict[int, tuple[tuple[float, ...], ...]] = {}
    for group, pool in enumerate(pools):
        if group not in config.states:
            found.update(_largest(pool, config))
    return tuple(found.get(layer, ()) for layer in range(config.layers))


def _largest(pool: PagePool, config: ModelConfig) -> dict[int, tuple[tuple[float, ...], ...]]:
    """Return the ranges of each layer in a pool's layer group, by plane (keys, values) and head."""
    [group], pages = pool.spec.groups, torch.arange(pool.num_pages)
    kv = kv_pages(torch.from_numpy(pool.array), pool.spec, config, gathered=pool.num_pages)
    out = torch.empty((group.planes, group.kv_heads, pool.num_pages * pool.spec.chunk_tokens, group.head_dim))
    found = {}
    for layer in group.layers:
        # the unused part of the last page is zero, because its memory was not used before
        kv.gather(layer, pages, out)
        largest = out.abs().amax((2, 3))
        if not largest.isfinite().all():
            raise ModelError("the model's keys or values are not finite, so there is no scale for them")
        found[layer] = tuple(map(tuple, largest.where(largest > 0, 1.0).tolist()))
    return found


def write_ranges(config: ModelConfig, ranges: Ranges, out: Path) -> None:
    try:
        out.write_bytes(
            msgspec.json.format(msgspec.json.encode(ScaleCalibration(config.digest(), ranges))) + b"\n"
        )
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from error
