"""Data keys that hosts share, in a separate bucket.

A daemon with a disk key seals (encrypts) the pages that it publishes (``forms.py``). The pages of a *scope*,
a tenant and a model, are sealed with the scope's *shared data key*. This key is one object,
``PREFIX/keys/NAME``::

    magic ‖ key id ‖ nonce ‖ AES-256-GCM(data key, tenant, model)

The object is encrypted with the *sharing key*, which is derived from the master key. So hosts with the same
master key share pages, and for hosts with another master key all these pages are misses. NAME is a keyed hash
of the tenant and the model. The object is written only if NAME does not exist (``If-None-Match``), so hosts
that publish at the same time agree on one key. Each agent lists the keys every ``refresh_s`` seconds and
keeps them in memory. No lookup waits for the server.

**Why the keys have a separate bucket.** A forget deletes the keys of a tenant. If someone has an earlier copy
of the pages' bucket, this copy then has pages without a key. If the keys were in the pages' bucket, the copy
would contain them, and the master key would decrypt them. So :func:`check_keys_url` refuses the same bucket.
For the same reason, the keys' bucket must keep no old versions; making a key in a bucket with versions is
refused.

**Forget.** :meth:`SharedKeys.forget` deletes the keys. When it returns, the server has confirmed the
deletion, and this agent has erased its copies. An agent of another host notices a missing key at its next
listing. It erases its copy, and tells its daemon (:class:`~tierstore.cluster.orders.Vanished`). This daemon
then forgets the tenant and model in its own tiers. Until then, the agent uses no new key of this scope, so
that no page from before the forget is published under a new key. An agent that cannot list the keys stops
using them after twice ``refresh_s`` plus 5 s. So no host reads forgotten bundles after this time.

A daemon writes to its disk which keys exist (:class:`~tierstore.cluster.orders.KeysHeld`). So a host that was
down during a forget notices the forget when it starts. If a key is missing in a listing, the agent reads its
object before it treats the key as deleted, so an incomplete listing does not cause a forget.

A program that can write to the keys' bucket can make all hosts forget. It can also restore a copy of a key
from before a forget. It cannot decrypt keys, exchange the keys of two tenants, or make a key that hosts use.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from tierstore.cluster.orders import MOST_KEYS, Counted, KeysHeld, ToDaemon, Vanished
from tierstore.cluster.s3 import Bucket, NoObjectError
from tierstore.cluster.s3_address import S3Address
from tierstore.errors import UsageError
from tierstore.tiers.disk.keyring import (
    ID_BYTES,
    KEY_BYTES,
    NONCE_BYTES,
    DataKey,
    Scope,
    SecretMemory,
    require_cryptography,
    unwrap,
    wrap,
)

_KEYS = "keys"
_MAGIC = b"tierstore key 1\0"
_MOST_BYTES = 256 << 10  # limit of an object's size: names of tenants and models have at most 64 KiB
_LATE_S = 5.0


class _StoredKey(NamedTuple):
    """An object in the keys' bucket. ``key`` is None if the sharing key does not decrypt the object."""

    tag: str  # changes with the object
    id: bytes
    key: DataKey | None = None
    scope: Scope | None = None  # None if it is not known


class SharedKeys:
    """The keys in a bucket. Thread-safe. Only :meth:`find`, :meth:`by_id` and :meth:`resume` never wait for
    the server. All other methods raise :class:`BucketError` if the server does not answer. ``held`` are the
    keys (tenant, model and id) that this host knew when its last agent ended. ``tell`` receives changes of
    these keys, and a :class:`Vanished` for each key that another host has deleted."""

    def __init__(
        self,
        bucket: Bucket,
        sharing_key: bytes,
        readers: ThreadPoolExecutor,
        tell: Callable[[ToDaemon], None],
        held: Sequence[tuple[str, str, bytes]] = (),
    ) -> None:
        require_cryptography("a shared store with a disk key")
        self.bucket = bucket
        self.gone: set[bytes] = set()  # ids of keys that were deleted since the start
        self.deletes = False  # whether this agent has deleted a key
        self._readers = readers
        self._tell = tell
        self._memory = SecretMemory()
        self._sharing_key = self._memory.keep(sharing_key)
        self._limit_s = 2 * bucket.address.refresh_s + _LATE_S
        self._listed_at = -float("inf")
        # Numbers of Vanished messages: other numbers than those of an earlier agent or of the daemon.
        self._numbers = itertools.count(-1 - secrets.randbelow(1 << 60), -1)
        self._lock = threading.Lock()  # for changes of the fields below; reading them needs no lock
        self._held = list(held)  # the keys in the last report to the daemon
        self._stored = {  # by path
            self._path(scope := Scope(tenant, model)): _StoredKey("unread", id, scope=scope)
            for tenant, model, id in held
        }
        self._by_scope: dict[Scope, DataKey] = {}
        self._by_id: dict[bytes, DataKey] = {}
        self._blocks: dict[int, Callable[[Scope], bool]] = {}  # matches scopes that are being forgotten

    def __repr__(self) -> str:
        return f"SharedKeys({len(self._by_id)} keys)"

    # -- finding -------------------------------------------------------------------------------------

    def find(self, scope: Scope) -> DataKey | None:
        """Return the key of a scope. Return None if the scope has no known key, if the scope is being
        forgotten, or if the last listing is too old."""
        if self._withheld(scope):
            return None
        return self._by_scope.get(scope)

    def by_id(self, id: bytes) -> DataKey | None:
        """Return the key with this id. Return None for an unknown id, and in the cases in which :meth:`find`
        does."""
        key = self._by_id.get(id)
        return self.find(key.scope) if key is not None else None

    def find_or_make(self, scope: Scope) -> DataKey | None:
        """Return the key of a scope, and make it if there is none. Return None in the cases in which
        :meth:`find` does, and if no key could be made."""
        if scope not in self._by_scope and not self._withheld(scope):
            with self._lock:
                path = self._path(scope)
                if path not in self._stored:
                    if len(self._stored) >= MOST_KEYS:
                        self._tell(Counted({"keys_beyond_the_limit": 1}))
                        return None
                    self.bucket.create(path, self._wrapped(path, scope))
                    self._note(path, "", self._read(path))  # another host may have been faster
                    self._report()
            if scope not in self._by_scope:  # the object in the bucket is not a valid key
                self._tell(Counted({"unreadable_keys": 1}))
        return self.find(scope)

    def _withheld(self, scope: Scope) -> bool:
        late = time.monotonic() - self._listed_at > self._limit_s
        return late or any(covers(scope) for covers in list(self._blocks.values()))

    # -- following the bucket ------------------------------------------------------------------------

    def refresh(self, after_s: float = 0.0) -> None:
        """List the keys, if the last listing is at least ``after_s`` seconds old: find new keys, and notice
        deleted ones."""
        with self._lock:
            if time.monotonic() - self._listed_at >= after_s:
                self._refresh()

    def forget(self, number: int, covers: Callable[[Scope], bool]) -> int:
        """Delete the keys of all scopes for which ``covers`` is true, and return their number. These scopes
        get no new key until :meth:`resume` is called with ``number``."""
        self._blocks[number] = covers
        with self._lock:
            self._refresh()
            paths = [self._path(scope) for scope in self._by_scope if covers(scope)]
            if paths:
                self.deletes = True
                self.bucket.delete(paths)
            for path in paths:
                self._drop(path)
        return len(paths)

    def resume(self, number: int) -> None:
        """Allow new keys for the scopes of the forget with this number."""
        self._blocks.pop(number, None)

    def _refresh(self) -> None:
        began = time.monotonic()
        listed = {each.path: each.tag for each in self.bucket.list(_KEYS)}
        known = {path: each.tag for path, each in self._stored.items()}
        changed = [path for path in {**known, **listed} if known.get(path) != listed.get(path, "")]
        for path, data in zip(changed, self._readers.map(self._read, changed), strict=True):
            scope = self._note(path, listed.get(path, ""), data)
            if scope is not None and not any(covers(scope) for covers in list(self._blocks.values())):
                number = next(self._numbers)
                self._blocks[number] = scope.__eq__
                self._tell(Vanished(number, *scope.names))
        self._listed_at = began
        self._report()

    def _read(self, path: str) -> bytes:
        """Return the bytes of an object; empty if the object does not exist."""
        try:
            return bytes(self.bucket.read(path, 0, _MOST_BYTES))
        except NoObjectError:
            return b""

    def _note(self, path: str, tag: str, data: bytes) -> Scope | None:
        """Record the content of an object. If a known key has disappeared, return its scope."""
        known = self._stored.get(path)
        id = data[len(_MAGIC) : len(_MAGIC) + ID_BYTES]
        same = known is not None and data and known.id == id
        if known is not None and same and (known.key is not None or known.scope is None):
            self._stored[path] = known._replace(tag=tag)
            return None
        scope = self._drop(path) if known is not None and not same else None
        if data:
            key = self._unwrapped(path, data)
            self._stored[path] = _StoredKey(tag, id, key, key.scope if key is not None else None)
            if key is not None:
                self._by_scope[key.scope] = self._by_id[key.id] = key
        return scope

    def _drop(self, path: str) -> Scope | None:
        stored = self._stored.pop(path)
        self.gone.add(stored.id)
        key = stored.key
        if key is not None:
            key.dropped = True
            del self._by_scope[key.scope], self._by_id[key.id]
            self._memory.erase(key.secret)
        return stored.scope

    def _report(self) -> None:
        """Tell the daemon which keys exist, for the next agent. Do not tell it while a forget is running: if
        the daemon ends before it has forgotten, the next agent must notice the missing key again."""
        held = sorted(
            (*each.scope.names, each.id) for each in self._stored.values() if each.scope is not None
        )
        del held[MOST_KEYS:]  # another program may have written more keys than agents make
        if held != self._held and not self._blocks:
            self._held = held
            self._tell(KeysHeld(held))

    # -- the objects ---------------------------------------------------------------------------------

    def _path(self, scope: Scope) -> str:
        name = blake2b(msgspec.msgpack.encode(scope.names), key=self._derived(b"names"), digest_size=20)
        return f"{_KEYS}/{name.hexdigest()}"

    def _wrapped(self, path: str, scope: Scope) -> bytes:
        """Return the bytes of an object with a new key."""
        head = _MAGIC + secrets.token_bytes(ID_BYTES)
        entry = msgspec.msgpack.encode((secrets.token_bytes(KEY_BYTES), *scope.names))
        return head + wrap(self._derived(b"wrap"), entry, head + path.encode())

    def _unwrapped(self, path: str, data: bytes) -> DataKey | None:
        start = len(_MAGIC) + ID_BYTES
        head, nonce, wrapped = data[:start], data[start : start + NONCE_BYTES], data[start + NONCE_BYTES :]
        plain = unwrap(self._derived(b"wrap"), nonce, wrapped, head + path.encode())
        if plain is None or not head.startswith(_MAGIC):
            return None
        secret, tenant, model = msgspec.msgpack.decode(plain, type=tuple[bytes, str, str])
        return DataKey(head[len(_MAGIC) :], Scope(tenant, model), self._memory.keep(secret), slot=0)

    def _derived(self, use: bytes) -> bytes:
        return blake2b(use, key=bytes(self._sharing_key), digest_size=KEY_BYTES).digest()


def check_keys_url(pages_url: str, url: str) -> None:
    """Check the address of the keys' bucket. Raise :class:`UsageError` if it is malformed, or if it is the
    bucket with the pages."""
    pages, keys = S3Address.parse(pages_url), S3Address.parse(url)
    if (pages.endpoint, pages.bucket) == (keys.endpoint, keys.bucket):
        raise UsageError(
            f"cluster_keys is in the pages' bucket {keys.bucket}, so a copy of it would have the keys: give "
            "another bucket, which keeps no old versions"
        )
