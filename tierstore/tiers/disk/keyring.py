"""The keys of an encrypted disk tier, in one file outside of the store's directory.

**Three levels.** The operator's *master key* has 32 bytes, in a file or printed by a command. The master key
decrypts the *keyring*, a file outside of the store's directory. The keyring holds a random *ring key*,
encrypted with the master key, and a *data key* for each tenant and model, encrypted with the ring key. With
*session keys*, each session has a separate data key for its pages of a model. A data key leaves this process
only in encrypted (*wrapped*) form. All keys are wrapped with AES-256-GCM. A wrapped data key contains the
names of its tenant and model, and the session's hash, so that an attacker cannot exchange two entries of the
keyring.

**Why the keyring is not in the store's directory.** Forgetting a tenant overwrites its keys in the keyring.
An earlier copy of the directory has the tenant's pages, but no key. If the directory held the wrapped keys,
its copies would hold them too, and the master key would decrypt them. So :meth:`Keyring.open` refuses a path
inside of the directory. A *backup of the keyring* from before the forget still opens the tenant's pages in a
backup of the directory. Keep fewer backups of the keyring than of the directory, or none: losing the keyring
costs only cached pages.

**How a data key is forgotten.** Each wrapped key has a slot in the keyring's file. :meth:`Keyring.drop`
overwrites the slot in place and syncs the file before it returns. A crash during this leaves the whole key,
or bytes that do not decrypt. Replacing the file would leave the old keys in free blocks of the file system.
On SSDs, and on file systems that copy on write, the old block may survive until the device or the file system
reuses it. On such disks, only destroying the master key is final: rotate to a new master key, and destroy the
old one.

**Many sessions.** A new key takes a slot of 1 KiB. All new keys of a batch of pages are written with one
sync. :meth:`Keyring.free_sessions` drops the keys of sessions without pages on disk, and new keys reuse their
slots. At :data:`MOST_SESSION_KEYS` session keys, a new session gets no key (:meth:`Keyring.admits`).

**Rotation** replaces the ring key and the master key together. The new ring key wraps the data keys in a new
file, which replaces the old one. Pages do not change. Remains of the old file on the disk can be decrypted
only with the old master key.

**Memory.** Data keys are in memory that is locked (never swapped) and left out of core dumps. Python copies a
key for each use, and OpenSSL derives round keys from it. The copies of keys are short-lived, but nothing
erases them, and a core dump may contain them. No key is in a ``repr``, a log line or an exception.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import secrets
import shlex
import struct
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.extras import install
from tierstore.locks import PathLock
from tierstore.tiers.disk.io import FileIO

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.modes import GCM

_log = logging.getLogger(__name__)

KEY_BYTES = 32
ID_BYTES = 8
NAME_BYTES = 16
SALT_BYTES = 32
_COMMAND = "command:"
_COMMAND_S = 30.0
_BESIDE = ".ring"  # suffix of the default keyring's file, which is beside the master key's file

_MAGIC = b"tierstore ring 1"
_RING_ID_BYTES = 16
NONCE_BYTES = 12
_TAG_BYTES = 16
_NONCE_OF_BYTES, _NONCE_OF_TEXT = bytes(12), bytes(11) + b"\1"
_LEAST_UPDATE = 64  # bytes at the end of a payload that do not go through update_into, see DataKey.seal
_SLOT_BYTES = 1024
_HEADER = struct.Struct(f"<16s{_RING_ID_BYTES}s{NONCE_BYTES}s{KEY_BYTES + _TAG_BYTES}s")
_LENGTH = struct.Struct("<H")
_ENTRY_BYTES = _SLOT_BYTES - NONCE_BYTES - _TAG_BYTES
_MOST_NAME_BYTES = 400  # most bytes of a name in an entry; longer names are hashed
SESSION_BYTES = 16
MOST_SESSION_KEYS = 1 << 16  # in one keyring, whose file then has 64 MiB
_LEAST_FREED = 64  # new session keys before a search for session keys without pages


class Scope(NamedTuple):
    """The pages that one data key encrypts: those of a tenant and a model, or those of one session."""

    tenant: str  # as in the identities of the pages
    model: str
    session: bytes = b""  # hash of the session's name (:func:`session_hash`); empty: not only one session

    @property
    def names(self) -> tuple[str, str]:
        return self.tenant, self.model

    @property
    def whole(self) -> Scope:
        """The scope of the tenant and the model."""
        return self._replace(session=b"")


# -- memory for keys -----------------------------------------------------------------------------------

_KEYS_PER_BLOCK = 128
_MADV_WIPEONFORK = 18


class SecretMemory:
    """Memory for keys: locked, left out of core dumps, and empty in a forked child. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []
        self._free: list[memoryview] = []

    def __repr__(self) -> str:
        return f"SecretMemory({len(self._blocks)} blocks)"

    def keep(self, secret: bytes) -> memoryview:
        """Copy ``secret``, which has :data:`KEY_BYTES` bytes, and return a view of the copy."""
        if not self._free:
            self._add_block()
        view = self._free.pop()
        view[:] = secret
        return view

    def erase(self, view: memoryview) -> None:
        """Overwrite a secret and free its memory."""
        view[:] = bytes(KEY_BYTES)
        self._free.append(view)

    def close(self) -> None:
        """Overwrite everything."""
        for block in self._blocks:
            block[:] = bytes(len(block))

    def _add_block(self) -> None:
        block = mmap.mmap(-1, _KEYS_PER_BLOCK * KEY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (mmap.MADV_DONTDUMP, _MADV_WIPEONFORK):
            try:
                block.madvise(advice)
            except OSError as error:
                _log.info("the kernel does not exclude keys from dumps and forks: %s", error.strerror)
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(block))):
            _log.info("keys may be swapped: mlock: %s (see ulimit -l)", os.strerror(ctypes.get_errno()))
        self._blocks.append(block)
        view = memoryview(block)
        starts = range(0, len(block), KEY_BYTES)
        self._free += [view[start : start + KEY_BYTES] for start in reversed(starts)]


# -- the master key ------------------------------------------------------------------------------------


def read_master_key(source: str) -> bytes:
    """Return the master key. ``source`` is a file with its 64 hexadecimal digits, or ``command:COMMAND`` for
    a command that prints them. The command runs without a shell, for at most 30 s.

    Raise :class:`UsageError` for a file that does not exist or that other users can access, for a command
    that fails, and for a malformed key.
    """
    if source.startswith(_COMMAND):
        text = _printed(source.removeprefix(_COMMAND))
    else:
        path = Path(source)
        try:
            open_to_others = path.stat().st_mode & 0o077
            text = path.read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"cannot read the disk key in {source}: {why}; `tierstore disk-key new` makes one"
            ) from error
        if open_to_others:
            raise UsageError(f"{source} can be read by others: chmod 600 {source}")
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:  # the message does not show the text: it may be a key with a typing error
        raise UsageError(
            f"{source} is no disk key: it must be {2 * KEY_BYTES} hexadecimal digits, "
            "as `tierstore disk-key new` makes them"
        )
    return key


def _printed(command: str) -> bytes:
    try:
        done = subprocess.run(
            shlex.split(command),
            stdout=subprocess.PIPE,
            check=True,
            timeout=_COMMAND_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        # The message has neither the output nor the command's arguments: both may be secret.
        raise UsageError(
            f"the command for the disk key failed ({type(error).__name__}): run it by hand"
        ) from None
    return done.stdout


def sharing_key(master: bytes) -> bytes:
    """Derive from the master key the key that decrypts the data keys that hosts share
    (``cluster/shared_keys.py``). So the process that shares them need not know the master key."""
    return blake2b(key=master, digest_size=KEY_BYTES, person=b"shared keys").digest()


def make_master_key(path: Path) -> None:
    """Write a new master key to ``path``. Only the file's owner can read it. Raise :class:`UsageError` if the
    file exists or cannot be written."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise UsageError(f"{path} is there already: choose another name, or remove it") from error
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    try:
        with os.fdopen(fd, "w") as file:
            file.write(f"{secrets.token_bytes(KEY_BYTES).hex()}\n")
            file.flush()
            os.fsync(fd)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def keyring_path(source: str, given: Path | None) -> Path:
    """Return the keyring's path: ``given``, or a file beside the master key's. Raise :class:`UsageError` if
    the key comes from a command and no path is given."""
    if given is not None:
        return given
    if source.startswith(_COMMAND):
        raise UsageError("disk_key is a command: give disk_keyring, a file outside of the disk directory")
    return Path(f"{source}{_BESIDE}")


# -- the keyring ---------------------------------------------------------------------------------------


_Wanted: TypeAlias = "Callable[[Scope], bool]"
_KEPT_DROPS = 1024


class DataKey:
    """The key of one tenant's or one session's pages of one model. Thread-safe.

    After the key was dropped, each use gets a random key instead. So a page that is encrypted while its
    tenant is being forgotten can never be decrypted."""

    __slots__ = ("dropped", "id", "scope", "secret", "slot")

    def __init__(self, id: bytes, scope: Scope, secret: memoryview, slot: int) -> None:
        self.id = id
        self.scope = scope
        self.slot = slot  # the key's position in the keyring's file
        self.secret = secret
        self.dropped = False  # set before the secret is erased

    def __repr__(self) -> str:
        return f"DataKey({self.id.hex()})"

    @property
    def number(self) -> int:
        """The id as the signed number that :func:`~tierstore.tiers.disk.records.key_number` returns."""
        return int.from_bytes(self.id, "little", signed=True)

    def page_key(self, salt: bytes) -> bytes:
        """Return the AES key of the page with this salt: keyed BLAKE2b (RFC 7693), a pseudo-random
        function."""
        return blake2b(salt, key=self._current(), digest_size=KEY_BYTES, person=b"page").digest()

    def seal(self, salt: bytes, facts: bytes, plain: memoryview, out: memoryview) -> bytes:
        """Encrypt ``plain`` with AES-256-GCM into ``out``. If ``out`` is longer, ``plain`` is padded with
        zeros. Return the tag, which also authenticates ``facts``. Each ``salt`` (:data:`SALT_BYTES` random
        bytes) may be used once in this method, and once in :meth:`seal_text`."""
        cipher = self._cipher(salt).encryptor()
        cipher.authenticate_additional_data(facts)
        # update_into needs an output buffer one block larger than its output, so the end goes through update.
        whole = max(plain.nbytes - _LEAST_UPDATE, 0)
        if whole:
            cipher.update_into(plain[:whole], out)
        rest = bytes(plain[whole:]) + bytes(out.nbytes - plain.nbytes)
        out[whole:] = cipher.update(rest) + cipher.finalize()
        return cipher.tag

    def open(self, salt: bytes, tag: bytes, facts: bytes, sealed: memoryview, out: memoryview) -> bool:
        """Decrypt the bytes of :meth:`seal` into ``out``, which has the size of the plain bytes. ``out`` may
        be the same memory as ``sealed``, but may not overlap it in part. Return False if the bytes, the tag
        or ``facts`` were changed; then do not use ``out``."""
        from cryptography.exceptions import InvalidTag

        cipher = self._cipher(salt).decryptor()
        cipher.authenticate_additional_data(facts)
        whole = max(out.nbytes - _LEAST_UPDATE, 0)
        if whole:
            cipher.update_into(sealed[:whole], out)
        out[whole:] = cipher.update(bytes(sealed[whole:]))[: out.nbytes - whole]
        try:
            cipher.finalize_with_tag(tag)
        except InvalidTag:
            return False
        return True

    def seal_text(self, salt: bytes, facts: bytes, text: bytes) -> bytes:
        """Return ``text``, encrypted, followed by the tag, which also authenticates ``facts``. ``salt`` is
        as in :meth:`seal`."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self.page_key(salt)).encrypt(_NONCE_OF_TEXT, text, facts)

    def open_text(self, salt: bytes, facts: bytes, sealed: bytes) -> bytes | None:
        """Decrypt the bytes of :meth:`seal_text`. Return None if the bytes or ``facts`` were changed."""
        return unwrap(self.page_key(salt), _NONCE_OF_TEXT, sealed, facts)

    def name(self, data: bytes, use: bytes) -> bytes:
        """Return the keyed hash (16 bytes) that replaces ``data`` in the index. Equal ``data`` has different
        hashes for different ``use``."""
        return blake2b(data, key=self._current(), digest_size=NAME_BYTES, person=use).digest()

    def _cipher(self, salt: bytes) -> Cipher[GCM]:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import GCM

        return Cipher(AES(self.page_key(salt)), GCM(_NONCE_OF_BYTES))

    def _current(self) -> bytes:
        secret = bytes(self.secret)
        # ``dropped`` is set before the secret is erased, so a copy made before this check is whole.
        return secrets.token_bytes(KEY_BYTES) if self.dropped else secret


class Keyring:
    """An open keyring. Thread-safe. One process at a time can have a keyring open. With ``session_keys``, a
    page that is saved within a session is encrypted with the session's key."""

    def __init__(self, lock: PathLock, id: bytes, ring_key: bytes | None, sharing: bytes) -> None:
        self.path = lock.path
        self.id = id.hex()
        self._id = id
        self._lock_file = lock
        self._lock = threading.Lock()
        self._memory = SecretMemory()
        self._ring_key = self._memory.keep(ring_key) if ring_key is not None else None
        self._sharing = self._memory.keep(sharing)
        self.session_keys = False
        # Guarded by _lock.
        self._by_scope: dict[Scope, DataKey] = {}
        self._by_id: dict[bytes, DataKey] = {}
        self.drops = 0  # number of calls of drop
        self._last_drops: deque[_Wanted] = deque(maxlen=_KEPT_DROPS)  # ``wanted`` of the last drops
        self._free_slots: list[int] = []
        self._torn: set[int] = set()  # slots that may hold a partly written key
        self._slots = 0  # highest slot that was ever used; slot 0 is the header
        self._sessions = 0  # number of session keys
        self._kept_sessions = 0  # number of session keys after the last call of free_sessions
        if ring_key is not None:
            self._read()
        _open_keyrings.add(self)

    @classmethod
    def open(cls, path: Path, master: bytes, *, directory: Path | None = None) -> Keyring:
        """Open the keyring at ``path``; create it if it does not exist. ``directory`` is the store's.

        If ``master`` is not the keyring's master key, the returned keyring is :attr:`locked`. Raise
        :class:`UsageError` for a path inside of ``directory``, and :class:`StoreUnavailableError` for a file
        that is no keyring, is in use, or cannot be written.
        """
        if directory is not None and directory.resolve() in (path.resolve(), *path.resolve().parents):
            raise UsageError(
                f"the keyring {path} is inside of the disk directory: a copy of the directory would have the "
                "keys; give --disk-keyring with a path elsewhere"
            )
        require_cryptography("encryption of the disk tier")
        try:
            lock = PathLock(path)
        except BlockingIOError as error:
            raise StoreUnavailableError(
                f"{path} is in use by another store: give each store a keyring of its own"
            ) from error
        except OSError as error:
            raise StoreUnavailableError(f"cannot use the keyring {path}: {error.strerror}") from error
        try:
            return cls._opened(lock, master)
        except OSError as error:
            lock.release()
            raise StoreUnavailableError(f"cannot use the keyring {path}: {error.strerror}") from error
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _opened(cls, lock: PathLock, master: bytes) -> Keyring:
        header = os.pread(lock.fd, _SLOT_BYTES, 0)
        if not header.strip(b"\0"):  # a new file, or a crash interrupted its first opening
            ring_key, id = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(_RING_ID_BYTES)
            _write(lock.fd, {0: _wrapped_ring_key(master, id, ring_key)})
            FileIO().sync_directory(lock.path.parent)
            return cls(lock, id, ring_key, sharing_key(master))
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise StoreUnavailableError(f"{lock.path} is no keyring of tierstore: give another file")
        _, id, nonce, wrapped = _HEADER.unpack_from(header)
        _erase_rotated(lock.path, id)
        return cls(lock, id, unwrap(master, nonce, wrapped, _MAGIC + id), sharing_key(master))

    def __repr__(self) -> str:
        return f"Keyring({self.path}, {len(self)} keys{', locked' if self.locked else ''})"

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def locked(self) -> bool:
        """Whether the keyring was opened with a wrong master key. A locked keyring has no keys and makes
        none."""
        return self._ring_key is None

    def sharing_key(self) -> bytes | None:
        """Return :func:`sharing_key` of the master key; None if the keyring is :attr:`locked`."""
        return None if self.locked else bytes(self._sharing)

    def find(self, scope: Scope) -> DataKey | None:
        """Return the key of a scope; None if the scope has no key."""
        return self._by_scope.get(_shortened(scope))

    def by_id(self, id: bytes) -> DataKey | None:
        """Return the key with this id; None if the key was dropped, or is in another keyring."""
        return self._by_id.get(id)

    def key(self, scope: Scope, *, drops: int | None = None) -> DataKey | None:
        """Return the key of a scope. If the scope has no key, make one, durably. Return None if the scope's
        key was dropped since :attr:`drops` had the value ``drops`` (None: since now). Raise :class:`OSError`
        if the key cannot be written."""
        drops = self.drops if drops is None else drops
        self.make([(scope, drops)])
        scope = _shortened(scope)
        found = self._by_scope.get(scope)
        # Checked after the search, which may have found a key that was made after the drop.
        return None if self._dropped_since(scope, drops) else found

    def make(self, wanted: Iterable[tuple[Scope, int]]) -> None:
        """Make a key for each of these scopes that has none, durably, with one sync for all keys. The number
        beside a scope is an earlier value of :attr:`drops`: if the scope's key was dropped since then, no new
        key is made. Raise :class:`OSError` if the keys cannot be written."""
        missing: dict[Scope, int] = {}
        for scope, drops in wanted:
            scope = _shortened(scope)
            if scope not in self._by_scope:
                missing[scope] = max(drops, missing.get(scope, 0))
        if not missing:
            return
        with self._lock:
            self._make(
                [
                    scope
                    for scope, drops in missing.items()
                    if scope not in self._by_scope and not self._dropped_since(scope, drops)
                ]
            )

    def _dropped_since(self, scope: Scope, drops: int) -> bool:
        newer = self.drops - drops
        if newer > _KEPT_DROPS:
            return True  # this is a guess, because older drops are not recorded; a wrong one loses one page
        return any(wanted(scope) for wanted in list(self._last_drops)[len(self._last_drops) - newer :])

    def drop(self, wanted: _Wanted) -> int:
        """Forget the keys of all scopes for which ``wanted`` returns True, and return the number of these
        keys. When this returns, they cannot be recovered from the keyring (but see the module's docstring).
        ``wanted`` gets scopes with names as :func:`scope_name` returns them. Raise :class:`OSError` if the
        file cannot be written; then call this method again."""
        self._require_unlocked()
        with self._lock:
            dropped = [key for key in self._by_scope.values() if wanted(key.scope)]
            self._last_drops.append(wanted)  # even if no key is dropped: another thread may be making one
            self.drops += 1
            self._erase(dropped)
            if self.path.exists() and not self._lock_file.current():
                raise OSError(errno.ESTALE, f"{self.path} was replaced by another file")
            return len(dropped)

    def of_session(self, session: bytes) -> list[DataKey]:
        """Return the keys of a session: one for each tenant and model."""
        with self._lock:
            return [key for key in self._by_scope.values() if key.scope.session == session]

    @property
    def keeps_sessions(self) -> bool:
        """Whether sessions have keys, or may get keys later."""
        return self.session_keys or self._sessions > 0

    def admits(self, scope: Scope) -> bool:
        """Return whether the scope has a key or may get one. Only the number of session keys is limited."""
        return not scope.session or self._sessions < MOST_SESSION_KEYS or _shortened(scope) in self._by_scope

    @property
    def sessions_due(self) -> bool:
        """Whether enough session keys are new that :meth:`free_sessions` should be called."""
        kept = self._kept_sessions
        return self._sessions >= min(kept + max(kept // 8, _LEAST_FREED), MOST_SESSION_KEYS)

    def free_sessions(self, used: Collection[bytes]) -> int:
        """Drop the session keys whose ids are not in ``used``, and return their number. No page may be in the
        course of being written, because the page would lose its key. Raise :class:`OSError` if the file
        cannot be written."""
        with self._lock:
            keys = self._by_scope.values()
            unused = [key for key in keys if key.scope.session and key.id not in used]
            self._erase(unused)
            self._kept_sessions = self._sessions
            return len(unused)

    def _erase(self, keys: Sequence[DataKey]) -> None:
        """Overwrite keys in the file and in memory."""
        for key in keys:  # from now on, a key is not used, even if the file cannot be written
            key.dropped = True
            self._by_id.pop(key.id, None)
        for key in keys:
            os.pwrite(self._lock_file.fd, bytes(_SLOT_BYTES), key.slot * _SLOT_BYTES)
        if keys:
            os.fdatasync(self._lock_file.fd)
        for key in keys:
            del self._by_scope[key.scope]
            self._sessions -= bool(key.scope.session)
            self._memory.erase(key.secret)
            self._free_slots.append(key.slot)

    def rotate(self, master: bytes) -> None:
        """Replace the keyring by one with another master key and another ring key, durably, and close it.
        Raise :class:`OSError` if the file cannot be written; then it is the complete old keyring or the
        complete new keyring."""
        assert self._ring_key is not None, "a locked keyring cannot be rotated"
        ring_key = secrets.token_bytes(KEY_BYTES)
        new = _rotated(self.path)
        with self._lock:
            slots = [_wrapped_ring_key(master, self._id, ring_key)]
            slots += [wrap(ring_key, _packed(key), self._id) for key in self._by_scope.values()]
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _write(fd, dict(enumerate(slots)))
            finally:
                os.close(fd)
            os.replace(new, self.path)
        except OSError:
            _erase_rotated(self.path, self._id)
            raise
        FileIO().sync_directory(self.path.parent)
        self.close()

    def close(self) -> None:
        """Erase the keys in memory, and release the file. Repeated calls do nothing."""
        with self._lock:
            for key in self._by_scope.values():
                key.dropped = True
            self._by_scope.clear()
            self._by_id.clear()
            self._memory.close()
            self._lock_file.release()

    def _read(self) -> None:
        for slot, (nonce, wrapped) in enumerate(_slots(self._lock_file.fd), 1):
            self._slots = slot
            entry = self._unwrapped(nonce, wrapped)
            if entry is None:  # the slot is free, or has a key that was dropped or only partly written
                self._free_slots.append(slot)
                continue
            scope = Scope(entry.tenant, entry.model, entry.session)
            self._add(DataKey(entry.id, scope, self._memory.keep(entry.secret), slot))

    def _unwrapped(self, nonce: bytes, wrapped: bytes) -> _Entry | None:
        assert self._ring_key is not None
        plain = unwrap(bytes(self._ring_key), nonce, wrapped, self._id)
        if plain is None:
            return None
        (length,) = _LENGTH.unpack_from(plain)
        return msgspec.msgpack.decode(plain[_LENGTH.size : _LENGTH.size + length], type=_Entry)

    def _make(self, scopes: Sequence[Scope]) -> None:
        if not scopes:
            return
        ring_key = self._require_unlocked()
        made: list[DataKey] = []
        for number, scope in enumerate(scopes):
            free = len(self._free_slots) - number
            slot = self._free_slots[free - 1] if free > 0 else self._slots + 1 - free
            secret = self._memory.keep(secrets.token_bytes(KEY_BYTES))
            made.append(DataKey(secrets.token_bytes(ID_BYTES), scope, secret, slot))
        # Erase partly written keys: if one of them was complete, its scope would have two keys.
        slots = dict.fromkeys(self._torn, bytes(_SLOT_BYTES))
        slots |= {key.slot: wrap(ring_key, _packed(key), self._id) for key in made}
        self._torn = set(slots)
        try:
            _write(self._lock_file.fd, slots)
        except OSError:
            for key in made:
                self._memory.erase(key.secret)
            raise
        self._torn.clear()
        del self._free_slots[max(len(self._free_slots) - len(made), 0) :]
        for key in made:
            self._slots = max(self._slots, key.slot)
            self._add(key)

    def _require_unlocked(self) -> bytes:
        if self._ring_key is None:
            raise OSError(errno.EACCES, "the disk key does not open the keyring")
        return bytes(self._ring_key)

    def _add(self, key: DataKey) -> None:
        self._by_scope[key.scope] = key
        self._by_id[key.id] = key
        self._sessions += bool(key.scope.session)


def _release_after_fork() -> None:
    # A forked child shares the lock's open file, and would keep the keyring locked after its parent's end.
    for keyring in list(_open_keyrings):
        keyring._lock_file.release()


_open_keyrings: weakref.WeakSet[Keyring] = weakref.WeakSet()
os.register_at_fork(after_in_child=_release_after_fork)


def require_cryptography(what: str) -> None:
    """Raise :class:`StoreUnavailableError` if the package cryptography is missing. ``what`` is the feature
    that needs it, for the message."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise StoreUnavailableError(
            f"{what} needs the package cryptography: {install('encryption')}"
        ) from error


def open_keyring(
    source: str, path: Path | None, directory: Path | None, *, session_keys: bool = False
) -> Keyring | None:
    """Open the keyring for the store in ``directory``; return None if ``source`` is empty. ``source``,
    ``path`` and ``session_keys`` are the settings ``disk_key``, ``disk_keyring`` and ``session_keys``. Raise
    the errors of :func:`read_master_key` and :meth:`Keyring.open`, and :class:`UsageError` for a keyring or
    session keys without ``disk_key``, or for ``disk_key`` without a directory."""
    if not source:
        if path is not None:
            raise UsageError("disk_keyring needs disk_key: give both, or neither")
        if session_keys:
            raise UsageError("session_keys needs disk_key: give both, or neither")
        return None
    if directory is None:
        raise UsageError("disk_key encrypts the disk tier, and there is none: give a directory for it")
    keyring = Keyring.open(keyring_path(source, path), read_master_key(source), directory=directory)
    keyring.session_keys = session_keys
    return keyring


def session_hash(tenant: str, name: str) -> bytes:
    """Return the hash (:data:`SESSION_BYTES` bytes) that a keyring has instead of a session's name.
    ``tenant`` is the tenant of the session's client."""
    names = msgspec.msgpack.encode((tenant, name))
    return blake2b(names, digest_size=SESSION_BYTES, person=b"session").digest()


def scope_name(name: str) -> str:
    """Return a tenant's or a model's name as keyrings store it: a long name is hashed."""
    data = name.encode()
    return name if len(data) <= _MOST_NAME_BYTES else f"sha256:{sha256(data).hexdigest()}"


def _shortened(scope: Scope) -> Scope:
    return Scope(scope_name(scope.tenant), scope_name(scope.model), scope.session)


class _Entry(NamedTuple):
    """The contents of a slot: one data key."""

    id: bytes
    secret: bytes
    tenant: str
    model: str
    session: bytes = b""


def _packed(key: DataKey) -> bytes:
    tenant, model, session = key.scope
    parts = (key.id, bytes(key.secret), tenant, model, *([session] if session else []))
    entry = msgspec.msgpack.encode(parts)
    return (_LENGTH.pack(len(entry)) + entry).ljust(_ENTRY_BYTES, b"\0")


def _slots(fd: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the nonce and the wrapped contents of each slot after the header."""
    at = _SLOT_BYTES
    while slot := os.pread(fd, _SLOT_BYTES, at):
        yield slot[:NONCE_BYTES], slot[NONCE_BYTES:]
        at += _SLOT_BYTES


def _write(fd: int, slots: Mapping[int, bytes]) -> None:
    """Write slots, durably. Raise :class:`OSError`, with ENOSPC if only a part of a slot could be written."""
    for slot, data in slots.items():
        if os.pwrite(fd, data, slot * _SLOT_BYTES) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(fd)


def _rotated(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _erase_rotated(path: Path, id: bytes) -> None:
    """Overwrite and remove the new keyring of a rotation that was interrupted, because it has the keys of
    tenants that may be forgotten later. Leave any other file."""
    left = _rotated(path)
    try:
        fd = os.open(left, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, IsADirectoryError):
        return
    try:
        header = os.pread(fd, _SLOT_BYTES, 0)
        if header.strip(b"\0") and not header.startswith(_MAGIC + id):
            return
        os.pwrite(fd, bytes(os.fstat(fd).st_size), 0)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    os.unlink(left)
    FileIO().sync_directory(path.parent)


def _wrapped_ring_key(master: bytes, id: bytes, ring_key: bytes) -> bytes:
    """Return the header's slot. The header fits into one sector, which a disk writes as a whole or not at
    all."""
    wrapped = wrap(master, ring_key, _MAGIC + id)
    header = _HEADER.pack(_MAGIC, id, wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:])
    return header.ljust(_SLOT_BYTES, b"\0")


def wrap(key: bytes, plain: bytes, facts: bytes) -> bytes:
    """Return a random nonce, ``plain`` encrypted with AES-256-GCM, and the tag, which also authenticates
    ``facts``."""
    # NIST SP 800-38D allows 2³² random nonces of 96 bits per key, far more than a keyring needs.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, plain, facts)


def unwrap(key: bytes, nonce: bytes, wrapped: bytes, facts: bytes) -> bytes | None:
    """Decrypt the bytes of :func:`wrap`. Return None if ``key`` or ``facts`` is another, or the bytes were
    changed."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(nonce, wrapped, facts)
    except (InvalidTag, ValueError):
        return None
