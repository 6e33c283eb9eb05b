"""Naming a prompt on the command line: its tokens, and what its pages are pages of."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.errors import SpecError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tierstore.cli.operator import Operator
    from tierstore.daemon.protocol import PromptPart
    from tierstore.keys import Identity

Tokens = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="The prompt's token ids: a JSON list, numbers between spaces or commas, or .npy; - is stdin",
        show_default=False,
        allow_dash=True,
    ),
]
Model = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="Pages of this model", show_default=False)
]
IdentityDigest = Annotated[
    str | None,
    typer.Option(
        "--identity",
        metavar="HEX",
        help="… or of this identity, as `tierstore ls` shows it",
        show_default=False,
    ),
]


def read_tokens(file: Path) -> npt.NDArray[np.uint32]:
    """The token ids in a file. Raises :class:`UsageError` for anything else."""
    import numpy as np

    try:
        if file.suffix == ".npy":
            array = np.load(file, allow_pickle=False)
        else:
            text = sys.stdin.read() if str(file) == "-" else file.read_text()
            array = np.asarray(_numbers(text))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    except ValueError as error:
        raise UsageError(f"{file} holds no token ids: {error}") from error
    if (
        array.ndim != 1
        or not array.size
        or array.dtype.kind not in "iu"
        or not 0 <= array.min() <= array.max() < 1 << 32
    ):
        raise UsageError(f"{file} holds no token ids: give a flat list of numbers from 0 to 2³²-1")
    tokens: npt.NDArray[np.uint32] = array.astype(np.uint32)
    return tokens


def _numbers(text: str) -> list[int]:
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    return [int(number) for number in re.split(r"[\s,]+", text.strip())]


def choose_identity(known: list[Identity], model: str | None, digest: str | None) -> Identity:
    """The one that is meant. Raises :class:`UsageError` when that is none, or more than one."""
    chosen = [
        identity
        for identity in known
        if (model is None or identity.model == model) and identity.digest.hex().startswith(digest or "")
    ]
    if len(chosen) == 1:
        return chosen[0]
    listed = "; ".join(f"{identity.digest.hex()[:8]}: {_name(identity)}" for identity in chosen or known)
    if not known:
        raise UsageError("the daemon knows of no pages yet: save some first")
    if not chosen:
        raise UsageError(f"nothing like that is known; there is {listed}")
    raise UsageError(f"say with --identity which of these is meant: {listed}")


def _name(identity: Identity) -> str:
    fields = {name: value for name, value in asdict(identity).items() if value and name != "layout"}
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def register(operator: Operator, tokens: npt.NDArray[np.uint32], identity: Identity) -> PromptPart:
    """The prompt, as messages name it. Raises :class:`UsageError` for pages that only their engine can
    name."""
    from tierstore.daemon import protocol
    from tierstore.keys import Prompt
    from tierstore.spec import KVSpec, is_opaque

    if is_opaque(identity.layout):
        raise UsageError(
            f"pages of {identity.model} are found by keys that only their engine can make: "
            "ask for it with the request (docs/vllm.md)"
        )
    try:
        spec = KVSpec.parse(identity.layout)
    except SpecError as error:
        raise UsageError(f"pages of {identity.model} have a layout of another version: {error}") from error
    message = protocol.Register(0, asdict(identity), spec.page_bytes, spec.chunk_tokens)
    number = operator.ask(message, protocol.Registered).identity
    prompt = Prompt(identity, tokens, chunk_tokens=spec.chunk_tokens)
    return protocol.PromptPart(number, b"".join(prompt.keys), prompt.token_bytes)


def named(operator: Operator, file: Path, model: str | None, digest: str | None) -> tuple[PromptPart, int]:
    """The prompt of a command, and how many tokens it has."""
    from tierstore.daemon import protocol
    from tierstore.keys import Identity

    tokens = read_tokens(file)
    answer = operator.ask(protocol.Identities(0), protocol.IdentitiesAnswer)
    identity = choose_identity([Identity(**fields) for fields in answer.identities], model, digest)
    return register(operator, tokens, identity), len(tokens)
