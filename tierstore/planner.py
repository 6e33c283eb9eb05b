"""The planner: decide which part of a hit to load, and which to recompute. Pure: no waiting, no clock, no
I/O.

A hit is worth loading only if loading is faster than computing, and the ratio of the two varies a hundredfold
between machines. So loads report how long their bytes took (:meth:`Planner.moved`), and engines report how
long their prefill steps took (:meth:`Planner.computed`).

**Estimates.** Each estimate is a line through the latest measurements, fitted by relative errors. The seconds
of a load are a latency plus a time per byte. The seconds of computing are a time per token plus a time per
pair of a token and an earlier token (attention). The planner multiplies this line by a quantile of the
measured excess over the line, so a tier that is slow one time in four counts as slow. Old measurements are
forgotten, so a slow disk is tried again later. A tier without measurements counts as fast, and the load's
deadline limits the damage.

**The plan.** The parts of a hit in different tiers follow one another along the prompt, fastest tier first.
The engine loads some leading parts and computes the rest of the prompt. Within one tier's part, the cost of
loading a token is constant, and the cost of computing it grows with its position. So it is best to load a
part completely or not at all. *From both ends*, the engine computes from the front while pages are loaded
from the back, so it never computes KV that is already loaded.

::

    one way     [ load ................. )[ compute ..... ]        one after the other
    both ends   [ compute ──▶ meet ◀── load )[ compute .... ]      the first two at the same time
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_KEPT = 24  # number of measurements that are kept of a tier, and of computing
_RECENT_S = 30.0  # older measurements of a tier do not count
_QUANTILE = 0.75  # quantile of the excess over the line that plans use
_LEAST_EXCESS = 1.0
_PROBE_S = 5.0  # every this many seconds, a read that no caller waits for measures a declined tier
_SLACK = 4.0  # a load may take this many times its expected time …
_LEAST_SLACK_S = 0.02  # … plus this many seconds
_UNKNOWN_SHARE = 0.25  # share of the computing time that a load from an unmeasured tier may take
# A plan may load only if it takes at most this share of the time without loads: measurements have errors.
_MARGIN = 0.9
# Share of their combined speed that loading and computing reach together: each sometimes waits for the other.
_BOTH_EFFICIENCY = 0.75
# A load that ends within this share of its own time after the previous load is in the same burst.
_BURST = 0.125


@dataclass(frozen=True, slots=True)
class TierRate:
    """The cost of a tier's bytes: a load waits ``backlog_s`` for earlier loads, and its bytes then arrive
    after ``latency_s`` at ``bytes_per_s``."""

    bytes_per_s: float
    latency_s: float = 0.0
    backlog_s: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return the seconds that ``nbytes`` take, without the backlog."""
        return self.latency_s + nbytes / self.bytes_per_s if nbytes else 0.0


CLUSTER = "cluster"  # name under which the rate of fetching from other hosts is measured, like a tier's


@dataclass(frozen=True, slots=True)
class Prefill:
    """The time to compute tokens: ``token_s`` seconds per token, plus ``pair_s`` seconds per pair of a token
    and an earlier token (attention). ``pair_s`` is 0 if only one speed is known."""

    token_s: float
    pair_s: float = 0.0

    def seconds(self, tokens: float, behind: float = 0) -> float:
        """Return the seconds to compute ``tokens`` tokens behind ``behind`` tokens whose KV is available."""
        return tokens * self.token_s + tokens * (behind + tokens / 2) * self.pair_s


@dataclass(frozen=True, slots=True)
class TierPart:
    """Consecutive tokens of a hit in one tier, and the bytes to load for them: 0 for tokens in HBM."""

    tier: str
    tokens: int
    nbytes: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision to use the first ``tokens`` tokens of the hit, and to compute the rest of the prompt.

    Tokens before ``meeting_point`` are computed while the tokens behind it are loaded from the back. If
    ``meeting_point`` is not behind the tokens in HBM, all tokens are loaded. ``load_s`` and ``ttft_s`` are
    the expected times of the load and until the first token. The load is given up after ``deadline_s``
    seconds; None if the speed of computing is unknown.
    """

    tokens: int
    meeting_point: int
    load_s: float
    ttft_s: float
    deadline_s: float | None
    declined: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the hit, by tier, that are not used because loading them would be slower."""


def plan(
    parts: Sequence[TierPart],
    prompt_tokens: int,
    rates: Mapping[str, TierRate],
    prefill: Prefill | None,
    *,
    block: int = 0,
    margin: float = 1.0,
) -> Plan:
    """Return the plan with the shortest time to a prompt's first token.

    ``parts`` has the parts of the hit, in prompt order. A tier that is not in ``rates`` has an unknown cost.
    If the engine computes ``block`` tokens at a time, the meeting point of both ends is a multiple of
    ``block``; with 0, all tokens are loaded. A plan that loads from below HBM is chosen only if it takes no
    more than ``margin`` times the plan without loads.
    """
    held = sum(part.tokens for part in parts)
    free = 0  # leading tokens in HBM, which need no load
    for part in parts:
        if part.nbytes:
            break
        free += part.tokens
    if prefill is None:
        return Plan(held, 0, load_seconds(parts, rates), 0.0, None)

    def compute_s(start: int, stop: int) -> float:
        return prefill.seconds(max(stop - start, 0), start)

    best = Plan(free, free, 0.0, compute_s(free, prompt_tokens), 0.0)
    limit = best.ttft_s * margin
    end = 0
    for count, part in enumerate(parts, 1):
        end += part.tokens
        if not part.nbytes and end <= free:
            continue
        used = parts[:count]
        rest_s = compute_s(end, prompt_tokens)
        load_s = load_seconds(used, rates)
        meeting_point = free
        if block:
            near = _meeting_point(used, free, end, rates, prefill) // block * block
            for both in (near, near + block):
                behind_s = load_seconds(_behind(used, both), rates)
                both_s = max(compute_s(free, both), behind_s) / _BOTH_EFFICIENCY
                if free < both < end and both_s <= load_s:
                    meeting_point, load_s = both, both_s
        ttft_s = load_s + rest_s
        if ttft_s <= min(limit, best.ttft_s):
            known = all(each.tier in rates for each in used if each.nbytes)
            deadline_s = _deadline_s(load_s, compute_s(free, end), known=known)
            best = Plan(end, meeting_point, load_s, ttft_s, deadline_s)
    declined: dict[str, int] = {}
    start = 0
    for part in parts:
        unused = min(part.tokens, max(start + part.tokens - best.tokens, 0))
        if unused:
            declined[part.tier] = declined.get(part.tier, 0) + unused
        start += part.tokens
    return Plan(best.tokens, best.meeting_point, best.load_s, best.ttft_s, best.deadline_s, declined)


def load_seconds(parts: Iterable[TierPart], rates: Mapping[str, TierRate]) -> float:
    """Return the seconds to load ``parts`` one after the other. A tier works off its backlog while earlier
    parts arrive."""
    now_s = 0.0
    for part in parts:
        rate = rates.get(part.tier)
        if rate is not None and part.nbytes:
            now_s = max(now_s, rate.backlog_s) + rate.seconds(part.nbytes)
    return now_s


def _behind(parts: Sequence[TierPart], start: int) -> list[TierPart]:
    """Return the parts of ``parts`` from token ``start`` on."""
    behind = []
    for part in parts:
        left = min(part.tokens, max(part.tokens - start, 0))
        if left:
            behind.append(TierPart(part.tier, left, part.nbytes * left / part.tokens))
        start = max(start - part.tokens, 0)
    return behind


def _meeting_point(
    parts: Sequence[TierPart], free: int, end: int, rates: Mapping[str, TierRate], prefill: Prefill
) -> int:
    """Return the first token at which loading all tokens behind it takes no longer than computing all tokens
    before it."""
    low, high = free, end
    while low < high:
        middle = (low + high) // 2
        if load_seconds(_behind(parts, middle), rates) <= prefill.seconds(middle - free, free):
            high = middle
        else:
            low = middle + 1
    # Computing up to this token may take longer than the load. Then the token before it may be better.
    before = max(low - 1, free)
    front_s = prefill.seconds(low - free, free)
    return before if load_seconds(_behind(parts, before), rates) < front_s else low


def _deadline_s(load_s: float, compute_s: float, *, known: bool) -> float:
    """Return the seconds after which to give up a load: never less than its expected time, and if possible
    less than the time to compute its tokens."""
    if not known:
        return max(load_s, _UNKNOWN_SHARE * compute_s)
    return max(load_s, min(compute_s, load_s * _SLACK + _LEAST_SLACK_S))


# -- measurements ------------------------------------------------------------------------------------


def fit_line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return ``(p, q)``, both at least 0. ``p * x + q * y`` is the best fit of ``seconds``, by relative
    errors, over points ``(x, y, seconds)`` with positive seconds."""
    rows = [(x / s, y / s) for x, y, s in points]
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        p, q = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if p >= 0 and q >= 0:
            return p, q
        if p < 0:
            return 0.0, b1 / bb
    elif not aa:
        return 0.0, b1 / bb
    return a1 / aa, 0.0


def fit_prefill(points: Sequence[tuple[float, float, float]]) -> Prefill:
    """Return the line through measured steps ``(tokens, behind, seconds)``. There must be at least one
    step."""
    return Prefill(*fit_line([(n, n * (behind + n / 2), s) for n, behind, s in points if s > 0]))


@dataclass(frozen=True, slots=True)
class _Measured:
    nbytes: float
    seconds: float
    at_s: float


class RateEstimate:
    """The cost of one tier's bytes, estimated from its latest loads."""

    def __init__(self) -> None:
        self._moves: deque[_Measured] = deque(maxlen=_KEPT)
        # the newest load that was late; None if a measurement followed it
        self._late: _Measured | None = None
        self._reported: tuple[TierRate, float] | None = None

    def moved(self, nbytes: float, seconds: float, now_s: float) -> None:
        """Add a measurement of one load. If the load waited for an earlier one, only the time after that
        counts. Loads that arrive in one burst count as one."""
        if nbytes <= 0:
            return
        self._late = None
        before = self._moves[-1] if self._moves else None
        if before is not None and now_s - before.at_s < seconds:
            if now_s - before.at_s < _BURST * seconds:
                self._moves.pop()
                nbytes, seconds = nbytes + before.nbytes, now_s - before.at_s + before.seconds
            else:
                seconds = now_s - before.at_s
        self._moves.append(_Measured(nbytes, max(seconds, 1e-9), now_s))

    def late(self, nbytes: float, seconds: float, now_s: float) -> None:
        """Record that the bytes did not arrive within ``seconds``: the load takes at least that long."""
        self._late = _Measured(nbytes, seconds, now_s)

    def report(self, rate: TierRate, now_s: float) -> None:
        """Use a rate that another process measured. The rate counts only if this process has no measurements;
        the reported backlog always counts."""
        self._reported = rate, now_s

    def measured_at(self) -> float:
        """Return the time of the last measurement; -inf before the first."""
        latest = self._late or (self._moves[-1] if self._moves else None)
        return latest.at_s if latest is not None else -math.inf

    def rate(self, now_s: float) -> TierRate | None:
        """Return the rate; None if nothing is known."""
        reported = (
            self._reported[0]
            if self._reported is not None and now_s - self._reported[1] <= _RECENT_S
            else None
        )
        recent = [move for move in self._moves if now_s - move.at_s <= _RECENT_S]
        late = self._late if self._late is not None and now_s - self._late.at_s <= _RECENT_S else None
        if not recent:
            return reported if late is None else TierRate(late.nbytes / late.seconds)
        byte_s, latency_s = fit_line([(move.nbytes, 1.0, move.seconds) for move in recent])
        excess = _pessimistic([m.seconds / (m.nbytes * byte_s + latency_s) for m in recent])
        if not byte_s:  # all of one size: the latency cannot be separated from the bytes
            byte_s, latency_s = latency_s / max(move.nbytes for move in recent), 0.0
        if late is not None:
            excess = max(excess, late.seconds / (late.nbytes * byte_s + latency_s))
        backlog_s = reported.backlog_s if reported is not None else 0.0
        return TierRate(1 / (byte_s * excess), latency_s * excess, backlog_s)


class PrefillEstimate:
    """How fast an engine computes, estimated from its latest steps. Steps of equal size at different
    positions tell the time per token and the time per pair apart."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)

    def computed(self, tokens: int, behind: int, seconds: float) -> None:
        if tokens > 0 and seconds > 0:
            self._steps.append((tokens, behind, seconds))

    def prefill(self) -> Prefill | None:
        """Return the estimate; None before the first step. It is the median of the measurements, because only
        loads are planned pessimistically."""
        if not self._steps:
            return None
        line = fit_prefill(self._steps)
        ratios = sorted(seconds / line.seconds(tokens, behind) for tokens, behind, seconds in self._steps)
        usual = ratios[(len(ratios) - 1) // 2]
        return Prefill(line.token_s * usual, line.pair_s * usual)


def _pessimistic(excess: list[float]) -> float:
    excess.sort()
    return max(excess[min(int(len(excess) * _QUANTILE), len(excess) - 1)], _LEAST_EXCESS)


class Planner:
    """The estimates of one store and its engine, and plans that are based on them. Thread-safe. All times are
    on the caller's clock.

    >>> planner = Planner()
    >>> planner.computed(1000, 0, 1.0)
    >>> planner.moved("disk", 1e6, 2.0, now_s=0.0)
    >>> planner.plan([TierPart("disk", 1000, 1e6)], 1001, now_s=0.0).declined
    {'disk': 1000}
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._estimates: dict[str, RateEstimate] = {}
        self._prefill = PrefillEstimate()
        self._probed: dict[str, float] = {}

    def moved(self, tier: str, nbytes: float, seconds: float, *, now_s: float) -> None:
        """Record that ``nbytes`` bytes from a tier arrived within ``seconds``."""
        with self._lock:
            self._estimates.setdefault(tier, RateEstimate()).moved(nbytes, seconds, now_s)

    def late(self, tier: str, nbytes: float, seconds: float, *, now_s: float) -> None:
        """Record that ``nbytes`` bytes from a tier did not arrive within ``seconds``."""
        with self._lock:
            self._estimates.setdefault(tier, RateEstimate()).late(nbytes, seconds, now_s)

    def report(self, tier: str, rate: TierRate, *, now_s: float) -> None:
        """Use the rate that a daemon reports for one of its tiers."""
        with self._lock:
            self._estimates.setdefault(tier, RateEstimate()).report(rate, now_s)

    def computed(self, tokens: int, behind: int, seconds: float) -> None:
        """Record that an engine computed ``tokens`` tokens of a prompt behind ``behind`` earlier tokens."""
        with self._lock:
            self._prefill.computed(tokens, behind, seconds)

    def prefill(self) -> Prefill | None:
        """Return how fast the engine computes; None before its first report."""
        with self._lock:
            return self._prefill.prefill()

    def rates(self, now_s: float) -> dict[str, TierRate]:
        """Return the known rates of the tiers."""
        with self._lock:
            found = {tier: estimate.rate(now_s) for tier, estimate in self._estimates.items()}
        return {tier: rate for tier, rate in found.items() if rate is not None}

    def plan(self, parts: Sequence[TierPart], prompt_tokens: int, *, now_s: float, block: int = 0) -> Plan:
        """Return the fastest plan with the present estimates; see :func:`plan`."""
        rates = self.rates(now_s)
        return plan(parts, prompt_tokens, rates, self.prefill(), block=block, margin=_MARGIN)

    def meeting_point(self, parts: Sequence[TierPart], front: int, *, now_s: float) -> int:
        """Return the token at which computing from token ``front`` on meets the loading of ``parts`` from
        their end. Return ``front`` if computing would not help, or if its speed is unknown."""
        prefill = self.prefill()
        if prefill is None:
            return front
        return _meeting_point(parts, front, sum(part.tokens for part in parts), self.rates(now_s), prefill)

    def take_probe(self, tier: str, now_s: float) -> bool:
        """Return whether the caller should measure a declined tier now. If so, the tier counts as
        measured."""
        with self._lock:
            rate = self._estimates.get(tier)
            latest = max(
                rate.measured_at() if rate is not None else -math.inf, self._probed.get(tier, -math.inf)
            )
            if now_s - latest < _PROBE_S:
                return False
            self._probed[tier] = now_s
            return True
