"""Answers to clients as OpenAI's objects, complete or in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierstore_engine.outputs import Completion, RequestMetrics, StepLogprobs, StepOutput, TokenLogprob
from tierstore_engine.tokenizer import Detokenizer, Tokenizer

Json = dict[str, Any]


def usage(prompts: Iterable[RequestMetrics], generated: int) -> Json:
    """Return OpenAI's usage object. ``prompts`` has the metrics of one continuation of each prompt.

    Cached tokens are prompt tokens whose KV came from the cache. This server also counts them by tier.
    """
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
    """The answer to one request to ``model``.

    Choices are numbered as the client sees them: the first ``n`` belong to the first of ``prompts``.
    ``spent`` are the last fields of an answer: ``usage``, and the fields that the client asked for.
    ``echoes`` has the text of each prompt if the text of its choices begins with it, and is empty otherwise.
    """

    prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        *,
        prompts: Sequence[Sequence[int]],
        n: int,
        logprobs: bool,
        include_usage: bool,
        echoes: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._n = n
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._echoes = echoes
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def id(self) -> str:
        """Return the id by which later requests name this answer."""
        return str(self._head["id"])

    def whole(self, completions: Sequence[Completion], spent: Json) -> Json:
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return {**self._head, "object": self.whole_kind, "choices": choices, **spent}

    def opening(self, index: int) -> Json | None:
        """Return the chunk before a choice's first token. Return None if this kind of answer has no such
        chunk."""
        return None

    def chunk(self, index: int, output: StepOutput) -> Json | None:
        """Return the chunk for a step's output; None if the step added nothing visible."""
        if not (output.text or output.finished or (self._logprobs and output.logprobs)):
            return None
        return self._chunk([self._piece(index, output)])

    def closing(self, spent: Json, handed: Json) -> Json | None:
        """Return the last chunk. It has ``spent`` if the client asked for the usage, and ``handed``, the
        fields for the engine that continues the prompt. None without either."""
        fields = {**(spent if self._include_usage else {}), **handed}
        return {**self._chunk([]), **fields} if fields else None

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _names(self, tokens: Sequence[TokenLogprob]) -> list[str]:
        """Name each token by its text. If several tokens have the same text, such as parts of characters,
        only the first gets it as its name. The names of the other tokens are their bytes or ids."""
        names: list[str] = []
        for each in tokens:
            data = self._tokenizer.token_bytes(each.token)
            by_bytes = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            wanted = (self._tokenizer.token_text(each.token), *((by_bytes,) if data else ()))
            names.append(next((name for name in wanted if name not in names), f"token_id:{each.token}"))
        return names

    @abstractmethod
    def _choice(self, index: int, completion: Completion) -> Json: ...

    @abstractmethod
    def _piece(self, index: int, output: StepOutput) -> Json: ...


@dataclass
class _Offsets:
    """The offsets of a choice's tokens in its text. ``waiting`` are the tokens that were not reported yet,
    and ``told`` is the number of reported ones."""

    detokenizer: Detokenizer
    waiting: list[StepLogprobs] = field(default_factory=list)
    told: int = 0
    shown: int = 0  # characters

    def take(
        self, text: str, entries: Sequence[StepLogprobs], *, ended: bool
    ) -> list[tuple[StepLogprobs, int]]:
        """Add a step's output. Return the tokens that begin within the text so far, with their offsets.

        At the end all remaining tokens are returned. Tokens cut off by a stop string begin at the end of the
        text.
        """
        self.shown += len(text)
        for entry in entries:
            self.detokenizer.push(entry.chosen.token)
            self.waiting.append(entry)
        if ended:
            self.detokenizer.flush()
        starts = self.detokenizer.starts[self.told :]
        ready = [start for start in starts if ended or start < self.shown]
        found = [(entry, min(start, self.shown)) for entry, start in zip(self.waiting, ready, strict=False)]
        self.told += len(found)
        del self.waiting[: len(found)]
        return found


class TextAnswer(Answer):
    """The answer to ``/v1/completions``."""

    prefix = "cmpl"
    whole_kind = chunk_kind = "text_completion"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._offsets: dict[int, _Offsets] = {}  # by choice

    def chunk(self, index: int, output: StepOutput) -> Json | None:
        piece = self._piece(index, output)
        seen = output.text or output.finished or (self._logprobs and piece["logprobs"]["tokens"])
        return self._chunk([piece]) if seen else None

    def opening(self, index: int) -> Json | None:
        echo = self._echo(index)
        choice = {"index": index, "text": echo, "logprobs": None, "finish_reason": None}
        return self._chunk([choice]) if echo else None

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._n] if self._echoes else ""

    def _choice(self, index: int, completion: Completion) -> Json:
        return {
            "index": index,
            "text": self._echo(index) + completion.text,
            "logprobs": self._table(index, completion.text, completion.logprobs, ended=True),
            "finish_reason": completion.finish_reason.value,
        }

    def _piece(self, index: int, output: StepOutput) -> Json:
        return {
            "index": index,
            "text": output.text,
            "logprobs": self._table(index, output.text, output.logprobs, ended=output.finished),
            "finish_reason": output.completion.finish_reason.value if output.completion else None,
        }

    def _table(self, index: int, text: str, entries: Sequence[StepLogprobs], *, ended: bool) -> Json | None:
        if not self._logprobs:
            return None
        offsets = self._offsets.get(index)
        if offsets is None:
            detokenizer = self._tokenizer.detokenizer(self._prompts[index // self._n])
            offsets = self._offsets[index] = _Offsets(detokenizer)
        found = offsets.take(text, entries, ended=ended)
        return {
            "tokens": [self._tokenizer.token_text(entry.chosen.token) for entry, _ in found],
            "token_logprobs": [entry.chosen.logprob for entry, _ in found],
            "top_logprobs": [
                {name: each.logprob for name, each in zip(self._names(entry.top), entry.top, strict=True)}
                for entry, _ in found
            ],
            "text_offset": [start for _, start in found],
        }


class ChatAnswer(Answer):
    """The answer to ``/v1/chat/completions``."""

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
                {
                    **self._entry(entry.chosen, self._tokenizer.token_text(entry.chosen.token)),
                    "top_logprobs": list(map(self._entry, entry.top, self._names(entry.top))),
                }
                for entry in entries
            ]
        }

    def _entry(self, token: TokenLogprob, name: str) -> Json:
        data = self._tokenizer.token_bytes(token.token)
        return {"token": name, "logprob": token.logprob, "bytes": list(data)}
