"""Trust in ``ipc://PATH``: check that the daemon there belongs to this user.

Any user can make a directory under /tmp, even the one that another user's daemon would choose. So the default
address is in a directory that belongs to this user and that no other user can write to. Both ends check that.
A client also asks the kernel for the owner of the process at the other end (SO_PEERCRED) before it sends
anything.
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
    """Return the directory of this user's default address: ``$XDG_RUNTIME_DIR``, or a directory under
    /tmp."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/tierstore-{os.geteuid()}")


def require_own_directory(path: Path) -> None:
    """Check the directory of a socket at the default address. A directory that does not exist yet is
    accepted, and so is every other address, because the user has chosen its directory.

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
        wrong = f"it belongs to uid {found.st_uid}, this is uid {uid}"
    elif found.st_mode & _WRITABLE_BY_OTHERS:
        wrong = f"other users can write to it (mode {stat.S_IMODE(found.st_mode):o}: use chmod 700)"
    else:
        return
    raise StoreUnavailableError(
        f"cannot trust {directory}, the default directory of the daemon's socket: {wrong}. Set "
        "XDG_RUNTIME_DIR to a directory of your own, or use another address"
    )


def require_own_peer(connection: socket.socket, url: str) -> None:
    """Check that the process which listens at the other end of a unix socket belongs to this user or to root.

    Raises :class:`StoreUnavailableError` if it belongs to another user.
    """
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid not in (_ROOT, os.geteuid()):
        raise StoreUnavailableError(
            f"process {pid}, which listens at {url}, belongs to uid {uid}, this is uid {os.geteuid()}: a "
            "daemon and its clients must run as the same user"
        )


def is_loopback(host: str) -> bool:
    """Return whether this name or address reaches only this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def foreign_host(served_at: str, host: str) -> str | None:
    """Return the name in the ``Host`` header of a request if the server at ``served_at`` must not answer it.

    A web page elsewhere can make its own name resolve to 127.0.0.1 (DNS rebinding) and would then read the
    answers of a server at loopback. So such a server answers only requests that name a loopback address, or
    none. Return None for a request that may be answered.

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
