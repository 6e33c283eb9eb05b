"""The options of a run of the scenarios, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import UsageError
from tierstore_tools.scenarios import load
from tierstore_tools.scenarios.endpoint import ScenarioRequest
from tierstore_tools.scenarios.load import Arrival
from tierstore_tools.scenarios.runs import Slo
from tierstore_tools.scenarios.targets import ServerRoom

SCENARIOS = ("batch", "longctx", "online", "stream")
_DOCUMENTS = 4
_SESSIONS = 12
_QUICK_READERS = 4
_LONG_PROMPTS, _LONG_EVERY_S = 3, 0.3
_PAUSE_S = 0.05  # how long a slow reader pauses after each piece of text


@dataclass(frozen=True, slots=True)
class Scenarios:
    """The options of one run. ``room.max_tokens`` is the length of a long prompt with its answer. Documents
    have half of this length, and conversations grow up to it. ``urls`` are running endpoints."""

    scenarios: tuple[str, ...]
    targets: tuple[str, ...]
    urls: tuple[str, ...]
    model: str
    vllm: Path | None
    room: ServerRoom
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
                raise UsageError(f"unknown scenario {name!r} (known: {', '.join(SCENARIOS)}, all)")
        expected = max(self.requests, self.slow_readers, max(self.rates_per_s) * self.seconds)
        if expected > load.MOST_REQUESTS or self.seconds > load.MOST_SECONDS:
            raise UsageError(
                f"a run has at most {load.MOST_REQUESTS:,} requests and takes {load.MOST_SECONDS:,.0f} s: "
                "lower --requests, --slow-readers, --rate or --seconds"
            )
        if self.room.max_tokens < 16 * self.answer_tokens:
            least = 16 * self.answer_tokens
            raise UsageError(f"--tokens must be at least 16 answers ({least}), got {self.room.max_tokens}")

    def batch(self) -> list[ScenarioRequest]:
        """Return the requests of the batch scenario."""
        half = self.room.max_tokens // 2
        return load.documents(
            self.requests,
            documents=_DOCUMENTS,
            document_tokens=half,
            question_tokens=max(half // 32, 1),
            answer_tokens=self.answer_tokens,
            seed=self.seed,
        )

    def long(self) -> list[ScenarioRequest]:
        """Return the prompts of the longctx scenario."""
        length = self.room.max_tokens - self.answer_tokens
        return [
            ScenarioRequest(load.tokens((self.seed, "long", number), length), self.answer_tokens)
            for number in range(self.rounds)
        ]

    def arrivals(self, rate_per_s: float) -> dict[str, list[Arrival]]:
        """Return the arrivals of the online scenario by the name of their source. Raises :class:`UsageError`
        for an unusable trace."""
        most, seed = self.room.max_tokens, f"{self.seed} at {rate_per_s:g}"  # rates share no pages
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

    def readers(self, round: int) -> list[load.Readers]:
        """Return the loads of the stream scenario: quick readers alone, beside slow ones, and beside long
        prompts that arrive. Readers have short prompts and long answers. Each round has new prompts."""
        short, whole = self.room.max_tokens // 32, self.room.max_tokens - self.answer_tokens

        def asks(name: str, count: int) -> list[ScenarioRequest]:
            seeds = [(self.seed, "reader", name, round, number) for number in range(count)]
            return [ScenarioRequest(load.tokens(seed, short), 4 * self.answer_tokens) for seed in seeds]

        slow = asks("beside slow ones", _QUICK_READERS + self.slow_readers)
        arrivals = [
            Arrival(
                number * _LONG_EVERY_S, ScenarioRequest(load.tokens((self.seed, round, number), whole), 1)
            )
            for number in range(1, _LONG_PROMPTS + 1)
        ]
        return [
            load.Readers(asks("alone", _QUICK_READERS)),
            load.Readers(
                slow[:_QUICK_READERS], f"{self.slow_readers} slow readers", slow[_QUICK_READERS:], _PAUSE_S
            ),
            load.Readers(
                asks("beside long ones", _QUICK_READERS), f"{_LONG_PROMPTS} long prompts", arrivals=arrivals
            ),
        ]
