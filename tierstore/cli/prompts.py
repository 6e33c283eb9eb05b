"""Prompts on the command line: their tokens, and the model that their pages belong to."""

from __future__ import annotations

import itertools
import json
import re
import sys
import tokenize  # for TokenError: NumPy parses the header of a .npy file as Python
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.errors import SpecError, StoreUnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    import numpy.typing as npt

    from tierstore import Store
    from tierstore.cli.operator import ConnectOptions, Operator
    from tierstore.keys import Identity, Prompt
    from tierstore.wire.messages import PromptPart

_TOKENS = typer.Argument(
    metavar="FILE",
    help="File with token ids: a JSON list, numbers separated by spaces or commas, or .npy; - is stdin",
    show_default=False,
    allow_dash=True,
)
Tokens = Annotated[Path, _TOKENS]
SomeTokens = Annotated[Path | None, _TOKENS]
TokensAsForPin = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="File with the prompt's token ids, as for pin", allow_dash=True),
]


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """The options that choose a model. The options may be left out if the store has pages of only one
    model."""

    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Model of the pages", show_default=False)
    ] = None
    identity: Annotated[
        str | None,
        typer.Option(
            "--identity",
            metavar="HEX",
            help="Identity of the pages, as `tierstore ls` shows it, instead of --model",
            show_default=False,
        ),
    ] = None

    def of(self, known: list[Identity]) -> tuple[Identity, ...]:
        """Return those of the ``known`` identities that belong to the chosen model, one for each layer group.
        Raise :class:`UsageError` if no model or several models match."""
        return _chosen(_models(known), self.model, self.identity)


_MOST_GROUPS = 4  # 4 groups have 24 possible orders, and each order takes a lookup
_LOOK_S = 10.0
_CONNECT_S = 5.0
_MOST_LISTED = 8  # identities in an error message
_MOST_CHARS = 60  # length of a name in an error message


def read_tokens(file: Path) -> npt.NDArray[np.uint32]:
    """Return the token ids in a file. Raise :class:`UsageError` if the file contains no token ids."""
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
    """Return the identity with this model and with a digest that begins with ``digest`` (None: any). Raise
    :class:`UsageError` if no identity or several identities match."""
    return _chosen([(identity,) for identity in known], model, digest)[0]


def _models(known: Sequence[Identity]) -> list[tuple[Identity, ...]]:
    """Group the identities by model. The layer groups of a model have the same chunk size and dtypes, and no
    layer in common."""
    from tierstore.spec import KVSpec

    alike: dict[object, list[tuple[Identity, set[int]]]] = {}
    alone = []
    for identity in known:
        try:
            spec = KVSpec.parse(identity.layout)
        except SpecError:  # the layout is opaque or from another version
            alone.append((identity,))
            continue
        if spec.of_inputs:
            continue  # named after the content of an input such as an image, so no prompt finds its pages
        pages = spec.dtype, spec.value_dtype, spec.scaled, spec.chunk_tokens
        layers = {layer for group in spec.groups for layer in group.layers}
        alike.setdefault((replace(identity, layout=""), pages), []).append((identity, layers))
    models: list[tuple[Identity, ...]] = []
    for groups in alike.values():
        together = len(set().union(*(layers for _, layers in groups))) == sum(
            len(layers) for _, layers in groups
        )
        identities = tuple(identity for identity, _ in groups)
        models += [identities] if together else [(identity,) for identity in identities]
    return [*models, *alone]


def _chosen(
    known: Sequence[tuple[Identity, ...]], model: str | None, digest: str | None
) -> tuple[Identity, ...]:
    chosen = [
        groups
        for groups in known
        if (model is None or groups[0].model == model)
        and any(identity.digest.hex().startswith(digest or "") for identity in groups)
    ]
    if len(chosen) == 1:
        return chosen[0]
    some = (chosen or known)[:_MOST_LISTED]
    listed = "; ".join(f"{groups[0].digest.hex()[:8]}: {_name(groups[0])}" for groups in some)
    left_out = len(chosen or known) - len(some)
    listed += f"; and {left_out:,} more" if left_out else ""
    if not known:
        raise UsageError("the daemon has no pages yet: save some first")
    if not chosen:
        raise UsageError(f"no stored pages match; the daemon has {listed}")
    raise UsageError(f"several identities match, choose one with --identity: {listed}")


def _name(identity: Identity) -> str:
    fields = {name: value for name, value in asdict(identity).items() if value and name != "layout"}
    return ", ".join(
        f"{name} {value if len(value) <= _MOST_CHARS else value[:_MOST_CHARS] + '…'}"
        for name, value in fields.items()
    )


def is_chain(groups: Sequence[Identity]) -> bool:
    """Return whether a model has one layer group with chained pages."""
    from tierstore.spec import is_hashed

    return len(groups) == 1 and not is_hashed(groups[0].layout)


@contextmanager
def open_model(
    groups: Sequence[Identity],
    prompts: Sequence[npt.NDArray[np.uint32]],
    open_store: Callable[[Identity], AbstractContextManager[Store]],
) -> Iterator[tuple[Store, list[Prompt]]]:
    """Open a store for all layer groups of a model. Yield it with the prompts. The names of pages depend on
    the order of the groups, which only the engine knows. So every order is tried, and the one that finds most
    pages of the first prompt is used. Raise :class:`UsageError` for pages whose keys only their engine can
    make."""
    from tierstore.keys import Prompt
    from tierstore.spec import KVSpec, is_hashed, is_opaque

    if is_opaque(groups[0].layout):
        raise UsageError(
            f"only the engine can make the keys of pages of {groups[0].model}: do this "
            "with a request to the engine (docs/vllm.md)"
        )
    if len(groups) > _MOST_GROUPS:
        raise UsageError(
            f"{groups[0].model} has {len(groups)} layer groups; commands support at most {_MOST_GROUPS}"
        )
    specs = [replace(KVSpec.parse(group.layout), hashed=False) for group in groups]
    chunk_tokens = specs[0].chunk_tokens
    orders = [
        replace(
            groups[0],
            layout=replace(specs[0], groups=sum((spec.groups for spec in order), start=())).describe(),
        )
        for order in itertools.permutations(specs)
    ]
    named = next((group for group in groups if is_hashed(group.layout)), None)

    def found(store: Store, model: Identity) -> int:
        group = model.groups.index(named)
        pages = Prompt(model, prompts[0], chunk_tokens=chunk_tokens).pages_of(group)
        with store.lookup(pages, counted=False) as hit:
            return hit.tokens

    model = orders[0]
    if named is not None and len(orders) > 1:
        with open_store(named) as store:
            model = max(orders, key=lambda each: found(store, each))
    with open_store(model) as store:
        yield store, [Prompt(model, tokens, chunk_tokens=chunk_tokens) for tokens in prompts]


@contextmanager
def connected_store(identity: Identity, where: ConnectOptions) -> Iterator[Store]:
    """Open a store that is backed by a daemon, for pages of ``identity``, without an HBM pool. Raise
    :class:`StoreUnavailableError` if no daemon answers."""
    import tierstore
    from tierstore.daemon.settings import default_listen
    from tierstore.spec import KVSpec

    url = where.connect or default_listen()
    with tierstore.connect(
        url,
        KVSpec.parse(identity.layout),
        identity=identity,
        lookup_s=_LOOK_S,
        keys=where.keys,
        server_key=where.server_key,
        verify=True,
    ) as store:
        if not store.wait_connected(_CONNECT_S):
            raise StoreUnavailableError(f"no daemon answers at {url}: start one with `tierstore serve`")
        yield store


def register(operator: Operator, tokens: npt.NDArray[np.uint32], identity: Identity) -> PromptPart:
    """Register the prompt's identity, and return the part of a message that describes the prompt. Raise
    :class:`UsageError` for pages whose keys only their engine can make."""
    from tierstore.keys import Prompt
    from tierstore.spec import KVSpec, is_opaque
    from tierstore.wire import messages

    if is_opaque(identity.layout):
        raise UsageError(
            f"only the engine can make the keys of pages of {identity.model}: do this "
            "with a request to the engine (docs/vllm.md)"
        )
    try:
        spec = KVSpec.parse(identity.layout)
    except SpecError as error:
        raise UsageError(f"pages of {identity.model} have a layout from another version: {error}") from error
    message = messages.Register(0, asdict(identity), spec.page_bytes, spec.chunk_tokens)
    number = operator.ask(message, messages.Registered).identity
    prompt = Prompt(identity, tokens, chunk_tokens=spec.chunk_tokens)
    return messages.PromptPart(number, b"".join(prompt.keys), prompt.token_bytes)


def known_identities(operator: Operator) -> list[Identity]:
    """Return all identities that the daemon knows. The daemon may have no pages of some identities."""
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
