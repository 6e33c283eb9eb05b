"""Reasons for missed prompt tokens, in the form of the API.

This module answers two questions:

- Why was this token not in the cache? The store explains the prompt when the request arrives. This
  explanation is then adjusted to the tokens that were really reused
  (:func:`~tierstore_connectors.common.explaining.missed`).
- How does this prompt differ from an earlier one? The server keeps its last prompts (:class:`KeptPrompts`),
  and compares two of them (:func:`compare`). The answer has the form of ``prompt_cache_diagnostics`` in
  OpenAI's Responses API.

An answer never contains text or tokens of another request, only positions.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np

from tierstore.explanation import CONTEXT_TOKENS, Explanation, Miss
from tierstore.index import common_tokens
from tierstore.keys import TOKEN_BYTES, TOKEN_DTYPE, encode_tokens
from tierstore_connectors.common.explaining import missed
from tierstore_engine.server.places import message_place
from tierstore_engine.server.requests import ChatMessage
from tierstore_engine.tokenizer import Tokenizer, common_length

Json: TypeAlias = dict[str, Any]
Scalar: TypeAlias = "str | bool | int | float | None"

MOST_PROMPTS = 256
MOST_BYTES = 64 << 20

NOT_FOUND: Json = {"type": "comparison_response_not_found"}
UNAVAILABLE: Json = {"type": "unavailable"}
_SAME: Json = {"type": "cache_hit"}

_MESSAGE_BYTES = 256  # bytes of memory of a message, without its text


# -- why tokens were missed --------------------------------------------------------------------------------


def miss_document(miss: Miss, place: Mapping[str, Any]) -> Json:
    """Return a miss in the form of the API, with the fields of ``place`` added (see
    :func:`place_document`)."""
    details: Json = {
        "tier": miss.tier,
        "age_s": miss.age_s,
        "policy": miss.policy,
        "more_bytes": miss.more_bytes,
        "fields": list(miss.fields),
        "group": miss.group,
        "cause": miss.cause.value if miss.cause is not None else None,
        "at": miss.at,
    }
    given = {name: value for name, value in details.items() if value not in (None, "", [])}
    return {
        "reason": miss.reason.value,
        "first": miss.first,
        "tokens": miss.tokens,
        **given,
        **place,
        "detail": miss.sentence(),
    }


def place_document(
    token: int,
    held_tokens: Sequence[int],
    text: str,
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    render: Callable[[int], str],
) -> Json:
    """Return where a prompt diverges at ``token`` from another prompt, which continues with ``held_tokens``.
    This is a message and a character in it or, for a prompt without messages, a character of the prompt.
    Return nothing if that is unknown. ``render``: see
    :func:`~tierstore_engine.server.places.message_place`."""
    starts = tokenizer.starts(text, begin=not messages)
    if token >= len(starts):
        return {}
    at = starts[token]
    held = b"".join(takewhile(bool, map(tokenizer.token_bytes, held_tokens)))
    # the difference lies within the first token that differs
    at += common_length(text[at:], held.decode(errors="ignore"))
    if not messages:
        return {"character": at}
    place = message_place(messages, text, at, render)
    if place is None:
        return {}
    document: Json = {"message": place.message, "role": place.role}
    return document if place.character is None else {**document, "character": place.character}


@dataclass(frozen=True)
class CacheReport:
    """The answer to a request's questions about the cache.

    ``explanations`` has one entry for each prompt, and ``places`` says where each of them diverges. They are
    None and empty if the request did not ask for reasons. So is ``diagnostics``. ``computes`` says that the
    engine loads nothing for this request.
    """

    explanations: Sequence[Explanation] | None = None
    places: Sequence[Json] = ()
    diagnostics: Json | None = None
    computes: bool = False

    def spent(self, usage: Json, reused: Sequence[int]) -> Json:
        """Return the last fields of an answer. ``reused`` is how many tokens of each prompt came from the
        cache."""
        spent: Json = {"usage": usage}
        if self.explanations is not None:
            numbered = enumerate(zip(self.explanations, self.places, reused, strict=True))
            misses = [miss for number, each in numbered for miss in self._misses(number, *each)]
            spent["usage"] = {**usage, "prompt_cache_misses": misses}
        if self.diagnostics is not None:
            spent["prompt_cache_diagnostics"] = self.diagnostics
        return spent

    def _misses(self, number: int, explanation: Explanation, place: Json, reused: int) -> list[Json]:
        """Return why tokens of one prompt were missed. ``prompt`` is the prompt's number if the request has
        several prompts."""
        assert self.explanations is not None
        of = {"prompt": number} if len(self.explanations) > 1 else {}
        misses = missed(explanation, reused, computes=self.computes)
        return [{**of, **miss_document(each, place if each.at is not None else {})} for each in misses]


# -- the comparison of two prompts -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeptMessage:
    """A message as the chat template sees it."""

    role: str
    text: str
    name: str | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """A kept prompt, with which later prompts are compared: a chat, or a completion's text. ``text`` is None
    for a chat and for token ids."""

    tokens: bytes
    messages: tuple[KeptMessage, ...] = ()
    options: Mapping[str, Scalar] = field(default_factory=dict)
    text: str | None = None

    @classmethod
    def of_chat(
        cls, tokens: list[int], messages: Sequence[ChatMessage], options: Mapping[str, Scalar] | None
    ) -> KeptPrompt:
        kept = tuple(KeptMessage(each.role, each.text, each.name, each.tool_call_id) for each in messages)
        return cls(encode_tokens(tokens), kept, dict(options or {}))

    @classmethod
    def of_text(cls, tokens: list[int], asked: str | list[int]) -> KeptPrompt:
        return cls(encode_tokens(tokens), text=asked if isinstance(asked, str) else None)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def nbytes(self) -> int:
        """Return about how much memory the kept prompt takes."""
        texts = [each.text for each in self.messages]
        texts += [
            self.text or "",
            *self.options,
            *(each for each in self.options.values() if isinstance(each, str)),
        ]
        return len(self.tokens) + sum(map(sys.getsizeof, texts)) + _MESSAGE_BYTES * (1 + len(self.messages))


class KeptPrompts:
    """The last prompts of a server, by the id of their answer. Use it on one event loop.

    Each prompt belongs to the API key that its client sent, and is found only with this key.
    """

    def __init__(self, *, most_prompts: int = MOST_PROMPTS, most_bytes: int = MOST_BYTES) -> None:
        self._most_prompts = most_prompts
        self._most_bytes = most_bytes
        self._prompts: OrderedDict[tuple[bytes, str], KeptPrompt] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, key: str, response_id: str, prompt: KeptPrompt) -> None:
        """Keep a prompt. The oldest prompts are dropped if the limits are exceeded."""
        self._prompts[_owned(key, response_id)] = prompt
        self.nbytes += prompt.nbytes
        while len(self._prompts) > self._most_prompts or self.nbytes > self._most_bytes:
            _, gone = self._prompts.popitem(last=False)
            self.nbytes -= gone.nbytes

    def find(self, key: str, response_id: str) -> KeptPrompt | None:
        """Return the prompt of an answer; None if it is unknown, or belongs to another key."""
        return self._prompts.get(_owned(key, response_id))


def compare(
    kept: KeptPrompt,
    current: KeptPrompt,
    messages_alone: Callable[[int], int],
    place: Callable[[int, Sequence[int]], Json],
) -> Json:
    """Return ``prompt_cache_diagnostics``: whether a prompt continues, repeats or shortens an earlier one, or
    where it differs.

    ``messages_alone(count)`` returns how many tokens the first ``count`` messages of the current chat have
    without the beginning of an answer. ``place(token, held_tokens)`` is :func:`place_document` of the current
    prompt.
    """
    common = common_tokens(kept.tokens, current.tokens)
    if common in (kept.num_tokens, current.num_tokens):
        return _SAME
    difference = _difference(kept, current, common, messages_alone, place)
    if difference is None:
        return _SAME
    return {
        "type": "cache_miss",
        "reason": "input_changed",
        "cache_missed_tokens": current.num_tokens - common,
        "comparison_reusable_tokens": kept.num_tokens,
        "at": common,
        **difference,
    }


def _difference(
    kept: KeptPrompt,
    current: KeptPrompt,
    common: int,
    messages_alone: Callable[[int], int],
    place: Callable[[int, Sequence[int]], Json],
) -> Json | None:
    """Return where two prompts differ whose tokens differ after ``common`` tokens. Return None if they differ
    only because the earlier prompt ends with the beginning of an answer and the current one has the whole
    answer there."""
    if not kept.messages or not current.messages:
        if kept.text is None or current.text is None:
            return {"detail": f"the prompt differs at token {common}"}
        character = common_length(kept.text, current.text)
        return {"character": character, "detail": f"the prompt differs at character {character}"}
    found: Json = {}
    details = []
    pairs = zip(kept.messages, current.messages, strict=False)
    number = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
    if number is not None:
        found, detail = _message_difference(number, kept.messages[number], current.messages[number])
        details.append(detail)
    options = {*kept.options.items()} ^ {*current.options.items()}
    if options:
        names = sorted({name for name, _ in options})
        found["chat_template_kwargs"] = names
        details.append(f"chat_template_kwargs differ in {', '.join(names)}")
    if not details:
        # The last token before an answer may merge with the answer's first token.
        if common >= messages_alone(min(len(kept.messages), len(current.messages))) - 1:
            return None
        held = kept.tokens[common * TOKEN_BYTES : (common + CONTEXT_TOKENS) * TOKEN_BYTES]
        found = place(common, np.frombuffer(held, TOKEN_DTYPE).tolist())
        what = f"message {found['message']} ({found['role']})" if found else "equal messages"
        details.append(f"the chat template renders {what} differently from token {common} on")
    return {**found, "detail": "; ".join(details)}


def _message_difference(number: int, one: KeptMessage, other: KeptMessage) -> tuple[Json, str]:
    found: Json = {"message": number, "role": other.role}
    what = f"message {number} ({other.role})"
    if one.role != other.role:
        return found, f"{what} had the role {one.role}"
    if one.text == other.text:
        return found, f"{what} differs in its name or tool_call_id"
    character = common_length(one.text, other.text)
    return {**found, "character": character}, f"{what} differs at character {character}"


def _owned(key: str, response_id: str) -> tuple[bytes, str]:
    return hashlib.sha256(key.encode(errors="replace")).digest(), response_id
