"""How an encrypted directory stores a page: its *sealed* form.

A sealed page is in the same index and the same extents as a plain page; only its bytes are encrypted. So
operations that need no key (check, repair, moves, a change of the capacity) are the same for both forms::

                         in memory                              in the directory
    payload              the page, or the codec's output        AES-256-GCM of it, padded to its room
    record.key           chain hash over the tokens             keyed hash of that hash
    record.tokens        the chunk's tokens                     keyed hash of the first four tokens, key id,
                                                                salt, AES-256-GCM of the record
    record.nbytes        of the page                            of its room
    record.checksum      XXH3-64 of the page                    XXH3-64 of the sealed payload
    record.codec         the codec's number                     0

**Keys and nonces.** Each page has a random salt of 32 bytes, from which its AES key is derived
(:meth:`~tierstore.tiers.disk.keyring.DataKey.page_key`). This AES key encrypts two texts, each once: the
payload with nonce 0, and the record with nonce 1. Nonces do not come from a counter, which could restart at
an old value. So no nonce repeats after a crash, or after a backup of the directory or the keyring was
restored. Moving a page to another place copies its sealed bytes.

**A session's pages** (with session keys) are encrypted with the session's key. The keyed hashes in the index
use the tenant's key, so that other sessions find the pages.

**What is authenticated.** The record's tag covers the page's key, tokens, sizes, codec, times, serial, parent
and identity, the keyed hashes in the index, the checksum, and the payload's tag. The payload's tag covers the
page's identity, key and serial. No tag covers the page's place, so that pages can be moved without keys. The
bytes at a wrong place do not match the payload's tag. Therefore these are misses: changed records and
payloads, swapped payloads, records under other serials, parents or identities, and the payload of an older
version of a page.

A program that can write to the directory can still delete pages. Such a program can also restore an earlier
state of a whole page: record, link and payload of one moment. The restored page holds the same tokens of the
same tenant and model. The store cannot distinguish such a page from a restored backup.

**A reader without a key** sees the identities (tenant, model, layout), the number of pages, their sizes in
steps of 1/64, their numbers of tokens, and the times at which pages were saved and used. The reader also sees
the shape of the prefix tree, and which children of one page begin with the same four tokens. The reader sees
no tokens, and no hash that could be compared with the hash of a guessed prompt."""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import xxhash
from msgspec.structs import replace

from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.memory import Memory
from tierstore.tiers.disk.keyring import (
    ID_BYTES,
    KEY_BYTES,
    NAME_BYTES,
    SALT_BYTES,
    DataKey,
    Keyring,
    Scope,
    session_hash,
)
from tierstore.tiers.disk.page_table import PageTable
from tierstore.tiers.disk.payloads import Payloads, Staging
from tierstore.tiers.disk.records import (
    BEGINNING,
    INLINE,
    KEY_NUMBER_BYTES,
    SEALED_BYTES,
    PageRecord,
    beginnings,
)
from tierstore.tiers.slabs import slot_bytes
from tierstore.units import MIB

_log = logging.getLogger(__name__)

_TAG_BYTES = 16
_PREFIX = struct.Struct(f"<{NAME_BYTES}s{ID_BYTES}s{SALT_BYTES}s")  # before the sealed record
# key, payload's tag, nbytes, checksum, codec, encoded_bytes
_RECORD = struct.Struct(f"<16s{_TAG_BYTES}sQQBQ")
_FACTS = struct.Struct("<QQQQd")  # serial, parent, room, checksum of the sealed payload, created_s
_MOMENT = struct.Struct(">Q")  # before the hash of a session
_SEAL = struct.Struct(f"<{ID_BYTES}s{SALT_BYTES}s{_TAG_BYTES}sQ")
SEAL_BYTES = _SEAL.size
_STAGING_BYTES = 96 * MIB  # memory kept for the sealed payloads of batches that are being written

assert _PREFIX.size + _RECORD.size + _TAG_BYTES == SEALED_BYTES
assert NAME_BYTES == BEGINNING
assert ID_BYTES == KEY_NUMBER_BYTES


class Seal(NamedTuple):
    """The value of :attr:`PageRecord.seal`: what is needed, beside the key, to decrypt a payload."""

    key_id: bytes
    salt: bytes
    tag: bytes
    checksum: int  # XXH3-64 of the sealed payload

    @classmethod
    def unpack(cls, data: bytes) -> Seal:
        return cls(*_SEAL.unpack(data))

    def pack(self) -> bytes:
        return _SEAL.pack(*self)


class Sealing:
    """Encrypts (*seals*) and decrypts (*opens*) pages with the keys of ``keyring``. Thread-safe.
    ``identity_of`` returns the identity with a given digest, or None if the index has no root for it."""

    def __init__(self, keyring: Keyring, identity_of: Callable[[bytes], Identity | None]) -> None:
        self.keyring = keyring
        self._identity_of = identity_of
        self._scopes: dict[bytes, Scope] = {}

    # -- names ---------------------------------------------------------------------------------------

    def key_name(self, identity: bytes, key: bytes) -> bytes | None:
        """Return the keyed hash that the index has in place of a page's key; None if the tenant has no
        encryption key."""
        data_key = self._find(identity)
        return data_key.name(key, b"key") if data_key is not None else None

    def beginning(self, identity: bytes, parent: int, tokens: bytes) -> bytes | None:
        """Return the keyed hash that the index has in place of the first four tokens of a chunk below
        ``parent``; None if the tenant has no encryption key."""
        data_key = self._find(identity)
        return _beginning(data_key, parent, tokens) if data_key is not None else None

    def links(
        self, parent: int, identity: bytes, key: bytes | None, tokens: bytes, *, whole: bool
    ) -> tuple[bytes | None, list[bytes]]:
        """Return the keyed hashes under which the index may have pages right below ``parent``: that of
        ``key`` if only ``whole`` pages count, otherwise those of the beginnings of ``tokens``."""
        if whole:
            return (self.key_name(identity, key) if key is not None else None), []
        names = [self.beginning(identity, parent, each) for each in beginnings(tokens)]
        return None, [name for name in names if name is not None]

    # -- payloads ------------------------------------------------------------------------------------

    def seal_payload(self, record: PageRecord, payload: memoryview, out: memoryview) -> Seal:
        """Encrypt ``payload`` into ``out``, which has the size of the page's room. Return the seal, with 0 in
        place of the checksum of ``out``. Make a key if the page's scope has none. Raise :class:`OSError` if
        the key cannot be stored."""
        data_key = self._key_for(record)
        salt = os.urandom(SALT_BYTES)
        return Seal(data_key.id, salt, data_key.seal(salt, _payload_facts(record), payload, out), 0)

    def open_payload(self, record: PageRecord, sealed: memoryview, out: memoryview) -> bool:
        """Decrypt a payload into ``out``, which has the size of the plain payload. Return False if these
        bytes were not sealed for this record, or if the key was dropped; then do not use ``out``."""
        seal = Seal.unpack(record.seal)
        data_key = self.keyring.by_id(seal.key_id)
        return data_key is not None and data_key.open(
            seal.salt, seal.tag, _payload_facts(record), sealed, out
        )

    # -- records -------------------------------------------------------------------------------------

    def sealed(self, record: PageRecord) -> PageRecord:
        """Return the form in which the index stores a record whose payload was sealed."""
        seal = Seal.unpack(record.seal)
        data_key = self.keyring.by_id(seal.key_id)
        if data_key is None:  # dropped since the payload was sealed: neither payload nor record can be opened
            data_key = _NOT_KEPT
        names = data_key
        if data_key.scope.session:
            names = self.keyring.find(data_key.scope.whole) or _NOT_KEPT
        stored = replace(
            record,
            key=names.name(record.key, b"key"),
            nbytes=record.room,
            checksum=seal.checksum,
            codec=0,
            encoded_bytes=0,
            seal=b"",
        )
        prefix = _PREFIX.pack(_beginning(names, record.parent, record.tokens), seal.key_id, seal.salt)
        plain = _RECORD.pack(
            record.key, seal.tag, record.nbytes, record.checksum, record.codec, record.encoded_bytes
        )
        facts = _record_facts(stored, prefix)
        stored.tokens = prefix + data_key.seal_text(seal.salt, facts, plain + record.tokens)
        return stored

    def addition(self, record: PageRecord) -> tuple[PageRecord, memoryview | None]:
        """Return the stored form of a written record, and its sealed payload if that is inline, for the
        commit."""
        payload = memoryview(record.seal)[SEAL_BYTES:] if record.place == INLINE else None
        record.seal = record.seal[:SEAL_BYTES]
        return self.sealed(record), payload

    def opened(self, stored: PageRecord) -> PageRecord | None:
        """Decrypt a stored record. Return None if the record was changed, or its encryption key was
        dropped."""
        if stored.codec or len(stored.tokens) < SEALED_BYTES:
            return None
        prefix = stored.tokens[: _PREFIX.size]
        _, key_id, salt = _PREFIX.unpack(prefix)
        data_key = self.keyring.by_id(key_id)
        if data_key is None:
            return None
        plain = data_key.open_text(salt, _record_facts(stored, prefix), stored.tokens[_PREFIX.size :])
        if plain is None:
            return None
        key, tag, nbytes, checksum, codec, encoded_bytes = _RECORD.unpack_from(plain)
        return replace(
            stored,
            key=key,
            tokens=plain[_RECORD.size :],
            nbytes=nbytes,
            checksum=checksum,
            codec=codec,
            encoded_bytes=encoded_bytes,
            seal=Seal(key_id, salt, tag, stored.checksum).pack(),
        )

    def moment(self, session: bytes = b"") -> bytes:
        """Return the value of :attr:`PageRecord.seal` for a record that is created now. The value says which
        drops of keys came before, and which ``session`` has the key that will encrypt the page (empty: the
        tenant's key)."""
        return _MOMENT.pack(self.keyring.drops) + session

    # -- keys ----------------------------------------------------------------------------------------

    def make_keys(self, records: Iterable[PageRecord]) -> None:
        """Make the keys that these pages need, with one sync. Raise :class:`OSError` if the keys cannot be
        stored."""
        wanted: dict[tuple[Scope, int], None] = {}
        for record in records:
            scope, drops = self._wanted(record)
            if scope is not None:
                wanted[scope.whole, drops] = wanted[scope, drops] = None
        self.keyring.make(wanted)

    def _wanted(self, record: PageRecord) -> tuple[Scope | None, int]:
        """Return the scope of a page that is not sealed yet, and the value of :attr:`Keyring.drops` when its
        record was created."""
        scope = self.scope(record.identity)
        if not record.seal:
            return scope, self.keyring.drops
        session = record.seal[_MOMENT.size :]
        (drops,) = _MOMENT.unpack_from(record.seal)
        return (scope._replace(session=session) if scope is not None else None), drops

    def _key_for(self, record: PageRecord) -> DataKey:
        """Return the key for sealing a page. If the page's tenant, model or session was forgotten after the
        record was created, the key is random and is not stored."""
        scope, drops = self._wanted(record)
        found = self.keyring.key(scope, drops=drops) if scope is not None else None
        return found if found is not None else _NOT_KEPT

    def _find(self, identity: bytes) -> DataKey | None:
        scope = self.scope(identity)
        return self.keyring.find(scope) if scope is not None else None

    def scope(self, digest: bytes) -> Scope | None:
        """Return the tenant and model of the identity with this digest; None if the index has no root for
        the identity."""
        scope = self._scopes.get(digest)
        if scope is None and (identity := self._identity_of(digest)) is not None:
            scope = self._scopes[digest] = Scope(identity.tenant, identity.model)
        return scope


class SessionKeys:
    """The data keys of sessions. Thread-safe. ``sealing`` is None if the directory is not encrypted; then
    sessions have no keys."""

    def __init__(self, sealing: Sealing | None) -> None:
        self._sealing = sealing

    def hash(self, tenant: str, name: str | None) -> bytes:
        """Return the hash of a session whose key encrypts its pages; empty if ``name`` is None or if sessions
        get no keys."""
        if name is None or self._sealing is None or not self._sealing.keyring.session_keys:
            return b""
        return session_hash(tenant, name)

    def of(self, record: PageRecord) -> bytes:
        """Return the hash of the session whose key encrypts the page of an opened record; empty if no
        session's key does."""
        if self._sealing is None or not record.seal:
            return b""
        data_key = self._sealing.keyring.by_id(Seal.unpack(record.seal[:SEAL_BYTES]).key_id)
        return data_key.scope.session if data_key is not None else b""

    def admits(self, identity: bytes, session: bytes) -> bool:
        """Return whether a page of this identity and session can be encrypted: False if the session has no
        key and there are too many session keys."""
        if self._sealing is None or not session:
            return True
        scope = self._sealing.scope(identity) or Scope("", "")
        return self._sealing.keyring.admits(scope._replace(session=session))

    def free(self, page_table: PageTable | None) -> None:
        """Drop the keys of sessions without pages on disk, if there may be many such keys. No page may be
        between ``DiskTier.write`` and the end of ``DiskTier.commit``. Raise :class:`OSError` if the keyring
        cannot be written."""
        if self._sealing is None or page_table is None or not self._sealing.keyring.sessions_due:
            return
        used = page_table.used_keys().astype("<i8").tobytes()
        ids = {used[at : at + ID_BYTES] for at in range(0, len(used), ID_BYTES)}
        if freed := self._sealing.keyring.free_sessions(ids):
            _log.info("disk tier: freed %d keys of sessions without pages", freed)


class SealedPayloads:
    """Seals payloads on their way to the disk. Thread-safe."""

    def __init__(self, sealing: Sealing, payloads: Payloads) -> None:
        self._sealing = sealing
        self._payloads = payloads
        self._staging = Staging(_STAGING_BYTES)

    def write(self, pages: Sequence[tuple[PageRecord, memoryview]]) -> None:
        """Encrypt payloads and write them to their places, as :meth:`Payloads.write` does. Set the records'
        seals, and the checksums of unencoded pages. An encrypted inline payload is kept in ``record.seal``
        until the commit. An inline payload is encrypted here and not in the commit, so that a tenant that is
        forgotten in between gets no new key."""
        self._sealing.make_keys(record for record, _ in pages)
        for record, view in pages:
            if record.place == INLINE:
                out = memoryview(bytearray(record.room))
                seal = self._sealing.seal_payload(record, view, out)
                record.seal = seal._replace(checksum=xxhash.xxh3_64_intdigest(out)).pack() + out
        outside = [page for page in pages if page[0].place != INLINE]
        if outside:
            try:
                memory = self._staging.take(sum(slot_bytes(record.room) for record, _ in outside))
            except UsageError as error:
                raise OSError(errno.ENOMEM, str(error)) from error
            try:
                self._write(outside, memory)
            finally:
                self._staging.give_back([memory])

    def _write(self, pages: Sequence[tuple[PageRecord, memoryview]], memory: Memory) -> None:
        sealed: list[tuple[PageRecord, memoryview]] = []
        seals: dict[int, Seal] = {}
        start = 0
        for record, _ in pages:
            out = memory.view(start, record.room)
            start += slot_bytes(record.room)
            sealed.append((replace(record, nbytes=record.room, codec=0), out))

        def seal(number: int, out: memoryview) -> None:
            record, view = pages[number]
            if not record.codec:
                record.checksum = xxhash.xxh3_64_intdigest(view)
            seals[number] = self._sealing.seal_payload(record, view, out)

        self._payloads.write(sealed, seal)
        for number, ((record, _), (written, _)) in enumerate(zip(pages, sealed, strict=True)):
            record.seal = seals[number]._replace(checksum=written.checksum).pack()


_NOT_KEPT = DataKey(bytes(ID_BYTES), Scope("", ""), memoryview(bytes(KEY_BYTES)), 0)
_NOT_KEPT.dropped = True  # so each use gets a random key


def _beginning(key: DataKey, parent: int, tokens: bytes) -> bytes:
    return key.name(parent.to_bytes(8, "big") + tokens[:BEGINNING].ljust(BEGINNING, b"\0"), b"tokens")


def _payload_facts(record: PageRecord) -> bytes:
    return record.identity + record.key + record.serial.to_bytes(8, "big")


def _record_facts(stored: PageRecord, prefix: bytes) -> bytes:
    numbers = _FACTS.pack(stored.serial, stored.parent, stored.nbytes, stored.checksum, stored.created_s)
    return numbers + stored.identity + stored.key + prefix
