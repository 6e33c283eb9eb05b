"""Pages that are being published on another host: asked for until they have come, or the time is over.

One thread asks, for all prompts in one call: for the first page that each of them lacks, since what is
behind it is of no use without it. A few others bring what is there. So a prompt costs a name in a call and
not a thread, and promises that nobody keeps cost those that are kept nothing.

A prompt is asked for again after a twentieth of the time for which nothing of it has come, so the asking adds
little to any wait, and one that nobody computes soon costs little: 5 ms to 50 ms.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tierstore.cluster import orders as o
from tierstore.cluster.objects import PageObject

_SHARE = 0.05
_ASK_AGAIN_S = (0.005, 0.05)
_BRINGERS = 4


@dataclass(slots=True, eq=False)
class PromisedPrompt:
    """``objects`` are what was promised of it; the first ``done`` of them have come."""

    order: o.FetchOrder
    objects: Sequence[PageObject]
    ends: float
    done: int = 0
    over: bool = False
    fetching: bool = False
    idle_since: float = field(default_factory=time.monotonic)
    ask_at: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether nothing more of it is asked for, whatever the time."""
        return self.over or self.done == len(self.objects)

    def put_off(self, now: float) -> None:
        """It was asked for, and nothing new is there."""
        pause = (now - self.idle_since) * _SHARE
        self.ask_at = now + min(max(pause, _ASK_AGAIN_S[0]), _ASK_AGAIN_S[1])


class PromisedPages:
    """``exists`` asks the shared store which names it has; ``fetch_remote`` has those pages of a prompt come
    that are there from ``done`` on, and says how many came, 0 when no more of it can be had; ``ended`` is
    told of each prompt once. All three are called on threads of this object, and do not raise."""

    def __init__(
        self,
        exists: Callable[[Sequence[str]], Sequence[bool]],
        fetch_remote: Callable[[PromisedPrompt], int],
        ended: Callable[[PromisedPrompt], None],
    ) -> None:
        self._exists = exists
        self._fetch = fetch_remote
        self._ended = ended
        self._prompts: dict[int, PromisedPrompt] = {}  # by the order's number
        self._changed = threading.Condition()  # guards it, and them
        self._fetchers = ThreadPoolExecutor(_BRINGERS, "tierstore-promised")
        threading.Thread(target=self._ask_always, name="tierstore-ask", daemon=True).start()

    def add(self, order: o.FetchOrder, objects: Sequence[PageObject]) -> None:
        prompt = PromisedPrompt(order, objects, time.monotonic() + order.wait_s)
        with self._changed:
            self._prompts[order.id] = prompt
            self._changed.notify()

    def stop(self, number: int) -> None:
        """It is not wanted any more: what is on its way still comes."""
        with self._changed:
            prompt = self._prompts.get(number)
            if prompt is not None:
                prompt.over = True
                self._changed.notify()

    def _ask_always(self) -> None:
        while True:
            for prompt in self._take_ended():
                self._ended(prompt)
            if due := self._wait_due():
                there = self._exists([prompt.objects[prompt.done].name for prompt in due])
                self._asked(due, there)

    def _take_ended(self) -> list[PromisedPrompt]:
        now = time.monotonic()
        with self._changed:
            ended = [
                prompt
                for prompt in self._prompts.values()
                if not prompt.fetching and (prompt.finished or prompt.ends <= now)
            ]
            for prompt in ended:
                del self._prompts[prompt.order.id]
        return ended

    def _wait_due(self) -> list[PromisedPrompt]:
        """Those that are to be asked for now; waits for the first of them, or for a change."""
        with self._changed:
            idle = [prompt for prompt in self._prompts.values() if not prompt.fetching]
            if any(prompt.finished for prompt in idle):
                return []  # came to be while nobody looked
            now = time.monotonic()
            due = [prompt for prompt in idle if prompt.ask_at <= now]
            if not due:
                first = min((min(prompt.ask_at, prompt.ends) for prompt in idle), default=None)
                self._changed.wait(None if first is None else max(first - now, 0))
            return due

    def _asked(self, due: Sequence[PromisedPrompt], there: Sequence[bool]) -> None:
        now = time.monotonic()
        with self._changed:
            for prompt, known in zip(due, there, strict=True):
                if known and not prompt.over:
                    prompt.fetching = True
                    self._fetchers.submit(self._fetch_one, prompt)
                else:
                    prompt.put_off(now)

    def _fetch_one(self, prompt: PromisedPrompt) -> None:
        # Others may have had the bringers all its time.
        late = prompt.over or prompt.ends <= time.monotonic()
        came = 0 if late else self._fetch(prompt)
        with self._changed:
            prompt.done += came
            prompt.over = prompt.over or not came
            prompt.fetching = False
            prompt.idle_since = time.monotonic()
            prompt.ask_at = 0.0
            self._changed.notify()
