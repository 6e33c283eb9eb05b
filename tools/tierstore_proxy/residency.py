"""Which decode engine holds how much of a prompt.

Three can say so, and the surest that answers is believed:

* :class:`DaemonLookups` asks each decode engine's daemon, by token ids (``Lookup`` and ``Release``, as an
  engine would; the daemon counts it as a lookup). Pages with keys that only their engine can make (vLLM's) it
  cannot ask for.
* :class:`Selector` asks NVIDIA Dynamo's, which follows the daemons' KV events, vLLM's pages among them.
* :class:`SentPrompts` remembers what was sent where. It needs no token ids, and knows nothing of what has
  left.

All answers are hints: where they are wrong a prompt is computed where it need not have been.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tierstore.cli.operator import Operator
from tierstore.cli.prompts import choose_identity, known_identities, register
from tierstore.errors import StoreUnavailableError, TierStoreError, UsageError
from tierstore.keys import Identity
from tierstore.spec import is_opaque
from tierstore.wire import messages
from tierstore_proxy.prompts import RoutedPrompt
from tierstore_proxy.upstream import within

_BLOCK_BYTES = 256  # of a prompt's content: some 64 tokens
_BLOCK_TOKENS = 64
_MOST_BLOCKS = 1 << 18
_MOST_MODELS = 64  # whose identities are remembered
_AGAIN_S = 2.0  # after a daemon could not be asked
_WORKERS_S = 10.0
_MOST_ANSWER_BYTES = 1 << 20


class SentPrompts:
    """The prompts that were sent to each engine, by blocks of 256 bytes, the last used 262,144 of them.

    >>> sent = SentPrompts(2)
    >>> sent.note(Prompt(None, b"a" * 600), 1)
    >>> sent.held(Prompt(None, b"a" * 2000))
    [0, 128]
    """

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._sent: OrderedDict[bytes, int] = OrderedDict()  # engines as bits

    def note(self, prompt: RoutedPrompt, engine: int) -> None:
        """It is going to be held there."""
        for block in self._blocks(prompt):
            self._sent[block] = self._sent.pop(block, 0) | 1 << engine
        while len(self._sent) > _MOST_BLOCKS:
            self._sent.popitem(last=False)

    def held(self, prompt: RoutedPrompt) -> list[int]:
        """Leading tokens that each engine was sent before."""
        held = [0] * self._engines
        everywhere = (1 << self._engines) - 1
        for block in self._blocks(prompt):
            everywhere &= self._sent.get(block, 0)
            if not everywhere:
                break
            for engine in range(self._engines):
                held[engine] += _BLOCK_TOKENS * (everywhere >> engine & 1)
        return [min(tokens, prompt.length) for tokens in held]

    @staticmethod
    def _blocks(prompt: RoutedPrompt) -> list[bytes]:
        content, name, names = prompt.content, b"", []
        for start in range(0, len(content) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            name = xxhash.xxh3_128_digest(name + content[start : start + _BLOCK_BYTES])
            names.append(name)
        return names


class PromptLookups:
    """Lookups in the daemon at ``url`` that hold nothing; for one thread. ``identity`` is the beginning of a
    digest: whose pages are asked for. Without one it is the only one without a tenant or an adapter, or
    the model's by name. ``keys`` and ``server_key`` are those of :func:`tierstore.connect`."""

    def __init__(
        self, url: str, identity: str = "", keys: Path | None = None, server_key: Path | None = None
    ) -> None:
        self.url = url
        self._digest = identity
        self._key_files = (keys, server_key)
        self._operator: Operator | None = None
        self._identities: dict[str, Identity] = {}  # by the model's name

    def held(self, tokens: npt.NDArray[np.uint32], model: str, wait_s: float) -> int:
        """Leading tokens that the daemon holds. Raises :class:`TierStoreError` when it does not say."""
        fresh = self._operator is None
        try:
            return self._look(self._connected(), tokens, model, wait_s)
        except (StoreUnavailableError, UsageError):
            if fresh:
                raise
            self.close()  # the session may have ended meanwhile
            return self._look(self._connected(), tokens, model, wait_s)

    def close(self) -> None:
        """End the session, and what it may hold. The next lookup begins another one."""
        self._identities.clear()
        if self._operator is not None:
            self._operator.close()
            self._operator = None

    def _look(self, operator: Operator, tokens: npt.NDArray[np.uint32], model: str, wait_s: float) -> int:
        if model not in self._identities:
            if len(self._identities) >= _MOST_MODELS:
                self._identities.clear()  # names are the clients' to choose
            self._identities[model] = self._chosen(known_identities(operator), model)
        part = register(operator, tokens, self._identities[model])
        lookup = messages.Find(0, part, len(tokens), wait_s / 2)
        found = operator.ask(lookup, messages.Found, wait_s=wait_s)
        if found.lease:
            operator.tell(messages.Release([found.lease]))
        return found.tokens

    def _chosen(self, known: list[Identity], model: str) -> Identity:
        """Raises :class:`UsageError` where that is not clear."""
        if self._digest:
            return choose_identity(known, None, self._digest)
        plain = [each for each in known if not (each.tenant or each.adapter or is_opaque(each.layout))]
        named = [each for each in plain if each.model == model]
        return choose_identity(named or plain or known, None, None)

    def _connected(self) -> Operator:
        if self._operator is None:
            self._operator = Operator(self.url, *self._key_files)
        return self._operator


class DaemonLookups:
    """``lookups`` on a thread of their own, beside an event loop. One that fails is followed by two seconds
    without."""

    def __init__(self, lookups: PromptLookups) -> None:
        self.url = lookups.url
        self.problem = ""  # why it is not asked, at the moment
        self._lookups = lookups  # the thread's
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tierstore-proxy-lookup")
        self._again_at = 0.0

    async def held(self, tokens: npt.NDArray[np.uint32], model: str, wait_s: float) -> int | None:
        """Leading tokens that the daemon holds; None where it does not say so within ``wait_s``."""
        ends = time.monotonic() + wait_s
        loop = asyncio.get_running_loop()
        try:
            return await within(wait_s, loop.run_in_executor(self._thread, self._ask, tokens, model, ends))
        except asyncio.TimeoutError:
            return None

    def close(self) -> None:
        self._thread.submit(self._lookups.close)
        self._thread.shutdown()

    def _ask(self, tokens: npt.NDArray[np.uint32], model: str, ends: float) -> int | None:
        now = time.monotonic()
        if not self._again_at <= now < ends:
            return None
        try:
            found = self._lookups.held(tokens, model, ends - now)
        except (TierStoreError, OSError) as error:
            self._lookups.close()
            self.problem = str(error)
            self._again_at = time.monotonic() + _AGAIN_S
            return None
        self.problem = ""
        return found


class _FollowerWorker(msgspec.Struct):
    worker_id: int
    endpoint: str


class _Overlap(msgspec.Struct):
    worker_id: int
    device_blocks: int = 0
    host_pinned_blocks: int = 0
    host_pinned_extension_blocks: int = 0
    disk_extension_blocks: int = 0

    @property
    def blocks(self) -> int:
        """From the beginning on, in any tier."""
        from_host = self.host_pinned_blocks
        from_device = self.device_blocks + self.host_pinned_extension_blocks
        return max(from_host, from_device) + self.disk_extension_blocks


class _Overlaps(msgspec.Struct):
    block_size: int
    workers: list[_Overlap]


class Selector:
    """Dynamo's selection service at ``url``, of which the overlap scores are used. Its workers are the
    engines at ``engines``, by their endpoints."""

    def __init__(self, url: str, engines: Sequence[str]) -> None:
        self.url = url
        self.problem = ""
        self._engines = engines
        self._http = httpx.AsyncClient(base_url=url, trust_env=False)
        self._numbers: dict[int, int] = {}  # engine by worker
        self._read_at = 0.0

    async def held(self, tokens: npt.NDArray[np.uint32], model: str, wait_s: float) -> list[int | None]:
        """Leading tokens that each engine holds; None where that is not known."""
        nothing: list[int | None] = [None] * len(self._engines)
        try:
            found = await within(wait_s, self._scores(tokens, model))
        except asyncio.TimeoutError:
            self.problem = f"no answer within {wait_s:g} s"
            return nothing
        except (httpx.HTTPError, msgspec.MsgspecError, ValueError) as error:
            self.problem = str(error) or type(error).__name__
            return nothing
        self.problem = ""
        for each in found.workers:
            if each.worker_id in self._numbers:
                nothing[self._numbers[each.worker_id]] = each.blocks * found.block_size
        return nothing

    async def close(self) -> None:
        await self._http.aclose()

    async def _scores(self, tokens: npt.NDArray[np.uint32], model: str) -> _Overlaps:
        if time.monotonic() > self._read_at + _WORKERS_S:
            workers = msgspec.json.decode(await self._read("GET", "/workers"), type=list[_FollowerWorker])
            self._numbers = {
                each.worker_id: self._engines.index(each.endpoint.rstrip("/"))
                for each in workers
                if each.endpoint.rstrip("/") in self._engines
            }
            self._read_at = time.monotonic()
        question = msgspec.json.encode({"model_name": model, "token_ids": tokens.tolist()})
        return msgspec.json.decode(await self._read("POST", "/overlap_scores", question), type=_Overlaps)

    async def _read(self, method: str, path: str, body: bytes | None = None) -> bytes:
        headers = {"content-type": "application/json"} if body is not None else {}
        async with self._http.stream(method, path, content=body, headers=headers) as answer:
            answer.raise_for_status()
            return await read_bounded(answer, _MOST_ANSWER_BYTES)


class KnownResidency:
    """All that is known of ``engines`` decode engines. ``daemons`` are theirs, one for each or one for
    all."""

    def __init__(
        self, engines: int, daemons: Sequence[DaemonLookups], selector: Selector | None, *, look_s: float
    ) -> None:
        self._engines = engines
        self._daemons = daemons
        self._selector = selector
        self._look_s = look_s
        self._sent = SentPrompts(engines)

    @property
    def wants_tokens(self) -> bool:
        """Whether somebody can be asked who wants token ids."""
        return bool(self._daemons) or self._selector is not None

    @property
    def problems(self) -> dict[str, str]:
        """By the URL of who cannot be asked."""
        problems = {daemon.url: daemon.problem for daemon in self._daemons}
        if self._selector is not None:
            problems[self._selector.url] = self._selector.problem
        return {url: problem for url, problem in problems.items() if problem}

    async def held(self, prompt: RoutedPrompt, model: str) -> list[int]:
        """Leading tokens of a prompt at each engine."""
        remembered = self._sent.held(prompt)
        if prompt.tokens is None:
            return remembered
        told = await self._told(prompt.tokens, model)
        return [each if each is not None else mine for each, mine in zip(told, remembered, strict=True)]

    def note(self, prompt: RoutedPrompt, engine: int) -> None:
        """A prompt was sent to an engine."""
        self._sent.note(prompt, engine)

    async def close(self) -> None:
        for daemon in self._daemons:
            await asyncio.to_thread(daemon.close)
        if self._selector is not None:
            await self._selector.close()

    async def _told(self, tokens: npt.NDArray[np.uint32], model: str) -> list[int | None]:
        if self._selector is not None:
            return await self._selector.held(tokens, model, self._look_s)
        asked = [daemon.held(tokens, model, self._look_s) for daemon in self._daemons]
        told: list[int | None] = [*await asyncio.gather(*asked)] or [None]
        return told * self._engines if len(told) == 1 else told


async def read_bounded(answer: httpx.Response, most: int) -> bytes:
    """An answer's body. Raises :class:`ValueError` for one that is longer than ``most`` bytes."""
    parts, total = [], 0
    async for part in answer.aiter_raw():
        total += len(part)
        if total > most:
            raise ValueError(f"the answer is longer than {most} bytes")
        parts.append(part)
    return b"".join(parts)
