"""What can be set: ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tierstore.daemon.settings import default_listen
from tierstore.errors import UsageError


@dataclass(frozen=True, slots=True)
class Settings:
    """``store`` is the daemon's address, ``keys`` and ``server_key`` are the files for ``tcp://``.
    ``namespace`` keeps engines apart that nothing else tells apart (weights changed in place under one name).

    ``chunk_tokens``: how many tokens a page holds (0: as few blocks as make 64 tokens). ``lookup_s`` is the
    longest a request waits to learn what the daemon has, ``prefetch_s`` the longest it waits for the disk,
    and ``load_s`` for its blocks. ``fence_s`` is the longest that a step waits for saves which read blocks
    that it is going to write; then they are given up. ``ahead``: how many waiting requests are looked up
    before vLLM asks for them. ``threads`` copy, in each worker.
    """

    store: str = field(default_factory=default_listen)
    keys: str | None = None
    server_key: str | None = None
    namespace: str = ""
    chunk_tokens: int = 0
    lookup_s: float = 0.25
    prefetch_s: float = 2.0
    load_s: float = 10.0
    fence_s: float = 0.01
    ahead: int = 32
    threads: int = 2

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Settings:
        """Raises :class:`UsageError` for a key that is not known or a value that cannot be."""
        known = {each.name: each for each in fields(cls)}
        unknown = sorted(set(extra) - set(known))
        if unknown:
            names = ", ".join(map(repr, unknown))
            raise UsageError(f"kv_connector_extra_config has no {names} (known: {', '.join(known)})")
        values: dict[str, Any] = {}
        for name, value in extra.items():
            values[name] = _checked(name, str(known[name].type), value)
        return cls(**values)


def _checked(name: str, kind: str, value: Any) -> Any:
    if kind.startswith("str"):
        if not isinstance(value, str):
            raise UsageError(f"kv_connector_extra_config: {name} is a string, not {value!r}")
        return value
    whole = kind == "int"
    sound = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    least = 1 if name == "threads" else 0
    if not sound or not least <= value < 1e9:
        what = "a whole number" if whole else "a number of seconds"
        raise UsageError(f"kv_connector_extra_config: {name} is {what} from {least} on, not {value!r}")
    return value
