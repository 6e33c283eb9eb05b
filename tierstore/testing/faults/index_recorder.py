"""Recording the index: what every LMDB transaction changes in its file.

LMDB writes past :class:`~tierstore.tiers.disk.FileIO`. But it writes in one way only: the changed pages to
places that no reader can need, a sync, and one meta page, itself synchronous. So the file before and the file
after a transaction tell everything that may be on disk at any moment in between. While
:func:`recorded_index` lasts, indexes in the journal's directory are opened with an environment that takes
the two copies; all else goes to the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import lmdb

from tierstore.testing.faults.journal import Committed, Created, Journal


@contextmanager
def recorded_index(journal: Journal) -> Iterator[None]:
    """Records the transactions on every index under the journal's directory that is opened in the block."""
    real = lmdb.open

    def open_(path: str, **options: Any) -> Any:
        inside = journal.root in Path(path).parents
        if not inside or options.get("readonly"):
            return real(path, **options)
        return _Environment(real, Path(path), options, journal)

    lmdb.open = open_  # type: ignore[assignment]
    try:
        yield
    finally:
        lmdb.open = real


class _Environment:
    def __init__(
        self, real: Callable[..., Any], path: Path, options: dict[str, Any], journal: Journal
    ) -> None:
        # Anything less would need another model: commits that are lost, or data pages behind their meta page.
        relaxed = [name for name in ("sync", "metasync") if not options.get(name, True)]
        relaxed += [name for name in ("writemap", "map_async") if options.get(name)]
        assert not relaxed, f"the index is opened with {relaxed}: commits are not durable when they return"
        self._path = path
        self._name = journal.name_of(path)
        self._journal = journal
        before = self.read()
        self._env = real(str(path), **options)
        after = self.read()
        if after != before:
            journal.add(Created(self._name, after))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def __enter__(self) -> _Environment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._env.close()

    def open_db(self, *args: Any, **options: Any) -> Any:
        with self.change():
            return self._env.open_db(*args, **options)

    def begin(self, *args: Any, **options: Any) -> Any:
        txn = self._env.begin(*args, **options)
        return _Transaction(self, txn) if options.get("write") else txn

    def read(self) -> bytes:
        return self._path.read_bytes() if self._path.exists() else b""

    @contextmanager
    def change(self) -> Iterator[None]:
        """Around whatever may commit."""
        before = self.read()
        yield
        after = self.read()
        if after != before:
            self._journal.add(Committed(self._name, before, after))


class _Transaction:
    """A write transaction. Only its end writes to the file."""

    def __init__(self, env: _Environment, txn: Any) -> None:
        self._env = env
        self._txn = txn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    def __enter__(self) -> _Transaction:
        self._txn.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._env.change():
            self._txn.__exit__(kind, error, trace)

    def commit(self) -> None:
        with self._env.change():
            self._txn.commit()
