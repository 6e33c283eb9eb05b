"""Find out which decode engine holds how much of a prompt.

There are three sources. There are three sources. The proxy uses the first of this list that answers:

* :class:`DaemonLookups` asks each decode engine's daemon, by token ids (``Lookup`` and ``Release``, like an
  engine; the daemon counts a lookup). This source cannot ask for vLLM's pages, whose keys only vLLM can make.
* :class:`Selector` asks NVIDIA Dynamo's selector, which follows the daemons' KV events, including those of
  vLLM's pages.
* :class:`SentPrompts` remembers which prompt was sent where. This source needs no token ids, and does not
  notice evictions.

All answers are hints. If a source is wrong, an engine computes a prompt that another engine holds.
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

_BLOCK_BYTES = 256  # size of a block of a prompt's content: about 64 tokens
_BLOCK_TOKENS = 64
_MOST_BLOCKS = 1 << 18
_MOST_MODELS = 64  # models whose identities are remembered
_AGAIN_S = 2.0  # pause after a daemon could not be asked
_WORKERS_S = 10.0
_MOST_ANSWER_BYTES = 1 << 20


class SentPrompts:
    """The prompts that were sent to each engine, as the last 262,144 used blocks of 256 bytes.

    >>> sent = SentPrompts(2)
    >>> sent.note(RoutedPrompt(None, b"a" * 600), 1)
    >>> sent.held(RoutedPrompt(None, b"a" * 2000))
    [0, 128]
    """

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._sent: OrderedDict[bytes, int] = OrderedDict()  # each value is a bit set of engines

    def note(self, prompt: RoutedPrompt, engine: int) -> None:
        """Record that an engine will hold a prompt."""
        for block in self._blocks(prompt):
            self._sent[block] = self._sent.pop(block, 0) | 1 << engine
        while len(self._sent) > _MOST_BLOCKS:
            self._sent.popitem(last=False)

    def held(self, prompt: RoutedPrompt) -> list[int]:
        """Return how many leading tokens each engine was sent before."""
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
    """Lookups in the daemon at ``url`` that keep no lease; for one thread.

    ``identity`` is the beginning of an identity's digest. If it is not given, the only identity without a
    tenant and an adapter is used, or the one with the model's name. ``keys`` and ``server_key`` are those of
    :func:`tierstore.connect`.
    """

    def __init__(
        self, url: str, identity: str = "", keys: Path | None = None, server_key: Path | None = None
    ) -> None:
        self.url = url
        self._digest = identity
        self._key_files = (keys, server_key)
        self._operator: Operator | None = None
        self._identities: dict[str, Identity] = {}  # by the model's name

    def held(self, tokens: npt.NDArray[np.uint32], model: str, wait_s: float) -> int:
        """Return how many leading tokens the daemon holds. Raises :class:`TierStoreError` if it does not
        answer."""
        fresh = self._operator is None
        try:
            return self._look(self._connected(), tokens, model, wait_s)
        except (StoreUnavailableError, UsageError):
            if fresh:
                raise
            self.close()  # the connection may have ended since its last use
            return self._look(self._connected(), tokens, model, wait_s)

    def close(self) -> None:
        """Close the client connection. The next lookup opens another connection."""
        self._identities.clear()
        if self._operator is not None:
            self._operator.close()
            self._operator = None

    def _look(self, operator: Operator, tokens: npt.NDArray[np.uint32], model: str, wait_s: float) -> int:
        if model not in self._identities:
            if len(self._identities) >= _MOST_MODELS:
                self._identities.clear()  # clients choose the names
            self._identities[model] = self._chosen(known_identities(operator), model)
        part = register(operator, tokens, self._identities[model])
        lookup = messages.Find(0, part, len(tokens), wait_s / 2)
        found = operator.ask(lookup, messages.Found, wait_s=wait_s)
        if found.lease:
            operator.tell(messages.Release([found.lease]))
        return found.tokens

    def _chosen(self, known: list[Identity], model: str) -> Identity:
        """Return the identity whose pages the proxy asks for. Raises :class:`UsageError` if it is
        ambiguous."""
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
    """Run ``lookups`` on a separate thread beside an event loop. After a failure there are no lookups for two
    seconds."""

    def __init__(self, lookups: PromptLookups) -> None:
        self.url = lookups.url
        self.problem = ""  # why the daemon is not asked at the moment; empty if it is asked
        self._lookups = lookups  # only the separate thread uses it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tierstore-proxy-lookup")
        self._again_at = 0.0

    async def held(self, tokens: npt.NDArray[np.uint32], model: str, wait_s: float) -> int | None:
        """Return how many leading tokens the daemon holds; None without an answer within ``wait_s``."""
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
        """Return how many leading blocks are held, in any tier."""
        from_host = self.host_pinned_blocks
        from_device = self.device_blocks + self.host_pinned_extension_blocks
        return max(from_host, from_device) + self.disk_extension_blocks


class _Overlaps(msgspec.Struct):
    block_size: int
    workers: list[_Overlap]


class Selector:
    """Overlap scores of Dynamo's selection service at ``url``. Its workers are mapped to ``engines`` by their
    endpoints."""

    def __init__(self, url: str, engines: Sequence[str]) -> None:
        self.url = url
        self.problem = ""
        self._engines = engines
        self._http = httpx.AsyncClient(base_url=url, trust_env=False)
        self._numbers: dict[int, int] = {}  # engine by worker
        self._read_at = 0.0

    async def held(self, tokens: npt.NDArray[np.uint32], model: str, wait_s: float) -> list[int | None]:
        """Return how many leading tokens each engine holds; None if that is unknown."""
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
    """All sources, for ``engines`` decode engines. ``daemons`` has one address for each engine, or one for
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
        """Return whether a source needs token ids."""
        return bool(self._daemons) or self._selector is not None

    @property
    def problems(self) -> dict[str, str]:
        """Return the problems of sources that cannot be asked, by URL."""
        problems = {daemon.url: daemon.problem for daemon in self._daemons}
        if self._selector is not None:
            problems[self._selector.url] = self._selector.problem
        return {url: problem for url, problem in problems.items() if problem}

    async def held(self, prompt: RoutedPrompt, model: str) -> list[int]:
        """Return how many leading tokens of a prompt each engine holds."""
        remembered = self._sent.held(prompt)
        if prompt.tokens is None:
            return remembered
        told = await self._told(prompt.tokens, model)
        return [each if each is not None else mine for each, mine in zip(told, remembered, strict=True)]

    def note(self, prompt: RoutedPrompt, engine: int) -> None:
        """Record that a prompt was sent to an engine."""
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
    """Return an answer's body. Raises :class:`ValueError` if it is longer than ``most`` bytes."""
    parts, total = [], 0
    async for part in answer.aiter_raw():
        total += len(part)
        if total > most:
            raise ValueError(f"the answer is longer than {most} bytes")
        parts.append(part)
    return b"".join(parts)
