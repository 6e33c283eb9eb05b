from __future__ import annotations

import asyncio
import threading

import pytest

from tierstore.testing.clock import ManualClock
from tierstore.transfer import Progress, Transfer, TransferState


def make(settle=lambda state: state, **kwargs):
    return Transfer(settle, pages=4, nbytes=400, **kwargs)


def test_progress_and_result():
    transfer = make()
    transfer.advance(3, 300)
    assert transfer.progress == Progress(3, 4, 300, 400)
    assert not transfer.done
    with pytest.raises(TimeoutError, match="3/4 pages"):
        transfer.wait(0.01)
    transfer.finish()
    assert transfer.wait() is TransferState.DONE
    assert not transfer.cancel()


def test_cancel_ends_it_for_everybody():
    transfer = make()
    ended = []
    transfer.on_end(lambda: ended.append(1))
    assert transfer.cancel()
    assert transfer.stopped
    transfer.finish()
    assert transfer.wait() is TransferState.CANCELLED
    transfer.on_end(lambda: ended.append(2))
    assert ended == [1, 2]


def test_the_deadline_ends_it_with_what_has_arrived():
    clock = ManualClock()
    transfer = make(deadline_s=5.0, clock=clock)
    clock.advance(4.9)
    assert not transfer.done
    assert transfer.remaining_s == pytest.approx(0.1)
    clock.advance(0.2)
    assert transfer.done
    assert transfer.wait() is TransferState.EXPIRED


def test_wait_returns_at_the_deadline_without_anybody_moving_it():
    assert make(deadline_s=0.02).wait() is TransferState.EXPIRED


def test_settle_runs_once_however_many_end_it():
    settled = []
    transfer = make(lambda state: settled.append(state))
    threads = [threading.Thread(target=end) for end in (transfer.finish, transfer.cancel) * 8]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transfer.wait()
    assert len(settled) == 1


@pytest.mark.parametrize("ending", ["finish", "cancel", "deadline", "already"])
def test_it_can_be_awaited(ending):
    async def run():
        transfer = make(deadline_s=0.05 if ending == "deadline" else None)
        if ending == "already":
            transfer.finish()
        elif ending != "deadline":
            threading.Timer(0.01, getattr(transfer, ending)).start()
        return await transfer

    expected = {"cancel": TransferState.CANCELLED, "deadline": TransferState.EXPIRED}
    assert asyncio.run(run()) is expected.get(ending, TransferState.DONE)
