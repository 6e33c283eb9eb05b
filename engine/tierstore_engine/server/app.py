"""The API server: from a request's bytes to its answer, and everything that can end a request early.

A generation request passes these steps. Its place and its sequences are freed in every case::

    body ─ place ─ parse ─ prompts (on another thread) ─ queued tokens ─ engine ─ answer
    413/408 429/503  400     400                          429             400       200, or events

While the engine works, a task listens for the client's disconnect, and a timer runs. Both end a request in
the same way: the engine's requests are cancelled and return completions like all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tierstore.daemon.stats import version
from tierstore.dashboard.feed import Feed, TooManyViewersError
from tierstore.dashboard.site import MOST_BODY_BYTES, Site, WebAnswer, WebRequest
from tierstore.explanation import Explanation
from tierstore.types import Promise, checked_session
from tierstore_connectors.common import handover
from tierstore_engine.engine import Engine
from tierstore_engine.server.admission import Admission
from tierstore_engine.server.chat import ChatTemplate
from tierstore_engine.server.dashboard import EngineDashboard
from tierstore_engine.server.defaults import OPENAI_DEFAULTS, SamplingDefaults
from tierstore_engine.server.diagnostics import (
    NOT_FOUND,
    UNAVAILABLE,
    CacheReport,
    KeptPrompt,
    KeptPrompts,
    compare,
    place_document,
)
from tierstore_engine.server.errors import ApiError
from tierstore_engine.server.http import Exchange, Handler, MeteredRoute, has_key, not_routed, require_key
from tierstore_engine.server.metrics import ServerMetrics, Snapshot
from tierstore_engine.server.planning import Choices, PlannedRequest, RequestPlanner, api_error, cut_off
from tierstore_engine.server.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    PoolRequest,
    R,
    TokenizeRequest,
    parse,
)
from tierstore_engine.server.responses import Answer, ChatAnswer, Json, TextAnswer
from tierstore_engine.server.settings import ServerSettings
from tierstore_engine.stepping import EngineThread, StepJob
from tierstore_engine.tokenizer import Tokenizer

SESSION_HEADER = "x-session-id"

T = TypeVar("T")

_POOL_S = 5.0  # how long the engine may take to answer between two steps
_EXPLAIN_S = 2.0  # how long a request that asks for reasons may wait for the store's index on disk

_log = logging.getLogger(__name__)


@dataclass
class _EngineWatch:
    """The reasons for ending a request early."""

    gone: bool = False
    expired: bool = False
    job: StepJob | None = None

    def begin(self, job: StepJob) -> None:
        """Take the engine's job. It is cancelled at once if the request has already ended."""
        self.job = job
        if self.gone or self.expired:
            self.end()

    def end(self) -> None:
        if self.job is not None:
            self.job.cancel()


class ApiServer:
    """The API over ``engine``, which this object owns until :meth:`close`. Used on one event loop."""

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        template: ChatTemplate | None,
        defaults: SamplingDefaults = OPENAI_DEFAULTS,
    ) -> None:
        self.settings = settings
        self.admission = Admission(settings)
        self.metrics = ServerMetrics()
        self.engine = EngineThread(engine)
        self._store = engine.connector
        self._adapters = dict(engine.adapters)
        # the names that requests may give as their model
        self._names = [settings.model_name, *self._adapters]
        self._computes = engine.settings.plan == "compute"
        self._kept = KeptPrompts()
        self._tokenizer: Tokenizer = engine.tokenizer
        self._config = engine.model.config
        self._positions = engine.limits.longest
        self._created = int(time.time())
        self._planner = RequestPlanner(
            self._config,
            self._tokenizer,
            template,
            defaults,
            settings,
            positions=self._positions,
            vision=engine.vision,
        )
        self._pictures = ThreadPoolExecutor(1, thread_name_prefix="tierstore-images")
        self._site = Site(settings.host, settings.api_key, title="tierstore engine", how="give an --api-key")
        self._page = EngineDashboard(
            settings.model_name, version(), self.engine, self._store.stats, self.admission
        )
        self._feed = Feed(self._page.look)
        self._feed.start()

        def endpoint(name: str, handler: Handler, *, public: bool = False) -> MeteredRoute:
            key = None if public else settings.api_key
            # A foreign web page has no key, and a server with a key may have its own host name.
            host = settings.host if settings.api_key is None and handler != self._dashboard else None
            return MeteredRoute(name, handler, self.metrics, api_key=key, host=host, error_of=api_error)

        # the dashboard's application checks the key itself
        page = endpoint("dashboard", self._dashboard, public=True)
        self.app = Starlette(
            routes=[
                Route("/v1/completions", endpoint("completions", self._completions), methods=["POST"]),
                Route("/v1/chat/completions", endpoint("chat", self._chat), methods=["POST"]),
                Route("/tokenize", endpoint("tokenize", self._tokenize), methods=["POST"]),
                Route("/v1/models", endpoint("models", self._models), methods=["GET"]),
                Route("/v1/models/{name:path}", endpoint("models", self._model), methods=["GET"]),
                Route("/pool", endpoint("pool", self._pool, public=True), methods=["GET", "POST"]),
                Route("/health", endpoint("health", self._health, public=True), methods=["GET"]),
                Route("/metrics", endpoint("metrics", self._metrics, public=True), methods=["GET"]),
                Route("/", page, methods=["GET"]),
                Route("/dashboard", page, methods=["GET"]),
                Route("/dashboard/{name:path}", page, methods=["GET", "POST"]),
            ],
            exception_handlers={HTTPException: not_routed},
        )

    async def drain(self) -> bool:
        """Answer 503 from now on, and wait for running requests. Return False if some of these requests had
        to be cancelled."""
        done = await self.admission.drain(self.settings.drain_s)
        await self._feed.close()
        if not done:
            self.engine.post(lambda engine: engine.cancel_all())
            await self.admission.drain(self.settings.drain_s)
        return done

    def close(self) -> None:
        """End the engine's thread and return the engine to the caller."""
        self._feed.stop()
        self._pictures.shutdown(cancel_futures=True)
        self.engine.close()

    async def _beside(self, request: GenerationRequest | TokenizeRequest, call: Callable[[], T]) -> T:
        """Return the result of ``call`` for a request, from another thread. Images take long, and the threads
        of asyncio are few: images have one thread, so that text does not wait behind them."""
        executor = self._pictures if request.images else None
        return await asyncio.get_running_loop().run_in_executor(executor, call)

    # -- small endpoints -----------------------------------------------------------------------------

    async def _models(self, exchange: Exchange) -> None:
        await exchange.reply(
            200, {"object": "list", "data": [self._model_object(name) for name in self._names]}
        )

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.request.path_params["name"]
        self._check_model(name)
        await exchange.reply(200, self._model_object(name))

    async def _tokenize(self, exchange: Exchange) -> None:
        body = await exchange.body(self.settings.max_body_bytes)  # a slow sender takes no place
        with self.admission.place():
            request = parse(body, TokenizeRequest)
            self._check_model(request.model)
            tokens = await self._beside(request, partial(self._planner.tokens_of, request))
            document = {"count": len(tokens), "max_model_len": self._positions, "tokens": tokens}
            await exchange.reply(200, document)

    async def _pool(self, exchange: Exchange) -> None:
        """Answer with the size of the page pool. POST sets it."""
        request = exchange.request
        self._require_pool_key(request)
        asked = WebRequest(request.method, request.url.path, dict(request.headers))
        if (refusal := self._site.strange(asked)) is not None:
            await exchange.send(Response(refusal.body, refusal.status, dict(refusal.headers)))
            return
        if request.method == "POST":
            wanted = parse(await exchange.body(MOST_BODY_BYTES), PoolRequest).bytes
            size = await self.engine.call(lambda engine: engine.resize_pool(wanted))
        else:
            try:
                size = await asyncio.wait_for(self.engine.call(lambda engine: engine.pool_size()), _POOL_S)
            except asyncio.TimeoutError:
                why = f"the engine's current step takes more than {_POOL_S:g} s: try again"
                raise ApiError(503, why, retry_after_s=1) from None
        document = {
            "bytes": size.nbytes,
            "target_bytes": size.target_bytes,
            "most_bytes": size.most_bytes,
        }
        await exchange.reply(200, document)

    def _require_pool_key(self, request: Request) -> None:
        """Check the key. Clients may read the pool's size, but only the operator may set it. Raises
        :class:`ApiError` (401, 403)."""
        api_key, operator_key = self.settings.api_key, self.settings.operator_key
        if operator_key is not None and has_key(request, operator_key):
            return
        if api_key is not None:
            require_key(request, api_key)
        if request.method == "GET":
            return
        if operator_key is None and api_key is not None:
            raise ApiError(403, "resizing the pool is disabled: start the server with --operator-key")
        if operator_key is not None:
            raise ApiError(
                403, "only the operator may resize the pool: send Authorization: Bearer OPERATOR_KEY"
            )

    async def _health(self, exchange: Exchange) -> None:
        if self.engine.failed is not None:
            await exchange.reply(503, {"status": "failed"})
        elif self.admission.draining:
            await exchange.reply(503, {"status": "draining"})
        else:
            await exchange.reply(200, {"status": "ok"})

    async def _metrics(self, exchange: Exchange) -> None:
        """Answer with metrics. The engine's values are those before its current step, so that a scrape does
        not wait for the step."""
        store = await asyncio.to_thread(self._store.stats)
        snapshot = Snapshot(
            self.engine.stats, store, self.admission.requests, self.admission.tokens, self.engine.errors
        )
        text = await asyncio.to_thread(self.metrics.text, snapshot)
        await exchange.send(Response(text, headers={"content-type": CONTENT_TYPE_LATEST}))

    async def _dashboard(self, exchange: Exchange) -> None:
        request = exchange.request
        query = request.url.query
        target = f"{request.url.path}?{query}" if query else request.url.path
        body = await exchange.any_body(MOST_BODY_BYTES)
        answer = self._site.answer(WebRequest(request.method, target, dict(request.headers), body))
        assert answer is not None, "all of these routes belong to the dashboard"
        if answer.follows:
            await self._follow(exchange, answer)
        else:
            await exchange.send(Response(answer.body, answer.status, dict(answer.headers)))

    async def _follow(self, exchange: Exchange, answer: WebAnswer) -> None:
        """Send the feed until the client disconnects or stops reading."""
        try:
            with self._feed.place():
                headers = [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
                await exchange.start(answer.status, headers)
                following = asyncio.create_task(self._feed.follow(partial(exchange.part, more=True)))
                leaving = asyncio.create_task(exchange.hang_up())
                try:
                    await asyncio.wait({following, leaving}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    following.cancel()
                    leaving.cancel()
                if following.done() and not following.cancelled():
                    following.result()
                    await exchange.part(b"", more=False)
        except TooManyViewersError as error:
            raise ApiError(503, str(error), retry_after_s=10) from None

    def _model_object(self, name: str) -> Json:
        document: Json = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tierstore",
            "max_model_len": self._positions,
        }
        return {**document, "parent": self.settings.model_name} if name in self._adapters else document

    def _check_model(self, name: str) -> None:
        if name not in self._names:
            served = ", ".join(map(repr, self._names))
            are = "are" if self._adapters else "is"
            raise ApiError(404, f"model {name!r} is not served here; {served} {are}", param="model")

    # -- generation ----------------------------------------------------------------------------------

    async def _completions(self, exchange: Exchange) -> None:
        await self._generate(exchange, CompletionRequest, TextAnswer, self._planner.text)

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, ChatRequest, ChatAnswer, self._planner.chat)

    async def _generate(
        self,
        exchange: Exchange,
        kind: type[R],
        answers: type[Answer],
        plan_of: Callable[[R, str | None], PlannedRequest],
    ) -> None:
        body = await exchange.body(self.settings.max_body_bytes)
        with self.admission.place() as place:
            request = parse(body, kind)
            self._check_model(request.model)
            session = _session(exchange.request, request)
            async with self._watched(exchange) as watch:
                plan = await self._beside(request, partial(plan_of, request, session))
                answer = answers(
                    request.model,
                    self._tokenizer,
                    prompts=plan.prompts,
                    n=request.choices,
                    logprobs=request.wants_logprobs,
                    include_usage=request.include_usage,
                    echoes=plan.echoes,
                )
                place.take(plan.tokens)
                # A prompt for another adapter has other pages, so it is not compared.
                key = f"{request.model} {exchange.request.headers.get('authorization', '')}"
                report = await self._report(plan, key)
                job = await self._submit(plan)
                watch.begin(job)
                if plan.kept is not None:
                    self._kept.add(key, answer.id, plan.kept)
                choices = Choices(job.ids, plan.samples)
                send = self._stream if request.stream else self._whole
                await send(exchange, job, choices, answer, watch, report, request)
            if not watch.gone and len(choices.completions) == len(choices.ids):
                self.metrics.served(exchange.seconds, choices.firsts)
                self._page.lately.ended(choices.firsts)

    # -- the cache's report --------------------------------------------------------------------------

    async def _report(self, plan: PlannedRequest, key: str) -> CacheReport:
        """Return the report on the cache that the request has asked for. It describes the state before the
        engine gets the request. The engine's steps do not wait for the report."""
        request, compared = plan.request, plan.request.compared_with
        if not request.explain_cache and compared is None:
            return CacheReport()
        kept = self._kept.find(key, compared) if compared is not None else None
        return await asyncio.to_thread(self._report_of, plan, kept)

    def _report_of(self, plan: PlannedRequest, kept: KeptPrompt | None) -> CacheReport:
        """Return the report. Make the report on another thread, because this reads the disk and renders
        messages."""
        diagnostics = None
        if plan.request.compared_with is not None:
            diagnostics = NOT_FOUND if kept is None else UNAVAILABLE
            if kept is not None and plan.kept is not None:
                with contextlib.suppress(ApiError):  # the template may refuse the first messages alone
                    diagnostics = compare(
                        kept,
                        plan.kept,
                        partial(self._messages_alone, plan.request),
                        partial(self._place, plan.request, 0),
                    )
        if not plan.request.explain_cache:
            return CacheReport(diagnostics=diagnostics)
        ends = time.monotonic() + _EXPLAIN_S
        explanations = [
            self._store.explain(
                self._store.prompt(prompt, adapter=self._adapters.get(plan.request.model, "")),
                max_tokens=len(prompt) - 1,  # the engine always computes at least one token
                timeout_s=max(ends - time.monotonic(), 0.0),
            )
            for prompt in plan.prompts
        ]
        places = [self._miss_place(plan.request, number, each) for number, each in enumerate(explanations)]
        return CacheReport(explanations, places, diagnostics, computes=self._computes)

    def _messages_alone(self, request: GenerationRequest, count: int) -> int:
        assert isinstance(request, ChatRequest), "only chats have messages"
        return len(self._tokenizer.encode(self._planner.chat_text(request, count), begin=False))

    def _miss_place(self, request: GenerationRequest, number: int, explanation: Explanation) -> Json:
        """Return where a prompt diverges from the held prompt that is most similar to it. Return nothing if
        that is unknown."""
        for miss in explanation.misses:
            if miss.at is not None:
                return self._place(request, number, miss.at, miss.held_tokens)
        return {}

    def _place(self, request: GenerationRequest, number: int, token: int, held_tokens: Sequence[int]) -> Json:
        """Return where a prompt diverges from another prompt, as a message and character of the request.
        Return nothing if that is unknown."""
        if isinstance(request, ChatRequest):
            text, render = self._planner.chat_text(request), partial(self._planner.chat_text, request)
            with contextlib.suppress(ApiError):  # the template may refuse the first messages alone
                return place_document(token, held_tokens, text, self._tokenizer, request.messages, render)
            return {}
        assert isinstance(request, CompletionRequest), "a request is either a completion or a chat"
        asked = request.prompts[number]
        if not isinstance(asked, str):
            return {}
        return place_document(token, held_tokens, asked, self._tokenizer, (), str)

    # -- answers -------------------------------------------------------------------------------------

    async def _submit(self, plan: PlannedRequest) -> StepJob:
        if self.engine.failed is not None:
            raise ApiError(503, "the engine has failed: restart the server")
        return await self.engine.submit(plan.add)

    async def _whole(
        self,
        exchange: Exchange,
        job: StepJob,
        choices: Choices,
        answer: Answer,
        watch: _EngineWatch,
        report: CacheReport,
        request: GenerationRequest,
    ) -> None:
        async for output in job:
            choices.note(output)
        if not watch.gone:
            self._check_ended(choices, watch)
            document = answer.whole(
                choices.best(request.choices), report.spent(choices.usage(), choices.reused)
            )
            await exchange.reply(200, {**document, **self._handed(request, choices)})

    async def _stream(
        self,
        exchange: Exchange,
        job: StepJob,
        choices: Choices,
        answer: Answer,
        watch: _EngineWatch,
        report: CacheReport,
        request: GenerationRequest,
    ) -> None:
        opened: set[int] = set()
        await exchange.start_events()
        try:
            async for output in job:
                choices.note(output)
                index = choices.index(output)
                if watch.gone or cut_off(output.completion):
                    continue
                if index not in opened:
                    opened.add(index)
                    await exchange.event(answer.opening(index))
                await exchange.event(answer.chunk(index, output))
            if not watch.gone:
                self._check_ended(choices, watch)
                spent = report.spent(choices.usage(), choices.reused)
                await exchange.event(answer.closing(spent, self._handed(request, choices)))
        except Exception as error:  # noqa: BLE001  # the status has been sent: report the error as an event
            await exchange.event(api_error(error).body)
        await exchange.end_events()

    def _handed(self, request: GenerationRequest, choices: Choices) -> Json:
        """Return the fields that another engine needs to continue the prompt. Return nothing if the prompt is
        not handed over."""
        if not request.hands_over:
            return {}
        promised = Promise(choices.firsts[0].submitted_tokens, self.settings.handover_s)
        return {"kv_transfer_params": handover.answer(promised)}

    def _check_ended(self, choices: Choices, watch: _EngineWatch) -> None:
        """Raise :class:`ApiError` if a request was cut off."""
        if watch.expired:
            raise ApiError(504, f"the request took longer than the limit of {self.settings.request_s:g} s")
        choices.check_ended()

    @asynccontextmanager
    async def _watched(self, exchange: Exchange) -> AsyncIterator[_EngineWatch]:
        """Cancel the request's work if the client disconnects or the time limit is over."""
        watch = _EngineWatch()

        def expire() -> None:
            watch.expired = True
            watch.end()

        async def listen() -> None:
            await exchange.hang_up()
            watch.gone = True
            self.metrics.hang_ups.inc()
            watch.end()

        timer = asyncio.get_running_loop().call_later(self.settings.request_s, expire)
        listener = asyncio.create_task(listen())
        try:
            yield watch
        finally:
            timer.cancel()
            listener.cancel()
            watch.end()
            with contextlib.suppress(asyncio.CancelledError):
                await listener


def _session(http: Request, request: GenerationRequest) -> str | None:
    """Return the conversation of a request. Raises :class:`UsageError` for a name that is too long."""
    return checked_session(http.headers.get(SESSION_HEADER) or request.user or None)
