"""``tierstore stats --curve``: the hit rates that larger tiers would have, estimated by the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.cli import show
from tierstore.units import format_size

if TYPE_CHECKING:
    from tierstore.curve import CurveStats

_FEW_SAMPLED = 500  # with fewer sampled pages, the estimate is rough


def write(curve: CurveStats) -> None:
    """Print the estimate as tables."""
    if not curve.asked_tokens:
        show.line("no estimate yet: there were no lookups")
        return
    show.line(
        f"hit rate {_percent(curve.measured_hit_rate)} since the start; at best {_percent(curve.ceiling)}, "
        f"with {_horizon(curve)}"
    )
    rough = " (few: a rough estimate)" if curve.sampled < _FEW_SAMPLED else ""
    show.line(
        f"estimated from {curve.asked_tokens:,} recently requested tokens and a sample of {curve.sampled:,} "
        f"pages{rough}"
    )
    if curve.left_out:
        show.line(
            f"{curve.left_out:,} lookups and saves came too fast and were left out. If these are many, the "
            "hit rates of large capacities are too low"
        )
    show.line("")
    here = {tier.capacity_bytes: name for name, tier in curve.tiers.items()}
    show.table(
        ("least recently used, with", "hit rate", "today"),
        [
            (format_size(point.capacity_bytes), _percent(point.hit_rate), here.get(point.capacity_bytes, ""))
            for point in curve.points
        ],
    )
    rows = [
        (
            name,
            format_size(tier.capacity_bytes),
            _percent(tier.hit_rate),
            f"+{format_size(more.added_bytes)}",
            f"+{100 * more.added_hit_rate:.1f}",
        )
        for name, tier in curve.tiers.items()
        for more in tier.more
    ]
    show.line("")
    show.table(("down to", "capacity", "hit rate", "with", "points more"), rows)


def _horizon(curve: CurveStats) -> str:
    return f"{format_size(curve.horizon_bytes)}" if curve.horizon_bytes else "no end of memory"


def _percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"
