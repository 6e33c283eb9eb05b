"""Hints and the names of sessions, as a client sends them and as the daemon takes them."""

from __future__ import annotations

from typing import cast

from tierstore.daemon.protocol import HintPart, Reserve
from tierstore.daemon.session import Refusal, Session
from tierstore.errors import UsageError
from tierstore.hints import Hint, Reuse
from tierstore.store.telling import Told


def hint_part(told: Told) -> HintPart | None:
    """As much of it as is a hint."""
    hint = told.hint
    return HintPart(hint.ttl_s, hint.reuse, hint.priority) if hint is not None else None


def told_with(session: Session, m: Reserve) -> Told:
    """What a client tells with its Reserve. Raises :class:`Refusal`."""
    try:
        hint = None
        if m.hint is not None:
            hint = Hint(m.hint.ttl_s, cast("Reuse | None", m.hint.reuse), m.hint.priority)
        return Told(hint, m.session or None, session.tenant)
    except UsageError as error:
        raise Refusal("usage", str(error)) from error
