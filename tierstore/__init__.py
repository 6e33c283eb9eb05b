"""tierstore: a tiered KV-cache store for LLM inference.

>>> import tierstore
>>> spec = tierstore.KVSpec.uniform(layers=2, kv_heads=1, head_dim=64, dtype="float16")
>>> with tierstore.open(None, spec, host_bytes=1 << 20) as store:
...     stored = store.save(range(128), [bytes(spec.page_bytes)] * 2).wait()
...     hit = store.lookup([*range(100), 5, 6, 7])
>>> stored, hit.tokens
(128, 100)

``import tierstore`` is quick: a public name's module is imported when the name is first used.
``docs/architecture.md`` describes how the store is built.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.defaults import CONNECT_S, DEFAULT_DISK_BYTES, DEFAULT_HOST_BYTES, MOVER_THREADS, STALL_S
from tierstore.errors import SpecError, StoreClosedError, StoreUnavailableError, TierStoreError, UsageError
from tierstore.units import KIB

if TYPE_CHECKING:
    from tierstore.backend import Backend
    from tierstore.groups import Group
    from tierstore.keys import Identity, PageKey, Prompt
    from tierstore.spec import KVSpec, LayerGroup, LayerKind
    from tierstore.store import Hit, Store, lookup_all
    from tierstore.tiers.device import Device
    from tierstore.tiers.hbm import PagePool
    from tierstore.tiers.overflow import Overflow
    from tierstore.tiers.pinned import Pin
    from tierstore.transfer import Progress, Transfer, TransferState
    from tierstore.types import Hint, Loaded, Promise

__all__ = [
    "DEFAULT_DISK_BYTES",
    "DEFAULT_HOST_BYTES",
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
    "open_beside",
    "open_overflow_pools",
    "open_pool",
    "open_pools",
]

_LAZY = {
    "Backend": "tierstore.backend",
    "Identity": "tierstore.keys",
    "PageKey": "tierstore.keys",
    "Prompt": "tierstore.keys",
    "KVSpec": "tierstore.spec",
    "LayerGroup": "tierstore.spec",
    "LayerKind": "tierstore.spec",
    "Hit": "tierstore.store",
    "Store": "tierstore.store",
    "lookup_all": "tierstore.store",
    "PagePool": "tierstore.tiers.hbm",
    "Progress": "tierstore.transfer",
    "Transfer": "tierstore.transfer",
    "TransferState": "tierstore.transfer",
    "Hint": "tierstore.types",
    "Loaded": "tierstore.types",
    "Promise": "tierstore.types",
}  # public names and the modules that define them

_LOOK_S = 10.0  # time limit of a lookup in an embedded store; each disk call also has its own limit

_log = logging.getLogger(__name__)


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'tierstore' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def open(
    path: str | Path | None,
    spec: KVSpec,
    *,
    identity: Identity | None = None,
    pools: PagePool | Sequence[PagePool] | None = None,
    host_bytes: int = DEFAULT_HOST_BYTES,
    disk_bytes: int = DEFAULT_DISK_BYTES,
    disk_write_budget: int = 0,
    disk_codec: str = "none",
    disk_key: str = "",
    disk_keyring: str | Path | None = None,
    session_keys: bool = False,
    inline_bytes: int = 16 * KIB,
    policy: str = "default",
    lease_s: float = 60.0,
    mover_threads: int = MOVER_THREADS,
    stall_s: float = STALL_S,
    max_age_days: float = 0.0,
    checkpoint_tokens: int | None = None,
    model_name: str = "",
) -> Store:
    """Open an embedded store, with its tiers in this process.

    ``path`` is the directory of the disk tier (None: no disk tier). A missing directory is created. Only one
    process at a time can use a directory. ``pools`` are the engine's HBM page pools, one for each layer
    group; a model with one group may pass the pool itself. Lookups find pages in these pools, and saves keep
    pages there, without a copy.

    ``identity`` applies to tokens that are given without a prompt. Without an identity only the layout tells
    models apart, so pass an identity if weights, adapters or tenants can differ.

    ``lease_s`` is how long a hit holds its pages. ``policy``, one of ``tierstore.policy.POLICIES``, selects
    the pages that leave a full tier first. ``disk_write_budget`` limits the page bytes written to disk per
    day (0: no limit). ``disk_codec`` encodes pages on disk: ``none``, ``lossless`` or ``zstd``
    (:mod:`tierstore.codec`). ``disk_key`` encrypts the disk tier: it is the path of a master key, or
    ``command:COMMAND`` for a command that prints a master key. ``disk_keyring`` is a file outside of ``path``
    with the keys of tenants (None: beside the master key; see docs/encryption.md). With ``session_keys``,
    each session has its own key, and forgetting the session deletes the key. ``checkpoint_tokens`` is the
    distance between the save points of a conversation in groups with named pages (None: see
    :mod:`tierstore.retention`). A disk call that takes longer than ``stall_s`` seconds marks the disk as
    stalled; loads and saves then do not wait for the disk until it answers. ``max_age_days`` is the longest
    time that a page is served after it was saved (0: no limit; see docs/encryption.md). `tierstore ls` shows
    ``model_name``, the model's name for people.

    Raises :class:`UsageError` for a capacity that cannot hold a page, and
    :class:`~tierstore.errors.StoreUnavailableError` for a directory that cannot be used.
    """
    from tierstore.arguments import text
    from tierstore.core.backend import LocalBackend, open_core
    from tierstore.groups import groups_of
    from tierstore.store.store import Store, checked_pools

    page_pools = checked_pools(spec, pools)
    name = text("model_name", model_name)
    core = open_core(
        path,
        max(group.page_bytes for group in groups_of(spec)),
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        disk_write_budget=disk_write_budget,
        disk_codec=disk_codec,
        disk_key=text("disk_key", disk_key),
        disk_keyring=disk_keyring,
        session_keys=session_keys,
        inline_bytes=inline_bytes,
        policy=policy,
        lease_s=lease_s,
        mover_threads=mover_threads,
        stall_s=stall_s,
        max_age_days=max_age_days,
        pools=page_pools,
    )
    backend = LocalBackend(core, owns_core=True, model_name=name)
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


def open_beside(store: Store, spec: KVSpec, *, identity: Identity, model_name: str = "") -> Store:
    """Open a second store, with other pages, in the tiers of an embedded ``store``: for example a store of
    embeddings (:meth:`KVSpec.embedding`). Both stores share the capacities and the policy of ``store``, which
    must be closed last. Raise :class:`UsageError` for a store at a daemon: connect to the daemon a second
    time instead.

    >>> from tierstore.keys import Identity
    >>> from tierstore.spec import KVSpec
    >>> with open(None, KVSpec.opaque(4096, chunk_tokens=8), host_bytes=1 << 20) as store:
    ...     spec = KVSpec.embedding(width=64, dtype="float32")
    ...     open_beside(store, spec, identity=Identity.of(spec, model="m")).close()
    """
    from tierstore.core.backend import LocalBackend
    from tierstore.store.store import Store

    if not isinstance(store.backend, LocalBackend):
        raise UsageError("a store at a daemon has no tiers of its own: connect a second store to the daemon")
    backend = LocalBackend(store.backend.core, model_name=model_name)
    return Store(backend, spec, identity=identity, lookup_s=_LOOK_S)


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
    log: logging.Logger | None = None,
) -> Store:
    """Connect to the daemon at ``url``: ``ipc://PATH`` on this host, ``tcp://HOST:PORT`` on another one.

    ``connect`` waits up to ``wait_s`` seconds for the daemon and logs a warning if the daemon does not
    answer. Engines that must not wait pass ``wait_s=0``. Without a daemon, lookups miss and saves store
    nothing; the store connects as soon as a daemon starts.

    ``lookup_s`` is the time limit of a lookup and of every other call without a deadline, except saves. For
    ``tcp://``, ``keys`` is this client's ``.secret`` file and ``server_key`` is the daemon's ``.key`` file
    (see ``tierstore keygen``). ``verify`` compares every page from the daemon's shared memory with the
    checksum of its save. Use ``verify`` if you do not trust other processes of the same user; it makes loads
    slower. Pages from other hosts and from disk are always verified.

    ``reach`` shares a device with a store that has no pool but copies pages to and from the device: pass
    :meth:`~tierstore.tiers.pinned.Reach.share` of that device. ``model_name`` is the model's name for people:
    it appears in KV events and in ``tierstore ls``, and does not change which pages are found. With
    ``loads=False`` the store requests no pages from the daemon, and with ``saves=False`` it sends none;
    lookups find pages in the pool, and saves keep pages there, in both cases. ``groups`` is for an engine
    with its own layer groups, such as one group for each worker: the ``identities`` of its prompts name the
    pages of each group, and ``spec`` describes the first group. ``log`` receives a line when the daemon
    connects and a line when the daemon disconnects. All other arguments are those of :func:`open`.

    The store belongs to one process. A forked child that uses it gets :class:`StoreClosedError` and must
    connect again. Raises :class:`UsageError` for an address or keys that cannot be used.
    """
    from tierstore.arguments import seconds, text, whole_number
    from tierstore.backend import Registration
    from tierstore.client.backend import RemoteBackend
    from tierstore.client.handshake import Address, CurveKeys
    from tierstore.groups import groups_of
    from tierstore.keys import Identity
    from tierstore.store.store import Store, checked_lookup_s, checked_pools

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
        log=log,
        reach=page_pools[0].reach if page_pools else reach,  # all pools lie in one memory
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
    """Wait until all ``stores`` are connected, at most ``wait_s`` seconds. Log a warning if one is not."""
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
    except BaseException:  # Ctrl-C
        for store in stores:
            store.close()
        raise


def open_pool(
    spec: KVSpec, num_pages: int, *, device: str = "cpu", most: int | None = None, shared_parts: int = 0
) -> PagePool:
    """Return a pool of ``num_pages`` pages on ``device``: ``cpu``, ``cuda`` or ``cuda:N``.

    ``most`` is the largest number of pages that the pool can be resized to (None: ``num_pages``). A pool on a
    GPU can be resized only if ``most`` is given. On a CPU, a pool with ``shared_parts`` lies in memory that
    other processes can map, and takes pages from its parts in turn. Raises :class:`UsageError` for a device
    that does not exist or has too little memory, and :class:`~tierstore.tiers.device.DeviceError` if the
    device's driver fails.
    """
    from tierstore.tiers.hbm import PagePool

    runtime = _device(device)
    if runtime is None:
        return PagePool(spec, num_pages, most=most, shared_parts=shared_parts)
    from tierstore.tiers.device_pool import DevicePool

    return DevicePool(spec, num_pages, runtime, most=most)


def open_pools(
    spec: KVSpec,
    nbytes: int,
    *,
    device: str = "cpu",
    most_bytes: int | None = None,
    shared_parts: int = 0,
    device_heads: Sequence[range] = (),
) -> tuple[PagePool, ...]:
    """Return a pool for each layer group of ``spec``, all in one memory of ``nbytes`` bytes on ``device``.

    ``most_bytes`` is the largest size that the memory can be resized to. With ``device_heads``, the memory is
    divided over several GPUs, starting with ``device``, and cannot be resized. Each GPU then holds some KV
    heads of all pages, or of the pages of one of ``shared_parts``. All else is as in :func:`open_pool`.
    """
    from tierstore.tiers import group_pools

    if device_heads:
        from tierstore.tiers.cuda import CudaDevice
        from tierstore.tiers.divided_pool import open_divided_pools

        if most_bytes is not None:
            raise UsageError("a page pool on several devices cannot be resized: give it one size")
        first = int(device.partition(":")[2] or 0)
        shares: dict[Device, range] = {
            CudaDevice(first + number): heads for number, heads in enumerate(device_heads)
        }
        return open_divided_pools(spec.split(), nbytes, shares, parts=max(shared_parts, 1))
    if len(spec.groups) == 1:
        most = None if most_bytes is None else most_bytes // spec.page_bytes
        return (
            open_pool(spec, nbytes // spec.page_bytes, device=device, most=most, shared_parts=shared_parts),
        )
    return group_pools.open_group_pools(
        spec.split(), nbytes, most_bytes=most_bytes, device=_device(device), shared_parts=shared_parts
    )


def open_overflow_pools(
    spec: KVSpec, counts: Sequence[int], overflow: Overflow, *, device: str = "cpu"
) -> tuple[PagePool, ...]:
    """Return a pool for each layer group of ``spec``, with ``counts`` pages each. The first pool has further
    pages in ``overflow``: on a CPU in a file, on a GPU in host memory and then in a file.

    Raises :class:`UsageError` if pages of the first layer group cannot lie in ``overflow``, for a size
    without room, and for an ``overflow`` that does not fit the device.
    """
    from tierstore.tiers.device_overflow import DeviceOverflowPool
    from tierstore.tiers.group_pools import bytes_for, open_group_pools
    from tierstore.tiers.overflow import OverflowPool

    overflow.check(device)
    runtime, (first_spec, *specs) = _device(device), spec.split()
    first: PagePool
    compute = None
    if runtime is None:
        pages = overflow.pages(first_spec, counts[0])
        first = OverflowPool(first_spec, pages, resident_pages=counts[0], directory=overflow.directory)
    else:
        first = DeviceOverflowPool.open(first_spec, counts[0], overflow, runtime)
        compute = first.hbm.compute
    if not specs:
        return (first,)
    nbytes = bytes_for(specs, counts[1:])
    return (first, *open_group_pools(specs, nbytes, device=runtime, compute=compute))


def _device(device: str) -> Device | None:
    """Return the device with this name; None for the CPU."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return None
    if kind == "cuda" and (index.isdigit() or not index):
        from tierstore.tiers.cuda import CudaDevice  # imports CuPy

        return CudaDevice(int(index or 0))
    raise UsageError(f"no page pool for device {device!r}: use cpu or cuda")
