"""Naming a prompt on the command line: its tokens, and what its pages are pages of."""

from __future__ import annotations

import json
import re
import sys
import tokenize  # NumPy parses the header of .npy as Python
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.errors import SpecError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tierstore.cli.operator import Operator
    from tierstore.keys import Identity
    from tierstore.wire.messages import PromptPart

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


_MOST_LISTED = 8  # identities in a message, with this much of each name:
_MOST_CHARS = 60


def read_tokens(file: Path) -> npt.NDArray[np.uint32]:
    """The token ids in a file. Raises :class:`UsageError` for anything else."""
    import numpy as np

    try:
        if file.suffix == ".npy":
            array = np.asarray(np.lib.format.open_memmap(file, mode="r"))
        else:
            text = sys.stdin.read() if str(file) == "-" else file.read_text()
            array = np.asarray(_numbers(text))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    except (ValueError, OverflowError, RecursionError, tokenize.TokenError) as error:
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
    some = (chosen or known)[:_MOST_LISTED]
    listed = "; ".join(f"{identity.digest.hex()[:8]}: {_name(identity)}" for identity in some)
    left_out = len(chosen or known) - len(some)
    listed += f"; and {left_out:,} more" if left_out else ""
    if not known:
        raise UsageError("the daemon knows of no pages yet: save some first")
    if not chosen:
        raise UsageError(f"nothing like that is known; there is {listed}")
    raise UsageError(f"say with --identity which of these is meant: {listed}")


def _name(identity: Identity) -> str:
    fields = {name: value for name, value in asdict(identity).items() if value and name != "layout"}
    return ", ".join(
        f"{name} {value if len(value) <= _MOST_CHARS else value[:_MOST_CHARS] + '…'}"
        for name, value in fields.items()
    )


def register(operator: Operator, tokens: npt.NDArray[np.uint32], identity: Identity) -> PromptPart:
    """The prompt, as messages name it. Raises :class:`UsageError` for pages that only their engine can
    name."""
    from tierstore.keys import Prompt
    from tierstore.spec import KVSpec, is_opaque
    from tierstore.wire import messages

    if is_opaque(identity.layout):
        raise UsageError(
            f"pages of {identity.model} are found by keys that only their engine can make: "
            "ask for it with the request (docs/vllm.md)"
        )
    try:
        spec = KVSpec.parse(identity.layout)
    except SpecError as error:
        raise UsageError(f"pages of {identity.model} have a layout of another version: {error}") from error
    message = messages.Register(0, asdict(identity), spec.page_bytes, spec.chunk_tokens)
    number = operator.ask(message, messages.Registered).identity
    prompt = Prompt(identity, tokens, chunk_tokens=spec.chunk_tokens)
    return messages.PromptPart(number, b"".join(prompt.keys), prompt.token_bytes)


def named(operator: Operator, file: Path, model: str | None, digest: str | None) -> tuple[PromptPart, int]:
    """The prompt of a command, and how many tokens it has."""
    tokens = read_tokens(file)
    identity = choose_identity(known_identities(operator), model, digest)
    return register(operator, tokens, identity), len(tokens)


def known_identities(operator: Operator) -> list[Identity]:
    """What the daemon may have pages of."""
    from tierstore.keys import Identity
    from tierstore.wire import messages

    known: list[Identity] = []
    after = b""
    while True:
        answer = operator.ask(messages.Identities(0, after), messages.IdentitiesAnswer)
        known += [Identity(**fields) for fields in answer.identities]
        after = answer.more
        if not after:
            return known
