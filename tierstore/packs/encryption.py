"""An encrypted pack: a pack's bytes in segments, each sealed with AES-256-GCM. Its readers need the key file.

::

    head      magic, salt of 32 bytes
    segment   up to 1 MiB of the pack, and a tag of 16 bytes
    …
    segment   the last one: it may be shorter, or empty

The salt is random and gives the file a key of its own. The nonce is the segment's number, and says whether
the segment is the last one. A segment that was changed, moved, left out or added therefore does not open, and
a file that was cut off is detected. The segments contain an ordinary pack, with its own hashes and signature.
The key decides who can read the pack, and the signature proves who wrote it. Like a plain pack, it is written
and read from beginning to end, also through a pipe.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from tierstore.packs.format import ENCRYPTED_MAGIC, PackError
from tierstore.tiers.disk.keyring import KEY_BYTES, require_cryptography

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SEGMENT_BYTES = 1 << 20
_SALT_BYTES = 32
_HEAD_BYTES = len(ENCRYPTED_MAGIC) + _SALT_BYTES
_TAG_BYTES = 16
_NONCE = struct.Struct(">3xQ?")  # the number of the segment, and whether it is the last one


class EncryptedOutput:
    """Writes an encrypted pack with ``write``. Call :meth:`finish` at the end of the pack. Raise
    :class:`StoreUnavailableError` without the package cryptography."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]], key: bytes) -> None:
        require_cryptography("an encrypted pack")
        self._write = write
        self._salt = os.urandom(_SALT_BYTES)
        self._cipher = _cipher(key, self._salt)
        self._waiting = bytearray()
        self._segments = 0

    async def write(self, data: bytes | memoryview) -> None:
        """Append ``data``."""
        view = memoryview(data)
        while view:
            part = view[: SEGMENT_BYTES - len(self._waiting)]
            view = view[len(part) :]
            self._waiting += part
            if view and len(self._waiting) == SEGMENT_BYTES:
                await self._seal(last=False)

    write_aligned = write

    async def go_to(self, offset: int) -> None:
        raise NotImplementedError("an encrypted pack is written from its beginning")

    async def finish(self) -> None:
        """Write the last segment."""
        if len(self._waiting) == SEGMENT_BYTES:
            await self._seal(last=False)
        await self._seal(last=True)

    async def _seal(self, *, last: bool) -> None:
        if not self._segments:
            await self._write(ENCRYPTED_MAGIC + self._salt)
        plain, self._waiting = bytes(self._waiting), bytearray()
        nonce = _NONCE.pack(self._segments, last)
        self._segments += 1
        await self._write(await asyncio.to_thread(self._cipher.encrypt, nonce, plain, None))


class EncryptedInput:
    """Reads an encrypted pack from ``file``, which aiofiles opened. It has those methods of an aiofiles file
    that a reader of packs needs. :meth:`read` and :meth:`readinto` raise :class:`PackError` for a plain pack,
    a wrong key, and a file that was changed or cut off."""

    def __init__(self, file: Any, key: bytes) -> None:
        require_cryptography("an encrypted pack")
        self._file = file
        self._key = key
        self._cipher: AESGCM | None = None  # None until the head has been read
        self._segments = 0
        self._next = b""  # the number of the segment that is opened next
        self._plain = memoryview(b"")

    async def seekable(self) -> bool:
        return False

    async def read(self, nbytes: int) -> bytes:
        if not self._plain:
            await self._open_next()
        part, self._plain = self._plain[:nbytes], self._plain[nbytes:]
        return bytes(part)

    async def readinto(self, view: memoryview) -> int:
        part = await self.read(len(view))
        view[: len(part)] = part
        return len(part)

    async def _open_next(self) -> None:
        from cryptography.exceptions import InvalidTag

        if self._cipher is None:
            head = await self._exactly(_HEAD_BYTES)
            if not head.startswith(ENCRYPTED_MAGIC):
                raise PackError("the pack is not encrypted: leave --key out")
            self._cipher = _cipher(self._key, head[len(ENCRYPTED_MAGIC) :])
            self._next = await self._exactly(SEGMENT_BYTES + _TAG_BYTES)
        elif not self._next:
            return  # the end
        sealed, self._next = self._next, await self._exactly(SEGMENT_BYTES + _TAG_BYTES)
        nonce = _NONCE.pack(self._segments, not self._next)
        try:
            plain = await asyncio.to_thread(self._cipher.decrypt, nonce, sealed, None)
        except InvalidTag:
            where = "the key does not open the pack, or it" if not self._segments else "the pack"
            raise PackError(f"{where} is damaged or cut off at segment {self._segments:,}") from None
        self._segments += 1
        self._plain = memoryview(plain)

    async def _exactly(self, nbytes: int) -> bytes:
        """Read ``nbytes``, or fewer at the end of the file."""
        parts = bytearray()
        while len(parts) < nbytes and (part := await self._file.read(nbytes - len(parts))):
            parts += part
        return bytes(parts)


def _cipher(key: bytes, salt: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(blake2b(salt, key=key, digest_size=KEY_BYTES, person=b"pack").digest())
