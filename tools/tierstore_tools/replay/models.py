"""How many bytes a token's KV takes in some model: what turns tokens into gigabytes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tierstore.errors import SpecError, UsageError
from tierstore.spec import KVSpec
from tierstore_engine.presets import PRESETS
from tierstore_tools.replay.formats.lines import whole


def spec_of(model: str) -> KVSpec:
    """Of a preset, of a folder with a ``config.json``, or of such a file. Raises :class:`UsageError` when it
    is none of these, or the model keeps something that has no size per token."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if model in PRESETS:
            return PRESETS[model].kv_spec()
        raise UsageError(
            f"no model {model!r}: neither a preset ({', '.join(PRESETS)}) nor a folder with a config.json"
        )
    try:
        config = msgspec.json.decode(whole(file), type=dict[str, object])
        return KVSpec.from_hf_config(config)
    except (msgspec.DecodeError, SpecError) as error:
        raise UsageError(f"{file}: {error}") from error
