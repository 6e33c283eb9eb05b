"""Lookups of a connected store: what is in HBM, and what the daemon has behind it."""

from __future__ import annotations

from tierstore.daemon.connected_hit import ConnectedHit
from tierstore.daemon.local import LocalPages
from tierstore.daemon.remembered import Question
from tierstore.daemon.remote import Asked, Remote
from tierstore.store.base import DEFAULT_LEASE_S


class Finder:
    """Thread-safe. The sync and the asyncio face differ in how they wait, and in nothing else."""

    def __init__(self, local: LocalPages, remote: Remote) -> None:
        self._local = local
        self._remote = remote

    def lookup(self, question: Question) -> ConnectedHit:
        asked = None
        if self._local.match(question).tokens < question.num_tokens:
            self._remote.introduce(question)
            asked = self._remote.ask(question, led=True)
            if asked is not None:
                asked.call.wait()
        return self._hit(question, asked)

    async def lookup_async(self, question: Question) -> ConnectedHit:
        asked = None
        if self._local.match(question).tokens < question.num_tokens:
            registering = self._remote.registering(question)
            if registering is not None:
                await registering
            asked = self._remote.ask(question)
            if asked is not None:
                await asked.call
        return self._hit(question, asked)

    def _hit(self, question: Question, asked: Asked | None) -> ConnectedHit:
        lease = self._remote.answer(asked) if asked is not None else None
        # Looked at again, because the daemon's answer took its time and nothing was held meanwhile.
        match = self._local.match(question)
        session = self._remote.connection.session
        lease_s = session.lease_s if session is not None else DEFAULT_LEASE_S
        state = self._local.state
        with state.lock:
            held = state.use(match, question.num_tokens, lease_s)
        hit = ConnectedHit(state, self._remote, question, match, held, lease)
        with state.lock:
            for label, tokens in hit.by_tier.items():
                state.counters.hit_tokens[label] += tokens
        return hit
