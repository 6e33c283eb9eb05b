"""Real processes, killed with SIGKILL at random moments, over and over, on one directory.

The writers are in ``mortal.py``. What is left of each is opened and judged here, against what it had said
before it died.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

from tests.campaigns import mortal
from tests.campaigns.prompts import Held
from tests.campaigns.verdict import Verdict, judge
from tierstore.errors import TierStoreError

_YOUNG = 0.3  # of the lives end at any moment from their beginning on, in the opening of the store too
_YOUNG_LIFE_S = 0.03
_MOST_FACTS = 12  # that the others have told; a slow machine lives longer
_LAST_BREATH_S = 0.005


class Killer:
    """Gives life to writers on ``directory`` and takes it. Use as a context manager."""

    def __init__(self, directory: Path, life: str, *, seed: int = 0) -> None:
        """``life`` is one of ``mortal.LIVES``. The seed chooses what the writers do and when they die; the
        moments are as exact as the machine's timers."""
        self.durable: Held = {}  # what must be there
        self.prompts: Held = {}  # what may be there
        self.acknowledged = 0
        self._directory = directory
        self._life = life
        self._chance = random.Random(seed)
        self._server = subprocess.Popen(
            [sys.executable, "-c", f"from {mortal.__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def __enter__(self) -> Killer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()

    def kill_one(self) -> Verdict:
        """One life, its end, and what it left. Raises :class:`TierStoreError` when it ended by itself."""
        self._start()
        pid = int(self._hear("pid"))
        young = self._chance.random() < _YOUNG
        facts = 0 if young else self._chance.randint(1, _MOST_FACTS)
        delay_s = self._chance.uniform(0, _YOUNG_LIFE_S if young else _LAST_BREATH_S)
        timer = threading.Timer(delay_s, _kill, [pid])
        try:
            self._listen(facts, timer)
        finally:
            timer.cancel()
        life = mortal.LIVES[self._life]
        return judge(self._directory, [life], self.prompts, self.durable, write_on=False)

    def _start(self) -> None:
        assert self._server.stdin is not None
        request = {
            "directory": str(self._directory),
            "life": self._life,
            "seed": self._chance.getrandbits(32),
            "durable": {number: tokens for (_, number), tokens in self.durable.items()},
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()

    def _hear(self, wanted: str) -> str:
        word, _, rest = self._line().partition(" ")
        if word != wanted:
            raise TierStoreError(f"a writer said {word!r} instead of {wanted!r}: {rest}")
        return rest

    def _listen(self, facts: int, timer: threading.Timer) -> None:
        """Take note of all that a writer says until its end, which is set off after ``facts`` facts."""
        while True:
            if facts == 0:
                timer.start()
            facts -= 1
            word, _, rest = self._line().partition(" ")
            if word == "ended":
                if int(rest) != signal.SIGKILL:
                    raise TierStoreError(f"a writer ended by itself or by signal {rest}")
                return
            self._note(word, rest)

    def _note(self, word: str, rest: str) -> None:
        if word == "error":
            raise TierStoreError(f"a writer failed: {rest}")
        number, *tokens = map(int, rest.split())
        if word == "?":
            self.prompts[0, number] = max(self.prompts.get((0, number), 0), *tokens)
        elif word == "-":
            self.durable.pop((0, number), None)
        else:
            self.durable[0, number] = tokens[0]
            self.acknowledged += 1

    def _line(self) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line.endswith("\n"):
            raise TierStoreError("the process that starts the writers has died")
        return line.rstrip("\n")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
