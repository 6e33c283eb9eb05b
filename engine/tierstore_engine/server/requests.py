"""Requests as types.

Unknown fields and values out of range are refused with the field's name, so that the server ignores no field
without telling the client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from tierstore.errors import UsageError
from tierstore.types import HANDOVER_S, MOST_HANDOVER_S, Hint, Promise, Reuse
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.server.defaults import (
    MinP,
    RepetitionPenalty,
    SamplingDefaults,
    Temperature,
    TopK,
    TopP,
)
from tierstore_engine.server.errors import ApiError, bad_request
from tierstore_engine.server.http import decode_json

T = TypeVar("T", int, float)
R = TypeVar("R", bound="GenerationRequest")
P = TypeVar("P", bound="GenerationRequest | TokenizeRequest | PoolRequest")

# Every string, list and map has a limit. A prompt of a million tokens fits.
Name: TypeAlias = Annotated[str, Meta(max_length=1 << 12)]
Text: TypeAlias = Annotated[str, Meta(max_length=1 << 26)]
TemplateArguments: TypeAlias = Annotated[dict[Name, Name | bool | int | float | None], Meta(max_length=256)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=1 << 21)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Stop: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=20)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """``include_usage`` asks for a last chunk with the usage of the whole request."""

    include_usage: bool | None = None


class CacheHints(Struct, forbid_unknown_fields=True, frozen=True):
    """Hints about the future of this prompt's pages (:class:`tierstore.types.Hint`).

    ``no_save`` stores nothing that this request computes. ``tokens`` and ``until_s`` are another engine's
    :class:`~tierstore.types.Promise`.
    """

    ttl_s: Annotated[float, Meta(ge=0)] | None = None
    reuse: Reuse | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    no_save: bool = False
    tokens: Annotated[int, Meta(ge=0, le=1 << 32)] | None = None
    until_s: Annotated[float, Meta(ge=0, le=MOST_HANDOVER_S)] | None = None

    def hint(self, *, elsewhere: bool) -> Hint | None:
        if self.ttl_s is None and self.reuse is None and not self.priority and not elsewhere:
            return None
        return Hint(ttl_s=self.ttl_s, reuse=self.reuse, priority=self.priority, elsewhere=elsewhere)


class KVTransferParams(Struct, forbid_unknown_fields=True):
    """vLLM's transfer parameters: ``{"tierstore": {…}}``, and the parameters of both engines in a hand-over
    (:mod:`tierstore_connectors.common.handover`). Fields of vLLM's other connectors must be null."""

    tierstore: CacheHints = CacheHints()
    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: None = None
    remote_block_ids: None = None
    remote_host: None = None
    remote_port: None = None
    remote_request_id: None = None

    def check(self) -> None:
        """Check the combination of fields. Raises :class:`ApiError`."""
        ours = self.tierstore
        if self.do_remote_decode and self.do_remote_prefill:
            raise _no_handover("do_remote_decode cannot be combined with do_remote_prefill")
        if not self.do_remote_prefill and (ours.tokens is not None or ours.until_s is not None):
            raise _no_handover("tierstore.tokens and until_s need do_remote_prefill: true")

    @property
    def promise(self) -> Promise | None:
        """Return the promise of the engine that computes the prompt."""
        ours = self.tierstore
        if not self.do_remote_prefill or not ours.tokens:
            return None
        return Promise(ours.tokens, HANDOVER_S if ours.until_s is None else ours.until_s)


class PromptCacheOptions(Struct, forbid_unknown_fields=True):
    """OpenAI's options of the prompt cache. ``comparison_response_id`` is the id of an earlier answer, with
    whose prompt this one is compared."""

    comparison_response_id: Name | None = None
    mode: Literal["implicit"] | None = None
    ttl: None = None


class GenerationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of both kinds of completion. ``null`` is the same as leaving a field out.

    ``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos``, ``stop_token_ids``, ``priority`` (lower ones
    come first) and ``kv_transfer_params`` are vLLM's extensions of OpenAI's API. Two fields exist in this
    server only. A request whose first token cannot be ready within ``ttft_slo_s`` seconds is refused. With
    ``explain_cache``, the usage says why prompt tokens were not cached.
    """

    model: Name
    n: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[Name, Bias], Meta(max_length=1024)] | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None
    kv_transfer_params: KVTransferParams | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    ttft_slo_s: Annotated[float, Meta(gt=0, le=86400)] | None = None
    explain_cache: bool | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @property
    def compared_with(self) -> str | None:
        """Return the id of the earlier answer with whose prompt this prompt is compared."""
        options = self.prompt_cache_options
        return options.comparison_response_id if options is not None else None

    @property
    def cache(self) -> CacheHints:
        return self.kv_transfer_params.tierstore if self.kv_transfer_params is not None else CacheHints()

    @property
    def hands_over(self) -> bool:
        """Return whether another engine continues the prompt."""
        return self.kv_transfer_params is not None and self.kv_transfer_params.do_remote_decode

    def promise(self, prompts: Sequence[Sequence[int]]) -> Promise | None:
        """Return another engine's promise for the request's prompt. Raises :class:`ApiError` for a promise of
        more tokens than the prompt has, and for a hand-over of several prompts."""
        params = self.kv_transfer_params
        promise = params.promise if params is not None else None
        if len(prompts) > 1 and (promise is not None or self.hands_over):
            raise _no_handover(f"a hand-over needs exactly one prompt, got {len(prompts)}")
        if promise is not None and promise.tokens > len(prompts[0]):
            raise _no_handover(
                f"tierstore.tokens is {promise.tokens}, but the prompt has {len(prompts[0])} tokens"
            )
        return promise

    @property
    def choices(self) -> int:
        """Return how many continuations of each prompt the answer has."""
        return self.n or 1

    @property
    def samples(self) -> int:
        """Return how many continuations of each prompt are computed."""
        return self.choices

    @property
    def images(self) -> list[str]:
        """Return the URLs of all images."""
        return []

    @property
    def wants_logprobs(self) -> bool:
        return False

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Check the combination of fields. Raises :class:`ApiError`."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true", param="stream_options")
        if self.stream and not self.include_usage:
            for name, asked in (
                ("explain_cache", self.explain_cache),
                ("prompt_cache_options", self.compared_with is not None),
            ):
                if asked:
                    raise bad_request(
                        f"{name} of a stream is answered in its last chunk: set "
                        "stream_options.include_usage to true",
                        param=name,
                    )
        if self.kv_transfer_params is not None:
            self.kv_transfer_params.check()

    def sampling(
        self, defaults: SamplingDefaults, *, max_new_tokens: int, logprobs: int | None
    ) -> SamplingParams:
        """Return the request's sampling parameters, with ``defaults`` for those that it leaves out.

        Raises :class:`~tierstore_engine.errors.RequestError` for values out of range.
        """
        stops = self.stop or ()
        top_k = _given(self.top_k, defaults.top_k)
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=_given(self.temperature, defaults.temperature),
            top_k=max(top_k, 0),
            top_p=_given(self.top_p, defaults.top_p),
            min_p=_given(self.min_p, defaults.min_p),
            seed=self.seed,
            stop=(stops,) if isinstance(stops, str) else tuple(stops),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=_given(self.repetition_penalty, defaults.repetition_penalty),
            logit_bias=_token_biases(self.logit_bias or {}),
        )


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/completions``. A prompt is text or token ids. The choices of several prompts follow each
    other in ``choices``. With ``echo`` each choice begins with its prompt's text."""

    prompt: Text | Annotated[list[Text | TokenId | TokenIds], Meta(max_length=1 << 21)]
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    suffix: None = None

    @property
    def samples(self) -> int:
        return self.best_of or self.choices

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of < self.choices:
            raise bad_request(
                f"best_of ({self.best_of}) must be at least n ({self.choices})", param="best_of"
            )
        if self.echo and self.logprobs is not None:
            raise bad_request(
                "echo cannot be combined with logprobs: only generated tokens have log probabilities",
                param="echo",
            )
        if self.stream and self.samples > self.choices:
            raise bad_request("best_of cannot be streamed: the best is known at the end", param="best_of")

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each as text or token ids. Raises :class:`ApiError` if token ids and prompts
        are mixed."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [each for each in self.prompt if not isinstance(each, int)]
        if not several and self.prompt:
            return [[each for each in self.prompt if isinstance(each, int)]]
        if len(several) < len(self.prompt):
            raise bad_request(
                "prompt must be a list of token ids or a list of prompts, not both", param="prompt"
            )
        if not several:
            raise bad_request("prompt is empty: give text or token ids", param="prompt")
        return several


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Text content."""

    text: Text


class ImageUrl(Struct, forbid_unknown_fields=True):
    """An image as a ``data:`` URL. The model's processor decides its size, so ``detail`` has one value."""

    url: Text
    detail: Literal["auto"] | None = None


class ImagePart(Struct, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    """An image."""

    image_url: ImageUrl


class ChatMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn of a conversation. An earlier answer is accepted in the form in which OpenAI's client sends it
    back, if it is text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart | ImagePart], Meta(max_length=1 << 16)] | None = None
    name: Name | None = None
    tool_call_id: Name | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content if isinstance(part, TextPart))
        return self.content or ""

    @property
    def images(self) -> list[str]:
        """Return the URLs of the message's images."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]


Messages: TypeAlias = Annotated[list[ChatMessage], Meta(min_length=1, max_length=1 << 16)]


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text"] = "text"


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/chat/completions``. OpenAI's fields that this server does not support have type None:
    clients may send them as ``null``."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateArguments | None = None
    audio: None = None
    function_call: None = None
    functions: None = None
    metadata: None = None
    modalities: None = None
    moderation: None = None
    parallel_tool_calls: None = None
    prediction: None = None
    prompt_cache_key: None = None
    prompt_cache_retention: None = None
    reasoning_effort: None = None
    safety_identifier: None = None
    service_tier: None = None
    store: None = None
    tool_choice: None = None
    tools: None = None
    verbosity: None = None
    web_search_options: None = None

    @property
    def images(self) -> list[str]:
        return _image_urls(self.messages)

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.images and (self.explain_cache or self.compared_with is not None):
            raise bad_request(
                "explain_cache and prompt_cache_options do not work with images: leave one of them out",
                param="messages",
            )


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /tokenize``, as in vLLM: returns the token ids of a prompt or a chat."""

    model: Name
    prompt: Text | None = None
    messages: Messages | None = None
    chat_template_kwargs: TemplateArguments | None = None

    @property
    def images(self) -> list[str]:
        """Return the URLs of all images."""
        return _image_urls(self.messages or [])

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either a prompt or messages", param="prompt")


class PoolRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /pool``: sets the memory for pages, such as ``{"bytes": 8589934592}``."""

    bytes: Annotated[int, Meta(ge=1)]

    def check(self) -> None:
        """Accept any size: the engine checks it."""


def parse(body: bytes, kind: type[P]) -> P:
    """Parse a request. Raises :class:`ApiError` (400) with one sentence that names the field."""
    try:
        request = decode_json(body, kind)
    except msgspec.ValidationError as error:
        sentence, _, place = str(error).partition(" - at `$")
        field = place.rstrip("`").lstrip(".") or None
        if sentence.startswith("Expected `null`, got"):
            raise bad_request(f"{field} is not supported: leave it out or send null", param=field) from None
        raise bad_request(f"{field}: {sentence}" if field else sentence, param=field) from None
    request.check()
    return request


def _image_urls(messages: Sequence[ChatMessage]) -> list[str]:
    return [url for message in messages for url in message.images]


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _no_handover(why: str) -> ApiError:
    return bad_request(f"kv_transfer_params: {why}", param="kv_transfer_params")


def _token_biases(biases: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError:
        raise bad_request("logit_bias: keys must be token ids", param="logit_bias") from None


def checked_hint(request: GenerationRequest) -> Hint | None:
    """Return the request's hint. Raises :class:`ApiError` for an invalid hint."""
    try:
        return request.cache.hint(elsewhere=request.hands_over)
    except UsageError as error:
        raise ApiError(400, str(error), param="kv_transfer_params") from None
