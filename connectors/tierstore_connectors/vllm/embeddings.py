"""Both halves of the connector for embeddings: the encoder's outputs for images and other media.

An embedding is found by the processor's output
(:class:`~tierstore_connectors.vllm.identity.MediaContents`). vLLM's name for the input is not used, because a
client may choose it. The identity has the model, weights, versions and configuration, as for KV.

* **The scheduler's half** looks up an embedding when vLLM asks whether a request can start. A thread loads
  the bytes at once. The request waits for them, at most ``lookup_s`` plus ``load_s``. A promised embedding
  cannot be taken back: a worker without it would end the engine. So the half promises only embeddings whose
  bytes are in its process. The next step's message carries the bytes to the workers.
* **The worker's half** puts the embeddings into vLLM's encoder cache. It also saves the encoder's outputs.
  All tensor parallel ranks have the same embeddings, and the first rank saves them.

An engine that only encodes (``ec_producer``) loads no bytes. It does not encode inputs that the store has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore_connectors.common.counters import ConnectorCounters
from tierstore_connectors.common.embeddings import EmbeddingKey, embedding_of, pages_of
from tierstore_connectors.common.facts import under_epoch
from tierstore_connectors.common.guard import ErrorLog
from tierstore_connectors.common.stores import GuardedStore
from tierstore_connectors.vllm.config import EncoderSettings
from tierstore_connectors.vllm.identity import MediaContents
from tierstore_connectors.vllm.layout import UnsupportedError
from tierstore_connectors.vllm.orders import RENEW_S

_MOST_HELD_BYTES = 256 << 20  # of embeddings that are being loaded, or that no step has taken yet
_IDLE_WAIT_S = 0.002  # in a step without tokens: a step that does not wait takes the CPU from the loads
_NO_MEDIA = "prompt_embeds"  # a modality that no encoder computes
_CLOSE_S = 2.0


@dataclass(slots=True)
class EncoderWork:
    """The orders of one step, by vLLM's name of the input. ``loads`` are put into the encoder cache.
    ``saves`` are saved when the encoder has computed them."""

    loads: dict[str, torch.Tensor] = field(default_factory=dict)
    saves: dict[str, EmbeddingKey] = field(default_factory=dict)


class EmbeddingStores:
    """The stores of one process, one for each kind of embedding. After a change of weights, the earlier
    stores are closed, because a daemon limits the identities of a client."""

    def __init__(self, settings: EncoderSettings, errors: ErrorLog, counters: ConnectorCounters) -> None:
        self._settings = settings
        self._errors = errors
        self._counters = counters
        self._lock = threading.Lock()
        self._stores: dict[Identity, GuardedStore] = {}

    def of(self, identity: Identity) -> GuardedStore:
        """Return the store for these embeddings. Open it at the first call. Raise
        :class:`~tierstore.errors.UsageError` for an invalid address."""
        with self._lock:
            if identity not in self._stores:
                gone = [each for each in self._stores if each.revision != identity.revision]
                for each in gone:
                    self._stores.pop(each).close()
                self._stores[identity] = self._open(identity)
            return self._stores[identity]

    def _open(self, identity: Identity) -> GuardedStore:
        settings = self._settings
        store = settings.connect(identity, KVSpec.parse(identity.layout))
        store.wait_connected(RENEW_S)
        return GuardedStore(
            store,
            lookup_s=settings.lookup_s,
            load_s=settings.load_s,
            errors=self._errors,
            counters=self._counters,
        )

    def wait_saved(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` seconds until lookups can find the saved embeddings."""
        for store in list(self._stores.values()):
            store.wait_saved(timeout_s)

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores.clear()


@dataclass(frozen=True, slots=True)
class _Held:
    """The answer for an embedding that the store has. ``embedding`` is None in an engine that loads
    nothing."""

    embedding: torch.Tensor | None


@dataclass(slots=True)
class _Input:
    """An input that was looked up. ``promised`` is set when vLLM was told that the store has it."""

    key: EmbeddingKey
    ends: float
    answer: Future[_Held | None]
    nbytes: int
    promised: bool = False

    def miss(self) -> None:
        """Replace the answer by a miss. Waiting requests do not look the input up again."""
        self.answer = Future()
        self.answer.set_result(None)


class EncoderScheduler:
    """The scheduler's half; see the module. It is called from the scheduler's thread.

    ``identity_of`` returns the identity of a modality's embeddings. ``adapters`` says whether LoRA adapters
    change embeddings. Then requests with an adapter do not use the store. Requests and features are vLLM's.
    """

    def __init__(
        self,
        settings: EncoderSettings,
        identity_of: Callable[[str], Identity],
        errors: ErrorLog,
        counters: ConnectorCounters,
        *,
        loads: bool,
        saves: bool,
        adapters: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._identity_of = identity_of
        self._errors = errors
        self._counters = counters
        self._loads = loads
        self._saves = saves
        self._adapters = adapters
        self._clock = clock
        self._epoch = ""
        self._media = MediaContents()
        self._stores = EmbeddingStores(settings, errors, counters)
        self._looking = ThreadPoolExecutor(1, thread_name_prefix="tierstore-embeddings")
        self._keys: dict[str, dict[int, EmbeddingKey | None]] = {}  # by request and place in it
        self._inputs: dict[str, _Input] = {}  # by vLLM's name, until a step takes them
        self._cached: set[str] = set()  # names of the inputs in vLLM's own encoder cache
        self._work = EncoderWork()

    def connect(self, modalities: Iterable[str]) -> None:
        """Connect to the daemon, so that the first request need not wait. Raise
        :class:`~tierstore.errors.UsageError` for an invalid address."""
        for modality in modalities:
            self._stores.of(self._identity_of(modality))

    def close(self) -> None:
        self._looking.shutdown(wait=False, cancel_futures=True)
        self._stores.close()

    # -- vLLM's questions ----------------------------------------------------------------------------

    def ready(self, request: Any, computed: int) -> bool:
        """Return whether a request can start: no lookup of an input behind its first ``computed`` tokens is
        under way. Look up the inputs that are neither in vLLM's cache nor known."""
        ready = True
        for at, feature in enumerate(request.mm_features):
            place, name = feature.mm_position, feature.identifier
            if place.offset + place.length <= computed or name in self._cached:
                continue
            key = self._key(request, at)
            known = self._inputs.get(name)
            if known is None:
                known = self._look_up(name, key) if key is not None else None
            elif known.key != key:  # the name stands for two inputs: neither may get the other's embedding
                known.miss()
            ready = ready and (known is None or not self._waits(known))
        return ready

    def has(self, name: str) -> bool:
        """Return whether an embedding need not be computed."""
        known = self._inputs.get(name)
        if known is None or not known.answer.done():
            return False
        known.promised = self._found(known) is not None
        return known.promised

    def allocated(self, request: Any, at: int) -> None:
        """Order the load of an input's embedding if it was promised. Otherwise order its save, after it is
        computed."""
        name = request.mm_features[at].identifier
        self._cached.add(name)
        known = self._inputs.pop(name, None)
        found = self._found(known) if known is not None and known.promised else None
        if found is not None:
            self._counters.add("found")
            if found.embedding is not None:
                self._work.loads[name] = found.embedding
                self._counters.add("loaded_bytes", found.embedding.nbytes)
            return
        key = self._key(request, at) if self._saves else None
        if key is not None:
            self._work.saves[name] = key

    def work(self, scheduler_output: Any) -> EncoderWork:
        """Return the orders of a step. If the step computes no tokens, first wait shortly for an answer."""
        self._cached.difference_update(scheduler_output.free_encoder_mm_hashes)
        if self._inputs and not scheduler_output.total_num_scheduled_tokens:
            wait([known.answer for known in self._inputs.values()], _IDLE_WAIT_S, FIRST_COMPLETED)
        work, self._work = self._work, EncoderWork()
        return work

    def finished(self, request: Any) -> None:
        """Forget a request."""
        for at, key in self._keys.pop(request.request_id, {}).items():
            name = request.mm_features[at].identifier
            known = self._inputs.get(name)
            if known is not None and known.key == key:
                del self._inputs[name]

    def forget_everything(self, epoch: str) -> None:
        """Stop finding embeddings that were saved before, because the weights may have changed."""
        self._epoch = epoch
        self._keys.clear()
        self._inputs.clear()
        self._cached.clear()

    # -- inside --------------------------------------------------------------------------------------

    def _key(self, request: Any, at: int) -> EmbeddingKey | None:
        """Return the key of an input of a request; None if the store is not used for it."""
        known = self._keys.setdefault(request.request_id, {})
        if at not in known:
            known[at] = self._new_key(request, at)
        return known[at]

    def _new_key(self, request: Any, at: int) -> EmbeddingKey | None:
        feature = request.mm_features[at]
        if feature.modality == _NO_MEDIA or (self._adapters and request.lora_request is not None):
            return None
        try:
            content = bytes.fromhex(self._media.digest(feature))
        except UnsupportedError as error:
            self._errors.warn("media", str(error))
            return None
        identity = under_epoch(self._identity_of(feature.modality), self._epoch)
        return EmbeddingKey(identity, content, request.get_num_encoder_embeds(at))

    def _look_up(self, name: str, key: EmbeddingKey) -> _Input | None:
        """Start the lookup of an input. Return None if there is no room for its embedding."""
        nbytes = key.rows * key.shape[1] * key.dtype.itemsize if self._loads else 0
        held = sum(known.nbytes for known in self._inputs.values())
        if held and held + nbytes > _MOST_HELD_BYTES:
            return None
        ends = self._clock() + self._settings.lookup_s + (self._settings.load_s if self._loads else 0)
        self._counters.add("lookups")
        self._inputs[name] = known = _Input(key, ends, self._looking.submit(self._find, key), nbytes)
        return known

    def _find(self, key: EmbeddingKey) -> _Held | None:
        """Find an embedding, here or on other hosts, and load it. Runs on the thread for lookups."""
        store, prompt = self._stores.of(key.identity), key.prompt
        hit = store.find(prompt)
        if hit is not None and not hit.tokens and hit.remote_tokens:
            hit.release()
            hit.fetch_remote(self._settings.load_s).wait()
            hit = store.find(prompt, counted=False)
        if hit is None or not hit.tokens:
            return None
        if not self._loads:
            hit.release()
            return _Held(None)
        tokens, [pages], _ = store.load(hit)
        return _Held(embedding_of(pages, key)) if tokens == len(prompt) else None

    def _waits(self, known: _Input) -> bool:
        """Return whether a lookup is still under way. A lookup that missed its deadline becomes a miss."""
        if known.answer.done():
            return False
        if self._clock() < known.ends:
            return True
        known.miss()
        self._counters.add("late_lookups")
        return False

    def _found(self, known: _Input) -> _Held | None:
        """Return the answer for an input, after it has arrived."""
        error = known.answer.exception()
        if error is not None:
            self._errors.caught("looking up an embedding", error)
            return None
        return known.answer.result()


class EncoderWorker:
    """The worker's half; see the module. ``saves`` says whether this worker saves computed embeddings."""

    def __init__(
        self, settings: EncoderSettings, errors: ErrorLog, counters: ConnectorCounters, *, saves: bool
    ) -> None:
        self._errors = errors
        self._saves = saves
        self._stores = EmbeddingStores(settings, errors, counters)

    def load(self, work: EncoderWork, encoder_cache: dict[str, torch.Tensor], device: Any) -> None:
        """Put the embeddings of a step into vLLM's encoder cache, on ``device``."""
        for name, embedding in work.loads.items():
            if name not in encoder_cache:
                encoder_cache[name] = embedding.to(device)

    def save(self, work: EncoderWork, encoder_cache: Mapping[str, torch.Tensor], name: str) -> None:
        """Start to save an embedding that the encoder has computed, if a save was ordered."""
        key = work.saves.get(name)
        if key is None or not self._saves:
            return
        try:
            pages = pages_of(encoder_cache[name], key)
            self._stores.of(key.identity).save(key.prompt, pages, first=0)
        except (UnsupportedError, UsageError) as error:
            self._errors.warn("saving an embedding", str(error))

    def wait_saved(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` seconds until other engines can find the saved embeddings."""
        self._stores.wait_saved(timeout_s)

    def close(self) -> None:
        self._stores.wait_saved(_CLOSE_S)
        self._stores.close()
