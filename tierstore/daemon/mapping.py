"""The mapping of a daemon's arena: one in a process, for all of its connections.

An engine has several (the scheduler's half of a connector and the worker's, one for each model), and every
mapping has page tables of its own: 2 MiB of them for each GiB of the arena, and 0.2 s to fill them.
"""

from __future__ import annotations

import os
import threading

from tierstore.memory import Memory

_File = tuple[int, int, int]  # device, inode, bytes


class Mapping:
    """``memory`` is the arena. Got by :func:`map_arena`; every holder lets go of it once."""

    def __init__(self, memory: Memory, file: _File) -> None:
        self.memory = memory
        self.file = file
        self.holders = 1  # guarded by _lock
        self._populating = threading.Thread(target=self._populate, name="tierstore-attach", daemon=True)
        self._populating.start()

    def wait_populated(self) -> None:
        """Block until copies are as fast as they get."""
        self._populating.join()

    def let_go(self) -> None:
        """The last holder's ends the mapping, once no copy that is under way uses it any more (a dead
        daemon's arena takes up memory until then)."""
        with _lock:
            self.holders -= 1
            if self.holders:
                return
            del _mappings[self.file]
        self.memory.close()

    def _populate(self) -> None:
        # Fill this process's page tables: the first touch of each shared 4 KiB page costs 0.25 µs and more
        # in the middle of a copy. This is also where a GPU's driver is to be told of the mapping
        # (cudaHostRegister), and in let_go() that it goes.
        self.memory.populate(lambda: self.holders > 0)


_lock = threading.Lock()
_mappings: dict[_File, Mapping] = {}


def map_arena(fd: int, nbytes: int) -> Mapping:
    """The mapping of a shared-memory file's first ``nbytes``, made if there is none. Owns ``fd`` from now on.
    Raises :class:`~tierstore.errors.UsageError` when it cannot be mapped, and leaves ``fd`` open then."""
    status = os.fstat(fd)
    file = status.st_dev, status.st_ino, nbytes
    with _lock:
        mapping = _mappings.get(file)
        if mapping is None:
            mapping = _mappings[file] = Mapping(Memory.attach(fd, nbytes), file)
        else:
            mapping.holders += 1
            os.close(fd)
    return mapping


def _forget_in_child() -> None:
    """A forked child has the mappings, but neither the threads nor, perhaps, the lock."""
    global _lock
    _lock = threading.Lock()
    for mapping in _mappings.values():
        mapping.memory.close()
    _mappings.clear()


os.register_at_fork(after_in_child=_forget_in_child)
