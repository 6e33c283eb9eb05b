"""Static scales of quantised KV, from a checkpoint or from the file of a calibration run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from tierstore.errors import UsageError
from tierstore_engine.checkpoint import Checkpoint
from tierstore_engine.config import ModelConfig
from tierstore_engine.errors import ModelError
from tierstore_engine.kv_format import CODES, Ranges

DYNAMIC, CHECKPOINT = "dynamic", "checkpoint"

# The names under which quantisers store the scale of a layer's K or V: one float, for FP8 e4m3.
_NAMES = ("self_attn.{plane}_scale", "self_attn.{plane}_proj.{plane}_scale", "self_attn.attn.{plane}_scale")


class ScaleCalibration(msgspec.Struct, forbid_unknown_fields=True):
    """The file that a calibration writes. ``model`` is the digest of the model's configuration."""

    model: str
    ranges: Ranges


def with_scales(config: ModelConfig, source: str, folder: Path | None) -> ModelConfig:
    """Return ``config`` with scales from ``source``: ``dynamic``, ``checkpoint`` (of ``folder``), or the path
    of a calibration file.

    Raises :class:`UsageError` if KV is not quantised or the file is invalid, and :class:`ModelError` for a
    checkpoint without scales.
    """
    if source == DYNAMIC:
        return config
    if not config.kv.quantised:
        raise UsageError("--kv-scales needs a --kv-dtype: KV in the model's dtype has no scales")
    check_scales(config)
    ranges = _of_checkpoint(config, folder) if source == CHECKPOINT else _of_file(config, Path(source))
    return replace(config, kv=replace(config.kv, ranges=ranges))


def check_scales(config: ModelConfig) -> None:
    """Raise :class:`UsageError` for a model with cross attention, whose scales text cannot calibrate."""
    if config.cross is not None:
        raise UsageError("--kv-scales does not work with cross attention: leave it out")


def _of_file(config: ModelConfig, file: Path) -> Ranges:
    try:
        found = msgspec.json.decode(file.read_bytes(), type=ScaleCalibration)
    except OSError as error:
        raise UsageError(f"--kv-scales: cannot read {file}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"--kv-scales: {file} was not written by calibrate: {error}") from error
    if found.model != config.digest():
        raise UsageError(f"--kv-scales: {file} was made for another model or dtype")
    _check(config, found.ranges, str(file))
    return found.ranges


def _planes_of(config: ModelConfig) -> list[tuple[int, int]]:
    """Return for each layer how many planes with scales it has, and how many heads a plane has: ``(2,
    kv_heads)`` for keys and values, ``(1, 1)`` for a latent, ``(0, 0)`` for a recurrent state."""
    found = {}
    for number, group in enumerate(config.groups):
        shape = (0, 0) if number in config.states else (group.planes, group.kv_heads)
        found.update(dict.fromkeys(group.layers, shape))
    return [found[layer] for layer in range(config.layers)]


def _of_checkpoint(config: ModelConfig, folder: Path | None) -> Ranges:
    if folder is None:
        raise UsageError("--kv-scales checkpoint: a preset has no checkpoint")
    with Checkpoint(folder) as checkpoint:

        def read(layer: int, plane: str, heads: int) -> tuple[float, ...]:
            names = [
                f"model.layers.{config.stored_number(layer)}.{name.format(plane=plane)}" for name in _NAMES
            ]
            for name in filter(checkpoint.__contains__, names):
                scale = checkpoint.read(name)
                if scale.numel() == 1:
                    return (float(scale) * CODES["fp8_e4m3"].largest,) * heads
            raise ModelError(f"{folder}: no scale of one number is named {' or '.join(names)}")

        ranges = tuple(
            tuple(read(layer, plane, heads) for plane in "kv"[:planes])
            for layer, (planes, heads) in enumerate(_planes_of(config))
        )
    _check(config, ranges, str(folder))
    return ranges


def _check(config: ModelConfig, ranges: Ranges, source: str) -> None:
    flat = [each for planes in ranges for heads in planes for each in heads]
    wanted = [[heads] * planes for planes, heads in _planes_of(config)]
    if [list(map(len, layer)) for layer in ranges] != wanted:
        raise UsageError(f"--kv-scales: {source} does not have a range for each layer, plane and head")
    if not all(2.0**-100 < each < 2.0**100 for each in flat):
        raise UsageError(f"--kv-scales: {source} has a range that is not between 2^-100 and 2^100")
