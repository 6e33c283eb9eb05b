"""Hints and promises of callers, and the result of a load.

**Hints.** A store knows the past of a page. The caller often knows its future. For example, a tool was called
and its result will continue this prefix within seconds. The user may have closed the window. The reasoning
that was just saved may be removed from the next turn. A :class:`Hint` tells the store.

Hints are advice. Only the policy that orders the pages for eviction reads them. Whether a page is found, and
which bytes it has, never depends on them. A wrong hint costs hits, and a policy that ignores hints (``lru``)
works as if there were none.

A hint is about the **next use** of a page. After that use it has no effect, even if its time to live is not
over.
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
# lifetime of "likely" without a ttl_s; otherwise every wrong hint would keep its pages for ever
LIKELY_S = 3_600.0
MOST_PRIORITY = 100
MOST_SESSION_CHARS = 256

_REUSE: dict[Reuse | None, policy.Reuse] = {
    "likely": policy.Reuse.LIKELY,
    None: policy.Reuse.UNKNOWN,
    "unlikely": policy.Reuse.UNLIKELY,
    "done": policy.Reuse.DONE,
}


def _is_number(value: object) -> bool:
    # Values from JSON may have any type.
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Hint:
    """The expected use of a prompt's pages. Raise :class:`UsageError` for values out of range.

    ``reuse`` is ``"likely"`` (this prompt will be continued), ``"unlikely"`` (perhaps, but not soon) or
    ``"done"`` (it will not be used again). ``ttl_s`` is the time to live: after this many seconds without a
    use, the pages count as done (None: an hour for likely, no end for others). ``priority``, from -100 to
    100, orders pages of equal reuse: pages with a higher one stay longer. ``elsewhere``: an engine on another
    host will use them; a daemon with a shared store publishes them there.
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
        """Whether the hint affects the order of eviction. One that only says ``elsewhere`` does not."""
        return not self.elsewhere or self.ttl_s is not None or self.reuse is not None or self.priority != 0

    def facts(self, now_s: float) -> policy.PageHint:
        """Return the hint in the policy's form, if it is given at ``now_s`` on the store's clock."""
        ttl_s = self.ttl_s
        if ttl_s is None:
            ttl_s = LIKELY_S if self.reuse == "likely" else math.inf
        return policy.PageHint(_REUSE[self.reuse], self.priority, now_s + ttl_s)


HANDOVER_S = 1.0  # how long other engines wait for promised pages
MOST_HANDOVER_S = 10.0


@dataclass(frozen=True, slots=True)
class Promise:
    """A statement by the engine that has computed a prompt: the pages of its first ``tokens`` tokens are on
    their way to the store. An engine that continues the prompt waits for them, at most ``until_s`` seconds
    from when it learns of the promise, and computes the tokens that have not arrived. Raise
    :class:`UsageError` for values out of range."""

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
    "parked": Hint(reuse="likely"),  # the engine itself will ask for it
}


def inferred(finish_reason: str) -> Hint | None:
    """Return the hint that follows from a request's ``finish_reason`` (as named by the OpenAI API and the
    engines). ``"parked"`` is a request that has not ended but was preempted. None for reasons that say
    nothing: after ``"stop"`` and ``"length"``, the user may continue or not."""
    return _INFERRED.get(finish_reason)


def checked_session(session: str | None) -> str | None:
    """Return a session's name unchanged. Raise :class:`UsageError` if it is empty, too long, or not text."""
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
    """The pages to forget: those of a tenant, a model, a model of a tenant, or a session of a tenant.

    ``tenant`` is the tenant of an identity, or the name of a client's key in a daemon. ``model`` is an
    identity's model, or a model's name for people. A ``session`` has the pages that no other session has
    used. In a store with session keys, it has all pages that it saved first, and those behind them.

    The pages leave the pools of this store and the host tier at once. When the call returns, no lookup finds
    them on disk either, even after a crash. In an encrypted store, the keys of the tenant or model (with
    session keys, of the session) are gone then, so the present keyring opens no copy of the directory.
    Otherwise, the bytes are overwritten in the background. A daemon tells the pools of other engines.
    docs/encryption.md has the limits. A running save may end afterwards.

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
        """Return whether to forget pages of this tenant and of a model with these names. A client's tenant
        covers the tenants that the client itself distinguishes."""
        right = self.tenant is None or self.tenant in (tenant, outer_tenant(tenant))
        return right and (self.model is None or self.model in models)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetReceipt:
    """The result of :meth:`Store.forget <tierstore.Store.forget>`. ``tenant``, ``model`` and ``session`` are
    as given (None: not given). No lookup finds the pages in any tier of this store. With ``encrypted``, the
    ``keys`` are gone from the keyring. ``shared_keys`` is None unless the store shares encrypted pages with
    other hosts."""

    tenant: _Name | None
    model: _Name | None
    session: _Name | None
    encrypted: bool  # whether the disk tier is encrypted
    identities: int  # identities of the tenant or model that had pages, or a client; 0 for a session
    hbm_pages: int = 0  # pages in the store's own pools
    host_pages: int  # pages in host memory
    keys: int  # dropped data keys; an encrypted store has one for each tenant and model, or session of these
    shared_keys: int | None = None  # … and in the shared store. Other hosts drop them at their next listing
    at_s: float  # wall clock at the beginning, in seconds since 1970
    took_s: float


@dataclass(frozen=True, slots=True)
class GroupPages:
    """HBM pages of one layer group's pool, for chunks ``first, first + 1, …`` of a prompt."""

    first: int = 0
    pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load: the first ``tokens`` tokens. ``pages`` are HBM pages, which the caller owns (none
    for buffers). ``moved_bytes`` is the payload that was copied. With several layer groups, ``groups`` has
    the pages of each, and ``pages`` those of the first."""

    tokens: int
    pages: tuple[int, ...] = ()
    moved_bytes: int = 0
    groups: tuple[GroupPages, ...] = ()
