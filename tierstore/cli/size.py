"""``tierstore size``: the memory of a model's KV, and the number of sessions that fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tierstore import sizing
from tierstore.cli import show
from tierstore.errors import UsageError
from tierstore.gguf import read_config
from tierstore.spec import DEFAULT_CHUNK_TOKENS, read_json
from tierstore.units import format_size, parse_size

_GGUF = ".gguf"


def command(
    model: Annotated[
        str,
        typer.Argument(
            help=f"A config.json, a folder that has one, a GGUF file, or {', '.join(sizing.PRESETS)}",
            show_default=False,
        ),
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a session")] = 100_000,
    batch: Annotated[int, typer.Option(min=1, help="Sessions at the same time")] = 8,
    dtype: Annotated[
        str | None, typer.Option(help="dtype of KV (default: the model's)", show_default=False)
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a page")] = DEFAULT_CHUNK_TOKENS,
    hbm: Annotated[str, typer.Option(help="Device memory for pages")] = "40GiB",
    device: Annotated[
        str | None,
        typer.Option(
            help="Device memory for weights and pages, instead of --hbm: pages get what the weights leave",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Size of the host arena")] = "512GiB",
    disk: Annotated[str, typer.Option(help="Size of the disk tier")] = "4TiB",
    json: Annotated[bool, typer.Option("--json", help="Write one JSON document")] = False,
) -> None:
    """Show the memory that a model's KV takes and what fits.

    The table has the bytes of a token and of a session for each layer group. Below it are the sessions that
    fit each tier. A session counts the pages that its next turn needs: the last pages of a sliding window,
    one snapshot of a recurrent state. For a model with an encoder of images or sound, it also shows the size
    of an embedding.
    """
    config = _config(model)
    sizes, embedding = sizing.group_sizes(config, dtype=dtype), sizing.embedding_size(config)
    needed = [each.session_bytes(tokens, chunk_tokens) for each in sizes]
    everything = [each.all_bytes(tokens, chunk_tokens) for each in sizes]
    weights = _weights_bytes(Path(model))
    pages = parse_size(hbm) if device is None else _left_by(weights, parse_size(device), model)
    capacities = {"hbm": pages, "host": parse_size(host), "disk": parse_size(disk)}
    fits = {tier: sizing.fitting(capacity, needed) for tier, capacity in capacities.items()}
    if json:
        document = {"model": model, "tokens": tokens, "groups": _groups(sizes, needed)}
        document |= {"session_bytes": sum(needed), "all_tokens_bytes": sum(everything)}
        document |= {"weights_bytes": weights} if weights else {}
        if embedding is not None:
            document["embedding"] = {**asdict(embedding), "input_bytes": embedding.input_bytes}
        show.write_json({**document, "sessions_that_fit": fits})
        return
    _show_groups(sizes, needed, tokens)
    if sum(everything) > sum(needed):
        share = sum(needed) / sum(everything)
        show.line(f"keeping every token: {format_size(sum(everything))}; a session needs {share:.2f} of that")
    show.line(f"{batch:,} sessions: {format_size(batch * sum(needed))}")
    if embedding is not None:
        rows = [("embeddings", embedding), *_cross_sizes(sizes, embedding.rows)]
        for label, size in rows:
            each = f"{format_size(size.row_bytes)} a row"
            if size.input_bytes is not None:
                each += f", {format_size(size.input_bytes)} an input of {size.rows:,} rows"
            show.line(f"{label} (not in a session): {each}")
    if weights:
        show.line(f"weights, as they are stored: {format_size(weights)}")
    show.line("")
    show.table(
        ("tier", "capacity", "sessions that fit", f"{batch:,} fit"),
        [
            (tier, format_size(capacities[tier]), f"{count:,}", "yes" if count >= batch else "no")
            for tier, count in fits.items()
        ],
    )


def _cross_sizes(
    sizes: Sequence[sizing.GroupSize], rows: int | None
) -> list[tuple[str, sizing.EmbeddingSize]]:
    """Return a label and a size for each group of cross-attention layers. The size is that of the KV of an
    input, such as an image, of ``rows`` rows."""
    crosses = [each for each in sizes if each.row_bytes]
    return [(each.group.label, sizing.EmbeddingSize(int(each.row_bytes), rows)) for each in crosses]


def _groups(sizes: Sequence[sizing.GroupSize], needed: Sequence[int]) -> list[dict[str, Any]]:
    """Return the layer groups for ``--json``."""
    return [
        {
            "kind": each.group.kind.value,
            "layers": len(each.group.layers),
            "window": each.group.window,
            "token_bytes": each.token_bytes,
            "state_bytes": each.state_bytes,
            "row_bytes": each.row_bytes,
            "session_bytes": session,
        }
        for each, session in zip(sizes, needed, strict=True)
    ]


def _show_groups(sizes: Sequence[sizing.GroupSize], needed: Sequence[int], tokens: int) -> None:
    rows = [
        (
            each.group.label,
            f"{len(each.group.layers):,}",
            format_size(each.token_bytes) if each.token_bytes else "–",
            format_size(each.state_bytes) if each.state_bytes else "–",
            format_size(session),
        )
        for each, session in zip(sizes, needed, strict=True)
        if not each.row_bytes
    ]
    per_token = sum(each.token_bytes for each in sizes)
    total_state = sum(each.state_bytes for each in sizes)
    state = format_size(total_state) if total_state else "–"
    rows.append(("all", "", format_size(per_token), state, format_size(sum(needed))))
    show.table(("layers that keep", "layers", "a token", "a state", f"a session of {tokens:,}"), rows)


def _weights_bytes(model: Path) -> int:
    """Return the size of the weight files in a folder, or of a GGUF file; 0 if there are none."""
    if model.suffix == _GGUF and model.is_file():
        return model.stat().st_size
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) if model.is_dir() else 0


def _left_by(weights: int, device: int, model: str) -> int:
    if not weights:
        raise UsageError(f"--device needs weights: a folder with *.safetensors or a GGUF file, got {model}")
    if weights >= device:
        raise UsageError(f"the weights take {format_size(weights)}, --device is {format_size(device)}")
    return device - weights


def _config(model: str) -> Mapping[str, Any]:
    if model in sizing.PRESETS:
        return sizing.PRESETS[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise UsageError(f"there is no {path}; known models are {', '.join(sizing.PRESETS)}")
    if path.suffix == _GGUF:
        return read_config(path)
    return read_json(path)
