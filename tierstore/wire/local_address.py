"""Whose daemon is at ``ipc://PATH``: this user's, or an impostor's?

Anybody may make a directory under /tmp, also the one that another user's daemon would choose. So the default
address lies in a directory that belongs to this user and that nobody else can write to: both ends check that.
A client also asks the kernel whose process is at the other end (SO_PEERCRED) before it says anything.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import struct
from pathlib import Path
from urllib.parse import urlsplit

from tierstore.errors import StoreUnavailableError

_PEER = struct.Struct("3i")  # pid, uid, gid
_ROOT = 0
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def default_directory() -> Path:
    """Where this user's daemon listens by default: ``$XDG_RUNTIME_DIR``, or a directory under /tmp."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/tierstore-{os.geteuid()}")


def require_own_directory(path: Path) -> None:
    """Check the directory of a socket at the default address. One that is not there yet is fine, and so are
    all others: who names an address has chosen its directory.

    Raises :class:`StoreUnavailableError` for a directory that another user owns or can write to.
    """
    directory = path.parent
    if directory != default_directory():
        return
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return
    uid = os.geteuid()
    if not stat.S_ISDIR(found.st_mode):
        wrong = "it is no directory"
    elif found.st_uid != uid:
        wrong = f"it belongs to uid {found.st_uid}, and this is uid {uid}"
    elif found.st_mode & _WRITABLE_BY_OTHERS:
        wrong = f"other users can write to it (mode {stat.S_IMODE(found.st_mode):o}; chmod 700 mends that)"
    else:
        return
    raise StoreUnavailableError(
        f"{directory}, the default place of the daemon's socket, cannot be trusted: {wrong}; set "
        "XDG_RUNTIME_DIR to a directory of your own, or name another address"
    )


def require_own_peer(connection: socket.socket, url: str) -> None:
    """Check that the process which listens at the other end of a unix socket is this user's or root's.

    Raises :class:`StoreUnavailableError` for anybody else's.
    """
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid not in (_ROOT, os.geteuid()):
        raise StoreUnavailableError(
            f"process {pid}, which listens at {url}, belongs to uid {uid}, and this is uid {os.geteuid()}: a "
            "daemon and its clients run as the same user"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine is reached by this name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def foreign_host(served_at: str, host: str) -> str | None:
    """Return the name in the ``Host`` header of a request if the server at ``served_at`` must not answer it.

    A web page elsewhere can have its own name resolve to 127.0.0.1 (DNS rebinding) and would read the answers
    of a server at loopback. So such a server answers only requests that name a loopback address, or none.
    None for a request that may be answered.

    >>> foreign_host("127.0.0.1", "evil.example:8000"), foreign_host("127.0.0.1", "localhost:8000")
    ('evil.example', None)
    """
    if not host or not is_loopback(served_at):
        return None
    try:
        name = (urlsplit(f"//{host}").hostname or "") if "@" not in host else ""
    except ValueError:
        name = ""
    return None if is_loopback(name) else name
