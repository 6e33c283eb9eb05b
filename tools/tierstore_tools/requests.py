"""Many clients with small requests: lookups of one short prompt, as fast as each of them can.

The clients are threads of several processes, each with a connection of its own, and run on the cores that the
daemon may use (start it with ``taskset`` to share two).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.errors import TierStoreError
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.store import Store
from tierstore_tools.connected_bytes import connect
from tierstore_tools.together import Meet, Together, share_cores_of

_TOKENS = 1024
_WAIT_S = 60.0

_SPEC = KVSpec.uniform(layers=1, kv_heads=1, head_dim=16, dtype="float16")


@dataclass(frozen=True, slots=True)
class RequestsRow:
    """``least_share`` is what the client with the fewest lookups got, of the mean."""

    clients: int
    processes: int
    cores: int  # of all clients and the daemon
    tokens: int
    lookups_per_s: float
    p50_ms: float
    p99_ms: float
    least_share: float


@dataclass(frozen=True, slots=True)
class _Served:
    cores: int
    seconds: float
    latencies: list[list[float]]  # seconds, by client


def measure(url: str, pid: int, *, clients: int, processes: int, seconds: float) -> RequestsRow:
    """``pid`` is the daemon's. Raises :class:`TierStoreError`."""
    identity = Identity.of(_SPEC, model="tierstore-bench requests", revision=str(time.time_ns()))
    with connect(url, _SPEC, identity) as store:
        store.save(_tokens(), [bytes(_SPEC.page_bytes)] * (_TOKENS // _SPEC.chunk_tokens)).wait(_WAIT_S)
    each = (url, pid, identity, clients // processes, seconds)
    served = Together(_work, [each] * processes).run()
    by_client = [latencies for one in served for latencies in one.latencies]
    counts = [len(latencies) for latencies in by_client]
    p50, p99 = (1e3 * float(np.percentile(np.concatenate(by_client), share)) for share in (50, 99))
    rate = sum(counts) / max(one.seconds for one in served)
    least = min(counts) / (sum(counts) / len(counts))
    return RequestsRow(len(counts), processes, served[0].cores, _TOKENS, rate, p50, p99, least)


def _tokens() -> npt.NDArray[np.uint32]:
    return np.arange(_TOKENS, dtype=np.uint32)


def _work(meet: Meet, url: str, pid: int, identity: Identity, clients: int, seconds: float) -> _Served:
    cores = share_cores_of(pid)
    stores = [connect(url, _SPEC, identity) for _ in range(clients)]
    latencies: list[list[float]] = [[] for _ in stores]
    tokens = _tokens()
    failed: list[str] = []

    def ask(store: Store, took: list[float]) -> None:
        now = time.perf_counter()
        while not took or now < ends:
            with store.lookup(tokens) as hit:
                if hit.tokens != _TOKENS:
                    failed.append(f"{hit.tokens} of {_TOKENS} tokens were found")
                    return
            before, now = now, time.perf_counter()
            took.append(now - before)

    threads = [
        threading.Thread(target=ask, args=(store, took))
        for store, took in zip(stores, latencies, strict=True)
    ]
    meet()
    started = time.perf_counter()
    ends = started + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - started
    for store in stores:
        store.close()
    if failed:
        raise TierStoreError(failed[0])
    return _Served(cores, took_s, latencies)
