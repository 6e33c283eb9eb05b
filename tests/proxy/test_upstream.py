"""Asking an engine how it is, and waiting no longer than one may."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from tierstore_proxy.upstream import Upstream, within


def test_a_caller_that_leaves_in_the_moment_of_the_result_has_left() -> None:
    async def main() -> None:
        for turns in range(4):  # of the loop, between the result and the cancellation
            result: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            waiting = asyncio.create_task(within(10.0, result))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            result.set_result(1)
            for _ in range(turns):
                await asyncio.sleep(0)
            if waiting.done():
                assert turns > 1
                continue
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(main())


@pytest.mark.parametrize("leaves", [False, True])
def test_what_takes_too_long_has_ended_when_the_caller_goes_on(leaves: bool) -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def main() -> None:
        waiting = asyncio.create_task(within(60.0 if leaves else 0.01, work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if leaves:
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError if leaves else asyncio.TimeoutError):
            await waiting
        assert ended

    asyncio.run(main())


def test_what_goes_wrong_is_said() -> None:
    async def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(within(10.0, work()))


def test_a_check_that_fails_as_nobody_expected_is_a_check_that_failed() -> None:
    """httpx raises RuntimeError, none of its own errors, where its client was closed."""

    async def main() -> None:
        engine = Upstream("http://127.0.0.1:9", "decode")
        await engine.close()
        await engine.check()
        await engine.check()
        assert "closed" in engine.problem
        assert engine.failures == 1

    asyncio.run(main())


def test_one_late_connect_takes_no_engine_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second in a row does. Nobody accepts, and the queue of connections is full: the kernel answers
    nothing."""
    monkeypatch.setattr("tierstore_proxy.upstream._CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as queued:
        for _ in range(2):
            client = queued.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())

        async def main() -> None:
            engine = Upstream(f"http://127.0.0.1:{full.getsockname()[1]}", "decode")
            await engine.check()
            assert engine.load.up
            await engine.check()
            assert not engine.load.up
            assert engine.problem == "no connection within 0.2 s"
            await engine.close()

        asyncio.run(main())
