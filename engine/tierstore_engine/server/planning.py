"""Make the engine's prompts from a parsed request, and the answer's choices from the engine's outputs. The
server and batches use this module."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace

from tierstore.errors import TierStoreError, UsageError
from tierstore.tiers.device import DeviceMemoryError
from tierstore.types import Promise
from tierstore_engine.config import ModelConfig
from tierstore_engine.engine import Engine, EngineStalledError
from tierstore_engine.errors import DeadlineError
from tierstore_engine.images import PromptImage
from tierstore_engine.limits import check_length, check_tokens
from tierstore_engine.outputs import Completion, FinishReason, RequestId, StepOutput
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.server.chat import ChatTemplate
from tierstore_engine.server.defaults import SamplingDefaults
from tierstore_engine.server.diagnostics import KeptPrompt
from tierstore_engine.server.errors import ApiError, bad_request
from tierstore_engine.server.pictures import check_count, read_image
from tierstore_engine.server.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
    checked_hint,
)
from tierstore_engine.server.responses import Json, usage
from tierstore_engine.server.settings import ServerSettings
from tierstore_engine.stepping import EngineClosedError
from tierstore_engine.tokenizer import Tokenizer
from tierstore_engine.vision import Vision

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedRequest:
    """A request whose prompts are token ids, ready for the engine."""

    prompts: list[list[int]]
    params: SamplingParams
    samples: int
    request: GenerationRequest
    session: str | None
    ttft_slo_s: float | None
    promise: Promise | None
    kept: KeptPrompt | None  # the prompt for later comparisons; None if there are several prompts
    # the text of each prompt, if its choices begin with this text
    echoes: list[str] = field(default_factory=list)
    images: tuple[PromptImage, ...] = ()  # those of a chat

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts))

    def add(self, engine: Engine) -> list[RequestId]:
        """Add all prompts to the engine, or none. Call it on the engine's thread."""
        ids: list[RequestId] = []
        try:
            for number, prompt in enumerate(self.prompts):
                ids += self._add_one(engine, prompt, number * self.samples)
        except BaseException:
            engine.discard(*ids)
            raise
        return ids

    def _add_one(self, engine: Engine, prompt: list[int], number: int) -> list[RequestId]:
        cache, seed = self.request.cache, self.params.seed
        params = self.params if seed is None else replace(self.params, seed=seed + number)
        first = engine.add(
            prompt,
            params,
            session=self.session,
            hint=checked_hint(self.request),
            save=not cache.no_save,
            priority=self.request.priority or 0,
            ttft_slo_s=self.ttft_slo_s,
            promise=self.promise,
            adapter=self.request.model if self.request.model in engine.adapters else None,
            images=self.images,
        )
        others = range(1, self.samples)
        return [
            first,
            *(engine.fork(first, seed=None if seed is None else seed + number + other) for other in others),
        ]


@dataclass
class Choices:
    """The outputs of a job, by continuation."""

    ids: list[RequestId]
    samples: int
    completions: dict[RequestId, Completion] = field(default_factory=dict)

    def index(self, output: StepOutput) -> int:
        return self.ids.index(output.request_id)

    def note(self, output: StepOutput) -> None:
        if output.completion is not None:
            self.completions[output.request_id] = output.completion

    def check_ended(self) -> None:
        """Raise :class:`ApiError` if a continuation was cut off."""
        for completion in self.completions.values():
            if completion.error is not None:
                raise ApiError(500, completion.error)
            if cut_off(completion):
                raise ApiError(503, "the server is shutting down", retry_after_s=1)

    @property
    def firsts(self) -> list[Completion]:
        """Return one continuation of each prompt: the one that computed the prompt."""
        return [self.completions[request_id] for request_id in self.ids[:: self.samples]]

    def usage(self) -> Json:
        generated = sum(len(completion.tokens) for completion in self.completions.values())
        return usage((completion.metrics for completion in self.firsts), generated)

    @property
    def reused(self) -> list[int]:
        """Return how many tokens of each prompt came from the cache."""
        return [completion.metrics.reused_tokens for completion in self.firsts]

    def best(self, n: int) -> list[Completion]:
        """Return the ``n`` likeliest continuations (per token) of each prompt, in the order of the
        prompts."""
        found = []
        for start in range(0, len(self.ids), self.samples):
            group = [self.completions[request_id] for request_id in self.ids[start : start + self.samples]]
            found += sorted(group, key=_mean_logprob, reverse=True)[:n] if n < len(group) else group
        return found


class RequestPlanner:
    """Turn requests into prompts of token ids and sampling parameters, within the limits of ``settings`` and
    of a model with ``positions``. Thread-safe: tokenizing a long text takes seconds, so that callers may
    use other threads."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: SamplingDefaults,
        settings: ServerSettings,
        *,
        positions: int,
        vision: Vision | None = None,
    ) -> None:
        """``vision`` processes the model's images; None if the model takes none."""
        self._vision = vision
        self._config = config
        self._tokenizer = tokenizer
        self._template = template
        self._defaults = defaults
        self._settings = settings
        self._positions = positions

    def text(self, request: CompletionRequest, session: str | None) -> PlannedRequest:
        asked = request.prompts
        self._check_choices(len(asked) * request.samples)
        encode = self._tokenizer.encode
        prompts = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked]
        room = self._room(prompts)
        asked_tokens = 16 if request.max_tokens is None else request.max_tokens
        best_of = request.samples > request.choices
        params = request.sampling(
            self._defaults,
            max_new_tokens=self._new_tokens(asked_tokens, room),
            logprobs=0 if request.logprobs is None and best_of else request.logprobs,
        )
        decode = self._tokenizer.decode
        echoes = [each if isinstance(each, str) else decode(each) for each in asked] if request.echo else []
        kept = KeptPrompt.of_text(prompts[0], asked[0]) if len(prompts) == 1 else None
        return self._planned(request, session, prompts, params, kept, echoes)

    def chat(self, request: ChatRequest, session: str | None) -> PlannedRequest:
        self._check_choices(request.choices)
        tokens_of, images = self._chat_tokens(request, embed=True)
        prompts = [tokens_of]
        room = self._room(prompts)
        asked = request.max_completion_tokens or request.max_tokens
        tokens = min(room, self._settings.max_new_tokens) if asked is None else self._new_tokens(asked, room)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        params = request.sampling(self._defaults, max_new_tokens=tokens, logprobs=logprobs)
        if images:
            return replace(self._planned(request, session, prompts, params, None, []), images=images)
        kept = KeptPrompt.of_chat(prompts[0], request.messages, request.chat_template_kwargs)
        return self._planned(request, session, prompts, params, kept, [])

    def _planned(
        self,
        request: GenerationRequest,
        session: str | None,
        prompts: list[list[int]],
        params: SamplingParams,
        kept: KeptPrompt | None,
        echoes: list[str],
    ) -> PlannedRequest:
        slo_s = self._settings.ttft_slo_s if request.ttft_slo_s is None else request.ttft_slo_s
        promise = request.promise(prompts)
        return PlannedRequest(
            prompts, params, request.samples, request, session, slo_s, promise, kept, echoes
        )

    def tokens_of(self, request: TokenizeRequest) -> list[int]:
        if request.prompt is not None:
            return self._tokenizer.encode(request.prompt)
        return self._chat_tokens(request, embed=False)[0]

    def _chat_tokens(
        self, request: ChatRequest | TokenizeRequest, *, embed: bool
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the tokens of a chat, and with ``embed`` its images. Raises :class:`ApiError` for images
        that are not read, and the errors of :class:`~tierstore_engine.vision.Vision`.

        Each image is encoded before the next one is decoded, so that the pixels of only one are in memory.
        """
        text, urls = self.chat_text(request), request.images
        tokens = self._tokenizer.encode(text, begin=False)
        if not urls:
            return tokens, ()
        if self._vision is None:
            raise bad_request("this model takes no images here: send text only", param="messages")
        check_count(urls)
        self._vision.check_text(text, len(urls))
        rows, images, count = list[int](), list[PromptImage](), len(tokens)
        for url in urls:
            processed = self._vision.process(read_image(url))
            rows.append(processed.tokens)
            count += processed.tokens
            check_length(count, self._positions)
            if embed:
                images.append(self._vision.embed(processed))
        tokens = self._tokenizer.encode(self._vision.expanded(text, rows), begin=False)
        starts = self._vision.places(tokens, rows)
        return tokens, tuple(
            replace(image, start=start) for image, start in zip(images, starts, strict=False)
        )

    def chat_text(self, request: ChatRequest | TokenizeRequest, count: int | None = None) -> str:
        """Return the text of a chat; with ``count`` that of its first messages, without the beginning of an
        answer."""
        if self._template is None:
            raise bad_request("this model has no chat template: use /v1/completions, or --chat-template")
        messages = (request.messages or [])[:count]
        return self._template.render(messages, request.chat_template_kwargs, answer=count is None)

    def _room(self, prompts: list[list[int]]) -> int:
        """Return how many new tokens fit after the longest prompt. Raises :class:`RequestError` if none
        do."""
        for prompt in prompts:
            check_tokens(prompt, vocab_size=self._config.prompt_tokens, limit=self._positions)
        return self._positions - max(map(len, prompts))

    def _check_choices(self, count: int) -> None:
        most = self._settings.max_choices
        if count > most:
            raise bad_request(
                f"{count} continuations are too many: the limit is {most} per request", param="n"
            )

    def _new_tokens(self, asked: int, room: int) -> int:
        """Return the number of new tokens. Raises :class:`ApiError` above the limit."""
        if asked > self._settings.max_new_tokens:
            raise bad_request(
                f"max_tokens must be at most {self._settings.max_new_tokens}, got {asked}",
                param="max_tokens",
            )
        return min(asked, room)


def cut_off(completion: Completion | None) -> bool:
    """Return whether a continuation was cut off."""
    return completion is not None and completion.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR)


def _mean_logprob(completion: Completion) -> float:
    chosen = [entry.chosen.logprob for entry in completion.logprobs]
    return sum(chosen) / max(len(chosen), 1)


def api_error(error: Exception) -> ApiError:
    """Return the error for the client. An unexpected exception is also logged."""
    match error:
        case ApiError():
            return error
        case DeadlineError(retry_after_s=None):
            return ApiError(503, str(error))
        case DeadlineError(retry_after_s=after_s):
            return ApiError(429, str(error), retry_after_s=max(math.ceil(after_s or 0.0), 1))
        case UsageError():
            return bad_request(str(error))
        case EngineStalledError() | EngineClosedError() | DeviceMemoryError():
            return ApiError(503, str(error), retry_after_s=1)
        case TierStoreError():
            return ApiError(500, str(error))
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "internal server error: see the server's log")
