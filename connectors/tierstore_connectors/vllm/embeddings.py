"""The scheduler half and worker half of the connector for embeddings (encoder outputs of images, for
example).

An embedding is found by a hash of the processor's output
(:class:`~tierstore_connectors.vllm.identity.MediaContents`). vLLM's name for the input is not used, because a
client may choose the name. The embedding's identity contains the model, weights, versions and configuration,
as for KV.

* **The scheduler half** looks up an embedding when vLLM asks whether a request can start. A thread then loads
  the bytes at once, and the request waits for them at most ``lookup_s`` plus ``load_s``. If a worker did not
  get a promised embedding, the engine would end. So the scheduler half promises only embeddings whose bytes
  are in its process. The next step's message carries the bytes to the workers.
* **The worker half** puts loaded embeddings into vLLM's encoder cache, and saves the encoder's outputs. All
  tensor-parallel ranks have the same embeddings, so only the first rank saves them.

An engine that only encodes (``ec_producer``) loads no embeddings, but skips encoding inputs whose embedding
is stored.
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

_MOST_HELD_BYTES = 256 << 20  # embeddings that are being loaded, or that no step has sent to workers yet
_IDLE_WAIT_S = 0.002  # in a step without tokens; without a wait the steps would take CPU time from loads
_NO_MEDIA = "prompt_embeds"  # the modality of inputs that a client has embedded itself
_CLOSE_S = 2.0


@dataclass(slots=True)
class EncoderWork:
    """The orders of one step, by vLLM's names of the inputs. The embeddings in ``loads`` are put into the
    encoder cache. The embeddings in ``saves`` are saved when the encoder has computed them."""

    loads: dict[str, torch.Tensor] = field(default_factory=dict)
    saves: dict[str, EmbeddingKey] = field(default_factory=dict)


class EmbeddingStores:
    """The stores of one process, one for each identity. After a change of weights, the stores of earlier
    identities are closed, because a daemon limits a client's number of identities."""

    def __init__(self, settings: EncoderSettings, errors: ErrorLog, counters: ConnectorCounters) -> None:
        self._settings = settings
        self._errors = errors
        self._counters = counters
        self._lock = threading.Lock()
        self._stores: dict[Identity, GuardedStore] = {}

    def of(self, identity: Identity) -> GuardedStore:
        """Return the store for embeddings of ``identity``, which the first call opens. Raise
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
    """The result of a lookup that found an embedding. ``embedding`` is None in an engine that only
    encodes."""

    embedding: torch.Tensor | None


@dataclass(slots=True)
class _Input:
    """An input that was looked up. ``promised`` is True after :meth:`EncoderScheduler.has` returned True for
    it."""

    key: EmbeddingKey
    ends: float
    answer: Future[_Held | None]
    nbytes: int
    promised: bool = False

    def miss(self) -> None:
        """Replace the answer by a miss. Requests that wait for the input do not look it up again."""
        self.answer = Future()
        self.answer.set_result(None)


class EncoderScheduler:
    """The scheduler half; see the module. The half is called from the scheduler's thread.

    ``identity_of`` returns the identity of a modality's embeddings. If ``adapters`` is True, LoRA adapters
    change embeddings, so requests with an adapter do not use the store. Arguments named ``request`` are
    vLLM's ``Request``.
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
        self._keys: dict[str, dict[int, EmbeddingKey | None]] = {}  # by request id and index of the input
        self._inputs: dict[str, _Input] = {}  # by vLLM's name, until a step sends their orders
        self._cached: set[str] = set()  # names of the inputs in vLLM's own encoder cache
        self._work = EncoderWork()

    def connect(self, modalities: Iterable[str]) -> None:
        """Connect to the daemon for embeddings of ``modalities``, so that the first request need not wait.
        Raise :class:`~tierstore.errors.UsageError` for an invalid address."""
        for modality in modalities:
            self._stores.of(self._identity_of(modality))

    def close(self) -> None:
        self._looking.shutdown(wait=False, cancel_futures=True)
        self._stores.close()

    # -- calls from vLLM -----------------------------------------------------------------------------

    def ready(self, request: Any, computed: int) -> bool:
        """Return whether a request can start: no lookup of an input after the request's first ``computed``
        tokens may be in progress. Look up inputs that are not in vLLM's encoder cache and were not
        looked up before."""
        ready = True
        for at, feature in enumerate(request.mm_features):
            place, name = feature.mm_position, feature.identifier
            if place.offset + place.length <= computed or name in self._cached:
                continue
            key = self._key(request, at)
            known = self._inputs.get(name)
            if known is None:
                known = self._look_up(name, key) if key is not None else None
            elif known.key != key:  # two inputs have this name, so neither may get the stored embedding
                known.miss()
            ready = ready and (known is None or not self._waits(known))
        return ready

    def has(self, name: str) -> bool:
        """Return whether the store has the embedding of the input ``name``, so that vLLM need not compute
        it."""
        known = self._inputs.get(name)
        if known is None or not known.answer.done():
            return False
        known.promised = self._found(known) is not None
        return known.promised

    def allocated(self, request: Any, at: int) -> None:
        """Order the load of an input's embedding if :meth:`has` returned True for it, otherwise the save of
        the computed embedding. ``at`` is the input's index in the request."""
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
        """Return the orders of a step. If the step computes no tokens, first wait up to 2 ms for a lookup."""
        self._cached.difference_update(scheduler_output.free_encoder_mm_hashes)
        if self._inputs and not scheduler_output.total_num_scheduled_tokens:
            wait([known.answer for known in self._inputs.values()], _IDLE_WAIT_S, FIRST_COMPLETED)
        work, self._work = self._work, EncoderWork()
        return work

    def finished(self, request: Any) -> None:
        """Forget a request that has ended, and the lookups of its inputs."""
        for at, key in self._keys.pop(request.request_id, {}).items():
            name = request.mm_features[at].identifier
            known = self._inputs.get(name)
            if known is not None and known.key == key:
                del self._inputs[name]

    def forget_everything(self, epoch: str) -> None:
        """Stop finding embeddings that were saved earlier, because the weights may have changed."""
        self._epoch = epoch
        self._keys.clear()
        self._inputs.clear()
        self._cached.clear()

    # -- lookups -------------------------------------------------------------------------------------

    def _key(self, request: Any, at: int) -> EmbeddingKey | None:
        """Return the key of an input of a request, or None if the input does not use the store."""
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
        """Start the lookup of an input. Return None if too many bytes of embeddings are held already."""
        nbytes = key.rows * key.shape[1] * key.dtype.itemsize if self._loads else 0
        held = sum(known.nbytes for known in self._inputs.values())
        if held and held + nbytes > _MOST_HELD_BYTES:
            return None
        ends = self._clock() + self._settings.lookup_s + (self._settings.load_s if self._loads else 0)
        self._counters.add("lookups")
        self._inputs[name] = known = _Input(key, ends, self._looking.submit(self._find, key), nbytes)
        return known

    def _find(self, key: EmbeddingKey) -> _Held | None:
        """Look up an embedding, on this host or other hosts, and load it. Called on the lookup thread."""
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
        """Return whether a lookup is still in progress. A lookup after its deadline becomes a miss."""
        if known.answer.done():
            return False
        if self._clock() < known.ends:
            return True
        known.miss()
        self._counters.add("late_lookups")
        return False

    def _found(self, known: _Input) -> _Held | None:
        """Return the result of an input's completed lookup."""
        error = known.answer.exception()
        if error is not None:
            self._errors.caught("looking up an embedding", error)
            return None
        return known.answer.result()


class EncoderWorker:
    """The worker half; see the module. ``saves`` says whether this worker saves computed embeddings."""

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
