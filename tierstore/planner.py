"""Load or recompute: costs in, a plan out. Pure: nothing here waits, reads a clock or does I/O.

A hit is worth loading only where loading is faster than computing, and both differ by a hundredfold between
machines. So both are measured where they arise: a load reports how long its bytes took
(:meth:`Planner.moved`), an engine how long its prefill steps took (:meth:`Planner.computed`).

**Estimates.** Either is a line through the latest measurements, fitted by relative errors: seconds are a
latency and so much for each byte; or so much for each token and so much for each pair of a token and one
before it (attention). What is planned with is that line times a quantile of what the measurements took in
excess of it: a tier that is slow once in four times counts as slow. Measurements are forgotten, so a disk
that was slow at noon is asked again at one. A tier of which nothing is known is taken for fast, and the
deadline is the net.

**The plan.** Tiers follow one another along a prompt, fastest first. A leading part is loaded and the rest is
computed. Within a tier's part the cost of loading grows evenly, and what a token saves grows with its
position: so the best place to stop is the end of a part, or before the first. *From both ends*, the engine
computes from the front while pages come from the back: KV of later tokens need not be computed before it is
loaded.

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

_KEPT = 24  # measurements of a tier, or of computing
_RECENT_S = 30.0  # older ones of a tier do not count
_QUANTILE = 0.75  # of excess over the line that is planned with
_LEAST_EXCESS = 1.0
_PROBE_S = 5.0  # a tier that is declined is measured this often, by a read that nobody waits for
_SLACK = 4.0  # a load may take so many times what was expected of it …
_LEAST_SLACK_S = 0.02  # … and this much more
_UNKNOWN_SHARE = 0.25  # of what computing takes: how long a load of an unknown tier may take
_MARGIN = 0.9  # what loading and computing may take at most, over computing alone: measurements err
_BOTH_EFFICIENCY = 0.75  # of loading and computing at once: steps and blocks wait for one another's ends
_BURST = 0.125  # bytes that came so soon after those before them (of what they took) came together with them


@dataclass(frozen=True, slots=True)
class TierRate:
    """What bytes of a tier cost: they wait ``backlog_s`` for those before them, then come after ``latency_s``
    at ``bytes_per_s``."""

    bytes_per_s: float
    latency_s: float = 0.0
    backlog_s: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Without the backlog."""
        return self.latency_s + nbytes / self.bytes_per_s if nbytes else 0.0


CLUSTER = "cluster"  # among the tiers' names: the way to pages of other hosts


@dataclass(frozen=True, slots=True)
class Prefill:
    """How long computing takes: ``token_s`` seconds per token, and ``pair_s`` per token and token before it
    (attention), which is 0 where only one speed is known."""

    token_s: float
    pair_s: float = 0.0

    def seconds(self, tokens: float, behind: float = 0) -> float:
        """For ``tokens`` tokens after ``behind`` others whose KV is there."""
        return tokens * self.token_s + tokens * (behind + tokens / 2) * self.pair_s


@dataclass(frozen=True, slots=True)
class TierPart:
    """Consecutive tokens of a hit that one tier holds, and their bytes. Those in HBM have none to move."""

    tier: str
    tokens: int
    nbytes: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Use the first ``tokens`` of the hit, and compute the rest of the prompt. Of them those before
    ``meeting_point`` are computed and those behind it loaded, from the back, at the same time; where
    ``meeting_point`` is not beyond what HBM holds, all are loaded. ``load_s`` and ``ttft_s`` are what is
    expected, by the figures planned with. ``deadline_s`` is when to give the load up (None: where nothing is
    known of computing)."""

    tokens: int
    meeting_point: int
    load_s: float
    ttft_s: float
    deadline_s: float | None
    declined: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the hit that are not used, by tier: loading them would be slower."""


def plan(
    parts: Sequence[TierPart],
    prompt_tokens: int,
    rates: Mapping[str, TierRate],
    prefill: Prefill | None,
    *,
    block: int = 0,
    margin: float = 1.0,
) -> Plan:
    """The fastest way to a prompt's first token. ``parts`` are the hit's, in the prompt's order; a tier that
    is missing in ``rates`` costs nothing that is known. With ``block``, both ends may meet at its multiples:
    an engine computes so many tokens at a time. A plan that loads below HBM is taken only where it takes no
    more than ``margin`` of one that does not."""
    held = sum(part.tokens for part in parts)
    free = 0  # tokens that are there at once
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
    """How long these take, one after the other; a tier's backlog passes while those before it come."""
    now_s = 0.0
    for part in parts:
        rate = rates.get(part.tier)
        if rate is not None and part.nbytes:
            now_s = max(now_s, rate.backlog_s) + rate.seconds(part.nbytes)
    return now_s


def _behind(parts: Sequence[TierPart], start: int) -> list[TierPart]:
    """What is left of ``parts`` from token ``start`` on."""
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
    """The first token behind which all is loaded no later than all before it is computed."""
    low, high = free, end
    while low < high:
        middle = (low + high) // 2
        if load_seconds(_behind(parts, middle), rates) <= prefill.seconds(middle - free, free):
            high = middle
        else:
            low = middle + 1
    # One token further on the front may be what takes longer.
    before = max(low - 1, free)
    front_s = prefill.seconds(low - free, free)
    return before if load_seconds(_behind(parts, before), rates) < front_s else low


def _deadline_s(load_s: float, compute_s: float, *, known: bool) -> float:
    """When a load has lost: never before it was expected, and where that leaves room, before computing would
    have been done."""
    if not known:
        return max(load_s, _UNKNOWN_SHARE * compute_s)
    return max(load_s, min(compute_s, load_s * _SLACK + _LEAST_SLACK_S))


# -- measuring -----------------------------------------------------------------------------------------


def fit_line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """``(p, q)``, neither below 0, that make ``p * x + q * y`` nearest to ``seconds``, by relative errors,
    over ``(x, y, seconds)`` with seconds above 0."""
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
    """From ``(tokens, behind, seconds)`` of measured steps, one at least."""
    return Prefill(*fit_line([(n, n * (behind + n / 2), s) for n, behind, s in points if s > 0]))


@dataclass(frozen=True, slots=True)
class _Measured:
    nbytes: float
    seconds: float
    at_s: float


class RateEstimate:
    """What bytes of one tier cost, from its latest loads."""

    def __init__(self) -> None:
        self._moves: deque[_Measured] = deque(maxlen=_KEPT)
        self._late: _Measured | None = None  # since the last of them: what did not come in so many seconds
        self._reported: tuple[TierRate, float] | None = None

    def moved(self, nbytes: float, seconds: float, now_s: float) -> None:
        """Of bytes that waited while those before them came, only the time after that counts; what came in
        one burst counts together."""
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
        """Bytes have not come in so many seconds: they take no less."""
        self._late = _Measured(nbytes, seconds, now_s)

    def report(self, rate: TierRate, now_s: float) -> None:
        """Somebody else has measured it: that counts where we have not, and its backlog in any case."""
        self._reported = rate, now_s

    def measured_at(self) -> float:
        """When it was measured last."""
        latest = self._late or (self._moves[-1] if self._moves else None)
        return latest.at_s if latest is not None else -math.inf

    def rate(self, now_s: float) -> TierRate | None:
        """None when nothing is known."""
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
        if not byte_s:  # all of one size: the latency cannot be told apart from the bytes
            byte_s, latency_s = latency_s / max(move.nbytes for move in recent), 0.0
        if late is not None:
            excess = max(excess, late.seconds / (late.nbytes * byte_s + latency_s))
        backlog_s = reported.backlog_s if reported is not None else 0.0
        return TierRate(1 / (byte_s * excess), latency_s * excess, backlog_s)


class PrefillEstimate:
    """How fast an engine computes, from its latest steps. Those of one size and different positions tell the
    two speeds apart."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)

    def computed(self, tokens: int, behind: int, seconds: float) -> None:
        if tokens > 0 and seconds > 0:
            self._steps.append((tokens, behind, seconds))

    def prefill(self) -> Prefill | None:
        """None when nothing is known. Taken from the middle of the measurements: pessimism belongs to what
        is to be loaded."""
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
    """The estimates of one store and its engine, and plans made with them. Thread-safe. All times are of the
    caller's clock.

    >>> planner = Planner()
    >>> planner.computed(1000, 0, 1.0)
    >>> planner.moved("disk", 1e6, 2.0, now_s=0.0)
    >>> planner.plan([Part("disk", 1000, 1e6)], 1001, now_s=0.0).declined
    {'disk': 1000}
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._estimates: dict[str, RateEstimate] = {}
        self._prefill = PrefillEstimate()
        self._probed: dict[str, float] = {}

    def moved(self, tier: str, nbytes: float, seconds: float, *, now_s: float) -> None:
        """So many bytes of a tier came in so many seconds."""
        with self._lock:
            self._estimates.setdefault(tier, RateEstimate()).moved(nbytes, seconds, now_s)

    def late(self, tier: str, nbytes: float, seconds: float, *, now_s: float) -> None:
        """So many bytes of a tier did not come in so many seconds."""
        with self._lock:
            self._estimates.setdefault(tier, RateEstimate()).late(nbytes, seconds, now_s)

    def report(self, tier: str, rate: TierRate, *, now_s: float) -> None:
        """What a daemon knows of its tier."""
        with self._lock:
            self._estimates.setdefault(tier, RateEstimate()).report(rate, now_s)

    def computed(self, tokens: int, behind: int, seconds: float) -> None:
        """An engine computed ``tokens`` tokens of a prompt after ``behind`` others."""
        with self._lock:
            self._prefill.computed(tokens, behind, seconds)

    def prefill(self) -> Prefill | None:
        """How fast the engine computes; None before it has said so."""
        with self._lock:
            return self._prefill.prefill()

    def rates(self, now_s: float) -> dict[str, TierRate]:
        """What is known of the tiers."""
        with self._lock:
            found = {tier: estimate.rate(now_s) for tier, estimate in self._estimates.items()}
        return {tier: rate for tier, rate in found.items() if rate is not None}

    def plan(self, parts: Sequence[TierPart], prompt_tokens: int, *, now_s: float, block: int = 0) -> Plan:
        """See :func:`plan`."""
        rates = self.rates(now_s)
        return plan(parts, prompt_tokens, rates, self.prefill(), block=block, margin=_MARGIN)

    def meeting_point(self, parts: Sequence[TierPart], front: int, *, now_s: float) -> int:
        """Where computing from token ``front`` on meets the loading of ``parts`` from their end; ``front``
        itself where computing would not help, or nothing is known."""
        prefill = self.prefill()
        if prefill is None:
            return front
        return _meeting_point(parts, front, sum(part.tokens for part in parts), self.rates(now_s), prefill)

    def take_probe(self, tier: str, now_s: float) -> bool:
        """Whether a tier that was declined should be measured now, while nobody waits. Counts as done."""
        with self._lock:
            rate = self._estimates.get(tier)
            latest = max(
                rate.measured_at() if rate is not None else -math.inf, self._probed.get(tier, -math.inf)
            )
            if now_s - latest < _PROBE_S:
                return False
            self._probed[tier] = now_s
            return True
