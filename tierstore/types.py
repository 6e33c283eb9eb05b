"""Hints and promises of callers, and the results of loads and forgets.

**Hints.** A store knows the past of a page. The caller often knows its future. For example, the model called
a tool, and the tool's result will continue this prefix within seconds. The user may have closed the window.
The reasoning that was just saved may be removed from the next turn. A :class:`Hint` passes this knowledge to
the store.

Hints are advice. Only the policy that orders pages for eviction reads hints. Whether a page is found, and
which bytes it has, never depends on them. A wrong hint costs hits, and a policy that ignores hints (``lru``)
works as if there were none.

A hint is about the **next use** of a page. After this use the hint has no effect, even if its time to live is
not over.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, get_args

from msgspec import Meta

from tierstore import policy
from tierstore.arguments import text
from tierstore.errors import UsageError
from tierstore.keys import outer_tenant

Reuse: TypeAlias = Literal["likely", "unlikely", "done"]

REUSES: tuple[Reuse, ...] = get_args(Reuse)
LIKELY_S = 3_600.0  # time to live of "likely" without a ttl_s: a wrong hint must not keep pages for ever
MOST_PRIORITY = 100
MOST_SESSION_CHARS = 256

_REUSE: dict[Reuse | None, policy.Reuse] = {
    "likely": policy.Reuse.LIKELY,
    None: policy.Reuse.UNKNOWN,
    "unlikely": policy.Reuse.UNLIKELY,
    "done": policy.Reuse.DONE,
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Hint:
    """The expected use of a prompt's pages. Raise :class:`UsageError` for values out of range.

    ``reuse`` is ``"likely"`` (this prompt will be continued), ``"unlikely"`` (this prompt may be continued,
    but not soon) or ``"done"`` (its pages will not be used again). ``ttl_s`` is the time to live: after this
    many seconds without a use, the pages count as done (None: an hour for likely, no end for others).
    ``priority``, from -100 to 100, orders pages of equal reuse: pages with a higher priority stay longer.
    With ``elsewhere``, an engine on another host will use the pages; a daemon with a shared store publishes
    them there.
    """

    ttl_s: float | None = None
    reuse: Reuse | None = None
    priority: int = 0
    elsewhere: bool = False

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not (_is_number(self.ttl_s) and 0 <= self.ttl_s <= sys.float_info.max):
            raise UsageError("a hint's ttl_s must be a number of seconds of at least 0")
        if self.reuse is not None and self.reuse not in REUSES:
            raise UsageError(f"a hint's reuse must be one of {', '.join(REUSES)}, got {self.reuse!r}")
        whole = isinstance(self.priority, int) and not isinstance(self.priority, bool)
        if not (whole and -MOST_PRIORITY <= self.priority <= MOST_PRIORITY):
            raise UsageError(
                f"a hint's priority must be a whole number from {-MOST_PRIORITY} to {MOST_PRIORITY}, "
                f"got {self.priority!r}"
            )
        if not isinstance(self.elsewhere, bool):
            raise UsageError(f"a hint's elsewhere must be true or false, got {self.elsewhere!r}")

    @property
    def for_policy(self) -> bool:
        """Whether the hint affects the order of eviction. A hint with only ``elsewhere`` does not."""
        return not self.elsewhere or self.ttl_s is not None or self.reuse is not None or self.priority != 0

    def facts(self, now_s: float) -> policy.PageHint:
        """Return the hint in the policy's form. ``now_s`` is the time on the store's clock at which the hint
        is given."""
        ttl_s = self.ttl_s
        if ttl_s is None:
            ttl_s = LIKELY_S if self.reuse == "likely" else math.inf
        return policy.PageHint(_REUSE[self.reuse], self.priority, now_s + ttl_s)


HANDOVER_S = 1.0  # seconds for which other engines wait for promised pages
MOST_HANDOVER_S = 10.0


@dataclass(frozen=True, slots=True)
class Promise:
    """A statement by the engine that has computed a prompt that it is saving the pages of the prompt's first
    ``tokens`` tokens. An engine that continues the prompt waits for these pages, at most ``until_s`` seconds
    after it learns of the promise, and computes the tokens that have not arrived. Raise :class:`UsageError`
    for values out of range."""

    tokens: int
    until_s: float = HANDOVER_S

    def __post_init__(self) -> None:
        whole = isinstance(self.tokens, int) and not isinstance(self.tokens, bool)
        if not (whole and self.tokens >= 0):
            raise UsageError(f"a promise's tokens must be a whole number of at least 0, got {self.tokens!r}")
        if not (_is_number(self.until_s) and 0 <= self.until_s <= MOST_HANDOVER_S):
            raise UsageError(
                f"a promise's until_s must be between 0 and {MOST_HANDOVER_S:g} seconds, got {self.until_s!r}"
            )


_INFERRED = {
    "tool_calls": Hint(ttl_s=600.0, reuse="likely"),  # the tool's result continues this prompt
    "abort": Hint(reuse="unlikely"),  # the client disconnected or cancelled
    "cancelled": Hint(reuse="unlikely"),
    "parked": Hint(reuse="likely"),  # the engine will continue the request
}


def inferred(finish_reason: str) -> Hint | None:
    """Return the hint that follows from a request's ``finish_reason`` (as named by the OpenAI API and the
    engines). ``"parked"`` is a request that was preempted before its end. Return None for ``"stop"`` and
    ``"length"``, after which the user may continue or not, and for unknown reasons."""
    return _INFERRED.get(finish_reason)


def checked_session(session: str | None) -> str | None:
    """Return the session's name. Raise :class:`UsageError` if the name is empty, too long, or not text."""
    if session is not None:
        text("a session's name", session)
        if not 0 < len(session) <= MOST_SESSION_CHARS:
            raise UsageError(
                f"a session's name must have 1 to {MOST_SESSION_CHARS} characters, got {len(session)}"
            )
    return session


_Name: TypeAlias = Annotated[str, Meta(max_length=1 << 16)]


@dataclass(frozen=True, slots=True)
class Forgettable:
    """The pages to forget: all pages of a tenant, a model, a tenant's model, or a tenant's session.

    ``tenant`` is the tenant of an identity, or the name of a client's key in a daemon. ``model`` is an
    identity's model, or a model's name for people. ``session`` stands for the pages that no other session has
    used. In a store with session keys, it stands for all pages that it saved first, and all pages behind
    them.

    The pages leave the pools of this store and the host tier before the call returns. From then on no lookup
    finds them on disk either, even after a crash. In an encrypted store, the keys of the tenant or model
    (with session keys, of the session) are deleted by then, so the present keyring cannot decrypt any copy of
    the directory. In a store without encryption, the bytes are overwritten in the background. A daemon
    informs the pools of other engines. docs/encryption.md has the limits. A running save of the pages may end
    after the forget.

    Raise :class:`UsageError` for another combination, and for names that are not text.

    >>> Forgettable(tenant="acme").covers("acme", "my-model")
    True
    """

    tenant: str | None = None
    model: str | None = None
    session: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("tenant", self.tenant), ("model", self.model)):
            if value is not None:
                text(f"the {name} to forget", value)
        checked_session(self.session)
        if self.session is not None and self.model is not None:
            raise UsageError("a session is forgotten for all models: leave model out")
        if self.tenant is None and self.model is None and self.session is None:
            raise UsageError("say what to forget: a tenant, a model or a session")

    def covers(self, tenant: str, *models: str) -> bool:
        """Return whether pages of this tenant, and of a model with any of these names, are to be forgotten. A
        client's tenant includes the tenants that the client itself distinguishes."""
        right = self.tenant is None or self.tenant in (tenant, outer_tenant(tenant))
        return right and (self.model is None or self.model in models)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetReceipt:
    """The result of :meth:`Store.forget <tierstore.Store.forget>`. ``tenant``, ``model`` and ``session`` are
    the call's arguments. No lookup finds the pages in any tier of this store. With ``encrypted``, the number
    of ``keys`` was deleted from the keyring. ``shared_keys`` is None unless the store shares encrypted pages
    with other hosts."""

    tenant: _Name | None
    model: _Name | None
    session: _Name | None
    encrypted: bool  # whether the disk tier is encrypted
    identities: int  # identities of the tenant or model with pages or a connected client; 0 for a session
    hbm_pages: int = 0  # forgotten pages in the store's own pools
    host_pages: int  # forgotten pages in host memory
    keys: int  # deleted data keys. Each tenant and model has one, or each session with session keys
    shared_keys: int | None = (
        None  # keys deleted in the shared store; other hosts drop them when they next list
    )
    at_s: float  # wall clock when the forget began, in seconds since 1970
    took_s: float


@dataclass(frozen=True, slots=True)
class GroupPages:
    """HBM pages in one layer group's pool, which hold chunks ``first, first + 1, …`` of a prompt."""

    first: int = 0
    pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load of a prompt's first ``tokens`` tokens. ``pages`` are HBM pages, which the caller
    owns; empty after a load into buffers. ``moved_bytes`` is the payload that was copied. With several layer
    groups, ``groups`` has the pages of each group, and ``pages`` has the pages of the first group."""

    tokens: int
    pages: tuple[int, ...] = ()
    moved_bytes: int = 0
    groups: tuple[GroupPages, ...] = ()
