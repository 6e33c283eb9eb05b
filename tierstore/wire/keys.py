"""CURVE keys for ``tcp://``: of the daemon, and of the clients that it admits.

A key pair is two files: ``NAME.secret`` with both keys and ``NAME.key`` with the public key. The daemon needs
its own ``.secret`` file and a directory with the ``.key`` file of each admitted client. The name of a
client's file is its tenant. The daemon adds the tenant to every identity of the client, so that tenants
cannot see each other's pages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os
import zmq
import zmq.utils.z85

from tierstore.errors import UsageError

_log = logging.getLogger(__name__)

ZAP_DOMAIN = b"tierstore"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_KEY = re.compile(r"[\x21-\x7e]{40}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A key pair, each key as Z85 text of 40 characters."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"


def generate(directory: Path, name: str) -> tuple[Path, Path]:
    """Make a key pair and return its ``.secret`` file and its ``.key`` file. Raise :class:`UsageError` if a
    file exists or cannot be written."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a key's name: use letters, digits, '.', '_' and '-'")
    public, secret = zmq.curve_keypair()
    pair, half = directory / f"{name}.secret", directory / f"{name}.key"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(pair, f"public {public.decode()}\nsecret {secret.decode()}\n")
    _write(half, f"public {public.decode()}\n")
    return pair, half


def read_pair(file: Path) -> KeyPair:
    """Read a key pair. Raise :class:`UsageError` for a malformed file and for a file that other users can
    read."""
    keys = _read(file)
    if "secret" not in keys:
        raise UsageError(f"{file} has no secret key: give a .secret file from `tierstore keygen`")
    if file.stat().st_mode & 0o077:
        raise UsageError(f"{file} can be read by others: chmod 600 {file}")
    return KeyPair(keys["public"], keys["secret"])


def read_public(file: Path) -> bytes:
    """Read a public key. Raise :class:`UsageError` for a malformed file."""
    return _read(file)["public"]


async def read_tenants(directory: Path) -> dict[bytes, str]:
    """Read the ``.key`` files in a directory, without blocking the event loop. Return the tenant (the file's
    name) by public key. Raise :class:`UsageError` if the directory or a file is unusable."""
    try:
        names = await aiofiles.os.listdir(directory)
    except OSError as error:
        raise UsageError(f"cannot read the tenants' keys in {directory}: {error.strerror}") from error
    tenants: dict[bytes, str] = {}
    for file in sorted(directory / name for name in names if name.endswith(".key")):
        try:
            async with aiofiles.open(file, encoding="ascii") as source:
                text = await source.read()
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(file, error) from error
        public = _parse(file, text)["public"]
        if public in tenants:
            raise UsageError(f"{file} has the same key as tenant {tenants[public]!r}")
        tenants[public] = file.stem
    return tenants


def _write(file: Path, text: str) -> None:
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise UsageError(f"{file} already exists: choose another name, or remove it") from error
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error
    with os.fdopen(fd, "w") as out:
        out.write(text)


def _read(file: Path) -> dict[str, bytes]:
    try:
        return _parse(file, file.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> UsageError:
    return UsageError(f"cannot read the key in {file}: {error}")


def _parse(file: Path, text: str) -> dict[str, bytes]:
    keys = {}
    for line in text.splitlines():
        kind, _, key = line.partition(" ")
        if kind in ("public", "secret") and _KEY.fullmatch(key):
            keys[kind] = key.encode()
    if "public" not in keys:
        raise UsageError(f"{file} is no key file: make one with `tierstore keygen`")
    return keys


class Doorkeeper:
    """Decides which clients' keys ZMQ admits (ZAP, ZeroMQ's RFC 27). Runs on the event loop."""

    def __init__(self, context: zmq.Context[Any], tenants: dict[bytes, str]) -> None:
        self.let_in(tenants)
        self.denied = 0
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ADDRESS)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fd, self._answer)

    def let_in(self, tenants: dict[bytes, str]) -> None:
        """Admit these keys, and no others, from now on. Existing connections do not end."""
        self._tenants = {zmq.utils.z85.decode(public): name for public, name in tenants.items()}

    def __contains__(self, tenant: str) -> bool:
        """Return whether a tenant has an admitted key."""
        return tenant in self._tenants.values()

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fd)
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            tenant = None
            if len(frames) == 7 and frames[0] == _ZAP_VERSION and frames[5] == b"CURVE":
                tenant = self._tenants.get(frames[6])
            number = frames[1] if len(frames) > 1 else b""
            if tenant is None:
                self.denied += 1
                _log.warning("rejected a client with an unknown key")
                reply = [_ZAP_VERSION, number, b"400", b"this key is not admitted", b"", b""]
            else:
                reply = [_ZAP_VERSION, number, b"200", b"OK", tenant.encode(), b""]
            self._socket.send_multipart(reply, zmq.NOBLOCK)
