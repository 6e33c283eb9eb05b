"""tierstore: a tiered KV-cache store for LLM inference.

>>> import tierstore
>>> spec = KVSpec.uniform(layers=2, kv_heads=1, head_dim=64, dtype="float16")
>>> with tierstore.open(None, spec, host_bytes=1 << 20) as store:
...     stored = store.save(range(128), [bytes(spec.page_bytes)] * 2).wait()
...     hit = store.lookup([*range(100), 5, 6, 7])
>>> stored, hit.tokens
(128, 100)

See ``docs/architecture.md`` for how it is built.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tierstore.arguments import seconds, text, whole_number
from tierstore.backend import Backend, Registration
from tierstore.client.backend import RemoteBackend
from tierstore.client.handshake import Address, CurveKeys
from tierstore.codec import NONE
from tierstore.core.backend import LocalBackend, open_core
from tierstore.core.core import MOVER_THREADS
from tierstore.core.health import STALL_S
from tierstore.errors import SpecError, StoreClosedError, StoreUnavailableError, TierStoreError, UsageError
from tierstore.groups import Group, groups_of
from tierstore.keys import Identity, PageKey, Prompt
from tierstore.policy import DEFAULT_POLICY
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.store import Hit, Store, lookup_all
from tierstore.store.store import checked_lookup_s, checked_pools
from tierstore.tiers import group_pools
from tierstore.tiers.device import Device
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.pinned import Pin
from tierstore.transfer import Progress, Transfer, TransferState
from tierstore.types import Hint, Loaded, Promise
from tierstore.units import GIB, KIB

__all__ = [
    "Backend",
    "Hint",
    "Hit",
    "Identity",
    "KVSpec",
    "LayerGroup",
    "LayerKind",
    "Loaded",
    "PageKey",
    "PagePool",
    "Progress",
    "Promise",
    "Prompt",
    "SpecError",
    "Store",
    "StoreClosedError",
    "StoreUnavailableError",
    "TierStoreError",
    "Transfer",
    "TransferState",
    "UsageError",
    "connect",
    "lookup_all",
    "open",
    "open_pool",
    "open_pools",
]

_log = logging.getLogger(__name__)

DEFAULT_HOST_BYTES = 1 * GIB
DEFAULT_DISK_BYTES = 10 * GIB
CONNECT_S = 5.0  # for a daemon that is busy, or just starting
_LOOK_S = 10.0  # the longest that an embedded store's lookup may take: its disk has limits of its own


def open(
    path: str | Path | None,
    spec: KVSpec,
    *,
    identity: Identity | None = None,
    pools: PagePool | Sequence[PagePool] | None = None,
    host_bytes: int = DEFAULT_HOST_BYTES,
    disk_bytes: int = DEFAULT_DISK_BYTES,
    disk_write_budget: int = 0,
    disk_codec: str = NONE,
    inline_bytes: int = 16 * KIB,
    policy: str = DEFAULT_POLICY,
    lease_s: float = 60.0,
    mover_threads: int = MOVER_THREADS,
    stall_s: float = STALL_S,
    checkpoint_tokens: int | None = None,
) -> Store:
    """Open an embedded store: its tiers are this process's own.

    ``path`` is the disk tier's directory (made if it is not there; one process at a time), None for none.
    ``pools`` are the engine's HBM page pools, one for each layer group, if pages are to be found and kept
    there too (of a model with one group it may be the pool itself). ``identity`` stands for tokens given
    without a prompt; without one only the layout tells pages apart, so give one wherever weights, adapters or
    tenants can differ. ``lease_s`` is how long a hit holds its pages.
    ``policy`` is one of ``tierstore.policy.POLICIES`` and says who leaves a full tier first.
    ``disk_write_budget`` is how many bytes of pages a day may be written to disk (0: any number).
    ``disk_codec`` is how pages are kept there: ``none``, ``lossless`` or ``zstd`` (:mod:`tierstore.codec`).
    ``checkpoint_tokens`` is how far apart the save points of a conversation are kept that it has gone on
    from, where pages are named (None: see :mod:`tierstore.retention`).
    A disk that has not answered a call for ``stall_s`` seconds is not waited for any more, until it does.

    Raises :class:`UsageError` for capacities that cannot hold a page and
    :class:`~tierstore.errors.StoreUnavailableError` for a directory that cannot be used.
    """
    page_pools = checked_pools(spec, pools)
    core = open_core(
        path,
        max(group.page_bytes for group in groups_of(spec)),
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        disk_write_budget=disk_write_budget,
        disk_codec=disk_codec,
        inline_bytes=inline_bytes,
        policy=policy,
        lease_s=lease_s,
        mover_threads=mover_threads,
        stall_s=stall_s,
        pools=page_pools,
    )
    backend = LocalBackend(core, owns_core=True)
    return Store(
        backend,
        spec,
        identity=identity,
        pools=page_pools or None,
        lookup_s=_LOOK_S,
        mover_threads=mover_threads,
        policy=policy,
        checkpoint_tokens=checkpoint_tokens,
    )


def connect(
    url: str,
    spec: KVSpec,
    *,
    identity: Identity | None = None,
    pools: PagePool | Sequence[PagePool] | None = None,
    lookup_s: float = 0.5,
    mover_threads: int = 2,
    keys: str | Path | None = None,
    server_key: str | Path | None = None,
    verify: bool = False,
    reach: Callable[[Pin], None] | None = None,
    model_name: str = "",
    loads: bool = True,
    saves: bool = True,
    checkpoint_tokens: int | None = None,
    groups: Sequence[Group] | None = None,
    wait_s: float = CONNECT_S,
) -> Store:
    """Use the daemon at ``url``: ``ipc://PATH`` on this host, ``tcp://HOST:PORT`` on another.

    It need not be there yet: while it is not, lookups miss and nothing is stored. ``connect`` waits for it up
    to ``wait_s`` seconds, and logs a warning if it is not there by then. Engines that must not wait give 0.
    ``lookup_s`` is the longest that a lookup (and every verb without a deadline of its own, but those that
    save) waits for an answer. ``keys`` is this
    client's ``.secret`` file, ``server_key`` the daemon's ``.key`` file (see ``tierstore keygen``), for
    ``tcp://``. ``verify``: every page that comes from the daemon's memory on this host is compared with the
    checksum of what was saved, for who does not trust every process of his own user (pages from other hosts
    and from disk always are). It costs a part of a load's speed. ``reach`` is for those who have no pool but
    copy between pages and the memory of a device all the same: :meth:`~tierstore.tiers.pinned.Reach.share` of
    that device's. ``model_name`` is what people call the model: KV events may be told by model, and it
    changes no page. Without ``loads`` the daemon is not asked for pages, without ``saves`` it is given none;
    what is in the pool is found and kept all the same. ``groups`` are for an engine that keeps pages in layer
    groups of its own, such as one for each worker: the ``identities`` of its prompts are what the pages of
    each are kept under, and ``spec`` is then that of the first. The other arguments are those of
    :func:`open`. The store is for one process: a forked child that uses it gets a :class:`StoreClosedError`,
    and connects for itself.

    Raises :class:`UsageError` for an address or keys that cannot be used.
    """
    page_pools = checked_pools(spec, pools)
    lookup_s = checked_lookup_s(lookup_s)
    wait_s = seconds("wait_s", wait_s)
    mover_threads = whole_number("mover_threads", mover_threads, least=1)
    identity = identity or Identity.of(spec, model="default")
    first, of_first = (groups or groups_of(spec))[0], identity.groups[0]
    backend = RemoteBackend(
        Address.parse(url, CurveKeys.read(keys, server_key)),
        Registration(of_first, first.page_bytes, spec.chunk_tokens, text("model_name", model_name)),
        patience_s=lookup_s,
        verify=verify,
        loads=loads,
        saves=saves,
        reach=page_pools[0].reach if page_pools else reach,  # they lie in one memory
    )
    store = Store(
        backend,
        spec,
        identity=identity,
        pools=page_pools or None,
        lookup_s=lookup_s,
        mover_threads=mover_threads,
        checkpoint_tokens=checkpoint_tokens,
        groups=groups,
    )
    _wait_for_daemon(url, [store], wait_s)
    return store


def _wait_for_daemon(url: str, stores: Sequence[Store], wait_s: float) -> None:
    """Wait until all of ``stores`` are connected, ``wait_s`` seconds at most."""
    if not wait_s:
        return
    ends = time.monotonic() + wait_s
    try:
        for store in stores:
            if not store.wait_connected(max(ends - time.monotonic(), 0.0)):
                _log.warning(
                    "no daemon answers at %s after %g s: lookups miss until it does. Start one with "
                    "`tierstore serve`, or check the address",
                    url,
                    wait_s,
                )
                return
    except BaseException:  # a person's Ctrl-C
        for store in stores:
            store.close()
        raise


def open_pool(spec: KVSpec, num_pages: int, *, device: str = "cpu", most: int | None = None) -> PagePool:
    """A pool on ``device``: ``cpu``, ``cuda`` or ``cuda:N``, which may be resized to ``most`` pages (None: on
    a CPU to ``num_pages``, on a device not at all). Raises :class:`UsageError` for a device that there is not
    or that has no room, and :class:`~tierstore.tiers.device.DeviceError` when its driver fails."""
    runtime = _device(device)
    if runtime is None:
        return PagePool(spec, num_pages, most=most)
    from tierstore.tiers.device_pool import DevicePool

    return DevicePool(spec, num_pages, runtime, most=most)


def open_pools(
    spec: KVSpec, nbytes: int, *, device: str = "cpu", most_bytes: int | None = None
) -> tuple[PagePool, ...]:
    """A pool for each layer group of ``spec``, in one memory of ``nbytes`` bytes on ``device``, which may be
    resized to ``most_bytes``; as :func:`open_pool`."""
    if len(spec.groups) == 1:
        most = None if most_bytes is None else most_bytes // spec.page_bytes
        return (open_pool(spec, nbytes // spec.page_bytes, device=device, most=most),)
    return group_pools.open_group_pools(spec.split(), nbytes, most_bytes=most_bytes, device=_device(device))


def _device(device: str) -> Device | None:
    """None is the CPU."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return None
    if kind == "cuda" and (index.isdigit() or not index):
        from tierstore.tiers.cuda import CudaDevice  # not before somebody has a GPU

        return CudaDevice(int(index or 0))
    raise UsageError(f"no page pool for device {device!r}: use cpu or cuda")
