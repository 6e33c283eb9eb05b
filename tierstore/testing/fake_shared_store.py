"""A shared store for tests, at the address ``fake:///PATH``. An object is a file in the directory ``PATH``,
so the agents of several hosts in a test share it.

Every call reads the faults to simulate from ``PATH/.faults.json``::

    {"slow_s": 0.1}            every call takes this many seconds
    {"hang": true}             calls do not return while this is set
    {"late_s": 2.0}            a get fails at once, and writes the bytes this many seconds later
    {"flip": true}             a get returns each object with one wrong byte
    {"tear": true}             a get silently omits the second half of each object
    {"short": true}            a get returns objects that are too short
    {"swap": true}             a get of two objects exchanges them
    {"refuse": true}           calls fail
    {"broken": true}           a put raises an error of an unexpected type
    {"full": true}             a put stores nothing
    {"crash": true}            a get kills the process
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tierstore.cluster.orders import Origin
from tierstore.cluster.shared_store import (
    NOT_THERE,
    Memory,
    SharedStore,
    SharedStoreOptions,
)
from tierstore.errors import SharedStoreError

_LOOK_S = 0.01


class FakeSharedStore(SharedStore):
    """A shared store whose objects are files. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.transport = "files"

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._faults()
        return [self._path(name).exists() for name in names]

    def get(self, names: Sequence[str], into: Sequence[Memory]) -> list[int]:
        faults = self._faults()
        if faults.get("crash"):
            os.kill(os.getpid(), 11)
        if faults.get("swap"):
            names = list(names)[::-1]
        objects = [self._read(name) for name in names]
        if faults.get("late_s"):
            late = threading.Timer(
                faults["late_s"], lambda: [_write(*each) for each in zip(objects, into, strict=True)]
            )
            late.daemon = True
            late.start()
            return [-800] * len(names)
        sizes = []
        for data, to in zip(objects, into, strict=True):
            if data is None:
                sizes.append(NOT_THERE)
                continue
            size = len(data)
            if faults.get("flip"):
                data = data[:-1] + bytes([data[-1] ^ 1])
            if faults.get("tear"):
                data = data[: size // 2]
            if faults.get("short"):
                data, size = data[:-1], size - 1
            sizes.append(size if _write(data, to) else -600)
        return sizes

    def put(self, names: Sequence[str], of: Sequence[Memory], origin: Origin) -> list[bool]:
        faults = self._faults()
        if faults.get("broken"):
            raise RuntimeError("the fake shared store is broken")
        if faults.get("full"):
            return [False] * len(names)
        for name, (address, nbytes) in zip(names, of, strict=True):
            path = self._path(name)
            if not path.exists():
                begun = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
                begun.write_bytes(ctypes.string_at(address, nbytes))
                begun.rename(path)
        return [True] * len(names)

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def used(self, names: Sequence[str]) -> None:
        """Do nothing: this store does not count uses."""

    def _path(self, name: str) -> Path:
        return self._directory / name.replace(":", "-")

    def _read(self, name: str) -> bytes | None:
        try:
            return self._path(name).read_bytes()
        except FileNotFoundError:
            return None

    def _faults(self) -> dict[str, Any]:
        faults = self._read_faults()
        while faults.get("hang"):
            time.sleep(_LOOK_S)
            faults = self._read_faults()
        time.sleep(faults.get("slow_s", 0))
        if faults.get("refuse"):
            raise SharedStoreError("the fake shared store refuses")
        return faults

    def _read_faults(self) -> dict[str, Any]:
        data = self._read(".faults.json")
        return json.loads(data) if data else {}


def set_faults(directory: Path, **faults: Any) -> None:
    """Simulate these faults, and no others, from now on."""
    begun = directory / ".faults.new"
    begun.write_text(json.dumps(faults))
    begun.rename(directory / ".faults.json")


def _write(data: bytes | None, to: Memory) -> bool:
    address, nbytes = to
    if data is None or len(data) > nbytes:
        return False
    ctypes.memmove(address, data, len(data))
    return True


def open_shared_store(options: SharedStoreOptions) -> SharedStore:
    directory = Path(urlsplit(options.url).path)
    if not directory.is_dir():
        raise SharedStoreError(f"there is no directory {directory}")
    store = FakeSharedStore(directory)
    store.exists(["ts1:"])
    return store
