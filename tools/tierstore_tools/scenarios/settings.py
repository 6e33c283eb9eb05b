"""What a run of the scenarios is to do: the command's options, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import UsageError
from tierstore_tools.scenarios import load
from tierstore_tools.scenarios.endpoint import Ask
from tierstore_tools.scenarios.load import Arrival
from tierstore_tools.scenarios.runs import Slo
from tierstore_tools.scenarios.targets import Room

SCENARIOS = ("batch", "longctx", "online", "stream")
_DOCUMENTS = 4
_SESSIONS = 12
_QUICK_READERS = 4
_PAUSE_S = 0.05  # of a slow reader, after each piece


@dataclass(frozen=True, slots=True)
class Scenarios:
    """``tokens`` is the length of the longest prompt with its answer: long prompts have it, documents half of
    it, conversations grow up to it. ``urls`` are endpoints that run already."""

    scenarios: tuple[str, ...]
    targets: tuple[str, ...]
    urls: tuple[str, ...]
    model: str
    vllm: Path | None
    room: Room
    requests: int
    answer_tokens: int
    rates_per_s: tuple[float, ...]
    seconds: float
    trace: Path | None
    block_tokens: int
    slo: Slo
    rounds: int
    slow_readers: int
    request_s: float
    seed: int
    directory: Path

    def __post_init__(self) -> None:
        for name in self.scenarios:
            if name not in SCENARIOS:
                raise UsageError(f"there is no scenario {name!r} (known: {', '.join(SCENARIOS)}, all)")
        expected = max(self.requests, self.slow_readers, max(self.rates_per_s) * self.seconds)
        if expected > load.MOST_REQUESTS or self.seconds > load.MOST_SECONDS:
            raise UsageError(
                f"a run has at most {load.MOST_REQUESTS:,} requests and {load.MOST_SECONDS:,.0f} s: lower "
                "--requests, --slow-readers, --rate or --seconds"
            )
        if self.room.max_tokens < 16 * self.answer_tokens:
            raise UsageError(f"--tokens is at least 16 answers: {16 * self.answer_tokens}")

    def batch(self) -> list[Ask]:
        half = self.room.max_tokens // 2
        return load.documents(
            self.requests,
            documents=_DOCUMENTS,
            document_tokens=half,
            question_tokens=max(half // 32, 1),
            answer_tokens=self.answer_tokens,
            seed=self.seed,
        )

    def long(self) -> list[Ask]:
        length = self.room.max_tokens - self.answer_tokens
        return [
            Ask(load.tokens((self.seed, "long", number), length), self.answer_tokens)
            for number in range(self.rounds)
        ]

    def arrivals(self, rate_per_s: float) -> dict[str, list[Arrival]]:
        """By the name of their process. Raises :class:`UsageError` for a trace that cannot be used."""
        most, seed = self.room.max_tokens, f"{self.seed} at {rate_per_s:g}"  # no rate finds another's pages
        found = {
            "poisson": load.conversations(
                rate_per_s,
                self.seconds,
                sessions=_SESSIONS,
                system_tokens=most // 8,
                turn_tokens=most // 16,
                answer_tokens=self.answer_tokens,
                max_tokens=most,
                seed=seed,
            )
        }
        if self.trace is not None:
            found["trace"] = load.from_trace(
                self.trace,
                max(int(rate_per_s * self.seconds), 1),
                rate_per_s,
                block_tokens=self.block_tokens,
                answer_tokens=self.answer_tokens,
                max_tokens=most,
                seed=seed,
            )
        return found

    def readers(self, slow: int) -> load.Readers:
        """The quick ones, and ``slow`` slow ones. Their answers are long, their prompts short."""
        short = self.room.max_tokens // 32
        everyone = [
            Ask(load.tokens((self.seed, "reader", slow, number), short), 4 * self.answer_tokens)
            for number in range(_QUICK_READERS + slow)
        ]
        return load.Readers(everyone[:_QUICK_READERS], everyone[_QUICK_READERS:], _PAUSE_S)
