"""``tierstore-engine generate --batch``: compute all requests of a file together.

The time to a first token does not matter here, so requests are ordered for throughput. Requests with a common
beginning follow one another: the first of them computes it, and the others find its pages. The engine always
has more requests than it computes at a time, so that its steps stay full to the end. A step then reads each
weight once for all its sequences, and each page that several of them share once
(:mod:`tierstore_engine.attention.beyond`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import msgspec

from tierstore.errors import TierStoreError, UsageError
from tierstore_engine.batch_file import CHAT, BatchLine, BatchResults, read_batch
from tierstore_engine.build import open_model_of
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import OpenModel
from tierstore_engine.opening import open_draft, open_engine
from tierstore_engine.options import BatchOptions, GenerateOptions
from tierstore_engine.outputs import RequestId
from tierstore_engine.pool_sizes import pages_wanted, resident_sequences
from tierstore_engine.server.chat import ChatTemplate, load_template
from tierstore_engine.server.defaults import SamplingDefaults
from tierstore_engine.server.errors import ApiError, bad_request
from tierstore_engine.server.planning import Choices, RequestPlanner, api_error
from tierstore_engine.server.requests import ChatRequest, CompletionRequest, GenerationRequest, parse
from tierstore_engine.server.responses import Answer, ChatAnswer, TextAnswer
from tierstore_engine.server.settings import ServerSettings
from tierstore_engine.settings import EngineSettings

Request: TypeAlias = ChatRequest | CompletionRequest

_SEQUENCES = 64
_AHEAD = 16  # sequences that wait in the engine, in addition to those of a step
_SHOWN_S = 0.5, 30.0  # seconds between two outputs of the progress: on a terminal, and in a file


def run(
    options: GenerateOptions, batch: BatchOptions, *, out: TextIO | None = None, err: TextIO | None = None
) -> None:
    """Compute the requests of ``batch.batch`` that have no result yet.

    Raises :class:`~tierstore.errors.TierStoreError` with a one-line message: before weights are read for
    files and options that cannot be used, and at the end if requests have failed.
    """
    out, err = out or sys.stdout, err or sys.stderr
    assert batch.batch is not None
    entries = read_batch(batch.batch)
    opened = open_model_of(options)
    overflow = options.overflow_of(opened.device)
    names, asked = _Names.of(options, opened), _Fallbacks.of(options)
    template = load_template(opened.folder, batch.chat_template)
    spec = opened.config.kv_spec(chunk_tokens=options.chunk_tokens)
    most = _SEQUENCES if batch.max_sequences is None else batch.max_sequences
    settings = replace(options.settings(), schedule="fcfs", max_sequences=most)
    settings.check_chunk(spec.chunk_tokens)
    pages = pages_wanted(options, opened.device, spec, settings)
    if overflow is not None and pages is not None and batch.max_sequences is None:
        settings = replace(settings, max_sequences=max(resident_sequences(spec, pages, settings), 1))
    draft = open_draft(options, pages)
    results = BatchResults(batch.output, entries, out)
    try:
        progress = _Progress(len(entries), len(results.done), results.failed, err)
        todo = [_parsed(entry, names, asked) for entry in entries if entry.id not in results.done]
        if todo:
            name = options.model
            engine = open_engine(options, opened, draft, pages=pages, settings=settings, model_name=name)
            try:
                planner = _planner(engine, opened, template, asked)
                _Batch(engine, planner, settings, results, progress).run(todo)
            finally:
                engine.close()
    finally:
        results.close()
    progress.end()
    if progress.failed:
        raise TierStoreError(f"{progress.failed} of {len(entries)} requests failed: their results say why")


@dataclass(frozen=True, slots=True)
class _Names:
    """The names that a request may give to its model. ``default`` is the model of a request that names no
    model."""

    default: str
    known: frozenset[str]

    @classmethod
    def of(cls, options: GenerateOptions, opened: OpenModel) -> _Names:
        name = Path(options.model).name or options.model
        adapters = [each.name for each in opened.adapters]
        default = adapters[0] if len(adapters) == 1 else name
        return cls(default, frozenset((name, options.model, *adapters)))


@dataclass(frozen=True, slots=True)
class _Fallbacks:
    """The command's options that apply to fields that a request leaves out."""

    defaults: SamplingDefaults
    max_new_tokens: int
    seed: int | None
    stop: list[str] | None
    ignore_eos: bool

    @classmethod
    def of(cls, options: GenerateOptions) -> _Fallbacks:
        """Raises :class:`UsageError` for values out of range."""
        options.sampling()
        defaults = SamplingDefaults(options.temperature, options.top_p, options.top_k, options.min_p)
        return cls(defaults, options.max_new_tokens, options.seed, options.stop, options.ignore_eos)

    def fill(self, request: Request) -> None:
        if request.max_tokens is None and not (
            isinstance(request, ChatRequest) and request.max_completion_tokens
        ):
            request.max_tokens = self.max_new_tokens
        request.seed = self.seed if request.seed is None else request.seed
        request.stop = self.stop if request.stop is None else request.stop
        request.ignore_eos = self.ignore_eos if request.ignore_eos is None else request.ignore_eos


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A line of the batch, with its request or the reason why it is invalid. Sorting by ``order`` puts
    requests with a common beginning one after the other."""

    entry: BatchLine
    request: Request | ApiError
    order: tuple[Any, ...] = ()


def _parsed(entry: BatchLine, names: _Names, asked: _Fallbacks) -> _Parsed:
    if entry.error is not None:
        return _Parsed(entry, bad_request(entry.error))
    kind: type[Request] = ChatRequest if entry.url == CHAT else CompletionRequest
    try:
        request: Request = parse(msgspec.json.encode({"model": names.default, **entry.body}), kind)
        if request.model not in names.known:
            known = ", ".join(map(repr, sorted(names.known)))
            raise ApiError(404, f"model {request.model!r} is not one of {known}", param="model")
        _check_fields(request)
        asked.fill(request)
        return _Parsed(entry, request, _order(request))
    except ApiError as error:
        return _Parsed(entry, error)


def _check_fields(request: Request) -> None:
    """Raise :class:`ApiError` for a field that has a meaning only for a server."""
    for name in ("stream", "explain_cache", "prompt_cache_options", "ttft_slo_s"):
        if getattr(request, name):
            raise bad_request(f"{name} is not possible in a batch: leave it out", param=name)
    if request.hands_over or request.promise(()) is not None:
        raise bad_request("a hand-over is not possible in a batch", param="kv_transfer_params")


def _order(request: Request) -> tuple[Any, ...]:
    if isinstance(request, ChatRequest):
        return request.model, 0, [(message.role, message.text) for message in request.messages]
    first = request.prompts[0]
    return request.model, 1 if isinstance(first, str) else 2, first


def _planner(
    engine: Engine, opened: OpenModel, template: ChatTemplate | None, asked: _Fallbacks
) -> RequestPlanner:
    pool, config = engine.connector.pool, engine.model.config
    positions = min(config.max_positions, pool.num_pages * pool.spec.chunk_tokens)
    limits = ServerSettings(max_new_tokens=positions)
    return RequestPlanner(
        config, opened.tokenizer, template, asked.defaults, limits, positions=positions, vision=engine.vision
    )


@dataclass(slots=True)
class _RunningLine:
    """A request in the engine."""

    entry: BatchLine
    request: GenerationRequest
    answer: Answer
    choices: Choices

    @property
    def ended(self) -> bool:
        return len(self.choices.completions) == len(self.choices.ids)


class _Batch:
    """Feed requests to an engine, and write their results as they end."""

    def __init__(
        self,
        engine: Engine,
        planner: RequestPlanner,
        settings: EngineSettings,
        results: BatchResults,
        progress: _Progress,
    ) -> None:
        self._engine = engine
        self._planner = planner
        self._most = settings.max_sequences + _AHEAD
        self._results = results
        self._progress = progress
        self._running: dict[RequestId, _RunningLine] = {}
        self._found: list[dict[str, Any]] = []  # results that have not been written yet

    def run(self, todo: Sequence[_Parsed]) -> None:
        """Compute all requests. Raises :class:`OSError` if a result cannot be written."""
        self._progress.begin()
        for each in todo:
            if isinstance(each.request, ApiError):
                self._fail(each.entry, each.request)
        self._write()
        coming = iter(sorted((each for each in todo if each.order), key=lambda each: each.order))
        while self._feed(coming):
            for output in self._engine.step():
                running = self._running[output.request_id]
                self._progress.generated += len(output.tokens)
                running.choices.note(output)
                if output.completion is not None:
                    del self._running[output.request_id]
                    if running.ended:
                        self._end(running)
            self._write()

    def _feed(self, coming: Iterator[_Parsed]) -> bool:
        """Add requests until the engine has enough. Return whether it has any request."""
        while len(self._running) < self._most and (each := next(coming, None)) is not None:
            assert not isinstance(each.request, ApiError)
            try:
                self._begin(each.entry, each.request)
            except UsageError as error:
                self._fail(each.entry, api_error(error))
            except ApiError as error:
                self._fail(each.entry, error)
        return bool(self._running)

    def _begin(self, entry: BatchLine, request: Request) -> None:
        """Raises :class:`ApiError` or :class:`UsageError` for a request that this model or pool cannot
        serve."""
        kind: type[Answer]
        if isinstance(request, ChatRequest):
            kind, plan = ChatAnswer, self._planner.chat(request, None)
        else:
            kind, plan = TextAnswer, self._planner.text(request, None)
        ids = plan.add(self._engine)
        answer = kind(
            request.model,
            self._engine.tokenizer,
            prompts=plan.prompts,
            n=request.choices,
            logprobs=request.wants_logprobs,
            include_usage=False,
            echoes=plan.echoes,
        )
        running = _RunningLine(entry, request, answer, Choices(ids, plan.samples))
        self._running.update((request_id, running) for request_id in ids)

    def _end(self, running: _RunningLine) -> None:
        choices = running.choices
        try:
            choices.check_ended()
        except ApiError as error:
            self._fail(running.entry, error)
            return
        body = running.answer.whole(choices.best(running.request.choices), {"usage": choices.usage()})
        self._progress.ended(choices.usage())
        self._found.append(_result(running.entry, 200, body, None))

    def _fail(self, entry: BatchLine, error: ApiError) -> None:
        self._progress.failed += 1
        said = {"code": str(error.status), "message": str(error)}
        self._found.append(_result(entry, error.status, error.body, said))

    def _write(self) -> None:
        self._results.add(self._found)
        self._progress.done += len(self._found)
        self._found.clear()
        self._progress.show()


def _result(
    entry: BatchLine, status: int, body: Mapping[str, Any], error: Mapping[str, str] | None
) -> dict[str, Any]:
    """Return a line of OpenAI's output files."""
    response = {"status_code": status, "request_id": entry.digest, "body": body}
    return {"id": entry.digest, "custom_id": entry.id, "response": response, "error": error}


@dataclass(slots=True)
class _Progress:
    """The progress of a run: one line that changes on a terminal, or a new line now and then elsewhere."""

    total: int
    before: int
    failed: int
    err: TextIO
    done: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated: int = 0
    began: float = field(default_factory=time.monotonic)
    shown: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """Start to count seconds, because the model has been loaded."""
        self.began = time.monotonic()

    def ended(self, usage: Mapping[str, Any]) -> None:
        self.prompt_tokens += usage["prompt_tokens"]
        self.reused_tokens += usage["prompt_tokens_details"]["cached_tokens"]

    def show(self) -> None:
        now, terminal = time.monotonic(), self.err.isatty()
        if now - self.shown >= _SHOWN_S[not terminal]:
            self.shown = now
            self._say(f"\r{self._line()}\x1b[K" if terminal else f"{self._line()}\n")

    def end(self) -> None:
        """Write the summary."""
        clear = "\r\x1b[K" if self.err.isatty() else ""
        before = f" ({self.before} before this run)" if self.before else ""
        self._say(
            f"{clear}{self._line()}{before}; {self.failed} failed; prompts of {self.prompt_tokens} tokens, "
            f"{self.reused_tokens} reused; {self.generated} new tokens in {self._seconds:.1f} s\n"
        )

    @property
    def _seconds(self) -> float:
        return max(time.monotonic() - self.began, 1e-9)

    def _line(self) -> str:
        rate = self.generated / self._seconds
        return f"{self.before + self.done} of {self.total} requests, {rate:.1f} new tokens/s"

    def _say(self, text: str) -> None:
        self.err.write(text)
        self.err.flush()
