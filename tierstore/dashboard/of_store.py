"""The parts of a dashboard that show a store, of a daemon or of an engine with an embedded store."""

from __future__ import annotations

from tierstore.core.health import Condition as TierCondition
from tierstore.core.health import TierHealth
from tierstore.curve import CurveStats
from tierstore.dashboard.view import ConditionRow, Curve, Mark, Meter, Table, ViewState
from tierstore.stats import StoreStats
from tierstore.units import format_size

_FEW_SAMPLED = 500  # with fewer sampled pages, the estimated curve is rough
_STATES = {
    TierCondition.ONLINE: ViewState.GOOD,
    TierCondition.READ_ONLY: ViewState.WARNING,
    TierCondition.OFFLINE: ViewState.BAD,
}


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def short(number: float) -> str:
    """Format a number with three digits and the suffix k, M or G."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if suffix == 'k' else limit):.3g} {suffix}"
    return f"{number:,.0f}" if number >= 100 or number == 0 else f"{number:.3g}"


def meters(stats: StoreStats) -> tuple[Meter, ...]:
    """Return a bar for each tier that shows how full it is."""
    return tuple(
        Meter(
            f"{name} {percent(tier.used_bytes / max(tier.capacity_bytes, 1))}",
            min(tier.used_bytes / max(tier.capacity_bytes, 1), 1.0),
            f"{format_size(tier.used_bytes)} of {format_size(tier.capacity_bytes)}, {tier.pages:,} pages, "
            f"{tier.leased_pages:,} leased",
        )
        for name, tier in stats.tiers.items()
    )


def conditions(stats: StoreStats) -> list[ConditionRow]:
    """Return the state of each tier that can fail, and a warning for each error counter that is not zero."""
    found = [
        ConditionRow(f"{tier} tier", _STATES[health.condition], _health(health))
        for tier, health in stats.health.items()
    ]
    damaged = stats.counters.get("damaged_pages")
    if damaged:
        text = f"{damaged:,} pages on disk were damaged, and counted as misses: see tierstore fsck"
        found.append(ConditionRow("pages", ViewState.WARNING, text))
    if stats.failed_tasks:
        text = f"{stats.failed_tasks:,} tasks failed because of a bug in tierstore: its log has a traceback"
        found.append(ConditionRow("tierstore", ViewState.WARNING, text))
    return found


def _health(health: TierHealth) -> str:
    if health.condition is TierCondition.ONLINE:
        return "read and written"
    errors = [f"{count} {kind} error{'s' * (count > 1)}" for kind, count in health.errors.items() if count]
    retry = [] if health.retry_s is None else [f"tries again in {health.retry_s:.0f} s"]
    return ", ".join(
        [f"{health.condition.value} for {health.since_s:.0f} s ({health.reason})", *errors, *retry]
    )


def curve(stats: CurveStats) -> Curve:
    """Return the estimated hit rate by capacity."""
    marks = tuple(Mark(name, tier.capacity_bytes) for name, tier in stats.tiers.items())
    if not stats.asked_tokens:
        return Curve((), (), marks, 0.0, "No estimate yet: there were no lookups.")
    rough = " With so few, the estimate is rough." if stats.sampled < _FEW_SAMPLED and stats.rate < 1 else ""
    return Curve(
        tuple(point.capacity_bytes for point in stats.points),
        tuple(point.hit_rate for point in stats.points),
        marks,
        stats.ceiling,
        f"At best {percent(stats.ceiling)}. Estimated for a cache that drops the least recently used page: "
        f"{stats.asked_tokens:,} recently requested tokens, a sample of {stats.sampled:,} pages.{rough}",
    )


def missed(stats: StoreStats) -> Table:
    """Return a table of the reasons for missed tokens in the last hour."""
    return Table(
        "Missed tokens by reason, last hour",
        ("reason", "tokens", "of missed"),
        stats.missed_rows,
        "No tokens were missed in the last hour.",
    )


def worth(stats: CurveStats) -> Table:
    """Return a table of the hit rates that larger tiers would have."""
    return Table(
        "Gain from more memory",
        ("with", "added", "hit rate then", "points more"),
        tuple(
            (
                f"{'twice' if more.share == 1 else f'{1 + more.share:g} times'} the {name} tier",
                format_size(more.added_bytes),
                percent(tier.hit_rate + more.added_hit_rate),
                f"+{100 * more.added_hit_rate:.1f}",
            )
            for name, tier in stats.tiers.items()
            for more in tier.more
            if more.share >= 1
        )
        if stats.asked_tokens
        else (),
        "There were no lookups yet.",
        note="The hit rate is the share of requested tokens found in this tier or a faster one.",
    )
