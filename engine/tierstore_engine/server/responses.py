"""What a client is answered: OpenAI's objects, whole or in pieces."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tierstore_engine.outputs import Completion, RequestMetrics, StepLogprobs, StepOutput, TokenLogprob
from tierstore_engine.tokenizer import Tokenizer

Json = dict[str, Any]


def usage(prompts: Iterable[RequestMetrics], generated: int) -> Json:
    """``prompts``: of one continuation of each. Cached tokens are those whose KV came out of the cache, here
    also by the tier that held them."""
    by_tier: Counter[str] = Counter()
    prompt_tokens = 0
    for metrics in prompts:
        prompt_tokens += metrics.prompt_tokens
        by_tier.update({tier: tokens for tier, tokens in metrics.reused_by_tier.items() if tokens})
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {
            "cached_tokens": by_tier.total(),
            "cached_tokens_by_tier": dict(by_tier),
        },
    }


class Answer(ABC):
    """The answer to one request, about ``model``. Choices are numbered as the client sees them."""

    prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(self, model: str, tokenizer: Tokenizer, *, logprobs: bool, include_usage: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, completions: Sequence[Completion], spent: Json) -> Json:
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return {**self._head, "object": self.whole_kind, "choices": choices, "usage": spent}

    def opening(self, index: int) -> Json | None:
        """What comes before a choice's first token, if anything does."""
        return None

    def chunk(self, index: int, output: StepOutput) -> Json | None:
        """What a step added to a choice; None where that cannot be seen."""
        if not (output.text or output.finished or (self._logprobs and output.logprobs)):
            return None
        return self._chunk([self._piece(index, output)])

    def closing(self, spent: Json) -> Json | None:
        """The last chunk, where the client asked for it."""
        return {**self._chunk([]), "usage": spent} if self._include_usage else None

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        return {**chunk, "usage": None} if self._include_usage else chunk

    @abstractmethod
    def _choice(self, index: int, completion: Completion) -> Json: ...

    @abstractmethod
    def _piece(self, index: int, output: StepOutput) -> Json: ...


class TextAnswer(Answer):
    """To ``/v1/completions``."""

    prefix = "cmpl"
    whole_kind = chunk_kind = "text_completion"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._offsets: Counter[int] = Counter()  # characters so far, by choice

    def _choice(self, index: int, completion: Completion) -> Json:
        return {
            "index": index,
            "text": completion.text,
            "logprobs": self._table(index, completion.logprobs),
            "finish_reason": completion.finish_reason.value,
        }

    def _piece(self, index: int, output: StepOutput) -> Json:
        return {
            "index": index,
            "text": output.text,
            "logprobs": self._table(index, output.logprobs),
            "finish_reason": output.completion.finish_reason.value if output.completion else None,
        }

    def _table(self, index: int, entries: Sequence[StepLogprobs]) -> Json | None:
        if not self._logprobs:
            return None
        texts = [self._text(entry.chosen) for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.chosen.logprob for entry in entries],
            "top_logprobs": [{self._text(each): each.logprob for each in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _text(self, token: TokenLogprob) -> str:
        return self._tokenizer.decode([token.token])


class ChatAnswer(Answer):
    """To ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _choice(self, index: int, completion: Completion) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": self._table(completion.logprobs),
            "finish_reason": completion.finish_reason.value,
        }

    def _piece(self, index: int, output: StepOutput) -> Json:
        return {
            "index": index,
            "delta": {"content": output.text} if output.text else {},
            "logprobs": self._table(output.logprobs),
            "finish_reason": output.completion.finish_reason.value if output.completion else None,
        }

    def _table(self, entries: Sequence[StepLogprobs]) -> Json | None:
        if not self._logprobs:
            return None
        return {
            "content": [
                {**self._entry(entry.chosen), "top_logprobs": [self._entry(each) for each in entry.top]}
                for entry in entries
            ]
        }

    def _entry(self, token: TokenLogprob) -> Json:
        data = self._tokenizer.token_bytes(token.token)
        return {
            "token": self._tokenizer.decode([token.token]),
            "logprob": token.logprob,
            "bytes": list(data) if data is not None else None,
        }
