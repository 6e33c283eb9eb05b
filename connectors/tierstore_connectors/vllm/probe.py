"""What the daemon holds of one request's prompt: asked once, looked at in every step.

A probe goes through two stages. It is *asked* on a thread: one question for each KV cache group on each
worker, since a chunk that one of them lacks cannot be loaded, and all but the first at once (see
:meth:`Probe._ask`). Then what is on disk is *brought* into memory, with a deadline, before anything is
promised to vLLM: a page that turns out to be damaged is then a shorter hit and not a failed load. All along
the daemon keeps what was found from leaving.

Groups with a sliding window are not brought: vLLM reads the last pages of them only, and those come from disk
when they are loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

from tierstore.daemon.connected import ConnectedStore, lookup_all
from tierstore.errors import StoreClosedError
from tierstore.keys import Identity, PageKey, Prompt
from tierstore.store.base import Hit
from tierstore.transfer import Transfer
from tierstore_connectors.vllm.guard import Faults

Wanted = Sequence[tuple[ConnectedStore, Identity, bool]]  # the last: only a window of it is read


@dataclass(slots=True)
class _Question:
    """What is asked about one of those wanted, and what the daemon has said."""

    store: ConnectedStore
    identity: Identity
    windowed: bool
    hit: Hit | None = None


class Probe:
    """One question. Asked on one thread, looked at from another."""

    def __init__(
        self,
        wanted: Wanted,
        keys: Sequence[PageKey],
        tokens: Callable[[], bytes],
        chunk_tokens: int,
        now: float,
    ) -> None:
        """``tokens`` gives those of the chunks that ``keys`` stand for; it is called on the asking thread."""
        self.began = now
        self.first_looked: float | None = None  # when vLLM first wanted to know
        self.on_disk = 0  # tokens that came from there
        self._wanted = wanted
        self._keys = keys
        self._tokens = tokens
        self._chunk_tokens = chunk_tokens
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._hits: list[Hit] = []  # guarded by _lock, as is all below
        self._brought: list[Transfer[int]] = []
        self._found = 0
        self._released = False

    @property
    def answered(self) -> bool:
        """Whether the daemon has said what it has (or was away)."""
        return self._answered.is_set()

    def wait(self, timeout: float) -> None:
        """Wait for what comes next: the answer, or pages on their way."""
        if not self._answered.is_set():
            self._answered.wait(timeout)
            return
        with self._lock:
            brought = list(self._brought)
        for transfer in brought:
            if not transfer.done:
                with suppress(TimeoutError):
                    transfer.wait(timeout)
                return

    def ask(self, threads: Executor, prefetch_s: float, faults: Faults) -> None:
        """Begin."""

        def run() -> None:
            try:
                self._ask(prefetch_s)
            except StoreClosedError:
                self.release()  # asked of a session that has been given up
            except Exception as error:  # noqa: BLE001  # on a thread of its own nobody else would see it
                faults.note("looking up a prompt", error)
                self.release()
            finally:
                self._answered.set()

        threads.submit(run)

    def tokens(self) -> int | None:
        """How many leading tokens can be loaded; None while it is not known, or they are on their way."""
        if not self._answered.is_set():
            return None
        with self._lock:
            if self._released:
                return 0
            brought = list(self._brought)
        if not all(transfer.done for transfer in brought):  # ends those whose time is over
            return None
        least = min((transfer.wait() for transfer in brought), default=self._found)
        return min(least, self._found) // self._chunk_tokens * self._chunk_tokens

    def release(self) -> None:
        """Nobody wants to know any more. Repeating it is harmless."""
        with self._lock:
            self._released = True
            hits, self._hits = self._hits, []
            brought, self._brought = self._brought, []
        for transfer in brought:
            transfer.cancel()
        for hit in hits:
            hit.release()

    def _given_up(self) -> bool:
        with self._lock:
            return self._released

    def _ask(self, prefetch_s: float) -> None:
        """Ask in up to three rounds, each of which builds on the answers of the one before. What is asked in
        one round is asked at once: no answer in it depends on another."""
        data = self._tokens()
        questions = [_Question(*each) for each in self._wanted]
        # By far the most prompts that are not held are held by nobody: that is found out with one question.
        # And all hold as much of a prompt as a rule: the others are not asked for more than the first has.
        found = self._look_up(questions[:1], data, len(self._keys) * self._chunk_tokens)
        found = self._look_up(questions[1:], data, found)
        # What one of them lacks cannot be loaded of any, and is not to be brought for nothing.
        longer = [each for each in questions if each.hit and each.hit.tokens > found and _on_disk(each)]
        found = self._look_up(longer, data, found)
        for each in questions:
            if found and each.hit is not None and _on_disk(each):
                self._bring(each.hit, prefetch_s)
        with self._lock:
            self._found = found
            released = self._released or not found
        if released:
            self.release()

    def _bring(self, hit: Hit, prefetch_s: float) -> None:
        """Unless it has been released: what is not held any more would be asked for, and held, once more."""
        with self._lock:
            if not self._released:
                self.on_disk = max(self.on_disk, hit.by_tier["disk"])
                self._brought.append(hit.prefetch(deadline_s=prefetch_s))

    def _look_up(self, questions: Sequence[_Question], data: bytes, limit: int) -> int:
        """Ask for ``limit`` tokens at most; how many all of them have. Nothing is asked after the release,
        nor when the answer could only be none."""
        if not limit or not questions or self._given_up():
            return limit
        keys = self._keys[: limit // self._chunk_tokens]

        def prompt(identity: Identity) -> Prompt:
            return Prompt.with_keys(identity, data, keys, chunk_tokens=self._chunk_tokens)

        hits = lookup_all(((each.store, prompt(each.identity)) for each in questions), max_tokens=limit)
        before = {each.hit for each in questions if each.hit is not None}
        for question, hit in zip(questions, hits, strict=True):
            question.hit = hit
        with self._lock:
            self._hits = [hit for hit in self._hits if hit not in before]
            self._hits += hits
        for hit in before:
            hit.release()
        return min(hit.tokens for hit in hits)


def _on_disk(question: _Question) -> bool:
    """Whether there is something to bring."""
    return question.hit is not None and not question.windowed and bool(question.hit.by_tier.get("disk"))
