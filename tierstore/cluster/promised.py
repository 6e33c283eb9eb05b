"""Fetch pages that another host has promised to publish: repeat the request until they arrive or the time is
over.

One thread asks the shared store for all prompts in one call. It asks for the first missing page of each
prompt, because later pages are useless without it. A few other threads fetch the pages. So a prompt costs one
name in a call instead of a thread, and a broken promise does not delay other prompts.

The time until a prompt is asked for again is a twentieth of the time since its last page arrived, but between
5 ms and 50 ms. So the repeated requests add little to a wait, and a prompt that is not computed soon costs
little.
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
    """A promised prompt: the first ``done`` of its ``objects`` have arrived."""

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
        """Whether to request no more pages, although the time may not be over."""
        return self.over or self.done == len(self.objects)

    def put_off(self, now: float) -> None:
        """Set the time of the next request, after a request that found no new page."""
        pause = (now - self.idle_since) * _SHARE
        self.ask_at = now + min(max(pause, _ASK_AGAIN_S[0]), _ASK_AGAIN_S[1])


class PromisedPages:
    """The promised prompts of an agent. ``exists`` returns which names the shared store has. ``fetch_remote``
    fetches the available pages of a prompt from page ``done`` on and returns their number; 0 if no more pages
    can be fetched. ``ended`` is called once for each prompt. Threads of this object call these functions,
    which must not raise."""

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
        self._changed = threading.Condition()  # guards the dict and the prompts
        self._fetchers = ThreadPoolExecutor(_BRINGERS, "tierstore-promised")
        threading.Thread(target=self._ask_always, name="tierstore-ask", daemon=True).start()

    def add(self, order: o.FetchOrder, objects: Sequence[PageObject]) -> None:
        prompt = PromisedPrompt(order, objects, time.monotonic() + order.wait_s)
        with self._changed:
            self._prompts[order.id] = prompt
            self._changed.notify()

    def stop(self, number: int) -> None:
        """Cancel a prompt. Pages that are being fetched still arrive."""
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
        """Return the prompts to ask for now. If there are none, wait until there may be."""
        with self._changed:
            idle = [prompt for prompt in self._prompts.values() if not prompt.fetching]
            if any(prompt.finished for prompt in idle):
                return []  # finished while this thread was busy
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
        # The prompt's time may be over, because other prompts have used all threads.
        late = prompt.over or prompt.ends <= time.monotonic()
        came = 0 if late else self._fetch(prompt)
        with self._changed:
            prompt.done += came
            prompt.over = prompt.over or not came
            prompt.fetching = False
            prompt.idle_since = time.monotonic()
            prompt.ask_at = 0.0
            self._changed.notify()
