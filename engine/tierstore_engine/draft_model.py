"""A draft model: a smaller model with the same vocabulary, which guesses tokens that the main model checks.

Each sequence has a *shadow*, a sequence of the draft model. The shadow's pages are in pools and in a store
under the draft model's identity, so a prompt's draft pages are found again like those of the main model. A
shadow may be ahead of its sequence by the drafted tokens. Only tokens that the sequence has accepted are
published: before the next draft, the shadow is cut back to them. A draft model with recurrent states copies
them at the accepted tokens, and returns to the copies after its draft.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ints
from dataclasses import dataclass, replace

from tierstore.errors import UsageError
from tierstore_connectors.base import Connector
from tierstore_engine.batch import Work, build_step, finishing
from tierstore_engine.drafting import Drafter
from tierstore_engine.keeper import PageKeeper
from tierstore_engine.outputs import RequestId
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.sequence import Sequence, SequenceState
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Runner
from tierstore_engine.tables import StateTable
from tierstore_engine.tokenizer import ByteTokenizer


@dataclass(slots=True)
class _Shadow:
    """The draft model's sequence for a sequence of the main model, its *leader*. Its first ``agreed`` tokens
    are those of the leader. While it is ``ahead``, its states include drafted tokens, and copies hold the
    states before these tokens."""

    sequence: Sequence
    agreed: int
    ahead: bool = False

    def follow(self, leader: Sequence) -> int:
        """Take over the leader's tokens, and drop drafted tokens that the leader did not accept. Return how
        many computed tokens are still valid. The newest token is not among them, because it must be
        computed."""
        own, tokens = self.sequence, leader.tokens
        same = self.agreed
        while same < min(len(own.tokens), len(tokens)) and own.tokens[same] == tokens[same]:
            same += 1
        own.tokens[same:] = tokens[same:]
        self.agreed = len(tokens)
        return min(own.computed, same, len(tokens) - 1)

    @property
    def _states(self) -> Iterator[StateTable]:
        return (table for table in self.sequence.tables if isinstance(table, StateTable))

    def go_ahead(self) -> None:
        """Copy the states before drafted tokens. If there is no room for the copies, the shadow drafts
        nothing."""
        self.ahead = all(table.keep_state() for table in self._states)

    def go_back(self) -> None:
        """Return to the states of the agreed tokens."""
        for table in self._states:
            table.go_back()
        if self.ahead:
            self.sequence.restore(self.agreed)
            self.ahead = False


class DraftModel(Drafter):
    """Draft up to ``tokens`` tokens with ``model``, over the pages of ``connector``, which :meth:`close`
    closes.

    A sequence gets no draft while its draft pages are being loaded, or if they have no room. A long prompt is
    computed chunk by chunk, one per step of the engine.
    """

    def __init__(
        self, model: Runner, connector: Connector, *, tokens: int = 5, settings: EngineSettings | None = None
    ) -> None:
        if tokens < 1:
            raise UsageError(f"a draft needs at least one token, got {tokens}")
        most = model.config.max_positions - 1
        if tokens > most:
            raise UsageError(f"this draft model drafts at most {most} tokens, got {tokens}: draft fewer")
        settings = settings or EngineSettings()
        self.connector = connector
        self._model = model
        self._tokens = tokens
        self._chunk = settings.prefill_chunk
        spec = model.config.kv_spec(chunk_tokens=connector.pool.spec.chunk_tokens)
        self._keeper = PageKeeper(
            connector,
            replace(settings, plan="load"),
            checkpoint_tokens=settings.checkpoint_distance(spec),
        )
        self._shadows: dict[RequestId, _Shadow] = {}

    def propose(self, sequences: Ints[Sequence]) -> Mapping[RequestId, Ints[int]]:
        ready = [sequence for sequence in sequences if self._prepare(sequence)]
        drafts: dict[RequestId, list[int]] = {sequence.request_id: [] for sequence in ready}
        for _ in range(self._tokens):
            work = [item for leader in ready if (item := self._work(leader)) is not None]
            if not work:
                break
            logits = self._model.compute(build_step(work, self.connector.pools))
            ending = {item.sequence.request_id for item in finishing(work)}
            for item in work:
                self._computed(item)
            ready = [leader for leader in ready if leader.request_id in ending]
            if not ready:
                break
            # The main model will use the same random numbers, so both models tend to choose the same tokens.
            draws = [leader.draws(drafts[leader.request_id])[-1] for leader in ready]
            choices = self._model.sample(logits, draws, range(len(draws)))
            for leader, choice in zip(ready, choices, strict=True):
                drafts[leader.request_id].append(choice.token)
                self._shadows[leader.request_id].sequence.tokens.append(choice.token)
        for request_id in drafts:
            self._shadows[request_id].go_back()
        return drafts

    def follow(self, work: Ints[Work]) -> None:
        """Do nothing: the draft model computes these tokens when it proposes the next ones."""

    def forget(self, sequence: Sequence) -> None:
        shadow = self._shadows.pop(sequence.request_id, None)
        if shadow is not None:
            if shadow.sequence.state is SequenceState.RUNNING:
                self._follow(shadow, sequence)
            self._keeper.leave(shadow.sequence)

    def close(self) -> None:
        for shadow in self._shadows.values():
            self._keeper.leave(shadow.sequence, save=False)
        self._shadows.clear()
        self.connector.close()

    def _prepare(self, leader: Sequence) -> bool:
        """Return whether the leader has a shadow that can be computed now."""
        if len(leader.tokens) + self._tokens > self._model.config.max_positions:
            return False
        shadow = self._shadows.get(leader.request_id)
        if shadow is None:
            shadow = self._shadows[leader.request_id] = self._begin(leader)
        own = shadow.sequence
        if own.state is SequenceState.WAITING and not self._keeper.admit(
            own, self._keeper.look_up(own, admitting=True)
        ):
            del self._shadows[leader.request_id]
            return False
        self._keeper.settle(own)
        if own.state is not SequenceState.RUNNING:
            return False
        return self._follow(shadow, leader)

    def _follow(self, shadow: _Shadow, leader: Sequence) -> bool:
        """Cut a running shadow back to its leader's tokens. If the leader's step has failed, the shadow's
        states may be ahead of these tokens: release its pages then, and return False."""
        own, computed = shadow.sequence, shadow.follow(leader)
        if self._keeper.stateful and computed < own.computed:
            self._keeper.leave(own, save=False)
            return False
        own.restore(computed)
        return True

    def _begin(self, leader: Sequence) -> _Shadow:
        own = Sequence(
            leader.request_id,
            self.connector.prompt(leader.tokens),
            leader.tokens,
            SamplingParams(),
            ByteTokenizer().detokenizer(),
            max_tokens=self._model.config.max_positions,
            stop_ids=frozenset(),
            added=time.monotonic(),
        )
        own.session, own.hint, own.no_save = leader.session, leader.hint, leader.no_save
        return _Shadow(own, len(leader.tokens))

    def _work(self, leader: Sequence) -> Work | None:
        """Return the next chunk of the leader's shadow, or the work for the next token of its draft. Return
        None if the pool has no pages for it."""
        shadow = self._shadows[leader.request_id]
        own, stop = shadow.sequence, len(shadow.sequence.tokens)
        if not own.grow(stop):
            return None
        if own.computed < shadow.agreed:
            stop = self._keeper.step_end(own, min((own.computed // self._chunk + 1) * self._chunk, stop))
        elif self._keeper.stateful and not shadow.ahead:
            shadow.go_ahead()
        return Work(own, own.computed, stop, guessed=0 if shadow.ahead else max(stop - shadow.agreed, 0))

    def _computed(self, item: Work) -> None:
        """Record that a shadow's work was computed, and save the pages of accepted tokens."""
        own, shadow = item.sequence, self._shadows[item.sequence.request_id]
        if item.stop <= shadow.agreed:
            own.restore(item.stop)
            self._keeper.save(own)
        elif shadow.ahead or not self._keeper.stateful:
            own.computed = item.stop
