"""What callers say with a save, and what a load gives back.

**Hints.** A store sees the past of a page. Whoever runs the conversation often knows what comes next: a tool
has been called and its result will follow this prefix within seconds; the user has closed the window; the
reasoning that was just saved will be cut out of the next turn. A :class:`Hint` says so.

Hints are advice. They are read by the policy that orders the pages for eviction, and by nothing else: whether
a page is found, and what bytes it has, never depends on one. A wrong hint costs hits, and a policy that knows
no hints (``lru``) goes on as if there were none.

A hint is about the **next use** of a page. When that has come, it is used up, however long it was to hold.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from tierstore import policy
from tierstore.arguments import text
from tierstore.errors import UsageError

Reuse: TypeAlias = Literal["likely", "unlikely", "done"]

REUSES: tuple[Reuse, ...] = get_args(Reuse)
LIKELY_S = 3_600.0  # that "likely" holds without a time of its own: or every wrong one would stay for good
MOST_PRIORITY = 100
MOST_SESSION_CHARS = 256

_REUSE: dict[Reuse | None, policy.Reuse] = {
    "likely": policy.Reuse.LIKELY,
    None: policy.Reuse.UNKNOWN,
    "unlikely": policy.Reuse.UNLIKELY,
    "done": policy.Reuse.DONE,
}


def _is_number(value: object) -> bool:
    # What comes out of somebody's JSON may be anything.
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Hint:
    """How the pages of a prompt are going to be used. Raises :class:`UsageError` for values out of range.

    ``reuse``: ``"likely"`` (this prompt is going to be continued), ``"unlikely"`` (perhaps, but not soon) or
    ``"done"`` (nobody will ask for it again). ``ttl_s`` is their time to live: when so many seconds have
    passed without a use, they are as good as done (None: an hour for what is likely, no end for others).
    ``priority``, from -100 to 100, orders pages of equal reuse: those of a higher one stay longer.
    ``elsewhere``: an engine on another host is going to ask for them; a daemon with a pool puts them there.
    """

    ttl_s: float | None = None
    reuse: Reuse | None = None
    priority: int = 0
    elsewhere: bool = False

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not (_is_number(self.ttl_s) and 0 <= self.ttl_s <= sys.float_info.max):
            raise UsageError("a hint's ttl_s is a number of seconds, 0 or more")
        if self.reuse is not None and self.reuse not in REUSES:
            raise UsageError(f"a hint's reuse is one of {', '.join(REUSES)}, not {self.reuse!r}")
        whole = isinstance(self.priority, int) and not isinstance(self.priority, bool)
        if not (whole and -MOST_PRIORITY <= self.priority <= MOST_PRIORITY):
            raise UsageError(
                f"a hint's priority is a whole number from {-MOST_PRIORITY} to {MOST_PRIORITY}, "
                f"not {self.priority!r}"
            )
        if not isinstance(self.elsewhere, bool):
            raise UsageError(f"a hint's elsewhere is true or false, not {self.elsewhere!r}")

    @property
    def for_policy(self) -> bool:
        """Whether it is about who leaves first: one that says ``elsewhere`` and nothing more is not."""
        return not self.elsewhere or self.ttl_s is not None or self.reuse is not None or self.priority != 0

    def facts(self, now_s: float) -> policy.PageHint:
        """The same for a policy, if it is given at ``now_s`` on the store's clock."""
        ttl_s = self.ttl_s
        if ttl_s is None:
            ttl_s = LIKELY_S if self.reuse == "likely" else math.inf
        return policy.PageHint(_REUSE[self.reuse], self.priority, now_s + ttl_s)


HANDOVER_S = 1.0  # that an engine asks others to wait for what it has promised
MOST_HANDOVER_S = 10.0


@dataclass(frozen=True, slots=True)
class Promise:
    """Whoever has computed a prompt says: the pages of its first ``tokens`` tokens are on their way to the
    store. An engine that goes on with it waits for them, ``until_s`` seconds at most from when it hears of
    it, and computes what has not come. Raises :class:`UsageError` for values out of range.
    """

    tokens: int
    until_s: float = HANDOVER_S

    def __post_init__(self) -> None:
        whole = isinstance(self.tokens, int) and not isinstance(self.tokens, bool)
        if not (whole and self.tokens >= 0):
            raise UsageError(f"a promise is of 0 tokens or more, not {self.tokens!r}")
        if not (_is_number(self.until_s) and 0 <= self.until_s <= MOST_HANDOVER_S):
            raise UsageError(
                f"a promise's until_s lies between 0 and {MOST_HANDOVER_S:g} seconds, not {self.until_s!r}"
            )


_INFERRED = {
    "tool_calls": Hint(ttl_s=600.0, reuse="likely"),  # the result comes back behind this very prompt
    "abort": Hint(reuse="unlikely"),  # somebody hung up, or has changed his mind
    "cancelled": Hint(reuse="unlikely"),
    "parked": Hint(reuse="likely"),  # the engine itself is going to ask for it
}


def inferred(finish_reason: str) -> Hint | None:
    """What an engine knows of a prompt's future when a request has ended for ``finish_reason`` (as the OpenAI
    API and the engines call them); ``"parked"`` is one that has not ended, but had to give way. None for
    those that say nothing: after ``"stop"`` and ``"length"`` the user may go on or not."""
    return _INFERRED.get(finish_reason)


def checked_session(session: str | None) -> str | None:
    """A session's name as it is. Raises :class:`UsageError` for an empty or a very long one, and for what is
    no text."""
    if session is not None:
        text("a session's name", session)
        if not 0 < len(session) <= MOST_SESSION_CHARS:
            raise UsageError(f"a session's name has 1 to {MOST_SESSION_CHARS} characters, not {len(session)}")
    return session


@dataclass(frozen=True, slots=True)
class GroupPages:
    """HBM pages of one layer group's pool, of chunks ``first, first + 1, …`` of a prompt."""

    first: int = 0
    pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought: the first ``tokens`` tokens. ``pages`` are HBM pages, each owned once by the
    caller (none for buffers); ``moved_bytes`` is the payload that had to be copied. Where there are several
    layer groups, ``groups`` has the pages of each, and ``pages`` are those of the first."""

    tokens: int
    pages: tuple[int, ...] = ()
    moved_bytes: int = 0
    groups: tuple[GroupPages, ...] = ()
