"""Signatures of packs by Ed25519 keys in PEM files. ``openssl genpkey -algorithm ed25519`` also makes such
files.

The package ``cryptography`` (the extra ``[packs]``) does the arithmetic. It is imported when a key is used.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.errors import UsageError
from tierstore.packs.format import UNSIGNED, PackError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

NO_SIGNATURE = bytes(64)
_NAME_CHARS = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Signer:
    """Signs seals. Signs the seals of a pack. If ``key`` is None, seals are unsigned."""

    key: Ed25519PrivateKey | None = None

    @property
    def public(self) -> bytes:
        return UNSIGNED if self.key is None else self.key.public_key().public_bytes_raw()

    def sign(self, digest: bytes) -> bytes:
        return NO_SIGNATURE if self.key is None else self.key.sign(digest)

    @classmethod
    def read(cls, file: Path) -> Signer:
        """Read the private key in a PEM file. Raise :class:`UsageError` for another kind of file, and for a
        file that other users can read."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            data = file.read_bytes()
            open_to_others = file.stat().st_mode & 0o077
            key = load_pem_private_key(data, password=None)
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"cannot read a private key in {file}: {error}") from error
        if open_to_others:
            raise UsageError(f"{file} can be read by others: chmod 600 {file}")
        if not isinstance(key, Ed25519PrivateKey):
            raise UsageError(f"{file} has no Ed25519 key: make one with `tierstore pack keygen`")
        return cls(key)


@dataclass(frozen=True)
class Trust:
    """The signature that a pack must have: one by the key ``public`` (32 bytes). If that is None, a pack may
    be unsigned, but a signature must be valid."""

    public: bytes | None = None

    @classmethod
    def read(cls, file: Path) -> Trust:
        """Read the public key in a PEM file. Raise :class:`UsageError` for another kind of file."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        try:
            key = load_pem_public_key(file.read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read a public key in {file}: {error}") from error
        if not isinstance(key, Ed25519PublicKey):
            raise UsageError(f"{file} has no Ed25519 key: give a .pub file from `tierstore pack keygen`")
        return cls(key.public_bytes_raw())

    def verifier(self, signer: bytes) -> Verifier:
        """Return the verifier for a pack whose head names this ``signer``. Raise :class:`PackError` if the
        signer is not the required one."""
        if self.public is not None and signer != self.public:
            who = f"signed by {name(signer)}" if signer != UNSIGNED else "not signed"
            raise PackError(f"the pack is {who}, but the required key is {name(self.public)}")
        return Verifier(signer)


class Verifier:
    """Checks the signatures of one pack."""

    def __init__(self, signer: bytes) -> None:
        self._key = None
        if signer != UNSIGNED:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

            try:
                self._key = Ed25519PublicKey.from_public_bytes(signer)
            except ValueError as error:
                raise PackError("the pack is damaged: its signer's key is invalid") from error

    def check(self, digest: bytes, signature: bytes) -> None:
        """Raise :class:`PackError` unless the signature is the signer's."""
        if self._key is None:
            if signature != NO_SIGNATURE:
                raise PackError("the pack is damaged: it has a signature but no signer")
            return
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, digest)
        except InvalidSignature:
            raise PackError("the pack's signature is wrong: the pack was changed") from None


def name(public: bytes) -> str:
    """Return a public key in the form in which users compare keys."""
    return "unsigned" if public == UNSIGNED else public.hex()[:_NAME_CHARS]


def generate(directory: Path, key_name: str) -> tuple[Path, Path]:
    """Make a key pair: ``NAME.pem``, which only its owner can read, and ``NAME.pub``. Existing files are
    never overwritten. Raise :class:`UsageError` if a file exists or cannot be written."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    if not _NAME.fullmatch(key_name):
        raise UsageError(f"{key_name!r} cannot be a key's name: use letters, digits, '.', '_' and '-'")
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    files = directory / f"{key_name}.pem", directory / f"{key_name}.pub"
    for file, data, mode in ((files[0], private, 0o600), (files[1], public, 0o644)):
        try:
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                out.write(data)
        except FileExistsError as error:
            raise UsageError(f"{file} is there already: choose another name, or remove it") from error
        except OSError as error:
            raise UsageError(f"cannot write {file}: {error.strerror}") from error
    return files
