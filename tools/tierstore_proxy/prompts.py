"""The parts of a request that decide its route, and the requests made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tierstore_engine.server.errors import bad_request
from tierstore_engine.server.http import decode_json

# The parameters that vLLM's own proxies send to a prefill engine. They say that another engine will decode,
# and that no other engine has computed the prompt.
_FOR_DECODE: Mapping[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_HINTS = "tierstore"
_BYTES_PER_TOKEN = 4  # approximate, of text


_TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]


class Api(Enum):
    """The kinds of completion, by their path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class RoutedPrompt:
    """One prompt. ``tokens`` are its ids (uint32), None if they are unknown. If they are unknown, ``text``
    replaces them: prompts with a common beginning have texts with a common beginning."""

    tokens: npt.NDArray[np.uint32] | None
    text: bytes

    @property
    def length(self) -> int:
        """Return the length in tokens, estimated if the tokens are unknown."""
        return len(self.tokens) if self.tokens is not None else -(-len(self.text) // _BYTES_PER_TOKEN)

    @property
    def content(self) -> bytes:
        """Return the prompt's content as bytes, about four for each token."""
        return self.tokens.tobytes() if self.tokens is not None else self.text


@dataclass(frozen=True)
class Asked:
    """A request for a completion. ``body`` is the received body. ``prompt`` is None for several prompts, or
    for one that only an engine can read."""

    api: Api
    body: bytes
    fields: Mapping[str, Any]
    prompt: RoutedPrompt | None

    @classmethod
    def parse(cls, api: Api, body: bytes) -> Asked:
        """Parse a request. Raises :class:`~tierstore_engine.server.errors.ApiError` (400) if it is not a JSON
        object. Engines report all other errors themselves."""
        try:
            fields = decode_json(body, dict[str, Any])
        except msgspec.ValidationError:
            raise bad_request("the body must be a JSON object") from None
        return cls(api, body, fields, _prompt(api, fields))

    @property
    def model(self) -> str:
        model = self.fields.get("model")
        return model if isinstance(model, str) else ""

    @property
    def tokenize_body(self) -> bytes:
        """Return the body of a /tokenize request, as in vLLM."""
        names = ("model", "prompt", "messages", "chat_template_kwargs")
        return msgspec.json.encode({name: self.fields[name] for name in names if name in self.fields})

    @property
    def prefill_body(self) -> bytes:
        """Return the same request for one token, which another engine will continue."""
        dropped = ("stream_options", "min_tokens", "best_of")
        fields = {name: value for name, value in self.fields.items() if name not in dropped}
        fields |= {"stream": False, "max_tokens": 1}
        fields |= {name: 1 for name in ("max_completion_tokens", "n") if fields.get(name) is not None}
        fields["kv_transfer_params"] = {**self._hints, **_FOR_DECODE}
        return msgspec.json.encode(fields)

    def decode_body(self, params: Mapping[str, Any] | None) -> bytes:
        """Return the request with a prefill engine's ``kv_transfer_params``; unchanged if ``params`` is
        None."""
        if params is None:
            return self.body
        mine, theirs = self._hints.get(_HINTS), params.get(_HINTS)
        both = {_HINTS: {**mine, **theirs}} if isinstance(mine, dict) and isinstance(theirs, dict) else {}
        return msgspec.json.encode({**self.fields, "kv_transfer_params": {**self._hints, **params, **both}})

    @property
    def _hints(self) -> dict[str, Any]:
        """Return the client's own hints for the store's policy."""
        given = self.fields.get("kv_transfer_params")
        hints = given.get(_HINTS) if isinstance(given, dict) else None
        return {_HINTS: hints} if hints is not None else {}


def _prompt(api: Api, fields: Mapping[str, Any]) -> RoutedPrompt | None:
    if api is Api.CHAT:
        messages = fields.get("messages")
        # The closing bracket is left out, so that the text of a conversation is the beginning of the text of
        # its next turn.
        return RoutedPrompt(None, msgspec.json.encode(messages)[:-1]) if isinstance(messages, list) else None
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return RoutedPrompt(None, prompt.encode(errors="surrogatepass"))
    tokens = token_ids(prompt)
    return RoutedPrompt(tokens, b"") if tokens is not None else None


def token_ids(value: object) -> npt.NDArray[np.uint32] | None:
    """Return a list of token ids as an array; None for anything else.

    >>> token_ids([1, 2]), token_ids([1, "a"])
    (array([1, 2], dtype=uint32), None)
    """
    try:
        return np.array(msgspec.convert(value, list[_TokenId]), dtype=np.uint32) if value else None
    except msgspec.ValidationError:
        return None
