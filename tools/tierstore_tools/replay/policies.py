"""The policies by the names of ``--policy``."""

from __future__ import annotations

from tierstore.errors import UsageError
from tierstore.policy import POLICIES
from tierstore_tools.replay.oracle import Belady


def policy_names() -> tuple[str, ...]:
    """All that can be replayed: those of the live store, and the offline ceiling."""
    return (*POLICIES, Belady.name)


def parse_policies(text: str) -> tuple[str, ...]:
    """The names in a list, each once. Raises :class:`UsageError` for one that is not known."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in policy_names():
            raise UsageError(f"no policy {name!r} (there are: {', '.join(policy_names())})")
    return names
