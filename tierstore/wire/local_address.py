"""Checks that the daemon at an address ``ipc://PATH`` belongs to this user.

Any user can make a directory under /tmp, even the directory that another user's daemon would use. So client
and daemon check that the directory of the default address belongs to this user and that no other user can
write to it. Before it sends anything, a client also asks the kernel which user owns the listening process
(SO_PEERCRED).
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
    """Raise :class:`StoreUnavailableError` if ``path`` is in the default directory and another user owns this
    directory or can write to it. Any other directory was chosen by the user and is not checked."""
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
    """Raise :class:`StoreUnavailableError` if the process that listens at the other end of a unix socket
    belongs neither to this user nor to root."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid not in (_ROOT, os.geteuid()):
        raise StoreUnavailableError(
            f"process {pid}, which listens at {url}, belongs to uid {uid}, this is uid {os.geteuid()}: a "
            "daemon and its clients must run as the same user"
        )


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def foreign_host(served_at: str, host: str) -> str | None:
    """Return the name in a request's ``Host`` header if the server at ``served_at`` must not answer the
    request; None if it may.

    A web page can make its own host name resolve to 127.0.0.1 (DNS rebinding), and could then read the
    answers of a server at a loopback address. So such a server answers only requests whose ``Host`` is a
    loopback address or is missing.

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
