"""Sampling fields of a request, and their defaults."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from tierstore_engine.checkpoint import GENERATION_FILE
from tierstore_engine.errors import ModelError

# Ranges of the fields, in requests and in generation_config.json.
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=100)]
TopP: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1)]
MinP: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty: TypeAlias = Annotated[float, Meta(gt=0, le=100)]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingDefaults:
    """The values of sampling fields that a request leaves out. The default values of these fields are
    OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


OPENAI_DEFAULTS = SamplingDefaults()


class _GenerationConfig(Struct, frozen=True):
    """The fields of ``generation_config.json`` that this engine reads. A field that the file does not have is
    None."""

    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None


def load_defaults(folder: Path | None) -> SamplingDefaults:
    """Return the sampling defaults in the ``generation_config.json`` of a model's folder, and log them as a
    warning.

    A field that the file lacks has OpenAI's default, and so has every field of a model without the file.
    ``"do_sample": false`` means temperature 0. Raises :class:`ModelError` for a file that cannot be read and
    for values out of range.
    """
    file = folder / GENERATION_FILE if folder is not None else None
    if file is None or not file.is_file():
        return OPENAI_DEFAULTS
    try:
        config = msgspec.json.decode(file.read_bytes(), type=_GenerationConfig)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(
            f"cannot use {file}: {error}. --generation-config none ignores its sampling"
        ) from None
    found = {
        name: value
        for name in SamplingDefaults.__dataclass_fields__
        if (value := getattr(config, name)) is not None
    }
    if config.do_sample is False:
        found["temperature"] = 0.0
    if found:
        said = ", ".join(f"{name} {value:g}" for name, value in found.items())
        _log.warning(
            "sampling defaults are those of %s: %s (--generation-config none: OpenAI's)",
            file,
            said,
        )
    return SamplingDefaults(**found)
