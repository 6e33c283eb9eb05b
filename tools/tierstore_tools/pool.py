"""What a page pool wastes: one memory of two levels, one page size for all layers, and contiguous buffers.

A simulation of the books, not of the bytes: made-up requests arrive as fast as they are admitted, their
prompts are computed chunk by chunk, then they decode, and leave. Three policies serve them from equally large
memories:

``two-level``    the engine's own: each layer group has pages of its own size, cut from large ones
                 (:mod:`tierstore.tiers.two_level`, the very objects), and windows give pages back
``one-size``     a page has a chunk of all layers, so windows are kept whole, and a state takes whole pages
``contiguous``   a buffer for the longest request that may come, as the field began

*Needed* is what the next token of each request attends, to the token. *Waste* is the rest of what is taken:
ends of pages, pages that are free but in a large page of another group, tokens outside of windows, and what
a buffer has that its request does not come to.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from tierstore.errors import UsageError
from tierstore.groups import GroupRule, Past
from tierstore.sizing import group_sizes
from tierstore.spec import KVSpec
from tierstore.tiers.two_level import check, small_pages, waste
from tierstore.units import format_size
from tierstore_tools import machine
from tierstore_tools.report import require_targets, table, write_json

_STEP = 1024  # prompt tokens that a step computes of a request
_MEDIAN_PROMPT, _SPREAD = 3000, 1.0  # of a lognormal distribution
_MEAN_ANSWER = 300
KINDS = ("between pages", "free pages of others")


@dataclass(slots=True, eq=False)
class _Request:
    prompt: int
    total: int
    tokens: int = 0

    def next(self) -> int:
        """How many tokens it has after the next step."""
        return min(self.tokens + _STEP, self.prompt) if self.tokens < self.prompt else self.tokens + 1


class Policy(ABC):
    """Who gets which bytes. ``taken_bytes`` are those that nobody else can have."""

    taken_bytes = 0

    @abstractmethod
    def grow(self, request: _Request, tokens: int) -> bool:
        """Give a request the room for ``tokens`` tokens; False, and nothing changed for others, without."""

    @abstractmethod
    def passed(self, request: _Request) -> None:
        """A step is over: what no later token of the request needs is given back."""

    @abstractmethod
    def free(self, request: _Request) -> None:
        """It leaves."""

    def parts(self) -> dict[str, float]:
        """Shares of what is taken that are wasted, by kind, where the policy can tell."""
        return {}


@dataclass(slots=True)
class _Held:
    """A request's pages in one group: those of chunks ``first …``."""

    first: int = 0
    pages: list[int] = field(default_factory=list)


class TwoLevel(Policy):
    def __init__(self, spec: KVSpec, nbytes: int) -> None:
        parts = spec.split()
        self._groups = small_pages([part.page_bytes for part in parts], nbytes)
        self._rules = [GroupRule.of(part.groups[0]) for part in parts]
        self._chunk = spec.chunk_tokens
        self._held: dict[_Request, list[_Held]] = {}

    @property
    def taken_bytes(self) -> int:  # type: ignore[override]
        return sum(len(group.parts) for group in self._groups) * self._groups[0].large_pages.large_bytes

    def grow(self, request: _Request, tokens: int) -> bool:
        held = self._held.setdefault(request, [_Held() for _ in self._groups])
        for group, rule, each in zip(self._groups, self._rules, held, strict=True):
            stop = 1 if rule.past is Past.STATE else -(-tokens // self._chunk)  # of a state one page
            pages = group.allocate(stop - each.first - len(each.pages), near=each.pages)
            if pages is None:
                return False
            each.pages += pages
        return True

    def passed(self, request: _Request) -> None:
        for group, rule, each in zip(self._groups, self._rules, self._held[request], strict=True):
            if rule.past is Past.STATE:
                continue
            gone = rule.needed(request.tokens).start // self._chunk - each.first
            group.free(each.pages[:gone])
            del each.pages[:gone]
            each.first += gone

    def free(self, request: _Request) -> None:
        for group, each in zip(self._groups, self._held.pop(request), strict=True):
            group.free(each.pages)
        check(self._groups)

    def parts(self) -> dict[str, float]:
        found, taken = waste(self._groups), max(self.taken_bytes, 1)
        return dict(zip(KINDS, (found.internal_bytes / taken, found.external_bytes / taken), strict=True))


class _Counted(Policy):
    """Room that is only counted."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._held: dict[_Request, int] = {}

    def _take(self, request: _Request, nbytes: int) -> bool:
        more = nbytes - self._held.get(request, 0)
        if self.taken_bytes + more > self._nbytes:
            self._held.setdefault(request, 0)
            return False
        self.taken_bytes += more
        self._held[request] = nbytes
        return True

    def passed(self, request: _Request) -> None:
        """Whatever a request has it keeps."""

    def free(self, request: _Request) -> None:
        self.taken_bytes -= self._held.pop(request)


class OneSize(_Counted):
    def __init__(self, spec: KVSpec, nbytes: int) -> None:
        super().__init__(nbytes)
        self._chunk = spec.chunk_tokens
        parts = [(GroupRule.of(part.groups[0]), part.page_bytes) for part in spec.split()]
        self._states = sum(size for rule, size in parts if rule.past is Past.STATE)
        self._page = sum(size for rule, size in parts if rule.past is not Past.STATE) or self._states

    def grow(self, request: _Request, tokens: int) -> bool:
        pages = -(-tokens // self._chunk) + -(-self._states // self._page)
        return self._take(request, pages * self._page)


class Contiguous(_Counted):
    def __init__(self, spec: KVSpec, nbytes: int, *, longest: int) -> None:
        super().__init__(nbytes)
        parts = [(GroupRule.of(part.groups[0]), part) for part in spec.split()]
        self._buffer = round(
            sum(
                part.page_bytes if rule.past is Past.STATE else part.token_bytes * longest
                for rule, part in parts
            )
        )

    def grow(self, request: _Request, tokens: int) -> bool:
        return self._take(request, self._buffer)


@dataclass(frozen=True, slots=True)
class PoolResult:
    """Means over the steps: requests at a time, and what is wasted of what is taken."""

    model: str
    policy: str
    requests: float
    waste: float
    worst_waste: float
    parts: Mapping[str, float]


def spec_of(config: Mapping[str, Any], *, chunk_tokens: int) -> KVSpec:
    """The layer groups of a model that :mod:`tierstore.sizing` understands."""
    groups = tuple(size.group for size in group_sizes(config))
    return KVSpec(groups, str(config.get("dtype") or "bfloat16"), chunk_tokens)


def needed_bytes(spec: KVSpec, tokens: int) -> float:
    """What the next token of a request with ``tokens`` tokens attends, and its states."""
    total = 0.0
    for part in spec.split():
        rule = GroupRule.of(part.groups[0])
        if rule.past is Past.STATE:
            total += part.page_bytes
        else:
            total += len(rule.needed(tokens)) * part.token_bytes
    return total


def simulate(
    model: str, spec: KVSpec, policy: Policy, name: str, *, steps: int, longest: int, seed: int
) -> PoolResult:
    """Serve ``steps`` steps, the first fifth of which are not counted."""
    draw = random.Random(seed)
    running: list[_Request] = []
    waiting = _arrival(draw, longest)
    counts: list[int] = []
    shares: list[float] = []
    parts: list[dict[str, float]] = []
    for step in range(steps):
        while policy.grow(waiting, waiting.next()):
            waiting.tokens = waiting.next()
            running.append(waiting)
            waiting = _arrival(draw, longest)
        policy.free(waiting)
        for request in list(running):
            if request not in running:
                continue  # it gave way
            while not policy.grow(request, request.next()):
                youngest = running.pop()
                policy.free(youngest)
                if youngest is request:
                    break
            else:
                request.tokens = request.next()
                if request.tokens >= request.total:
                    running.remove(request)
                    policy.free(request)
        for request in running:
            policy.passed(request)
        if step >= steps // 5 and policy.taken_bytes:
            needed = sum(needed_bytes(spec, request.tokens) for request in running)
            counts.append(len(running))
            shares.append(1 - needed / policy.taken_bytes)
            parts.append(policy.parts())
    if not counts:
        raise UsageError(f"the memory has no room for one request of {model} in contiguous buffers or pages")
    kinds = {kind: mean(each[kind] for each in parts) for kind in (parts[0] if parts else {})}
    return PoolResult(model, name, mean(counts), mean(shares), max(shares), kinds)


def _arrival(draw: random.Random, longest: int) -> _Request:
    prompt = min(max(round(draw.lognormvariate(0, _SPREAD) * _MEDIAN_PROMPT), 16), longest - 1)
    answer = max(round(draw.expovariate(1 / _MEAN_ANSWER)), 1)
    return _Request(prompt, min(prompt + answer, longest))


def run(
    models: Mapping[str, Mapping[str, Any]],
    *,
    nbytes: int,
    longest: int,
    chunk_tokens: int,
    steps: int,
    seed: int,
    policies: Sequence[str],
    json: str | None,
    plot: Path | None,
) -> None:
    """Simulate each model under each policy, and report. Raises :class:`UsageError` for a policy that there
    is not, and for a memory that is too small."""
    require_targets(json, plot)
    make: dict[str, Callable[[KVSpec], Policy]] = {
        "two-level": lambda spec: TwoLevel(spec, nbytes),
        "one-size": lambda spec: OneSize(spec, nbytes),
        "contiguous": lambda spec: Contiguous(spec, nbytes, longest=longest),
    }
    unknown = [name for name in policies if name not in make]
    if unknown:
        raise UsageError(f"no pool {unknown[0]!r} (known: {', '.join(make)})")
    results = []
    for model, config in models.items():
        spec = spec_of(config, chunk_tokens=chunk_tokens)
        for name in policies:
            results.append(
                simulate(model, spec, make[name](spec), name, steps=steps, longest=longest, seed=seed)
            )
    rows = [
        [
            each.model,
            each.policy,
            f"{each.requests:.1f}",
            f"{each.waste:.1%}",
            f"{each.worst_waste:.1%}",
            " / ".join(f"{share:.1%}" for share in each.parts.values()),
        ]
        for each in results
    ]
    columns = ["model", "pool", "requests", "waste", "worst", " / ".join(KINDS)]
    title = f"{format_size(nbytes)}, requests of up to {longest:,} tokens"
    table(title, columns, rows, to_stderr=json == "-")
    document = {
        "machine": machine.describe(),
        "memory_bytes": nbytes,
        "longest_tokens": longest,
        "chunk_tokens": chunk_tokens,
        "steps": steps,
        "seed": seed,
        "results": [asdict(each) for each in results],
    }
    write_json(document, json)
    if plot is not None:
        _plot(results, policies, plot)


def _plot(results: Sequence[PoolResult], policies: Sequence[str], target: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(each.model for each in results))
    figure, axes = plt.subplots(figsize=(8, 4))
    hatches = ["", "//", ".."]
    for number, policy in enumerate(policies):
        shares = [100 * each.waste for each in results if each.policy == policy]
        places = [place + 0.27 * (number - 1) for place in range(len(models))]
        bars = axes.bar(
            places, shares, width=0.25, label=policy, hatch=hatches[number % 3], edgecolor="black"
        )
        axes.bar_label(bars, fmt="%.0f %%", fontsize=8)
    axes.set_xticks(range(len(models)), models)
    axes.set_ylabel("waste, % of what is taken")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(policies), frameon=False)
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)
