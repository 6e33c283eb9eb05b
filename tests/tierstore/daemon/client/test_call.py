"""A request and its answer, when they come at the same moment as something else."""

from __future__ import annotations

from tierstore.client.channel import Call
from tierstore.transfer import TransferState
from tierstore.wire import messages as p


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class AnsweredTooLate(Call):
    """Its time is over just before the answer ends it."""

    def __init__(self, clock):
        super().__init__(p.Pong, 1.0, lambda answer, frames: answer, clock=clock)
        self._late_clock = clock

    def _end(self, state):
        if state is TransferState.DONE:
            self._late_clock.now += 2.0
            assert self.done
        return super()._end(state)


def test_an_answer_in_time_is_the_result():
    call = Call(p.Pong, 1.0, lambda answer, frames: answer, clock=Clock())
    assert call.answer(p.Pong(7))
    assert call.wait() == p.Pong(7)
    assert not call.late


def test_an_answer_that_is_given_back_is_not_used_as_well():
    call = AnsweredTooLate(Clock())
    assert not call.answer(p.Pong(7))
    assert call.wait() is None
    assert call.late
