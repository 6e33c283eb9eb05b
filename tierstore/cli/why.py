"""``tierstore why``: say why the store does not serve some tokens of a prompt or of the last requests."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.cli import show
from tierstore.cli.operator import ConnectOptions
from tierstore.cli.prompts import (
    ModelChoice,
    TokensAsForPin,
    connected_store,
    known_identities,
    open_model,
    read_tokens,
)
from tierstore.command_line import with_options
from tierstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from tierstore.explanation import Explanation, Miss, MissedRequest, MissReason

_LAST = 20  # requests
_MOST_SHOWN = 16  # tokens


@with_options
def command(
    tokens: TokensAsForPin = None,
    *,
    which: ModelChoice,
    last: Annotated[
        int | None,
        typer.Option(
            "--last",
            min=1,
            metavar="N",
            help=f"Without FILE: list the last N requests (default: {_LAST})",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON document")] = False,
    where: ConnectOptions,
) -> None:
    """Say why tokens of a prompt are not served from the store.

    With FILE, look the prompt up and give each missed token one reason. Nothing is loaded. Without FILE, list
    the last requests with missed tokens, the newest first. The daemon remembers 256.
    """
    if tokens is None:
        if which != ModelChoice():
            raise UsageError("give FILE with --model or --identity: the list has the requests of all models")
        _list(where, _LAST if last is None else last, json=json)
    elif last is not None:
        raise UsageError("give either FILE or --last N")
    else:
        _explain(where, read_tokens(tokens), which, json=json)


# -- one prompt ----------------------------------------------------------------------------------------


def _explain(where: ConnectOptions, array: npt.NDArray[np.uint32], which: ModelChoice, *, json: bool) -> None:
    with where.operator() as operator:
        groups = which.of(known_identities(operator))
    with open_model(groups, [array], lambda each: connected_store(each, where)) as (store, [prompt]):
        explanation = store.explain(prompt)
    tokens: list[int] = array.tolist()
    if json:
        show.write_json(to_json(explanation, tokens))
    else:
        _print(explanation, tokens)


def to_json(explanation: Explanation, tokens: Sequence[int]) -> dict[str, object]:
    """Return the document of ``--json`` about a prompt."""
    return {
        "prompt_tokens": explanation.prompt_tokens,
        "hit_tokens": explanation.hit_tokens,
        "missed_tokens": explanation.prompt_tokens - explanation.hit_tokens,
        "hit_tokens_by_tier": dict(explanation.by_tier),
        "missed_tokens_by_reason": _by_reason_to_json(explanation.by_reason),
        "misses": [_miss_to_json(miss, tokens) for miss in explanation.misses],
    }


def _by_reason_to_json(counts: Mapping[MissReason, int]) -> dict[str, int]:
    return {reason.value: tokens for reason, tokens in counts.items()}


def _miss_to_json(miss: Miss, tokens: Sequence[int]) -> dict[str, object]:
    rejoin = miss.rejoins(tokens)
    fields = asdict(miss)
    return {
        "first_token": fields.pop("first"),
        "at_token": fields.pop("at"),
        **fields,
        "reason": miss.reason.value,
        "text": miss.sentence(),
        "cause": None if miss.cause is None else miss.cause.value,
        "held_tokens": miss.held_tokens[:_MOST_SHOWN],
        "rejoin": None if rejoin is None else asdict(rejoin),
    }


def _print(explanation: Explanation, tokens: Sequence[int]) -> None:
    total, hit = explanation.prompt_tokens, explanation.hit_tokens
    tiers = ", ".join(f"{tier} {count:,}" for tier, count in explanation.by_tier.items() if count)
    show.line(f"{total:,} tokens: {hit:,} hit{f' ({tiers})' if tiers else ''}, {total - hit:,} missed")
    if explanation.misses:
        show.line("")
        show.table(
            ("reason", "details", "tokens", "from token"),
            [
                (
                    miss.reason.label,
                    miss.sentence().removeprefix(miss.reason.label).strip(),
                    f"{miss.tokens:,}",
                    f"{miss.first:,}",
                )
                for miss in explanation.misses
            ],
            left=2,
        )
    for miss in explanation.misses:
        if miss.at is not None:
            _print_divergence(miss, miss.at, tokens)


def _print_divergence(miss: Miss, at: int, tokens: Sequence[int]) -> None:
    """Show the tokens of a prompt and of the stored prompt from the token where they diverge."""
    own, held = tokens[at : at + _MOST_SHOWN], miss.held_tokens[:_MOST_SHOWN]
    places = range(at, at + max(len(own), len(held)))
    show.line("")
    show.table(
        ("token", *(f"{place:,}" for place in places)),
        [
            (name, *map(str, some), *["–"] * (len(places) - len(some)))
            for name, some in (("prompt", own), ("held", held))
        ],
    )
    rejoin = miss.rejoins(tokens)
    show.line(f"{rejoin}" if rejoin is not None else "the two do not agree again soon")


# -- the last requests ---------------------------------------------------------------------------------


def _list(where: ConnectOptions, last: int, *, json: bool) -> None:
    from tierstore.wire import messages

    with where.operator() as operator:
        answer = operator.ask(messages.MissedRequests(0, last), messages.MissedRequestsAnswer)
    if json:
        show.write_json({"requests": [_request_to_json(each) for each in answer.requests]})
    elif not answer.requests:
        show.line("no request has missed tokens since the daemon started")
    else:
        show.table(
            ("client", "model", "reasons", "age", "tokens", "hit"),
            [
                (
                    each.client,
                    each.model,
                    ", ".join(f"{reason.label} {n:,}" for reason, n in each.by_reason.items()),
                    show.age(each.at_s),
                    f"{each.prompt_tokens:,}",
                    f"{each.hit_tokens:,}",
                )
                for each in answer.requests
            ],
            left=3,
        )


def _request_to_json(request: MissedRequest) -> dict[str, object]:
    return {
        "at_s": request.at_s,
        "client": request.client,
        "model": request.model,
        "prompt_tokens": request.prompt_tokens,
        "hit_tokens": request.hit_tokens,
        "missed_tokens_by_reason": _by_reason_to_json(request.by_reason),
    }
