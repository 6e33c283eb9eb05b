"""One sample a second for all, and nobody is waited for."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest

from tierstore.dashboard.feed import Feed, SlowViewerError, TooManyViewersError
from tierstore.dashboard.view import Sample, View

WAIT_S = 60.0


class Looks:
    """Counts how often it was asked."""

    def __init__(self, *errors):
        self.count = 0
        self.errors = list(errors)

    async def __call__(self):
        self.count += 1
        if self.errors:
            raise self.errors.pop()
        return Sample(float(self.count), View("t", "a", "1", (), (), (), (), None, ()), {"x": (1 / 3, None)})


def run(test):
    async def within():
        return await asyncio.wait_for(test(), WAIT_S)

    return asyncio.run(within())


class Viewer:
    """Follows in the background; ``got(n)`` waits for n samples."""

    def __init__(self, feed):
        self.events = []
        self.samples = []
        self._more = asyncio.Event()
        self._feed = feed
        self.task = asyncio.create_task(self._follow())

    async def _follow(self):
        with self._feed.place():
            await self._feed.follow(self._send)

    async def _send(self, event):
        kind, _, rest = event.split(b"event: ")[1].partition(b"\n")
        document = msgspec.json.decode(rest.removeprefix(b"data: "))
        self.events.append(kind)
        if kind == b"sample":
            self.samples.append(document)
        self._more.set()

    async def got(self, samples):
        while len(self.samples) < samples:
            self._more.clear()
            await self._more.wait()


async def leave(*viewers):
    for viewer in viewers:
        viewer.task.cancel()
    for viewer in viewers:
        with contextlib.suppress(asyncio.CancelledError):
            await viewer.task


def test_many_who_look_cost_one_look():
    async def test():
        looks = Looks()
        feed = Feed(looks)
        feed.start()
        viewers = [Viewer(feed) for _ in range(8)]
        for viewer in viewers:
            await viewer.got(2)
        assert looks.count <= max(len(viewer.samples) for viewer in viewers) + 1
        assert {viewer.events[0] for viewer in viewers} == {b"history"}
        assert viewers[0].samples[0][:2] == [1.0, {"x": [0.3333, None]}]
        await leave(*viewers)
        assert feed.viewers == 0
        await feed.close()

    run(test)


def test_who_comes_later_gets_the_past_at_once_and_something_new_soon():
    async def test():
        feed = Feed(Looks(), unwatched_s=1e6)  # who comes ends the wait
        feed.start()
        first = Viewer(feed)
        await first.got(2)
        second = Viewer(feed)
        await second.got(1)
        assert second.samples[0][0] >= 2.0
        await leave(first, second)
        third = Viewer(feed)
        await third.got(2)
        await leave(third)
        await feed.close()

    run(test)


def test_places_are_bounded_and_given_back():
    async def test():
        feed = Feed(Looks(), most_viewers=2)
        with feed.place():
            with feed.place(), pytest.raises(TooManyViewersError), feed.place():
                raise AssertionError("a third one has a place")
            with feed.place():
                pass
        assert feed.viewers == 0

    run(test)


def test_who_does_not_read_is_hung_up_on_and_holds_nobody_up():
    async def test():
        feed = Feed(Looks(), slow_s=0.05)
        feed.start()
        good = Viewer(feed)

        async def never(event):
            await asyncio.Event().wait()

        with pytest.raises(SlowViewerError):
            await feed.follow(never)
        await good.got(2)
        await leave(good)
        await feed.close()

    run(test)


def test_what_cannot_be_looked_at_now_is_looked_at_again(caplog):
    async def test():
        feed = Feed(Looks(RuntimeError("not now"), RuntimeError("not now")))
        feed.start()
        viewer = Viewer(feed)
        await viewer.got(1)
        assert feed.failures == 2
        assert caplog.text.count("no new sample") == 1
        await leave(viewer)
        await feed.close()

    run(test)


def test_closing_lets_everybody_go():
    async def test():
        feed = Feed(Looks())
        feed.start()
        viewer = Viewer(feed)
        await viewer.got(1)
        await feed.close()
        await viewer.task

    run(test)
